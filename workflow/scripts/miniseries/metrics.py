"""Files and records every stage shares: atomic writes, locks, JSON lines, and one-line errors."""

import contextlib
import ctypes
import errno
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

SECONDS_BETWEEN_WAITING_LINES = 60.0
MADE_AGAIN = "delete it to have it made again"


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when the one that started it dies, so no orphan is left.

    Args:
        parent: id of that process; if it is dead already, this one ends here.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; while another process holds it, wait, and say so now and then."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=SECONDS_BETWEEN_WAITING_LINES)
        except Timeout:
            print(f"waiting for another process, which holds {path}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()


def num_cores() -> int:
    """Cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: a reader never sees a part, a kill leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)  # mkstemp makes private files; results are for everyone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, keys: Sequence[str] = (), remedy: str = MADE_AGAIN) -> Any:
    """Read one JSON file.

    Args:
        keys: that it must have, if any; it is an object then.
        remedy: for a damaged file.

    Raises:
        ValueError: the file is missing or damaged; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        advice = "" if remedy == MADE_AGAIN else f"; {remedy}"
        raise ValueError(f"{path}: no such file{advice}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {remedy}") from None
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"{path}: damaged, it lacks {', '.join(missing)}; {remedy}")
    return content


def sync_file(path: Path) -> None:
    """Return once a file's content is on the disk, where a power cut leaves it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """Append one line to a log; a single write, so lines are never mixed.

    A line that an earlier crash cut short is closed first, so that only that line is lost.
    """
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write((line + "\n").encode())


def append_record(path: Path, kind: str, **values: Any) -> None:
    """Append one record to a run's `metrics.jsonl`."""
    append_line(path, json.dumps({"kind": kind, **values}))


EVENTS = ("divergence", "rollback", "restart")  # what may happen at the same step again
OF_A_START = ("start", "memory")  # on what a process runs, also after it has gone back


def _give_up(latest: dict[str, dict[Any, dict[str, Any]]], back_to: int) -> None:
    """Forget what a run did after the step it went back to; it may never come there again."""
    for kind, found in latest.items():
        if kind not in (*EVENTS, *OF_A_START):
            # a training record is named by the update that it describes, from 0
            for key in [key for key in found if key[0] + (kind == "train") > back_to]:
                del found[key]


def read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read `metrics.jsonl` of one run, also while it is being written.

    After a resume steps repeat; the last record of a (kind, step) wins, but of `EVENTS` all are
    kept. A rollback takes back what was done after its step. Lines that are no records (the torn
    end of a killed run) are left out. A missing file is empty.

    Returns:
        kind -> records in the order of their steps.
    """
    latest: dict[str, dict[Any, dict[str, Any]]] = {}
    if not path.exists():
        return {}
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                record = json.loads(line)
                kind, step = record["kind"], record["step"]
                if not (isinstance(kind, str) and isinstance(step, int)):
                    continue
                key = (step, number) if kind in EVENTS else (step, 0)
                latest.setdefault(kind, {})[key] = record
                if kind == "rollback":
                    _give_up(latest, step)
            except (ValueError, KeyError, TypeError):
                continue
    return {kind: [found[key] for key in sorted(found)] for kind, found in latest.items() if found}


def run_main(function: Callable[..., Any], **arguments: Any) -> None:
    """Call a script's one function; what the user can mend becomes one line and exit code 1.

    Ctrl-C ends it without a word, with exit code 130 as in a shell.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # of a terminal that lacks a sample's characters
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for standard error
    try:
        function(**arguments)
    except (ValueError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; make room on the disk of results/ and give the same command again"
        print(f"error: {error}{remedy if is_full else ''}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # Ctrl-C: where it came is of no use to anybody
        raise SystemExit(130) from None
