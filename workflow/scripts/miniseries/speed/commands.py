"""One command at a time, as a user gives it: ended in time, stopped by TERM, and what it leaves.

Every process that a command starts inherits a mark in its environment, so that none can hide.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miniseries.metrics import read_metrics

MARK = "MINISERIES_REFERENCE"
LOOK_SECONDS = 0.05  # between two looks at a command
# What a command may take to end after Ctrl-C: a trainer is gone within 25 s
GRACE_SECONDS = 30.0
# For what ends by itself once its parent is gone, such as the compiler's workers
LEFTOVER_SECONDS = 5.0
WATCHDOG = re.compile("watchdog", re.IGNORECASE)


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    seconds: float
    is_late: bool  # it was ended at its deadline
    leftovers: list[str]  # command lines of processes that outlived it; killed
    watchdog: list[str]  # lines in which NCCL's watchdog speaks

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class TermAfter:
    """Sends TERM to the trainer of a run at a random moment after a step.

    Args:
        folder: the run's; its `lock` holds the trainer's id.
        step: 0-based; the signal comes within the time of a step after this one is done. No
            earlier start of the run may have done it, or the lock is read too early.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.due: float | None = None
        self.sent_at: float | None = None  # by `time.monotonic()`, like `due`

    def look(self) -> None:
        """Called again and again while the command runs."""
        if self.sent_at is not None:
            return
        if self.due is None:
            done = read_metrics(self.folder / "metrics.jsonl").get("train", [])
            if done and done[-1]["step"] >= self.step:
                self.due = time.monotonic() + random.uniform(0, done[-1]["step_time_ms"] / 1e3)
        elif time.monotonic() >= self.due:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((self.folder / "lock").read_text()), signal.SIGTERM)
            self.sent_at = time.monotonic()


def run_command(
    command: list[str],
    place: Path,
    log: Path,
    deadline: float,
    look: Callable[[], None] = lambda: None,
) -> Finished:
    """Run a command to its end, or to the deadline; whatever it leaves behind is killed.

    Args:
        command: started in a process group of its own, as by a terminal.
        place: working folder.
        log: gets all that it says.
        deadline: by `time.monotonic()`; then Ctrl-C is pressed, and a while later all is killed.
        look: called about every LOOK_SECONDS.
    """
    begun = time.monotonic()
    mark = f"{os.getpid()}-{begun}"
    environment = {**os.environ, MARK: mark, "NO_COLOR": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    is_late = False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not is_late:
                time.sleep(LOOK_SECONDS)
                look()
                is_late = time.monotonic() > deadline
        finally:
            if process.poll() is None:
                _press_ctrl_c(process)
            leftovers = _end_leftovers(mark)
    seconds = time.monotonic() - begun
    return Finished(process.wait(), seconds, is_late, leftovers, watchdog_lines(log))


def watchdog_lines(log: Path) -> list[str]:
    """Lines in which NCCL's watchdog speaks."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if WATCHDOG.search(line)]


def _press_ctrl_c(process: subprocess.Popen) -> None:
    """INT to all processes of a command; KILL to it if it does not end in time."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_leftovers(mark: str) -> list[str]:
    """Command lines of marked processes that do not end by themselves; they are killed."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(found.values())


def marked_processes(mark: str) -> dict[int, str]:
    """Process id -> command line of each living process with this mark in its environment."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found
