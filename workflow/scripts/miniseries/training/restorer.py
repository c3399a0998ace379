"""Where a run goes on from: its newest checkpoint, its trunk's, given weights, or fresh ones."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Full, Queue
from threading import Thread, main_thread
from typing import Any

import torch
import torch.distributed as dist

from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.settings import LATER_MACHINE_KEYS, checkpoints_held
from miniseries.training import checkpoint
from miniseries.training.distributed import World
from miniseries.training.guards import (
    MAX_ROLLBACKS,
    NUM_PINNED,
    Diverged,
    Guards,
    Rollbacks,
)
from miniseries.training.journal import Journal
from miniseries.training.pretrained import load_start

AHEAD_BYTES = 8 << 30  # of the host's memory; one process of `1558m` takes 6.2 GB


def draw_ahead(config: GPTConfig, seed: int, processes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """`draw_weights` by a thread that begins at once, while this one loads the compiler.

    Args:
        processes: of this node; together they are about `AHEAD_BYTES` ahead at most.
    """
    matrix_bytes = 4 * 4 * config.channels**2  # the largest of a layer
    drawn: Queue = Queue(max(1, AHEAD_BYTES // (processes * matrix_bytes)))

    def put(entry: Any) -> bool:
        # no daemon: one that is within PyTorch when the interpreter ends aborts the process
        while main_thread().is_alive():
            with contextlib.suppress(Full):
                drawn.put(entry, timeout=0.1)
                return True
        return False

    def draw() -> None:
        try:
            for entry in draw_weights(config, seed):
                if not put(entry):
                    return
        except Exception as error:
            put(error)
        put(None)

    def take() -> Iterator[tuple[str, torch.Tensor]]:
        while (entry := drawn.get()) is not None:
            if isinstance(entry, Exception):
                raise entry
            yield entry

    Thread(target=draw).start()
    return take()


@dataclass
class Beginning:
    """Where a start of a run begins."""

    step: int = 0  # steps done
    wall_seconds: float = 0.0  # of this run until then, over all starts
    notes: list[str] = field(default_factory=list)  # for the log


class Restorer:
    """Puts model, optimizer, and guards where training goes on; every rank calls every method.

    Args:
        settings: the run's frozen ones; `recipe` has the defaults of later keys besides.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        recipe: dict[str, Any],
        *,
        model: GPT,
        optimizer: torch.optim.AdamW,
        guards: Guards,
        rollbacks: Rollbacks,
        world: World,
    ) -> None:
        self.folder, self.settings, self.recipe = folder, settings, recipe
        self.model, self.optimizer, self.guards, self.world = model, optimizer, guards, world
        self.rollbacks = rollbacks

    def begin(self, micro_batch: int, drawn: Iterable[tuple[str, torch.Tensor]]) -> Beginning:
        """Load the newest checkpoint, or what the run starts from, or take fresh weights.

        Args:
            drawn: the fresh ones, as `draw_weights` gives them.

        Raises:
            ValueError: all checkpoints are damaged, or they belong to other settings.
            OSError: not even one checkpoint fits on the disk.
        """
        notes: list[str] = []
        if self.world.is_main:
            checkpoint.clean_up(self.folder)
            if checkpoint.saved_steps(self.folder)[-1:] != [self.recipe["max_steps"]]:
                notes = self._check_space()
        dist.barrier()
        state, problems = checkpoint.load_newest(
            self.folder, self.model, self.optimizer, self.world
        )
        notes += [f"{problem}; it is put aside, and an older one is taken" for problem in problems]
        beginning = self._first_state(state, micro_batch, drawn)
        beginning.notes[:0] = notes
        return beginning

    def _check_space(self) -> list[str]:
        machine = LATER_MACHINE_KEYS | self.settings["machine"]
        held = checkpoints_held({"recipe": self.recipe, "machine": machine})
        tensors = checkpoint.state_tensors(self.model, self.optimizer)
        return checkpoint.check_space(self.folder, tensors, held)

    def _first_state(
        self,
        state: dict[str, Any] | None,
        micro_batch: int,
        drawn: Iterable[tuple[str, torch.Tensor]],
    ) -> Beginning:
        start = self.settings.get("start")
        if state is not None:
            return self._take_over(state, self.settings["fingerprint"], micro_batch)
        if start and self.recipe["branch_from"]:
            return self._branch_off(Path(start["path"]), micro_batch)
        wanted = self.recipe["branch_from"] or self.recipe["init_from"]
        if start:
            load_start(self.model, Path(start["path"]))
        elif wanted:
            raise ValueError(
                f"this run starts from {wanted}: name the file by `--init-from`; under torchrun "
                "start the run once on one node, which notes it"
            )
        else:
            init_weights(self.model, drawn)
        return Beginning()

    def _take_over(self, state: dict[str, Any], fingerprint: str, micro_batch: int) -> Beginning:
        """What a checkpoint holds besides the weights and the optimizer."""
        if state["fingerprint"] != fingerprint:
            raise ValueError(
                f"the checkpoint of step {state['step']} belongs to other settings than "
                f"{self.folder / 'settings.json'}; give the new settings a run name of their own"
            )
        tokens = self.settings.get("data_fingerprint")
        if tokens and (state.get("data_fingerprint") or tokens) != tokens:
            raise ValueError(
                f"the checkpoint of step {state['step']} was trained on other tokens than "
                f"{self.folder / 'settings.json'} names (fingerprint "
                f"{state['data_fingerprint'][:12]} -> {tokens[:12]}); bring those back"
            )
        self.guards.load_state_dict(state)
        found = Beginning(state["step"], state["wall_seconds"])
        for key, now in self.roundings(micro_batch).items():
            if state.get(key, now) != now and "imported_from" not in state:
                found.notes.append(
                    f"the checkpoint was made with {key} {state[key]}, now it is {now}: the same "
                    "batches, and losses equal but for rounding"
                )
        return found

    def roundings(self, micro_batch: int) -> dict[str, Any]:
        """What besides recipe and tokens decides how losses are rounded; stands in checkpoints."""
        machine = LATER_MACHINE_KEYS | self.settings["machine"]
        return {
            "world_size": self.world.size,
            "micro_batch": micro_batch,
            "recompute": machine["recompute"],
            "deterministic": machine["deterministic"],
            "torch": torch.__version__,
            **self.model.implementations,
        }

    def _branch_off(self, marker: Path, micro_batch: int) -> Beginning:
        """Begin as the trunk was at the step of a marker, optimizer and all."""
        folder, trunk = checkpoint.read_marker(marker)
        if trunk["data_fingerprint"] != self.settings["data_fingerprint"]:
            raise ValueError(
                f"{folder}: this run's trunk was trained on other tokens; bring those back, or "
                "train the trunk again under another name"
            )
        state = checkpoint.load_checkpoint(folder, self.model, self.optimizer)
        found = self._take_over(state, trunk["fingerprint"], micro_batch)
        found.wall_seconds = 0.0  # the trunk counts its own time
        # what the trunk left out until here is left out here, too
        before = [r for r in Rollbacks(folder.parents[1]).done if r.back_to <= found.step]
        self.rollbacks.done.clear()
        self.rollbacks.note(*before, write=self.world.is_main)
        return found

    def go_back(self, step: int, divergence: Diverged, journal: Journal) -> int:
        """Pin the last sound checkpoints, go back to the newest, and skip what led astray.

        Args:
            step: the one that diverged; no checkpoint is being written.

        Returns:
            The step to go on with.

        Raises:
            ValueError: it is not asked for, not possible, or was done too often; or all the sound
                ones are damaged: those that came after them lie there as `.diverged` then.
        """
        saved = checkpoint.saved_steps(self.folder)
        sound = [s for s in saved if s <= divergence.since]
        if self.world.is_main:
            checkpoint.pin(self.folder, sound[-NUM_PINNED:])
        pinned = f"checkpoints kept for good: {sound[-NUM_PINNED:]}"
        journal.record("divergence", step, reason=str(divergence), pinned=sound[-NUM_PINNED:])
        more = self.recipe["rollback_skip_steps"]
        if not (more and sound and len(self.rollbacks.done) < MAX_ROLLBACKS):
            raise ValueError(f"{divergence}; {pinned}") from None
        if self.world.is_main:  # not away yet: the one to go back to may turn out to be damaged
            for later in saved[len(sound) :]:
                checkpoint.forget(self.folder, later, aside=checkpoint.DIVERGED)
        rollback = self.rollbacks.plan(step, sound[-1], more)
        # before loading, which may take long: who is killed meanwhile starts again as decided here
        self.rollbacks.note(rollback, write=self.world.is_main)
        journal.record("rollback", sound[-1], **asdict(rollback))
        state, problems = checkpoint.load_newest(
            self.folder, self.model, self.optimizer, self.world, until=sound[-1]
        )
        self.guards.load_state_dict(state)
        back_to, skipped = state["step"], rollback.batches_skipped
        journal.say("; ".join([str(divergence), pinned, *problems]))
        journal.say(f"going back to step {back_to} and on without the next {skipped} batches")
        return back_to
