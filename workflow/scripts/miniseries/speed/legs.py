"""Legs of a reference run: one command each, one after the other, until the time is over.

A leg that fails, or for which no time is left, says so in its record; the others run nevertheless.
"""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miniseries.metrics import read_json, write_json
from miniseries.speed.commands import Finished, TermAfter, run_command, watchdog_lines
from miniseries.training.launcher import newest_checkpoint

DONE, FAILED, NOT_RUN = "done", "failed", "not run"
Record = dict[str, Any]


@dataclass(frozen=True)
class Leg:
    """One command and what is made of it."""

    targets: list[str]  # of `snakemake`
    folder: Path | None = None  # of the run that it trains
    old: Path | None = None  # what an earlier call left of it, deleted before it begins
    log: Path | None = None  # what its command says elsewhere than on the terminal
    stop_after: int | None = None  # steps before TERM is sent; None lets it come to its end
    configfile: tuple[Path, ...] = ()  # besides the common ones
    needs: tuple[str, ...] = ()  # legs that must be done
    impossible: str | None = None  # why this machine cannot do it
    is_last: bool = False  # nobody needs the run's checkpoints afterwards: room on the disk
    figures: Callable[[], Record] = field(default=dict)  # for the leg's record


@dataclass(frozen=True)
class Course:
    """Where and under what circumstances legs are run."""

    root: Path  # of the project
    output: Path  # gets `legs/<leg>.json`, what the commands said, and the runs' logs
    configfile: list[Path]
    deadline: float  # by `time.monotonic()`
    circumstances: Record  # legs of two calls with the same ones belong together
    asked: list[str] | None = None  # the legs to run; None is all

    def run(self, legs: dict[str, Leg]) -> dict[str, Record]:
        """Run all legs in their order; those that an earlier call has done are kept.

        Returns:
            name -> record: state, `reason` unless it is done, seconds, leftovers and words of
            NCCL's watchdog (see `commands.Finished`), and the leg's own figures.
        """
        records: dict[str, Record] = {}
        again: set[str] = set()  # what stands on these is done again, too
        for name, leg in legs.items():
            file = self.output / "legs" / f"{name}.json"
            record = None if again.intersection(leg.needs) else self._kept(name, leg, file)
            if record is None:
                again.add(name)
                record = self._run_leg(name, leg, records)
                write_json(file, record | {"circumstances": self.circumstances})
            records[name] = record
            reason = f": {record['reason']}" if record["reason"] else ""
            print(f"{name}: {record['state']}{reason}, {record['seconds']:.1f} s", flush=True)
        return records

    def _kept(self, name: str, leg: Leg, file: Path) -> Record | None:
        """What an earlier call under the same circumstances found, if that is enough."""
        if not file.exists():
            return None
        record = read_json(file)
        is_there = leg.folder is None or (leg.folder / "metrics.jsonl").exists()
        is_same = record.pop("circumstances") == self.circumstances
        is_enough = record["state"] == DONE or not self._is_asked(name)
        return record if is_same and is_there and is_enough else None

    def _is_asked(self, name: str) -> bool:
        return self.asked is None or name in self.asked

    def _run_leg(self, name: str, leg: Leg, before: dict[str, Record]) -> Record:
        record: Record = {"state": NOT_RUN, "reason": self._obstacle(name, leg, before)}
        record |= {"seconds": 0.0, "leftovers": [], "watchdog": []}
        if record["reason"] is None:
            record |= self._command(name, leg)
            record |= _figures(leg, record)
        is_over = leg.impossible and all(before[need]["state"] == DONE for need in leg.needs)
        if leg.is_last and (record["state"] == DONE or is_over):
            shutil.rmtree(leg.folder / "checkpoints", ignore_errors=True)
        return record

    def _obstacle(self, name: str, leg: Leg, before: dict[str, Record]) -> str | None:
        """Why a leg cannot be run; None if it can."""
        failed = [need for need in leg.needs if before[need]["state"] != DONE]
        if leg.impossible:
            return leg.impossible
        if not self._is_asked(name):
            return "not asked for"
        if failed:
            return f"needs {failed[0]}, which is {before[failed[0]]['state']}"
        return "out of time" if time.monotonic() > self.deadline else None

    def _command(self, name: str, leg: Leg) -> Record:
        """Run a leg's command; the run's log is copied beside what the command said."""
        if leg.old:
            _delete(leg.old)
        command = [sys.executable, "-m", "snakemake", *leg.targets, "--configfile"]
        command += [str(path.resolve()) for path in [*self.configfile, *leg.configfile]]
        log = self.output / f"{name}.txt"
        print(f"{name}: begun; what it says goes to {log}", flush=True)
        first = newest_checkpoint(leg.folder) if leg.folder else 0
        term = None
        if leg.stop_after is not None:
            term = TermAfter(leg.folder, first + leg.stop_after - 1)
        look = term.look if term else lambda: None
        finished = run_command(command, self.root, log, self.deadline, look)
        fault = _fault(leg, finished, first, term)
        record = finished.record() | {"state": DONE, "reason": None}
        if fault:
            state = NOT_RUN if finished.is_late else FAILED
            record |= {"state": state, "reason": f"{fault}; see {log.name}"}
        record["watchdog"] = finished.watchdog + self._copy_logs(name, leg)
        if term and not fault:
            record["stopped_at"] = newest_checkpoint(leg.folder)
            record["seconds_to_stop"] = time.monotonic() - term.sent_at
        return record

    def _copy_logs(self, name: str, leg: Leg) -> list[str]:
        """Copy what else there is of a leg; returns what NCCL's watchdog says in it."""
        if leg.folder and (leg.folder / "metrics.jsonl").exists():
            copy = self.output / f"{leg.folder.name}.metrics.jsonl"
            shutil.copy(leg.folder / "metrics.jsonl", copy)
        if leg.log and leg.log.exists():
            shutil.copy(leg.log, self.output / f"{name}.log")
            return watchdog_lines(leg.log)
        return []


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fault(leg: Leg, finished: Finished, first: int, term: TermAfter | None) -> str | None:
    """What went wrong with a leg's command; None if nothing did.

    Args:
        first: step from which it went on.
    """
    if finished.is_late:
        return "out of time before its end"
    if term is None:
        return f"exit code {finished.code}" if finished.code else None
    if term.sent_at is None:
        return f"ended with exit code {finished.code} before it was stopped"
    if newest_checkpoint(leg.folder) < first + leg.stop_after:
        return "stopped, but the last step was not saved"
    return None


def _figures(leg: Leg, record: Record) -> Record:
    """The leg's own figures, also of a leg that failed half-way; without any the leg has failed."""
    try:
        return leg.figures()
    except (ValueError, KeyError, OSError) as error:
        if record["state"] == DONE:
            record |= {"state": FAILED, "reason": f"no figures: {error}"}
        return {}
