"""What a run says: llm.c's lines, a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import math
import sys
import time
from pathlib import Path

from tqdm import tqdm

SECONDS_BETWEEN_ETA_LINES = 30.0
SECONDS_BETWEEN_REDRAWS = 0.5


def step_line(
    step: int,
    max_steps: int,
    *,
    loss: float,
    loss_z: float,
    norm: float,
    norm_z: float,
    learning_rate: float,
    milliseconds: float,
    mfu_percent: float | None,
    tokens_per_second: float,
) -> str:
    """One line in llm.c's format; `step` is 1-based here as it is there."""
    mfu = "n/a" if mfu_percent is None else f"{mfu_percent:.1f}"
    return (
        f"step {step:4d}/{max_steps} | loss {loss:.6f} ({loss_z:+.2f}z)"
        f"| norm {norm:.4f} ({norm_z:+.2f}z)| lr {learning_rate:.2e} "
        f"| {milliseconds:.2f} ms | {mfu}% bf16 MFU | {tokens_per_second:.0f} tok/s"
    )


def duration(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Console:
    """Lines to standard output and, without the bar, to `train.log`; silent on other ranks."""

    def __init__(self, log: Path, max_steps: int, first_step: int, is_main: bool) -> None:
        self.is_main = is_main
        if not is_main:
            return
        self.log = log.open("a", encoding="utf-8")
        self.max_steps = max_steps
        self.bar = tqdm(
            total=max_steps,
            initial=first_step,
            unit="step",
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            dynamic_ncols=True,
            disable=not sys.stdout.isatty(),
            file=sys.stdout,
        )
        self._last_eta = self._last_progress = time.monotonic()

    def line(self, text: str) -> None:
        """Print one line, above the bar where there is one."""
        if not self.is_main:
            return
        self.log.write(text + "\n")
        self.log.flush()
        with contextlib.suppress(OSError):  # the terminal may be gone, the run goes on or saves
            if self.bar.disable:
                print(text, flush=True)
            else:
                self.bar.write(text, file=sys.stdout)

    def advance(self, step: int, seconds_left: float) -> None:
        """Show that `step` steps are done; now and then a line with the time that is left."""
        if not self.is_main:
            return
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{duration(seconds_left)} left", refresh=False)
            with contextlib.suppress(OSError):
                self.bar.update(step - self.bar.n)
        elif time.monotonic() - self._last_eta > SECONDS_BETWEEN_ETA_LINES:
            self._last_eta = time.monotonic()
            self.line(f"eta {duration(seconds_left)} until step {self.max_steps}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a pause in the steps is; without a bar by a line now and then."""
        if not self.is_main:
            return
        now = time.monotonic()
        if self.bar.disable and now - self._last_eta > SECONDS_BETWEEN_ETA_LINES:
            self._last_eta = now
            self.line(f"{what}: {done} of {total}")
        elif not self.bar.disable and now - self._last_progress > SECONDS_BETWEEN_REDRAWS:
            self._last_progress = now
            with contextlib.suppress(OSError):
                self.bar.set_postfix_str(f"{what} {done}/{total}")

    def close(self) -> None:
        """End the bar and the log."""
        if self.is_main:
            self.log.close()
            with contextlib.suppress(OSError):
                self.bar.close()


class RunningMean:
    """Exponential mean with bias correction, as llm.c smooths its tokens per second."""

    def __init__(self, decay: float = 0.95) -> None:
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def update(self, value: float) -> float:
        """Take in one value and give the mean."""
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.weight = self.decay * self.weight + (1 - self.decay)
        return self.total / self.weight

    @property
    def value(self) -> float:
        """The mean so far; NaN before the first value."""
        return self.total / self.weight if self.weight else math.nan
