"""What notices that a run goes wrong, and what is done about it: spikes, divergence, rollback."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from miniseries.metrics import read_json, write_json
from miniseries.training.optimizer import LossScale, ZScore

# Steps in a row above `divergence_z` that make a divergence: a single one is a bad batch. With
# five equal outliers among 128 values none is more than 4.96 standard deviations above the mean.
DIVERGED_STEPS = 5
MAX_ROLLBACKS = 5  # a run that diverges more often needs other settings
NUM_PINNED = 2  # checkpoints before a divergence that are never deleted
RECORD = "rollbacks.json"
REMEDY = "write it anew from the `rollback` lines of metrics.jsonl, which hold the same"


class Diverged(ValueError):
    """Loss or gradient left its course.

    Args:
        since: first step of it; a checkpoint of at most this many steps is sound.
    """

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since


class DivergenceDetector:
    """Raises when the loss stays far above its recent mean.

    Args:
        limit: standard deviations, `divergence_z`; 0 sees only what is not finite.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.since = limit, None

    def check_finite(self, step: int, loss: float, norm: float) -> None:
        """Before an update.

        Raises:
            Diverged: loss or gradient norm is not finite.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            since = step if self.since is None else self.since
            raise Diverged(
                f"step {step}: loss {loss}, gradient norm {norm}; stopped before this update", since
            )

    def check_course(self, step: int, loss_z: float) -> None:
        """Take in the z-score of a step's loss; NaN, of a short window, is no sign of anything.

        Raises:
            Diverged: it is the last one of too many above the limit.
        """
        if not (self.limit and loss_z > self.limit):
            self.since = None
            return
        self.since = step if self.since is None else self.since
        if step - self.since + 1 >= DIVERGED_STEPS:
            since, self.since = self.since, None
            raise Diverged(
                f"steps {since} to {step}: the loss is more than {self.limit} standard deviations "
                "above its recent mean",
                since,
            )

    def state_dict(self) -> int | None:
        """First of the steps above the limit, if the last one was."""
        return self.since

    def load_state_dict(self, state: int | None) -> None:
        """Put back what was saved."""
        self.since = state


@dataclass(frozen=True)
class Rollback:
    """One return to an older checkpoint."""

    found_at: int  # step at which the divergence was noticed
    back_to: int  # step of the checkpoint
    batches_skipped: int  # global batches that are never read again, and were not left out before
    # the first one left out, and the one after the last; older files have none, nor overlaps
    left_out: tuple[int, int] | None = None


class Rollbacks:
    """All returns of a run; they decide which global batch a step reads.

    They stand in a file of their own: a run killed before its next checkpoint must not read the
    same batches again.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        found = read_json(self.path, remedy=REMEDY) if self.path.exists() else []
        try:
            self.done = [Rollback(**entry) for entry in found]
        except TypeError as error:
            raise ValueError(f"{self.path}: damaged ({error}); {REMEDY}") from None

    @property
    def batches_skipped(self) -> int:
        """Batches that are never read again."""
        return sum(end - first for first, end in self._left_out())

    def _left_out(self) -> list[tuple[int, int]]:
        """First global batch, and the one after the last, of all that is left out; ascending."""
        found: list[tuple[int, int]] = []
        for rollback in self.done:
            first = _batch_beside(found, rollback.back_to)
            found = _united(found, rollback.left_out or (first, first + rollback.batches_skipped))
        return found

    def batch_of(self, step: int) -> int:
        """Number of the global batch that this step reads."""
        return _batch_beside(self._left_out(), step)

    def plan(self, found_at: int, back_to: int, more: int) -> Rollback:
        """Skip what was read since the checkpoint and `more` batches after it."""
        new = (self.batch_of(back_to), self.batch_of(found_at) + 1 + more)
        left_out = _united(self._left_out(), new)
        count = sum(end - first for first, end in left_out) - self.batches_skipped
        return Rollback(found_at, back_to, count, new)

    def note(self, *rollbacks: Rollback, write: bool) -> None:
        """Let them hold from now on; `write` on one process only."""
        self.done += rollbacks
        if write and rollbacks:
            write_json(self.path, [asdict(entry) for entry in self.done])


def _batch_beside(left_out: list[tuple[int, int]], step: int) -> int:
    """The step-th of the batches that are not left out."""
    batch = step
    for first, end in left_out:
        batch += end - first if batch >= first else 0
    return batch


def _united(intervals: list[tuple[int, int]], new: Sequence[int]) -> list[tuple[int, int]]:
    """Disjoint intervals, ascending, that hold the same as all of these."""
    found: list[tuple[int, int]] = []
    for first, end in sorted([*intervals, (new[0], new[1])]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


@dataclass(frozen=True)
class Verdict:
    """What a step's loss and gradient norm say of it."""

    loss_z: float
    grad_z: float
    reason_to_skip: str | None  # its update, as a line for the log; None if it is to be made


class Guards:
    """Everything that watches a run's loss and gradient norm; their memory is in the checkpoint.

    Args:
        recipe: `skip_loss_z`, `skip_grad_z`, and `divergence_z`, standard deviations; `precision`.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.limits = {"loss": recipe["skip_loss_z"], "grad": recipe["skip_grad_z"]}
        self.loss_detector, self.norm_detector = ZScore(), ZScore()
        self.loss_scale = LossScale() if recipe["precision"] == "fp16" else None
        self.divergence = DivergenceDetector(recipe["divergence_z"])

    @property
    def scale(self) -> float:
        """The factor by which a step's loss, and so its gradients, are to be multiplied."""
        return self.loss_scale.value if self.loss_scale else 1.0

    @property
    def need_the_host(self) -> bool:
        """Whether more than the next step's own loss and norm can keep its update back."""
        return bool(self.divergence.limit)

    def spoilt(self, figures: torch.Tensor) -> torch.Tensor:
        """Whether the next step's update is kept back, which its device so knows before the host.

        Args:
            figures: its loss in nats and its gradient norm, float64.
        """
        loss, norm = figures
        return (
            ~figures.isfinite().all()
            | (loss > self._ceiling("loss"))
            | (norm > self._ceiling("grad"))
        )

    def _ceiling(self, name: str) -> float:
        detector = {"loss": self.loss_detector, "grad": self.norm_detector}[name]
        return detector.ceiling(self.limits[name])

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        """Take in a step's loss in nats and its gradient norm; `spoilt` comes before it.

        Raises:
            Diverged: they left their course; the weights must be, or by `spoilt` are, untouched.
        """
        overflow = self._overflow(loss, norm)
        if overflow is None:
            self.divergence.check_finite(step, loss, norm)
        far = {"loss": loss > self._ceiling("loss"), "grad": norm > self._ceiling("grad")}
        z = {"loss": self.loss_detector.update(loss), "grad": self.norm_detector.update(norm)}
        self.divergence.check_course(step, z["loss"])
        outlier = next((name for name, is_far in far.items() if is_far), None)
        reason = outlier and f"skipping update due to {outlier} z-score of {z[outlier]:f}"
        return Verdict(z["loss"], z["grad"], overflow or reason)

    def _overflow(self, loss: float, norm: float) -> str | None:
        """Whether fp16 could not hold this step's gradients; the loss scale follows."""
        if self.loss_scale is None or not math.isfinite(loss):
            return None
        before, overflowed = self.loss_scale.value, not math.isfinite(norm)
        self.loss_scale.update(overflowed)
        if not overflowed:
            return None
        return f"skipping update due to overflow with loss scale {before:g}"

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "loss_detector": self.loss_detector.state_dict(),
            "norm_detector": self.norm_detector.state_dict(),
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
            "divergence": self.divergence.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what was saved, from a checkpoint's state."""
        self.loss_detector.load_state_dict(state["loss_detector"])
        self.norm_detector.load_state_dict(state["norm_detector"])
        if "divergence" in state:  # not in a checkpoint of llm.c, nor in one made before it came
            self.divergence.load_state_dict(state["divergence"])
        if self.loss_scale and state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])
