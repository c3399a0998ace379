"""The processes of one attempt at a run: started, watched, and ended together; knows no PyTorch.

Each process writes a byte into a pipe whenever it goes on to its next piece of work. One that is
silent for too long hangs, and its whole group is killed. A signal is passed on; what has not ended
some seconds later is killed, too, so that nothing is left behind.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from miniseries.metrics import num_cores

# Exit codes of a process of a run, besides 0: complete. Any other one is a crash.
REFUSED = 1  # what the user has to mend; starting again would not help
STOPPED = 130  # a signal ended it; everything up to its last step is saved
OUT_OF_MEMORY = 77
CRASHED = 70

GRACE_SECONDS = 21.0  # to save after a signal; all is over within 25
SECONDS_FOR_THE_OTHERS = 3.0  # to come to an end of their own when one process has failed
AWAY_SECONDS = 2.0  # a launcher that looks so seldom was itself stopped, as by Ctrl-Z
START_SECONDS = 1800.0  # until the first step: reading a checkpoint, compiling
BEAT, STEP = b".", b"s"
GPUS_SEEN = "MINISERIES_GPUS"  # their name, for processes that the launcher gives one each
PIPE = "MINISERIES_HEARTBEAT"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Heartbeat:
    """A process's side of the pipe; does nothing where no supervisor listens."""

    def __init__(self) -> None:
        self.pipe = int(os.environ.get(PIPE, -1))

    def beat(self, kind: bytes = BEAT) -> None:
        """Say that this process goes on; `STEP` after a whole optimizer step.

        Without a launcher it ends: that one's lock on the run's folder has gone with it.
        """
        if self.pipe < 0:
            return
        try:
            os.write(self.pipe, kind)
        except BlockingIOError:  # not read fast enough
            pass
        except BrokenPipeError:
            os._exit(CRASHED)


def signals_heard() -> list[signal.Signals]:
    """The signals that stop a run: all three, but HUP is for `nohup` to silence."""
    silenced = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (silenced and number == signal.SIGHUP)]


class Ears:
    """Context in which the first signal that asks this process to stop is noted, no more."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None

    def __enter__(self) -> "Ears":
        self._before = {number: signal.signal(number, self._note) for number in signals_heard()}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        self.heard = self.heard or signal.Signals(number)


@dataclass
class Outcome:
    """How an attempt ended."""

    codes: list[int]  # exit code by rank; -9 is a process that KILL ended
    num_steps: int  # optimizer steps that all processes did
    silent: list[int] = field(default_factory=list)  # ranks that hung, or waited for one that did
    is_late: bool = False  # some did not end in time after a signal
    killed: list[int] = field(default_factory=list)  # ranks that were still there at the end

    @property
    def is_stop(self) -> bool:
        """Whether a signal to one of the processes, meant to stop the run, ended it."""
        asked = {STOPPED, *(-number for number in SIGNALS)}
        return bool(asked.intersection(self.codes))

    def reason(self) -> str:
        """What happened, for the log; the first cause where there are several."""
        if self.silent:
            return f"no sign of life from process {', '.join(map(str, self.silent))}"
        failed = [r for r, code in enumerate(self.codes) if code and r not in self.killed]
        by_signal = [r for r in failed if self.codes[r] < 0]
        rank = (by_signal or failed)[0]
        code = self.codes[rank]
        what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"process {rank} {what}"


class _Process:
    """One process of the run and what its pipe says."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.listening, speaking = os.pipe()
        for end in (self.listening, speaking):
            os.set_blocking(end, False)
        environment = {**environment, PIPE: str(speaking)}
        self.child = subprocess.Popen(command, env=environment, pass_fds=[speaking])
        os.close(speaking)
        self.last_beat, self.num_steps = time.monotonic(), 0

    def listen(self) -> None:
        """Take in what the pipe holds."""
        with contextlib.suppress(BlockingIOError):
            heard = os.read(self.listening, 65536)
            self.last_beat = time.monotonic()
            self.num_steps += heard.count(STEP)

    def is_silent(self, stall_seconds: float) -> bool:
        """Whether it lives and has said nothing for too long."""
        limit = stall_seconds if self.num_steps else max(stall_seconds, START_SECONDS)
        return self.child.poll() is None and time.monotonic() - self.last_beat > limit

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        if self.child.poll() is None:
            self.child.send_signal(number)


def _reserved_port() -> socket.socket:
    """A socket whose port no one else is given while it is open.

    PyTorch's store can listen there all the same: both sockets allow it, and this one only holds.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _environments(processes: int, port: int) -> Iterator[dict[str, str]]:
    """What torchrun would set for each process of one node."""
    threads = max(1, num_cores() // processes)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    if processes > 1:
        shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    for rank in range(processes):
        yield {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def supervise(command: list[str], processes: int, stall_seconds: float, ears: Ears) -> Outcome:
    """Run the command once a process until all have ended, one way or the other.

    Args:
        command: of every process; each is told its rank by its environment, as by torchrun.
        stall_seconds: without a sign of life after which a process hangs.
        ears: of this process; a signal that came is passed on.
    """
    outcome = Outcome([], 0)
    with _reserved_port() as holder:
        environments = _environments(processes, holder.getsockname()[1])
        group = [_Process(command, environment) for environment in environments]
        try:
            _watch(group, stall_seconds, ears, outcome)
        finally:
            outcome.killed = [r for r, p in enumerate(group) if p.child.poll() is None]
            for process in group:
                process.send(signal.SIGKILL)
    outcome.codes = [process.child.wait() for process in group]
    for process in group:
        process.listen()
        os.close(process.listening)
    outcome.num_steps = min(process.num_steps for process in group)
    return outcome


def _watch(group: list[_Process], stall_seconds: float, ears: Ears, outcome: Outcome) -> None:
    """Return when all have ended, or when those that have not are to be killed."""
    deadline, is_told, looked = float("inf"), False, time.monotonic()
    pipes = {process.listening: process for process in group}
    while any(process.child.poll() is None for process in group):
        for pipe in select.select(list(pipes), [], [], 0.1)[0]:
            pipes[pipe].listen()
        away, looked = time.monotonic() - looked, time.monotonic()
        if away > AWAY_SECONDS:  # and so were the others, who could give no sign of life
            deadline += away
            for process in group:
                process.last_beat = looked
        # a closed pipe is always ready: its process has ended
        pipes = {pipe: p for pipe, p in pipes.items() if p.child.poll() is None}
        if ears.heard and not is_told:
            is_told, deadline = True, time.monotonic() + GRACE_SECONDS
            for process in group:
                process.send(signal.SIGTERM)
        ended = {process.child.poll() for process in group} - {None, 0}
        if ended:  # those that stop save together, and leave together
            more = GRACE_SECONDS if ended == {STOPPED} else SECONDS_FOR_THE_OTHERS
            deadline = min(deadline, time.monotonic() + more)
        if time.monotonic() > deadline:
            outcome.is_late = is_told and ended <= {STOPPED}  # else it failed at something else
            return
        outcome.silent = [r for r, p in enumerate(group) if p.is_silent(stall_seconds)]
        if outcome.silent and not is_told:
            _ask_where(group)
            return


def _ask_where(group: list[_Process]) -> None:
    """Let each process write to standard error what its threads are at, before it is killed."""
    for process in group:
        process.send(signal.SIGUSR1)
    time.sleep(1.0)
    sys.stderr.flush()
