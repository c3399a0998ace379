"""What a run says and writes: console lines, `train.log`, llm.c's `main.log`, `metrics.jsonl`."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniseries.evaluation.choices import question_set
from miniseries.metrics import append_line, append_record, read_metrics, sync_file
from miniseries.training.console import Console, RunningMean, step_line

MEBIBYTE = 1 << 20
# names of `memory.buffers` as llm.c's lines have them
BUFFERS = {
    "parameters": "parameters",
    "gradients": "parameter gradients",
    "adamw_m": "AdamW optimizer state m",
    "adamw_v": "AdamW optimizer state v",
    "master_copy": "master copy of params",
    "weights_without_master_copy": "sharded params",
}


@dataclass(frozen=True)
class StepReport:
    """What one step did. `step` is 0-based; loss and norm are those before the update."""

    step: int
    batch: int  # number of the global batch; more than `step` after a rollback
    loss: float
    grad_norm: float
    loss_z: float
    grad_z: float
    learning_rate: float
    seconds: float
    skipped: bool
    reserved_mib: float | None  # of the GPU's memory; the same from the first step to the last
    batch_hash: str  # of the token ids that the devices saw, 64 bits; the same for every split


def _none_if_nan(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Journal:
    """The voice of a run; on ranks other than the main one every method does nothing.

    Args:
        tokens_per_step: tokens of a global batch, over all ranks.
        tokens_per_epoch: training tokens of the dataset.
        flops_per_token: operations of the model by llm.c's formula, forward and backward.
        peak_flops: of all devices together, FLOP/s; None when unknown.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        first_step: int,
        max_steps: int,
        tokens_per_step: int,
        tokens_per_epoch: int,
        flops_per_token: float,
        peak_flops: float | None,
    ) -> None:
        self.folder, self.is_main = folder, is_main
        self.first_step, self.max_steps = first_step, max_steps
        self.tokens_per_step, self.tokens_per_epoch = tokens_per_step, tokens_per_epoch
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.console = Console(folder / "train.log", max_steps, first_step, is_main)
        self.speed = RunningMean()
        self.batches_read: int | None = None  # of the order of the tokens, left-out ones included
        self.pauses: dict[str, tuple[int, float]] = {}  # steps between two, seconds of the last

    def say(self, text: str) -> None:
        """One line to the console and train.log."""
        self.console.line(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """How far something without lines of its own is."""
        self.console.progress(what, done, total)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """One line into metrics.jsonl."""
        if self.is_main:
            append_record(self.folder / "metrics.jsonl", kind, step=step, **values)

    def sync(self) -> None:
        """Bring the log to the disk: no later start repeats what a power cut would take of it."""
        metrics = self.folder / "metrics.jsonl"
        if self.is_main and metrics.exists():
            sync_file(metrics)

    def log(self, step: int, text: str) -> None:
        """One line into main.log in llm.c's format."""
        if self.is_main:
            append_line(self.folder / "main.log", f"s:{step} {text}")

    def table(self, values: dict[str, Any]) -> None:
        """Every setting of the run, one a line."""
        width = max(len(key) for key in values)
        for key, value in values.items():
            self.say(f"| {key:<{width}} | {'none' if value in ('', None) else value}")

    def sizes(
        self,
        *,
        num_elements: int,
        buffers: dict[str, float | None],
        processes: int,
        micro_batch: int,
        sequence_length: int,
        grad_accum_steps: int,
    ) -> None:
        """llm.c's lines on parameters, memory, and how a batch is divided.

        Args:
            buffers: MiB by name, as `memory.buffers` gives them.
        """
        num_bytes = round(buffers["parameters"] * MEBIBYTE)
        self.say(f"num_parameters: {num_elements} => bytes: {num_bytes}")
        for name, what in BUFFERS.items():
            if buffers[name] is not None:
                self.say(f"allocating {buffers[name]:.0f} MiB for {what}")
        self.say(
            f"batch_size B={micro_batch} * seq_len T={sequence_length} * "
            f"num_processes={processes} and total_batch_size={self.tokens_per_step}"
        )
        self.say(f"=> setting grad_accum_steps={grad_accum_steps}")

    def memory(self, step: int, report: dict[str, float | None]) -> None:
        """What the first step of a start took, as `memory.report` gives it, MiB."""
        text = f"peak memory {report['peak']:.0f} MiB"
        if report["activations"] is not None:
            text += f", of which {report['activations']:.0f} MiB for activations"
        self.say(text)
        self.record("memory", step, **{f"{name}_mib": mib for name, mib in report.items()})

    @contextlib.contextmanager
    def pausing(self, what: str, every_steps: int) -> Iterator[None]:
        """Around work between steps; the time that is left counts as much for each time to come."""
        start = time.monotonic()
        yield
        self.pauses[what] = (every_steps, time.monotonic() - start)

    def seconds_left(self, step: int, seconds_per_step: float) -> float:
        """Time from `step` done steps to the end, evaluations and checkpoints included."""
        left = self.max_steps - step
        pauses = 0.0
        for every, seconds in self.pauses.values():
            # as many multiples of `every` as lie ahead; the last step always counts as one
            due = self.max_steps // every - step // every if every else 0
            pauses += seconds * (due + (not every or self.max_steps % every > 0))
        return left * seconds_per_step + pauses

    def mfu_percent(self, tokens_per_second: float) -> float | None:
        """Model FLOP utilisation; None when the peak of the device is unknown."""
        if self.peak_flops is None:
            return None
        return 100 * self.flops_per_token * tokens_per_second / self.peak_flops

    def step(self, report: StepReport) -> None:
        """One training step: console, main.log and metrics.jsonl."""
        tokens_per_second = self.tokens_per_step / report.seconds
        mfu = self.mfu_percent(tokens_per_second)
        if report.step > self.first_step:  # the first step of a start compiles and warms up
            self.speed.update(tokens_per_second)
        smooth = tokens_per_second if math.isnan(self.speed.value) else self.speed.value
        line = step_line(
            report.step + 1,
            self.max_steps,
            loss=report.loss,
            loss_z=report.loss_z,
            norm=report.grad_norm,
            norm_z=report.grad_z,
            learning_rate=report.learning_rate,
            milliseconds=report.seconds * 1e3,
            mfu_percent=mfu,
            tokens_per_second=smooth,
        )
        self.say(line)
        done = report.step + 1
        self.console.advance(done, self.seconds_left(done, self.tokens_per_step / smooth))
        rate, norm = report.learning_rate, report.grad_norm
        self.log(report.step, f"trl:{report.loss:.4f} lr:{rate:.6f} norm:{norm:.2f}")
        tokens_seen = (report.step + 1) * self.tokens_per_step
        self.record(
            "train",
            report.step,
            tokens_seen=tokens_seen,
            epoch=round(self._epochs(report.batch + 1), 4),
            train_loss_nats=report.loss,
            loss_z=_none_if_nan(report.loss_z),
            grad_norm=_none_if_nan(norm),
            grad_z=_none_if_nan(report.grad_z),
            learning_rate=rate,
            step_time_ms=report.seconds * 1e3,
            tokens_per_second=tokens_per_second,
            mfu_percent=mfu,
            skipped=report.skipped,
            reserved_mib=report.reserved_mib,
            batch_hash=report.batch_hash,
        )
        self._count_epochs(report.batch)

    def _epochs(self, batches: int) -> float:
        """How often the order of the training tokens is gone through with its first batches."""
        return batches * self.tokens_per_step / self.tokens_per_epoch

    def _count_epochs(self, batch: int) -> None:
        """A line when all training tokens have been read 1, 2, 4, 8 ... times."""
        before = batch if self.batches_read is None else self.batches_read
        self.batches_read = batch + 1
        done, earlier = self._epochs(self.batches_read), self._epochs(before)
        if int(earlier).bit_length() < int(done).bit_length():
            self.say(f"the training tokens have been read {done:.2f} times")

    def validation(self, step: int, scores: dict[str, Any]) -> None:
        """Validation loss of the weights after `step` updates."""
        loss = scores["val_loss_nats"]
        self.say(f"val loss {loss:f}")
        self.log(step, f"tel:{loss:.4f}")
        values = {"val_loss_nats": loss, "num_tokens": scores["num_tokens"]}
        self.record("val", step, tokens_seen=step * self.tokens_per_step, **values)

    def hellaswag(self, step: int, scores: dict[str, Any]) -> None:
        """Choices of endings by token mean, of the weights after `step` updates."""
        correct, items = scores["num_correct"], scores["num_items"]
        self.say(f"{question_set(items)}: {correct}/{items} = {correct / items:f}")
        self.log(step, f"eval:{correct / items:.4f}")
        values = {"num_correct": correct, "num_items": items}
        values["acc_norm_token_mean"] = correct / items
        self.record("hellaswag", step, tokens_seen=step * self.tokens_per_step, **values)

    def samples(self, step: int, text: str) -> None:
        """A generated text: console and samples.txt."""
        self.say(f"generating:\n---\n{text}\n---")
        if self.is_main:
            with (self.folder / "samples.txt").open("a", encoding="utf-8") as file:
                file.write(f"step {step}\n---\n{text}\n---\n")

    def start(self, *, val_tokens: int, batches_skipped: int, **values: Any) -> None:
        """A start or resume of the run, which has left out some batches by going back."""
        if self.first_step:
            self.say(f"resuming at step {self.first_step} of {self.max_steps}")
        epochs = self._epochs(self.max_steps + batches_skipped)
        self.say(
            f"{self.tokens_per_epoch:,} training tokens and {val_tokens:,} validation tokens; "
            f"the run reads {epochs:.2f} epochs"
        )
        if epochs > 1:
            self.say(
                f"warning: the run reads its training tokens {epochs:.2f} times; more text is "
                "better than the same text again"
            )
        counts = {"unique_tokens": self.tokens_per_epoch, "val_tokens": val_tokens}
        self.record("start", self.first_step, time=time.time(), **counts, **values)

    def saved(self, step: int, seconds: float, waited: float) -> None:
        """A checkpoint has become complete; training waited some of the time it took, seconds."""
        self.record("checkpoint", step, seconds=seconds, training_waited_seconds=waited)
        self.say(
            f"checkpoint of step {step} is complete: {seconds:.1f} s, "
            f"of which training waited {waited:.1f} s"
        )

    def finish(self, wall_seconds: float) -> None:
        """The run's last step is done; `wall_seconds` are those of all starts."""
        records = read_metrics(self.folder / "metrics.jsonl").get("train", [])
        times = [t for record in records if isinstance(t := record.get("step_time_ms"), float)]
        if times:
            self.say(f"total average iteration time: {sum(times) / len(times):f} ms")
        self.record("done", self.max_steps, wall_seconds=wall_seconds)

    def close(self) -> None:
        """End the progress bar and the log."""
        self.console.close()
