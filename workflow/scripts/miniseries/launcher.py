"""Start the processes of a run: claim its folder, freeze its settings, one process a GPU."""

import fcntl
import os
import sys
import uuid
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from miniseries.distributed import num_local_processes
from miniseries.metrics import read_json, write_json
from miniseries.settings import check_frozen
from miniseries.shards import load_manifest
from miniseries.trainer import STOPPED, train


def claim(folder: Path) -> IO[str]:
    """Lock the run's folder until this process ends, however it ends.

    Raises:
        ValueError: another process trains this run; names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ValueError(
            f"{folder}: process {lock.read().strip() or '?'} is training this run; "
            "wait for it, or stop it with `kill` and give the same command again"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def freeze(settings: Path, manifest: Path, folder: Path) -> dict[str, Any]:
    """Keep the run's settings beside its checkpoints; later starts must agree in the recipe.

    Returns:
        The settings with the machine part of today and the recipe of the first start.

    Raises:
        ValueError: the recipe or the data differ from the first start's; names the keys.
    """
    present = read_json(settings)
    present["data_fingerprint"] = load_manifest(manifest).fingerprint
    check_frozen(present, folder / "settings.json", manifest)
    write_json(folder / "settings.json", present)
    return present


def launch(
    settings: Path, manifest: Path, questions: Path | None, folder: Path, done: Path
) -> None:
    """Train one run on this machine and return when it is complete.

    Raises:
        ValueError: it cannot start or it failed; the message says what to do.
        SystemExit: stopped by a signal; everything is saved.
    """
    lock = claim(folder)
    frozen = freeze(settings, manifest, folder)
    processes = num_local_processes(frozen["machine"]["gpus"])
    if processes == 1:
        train(manifest, questions, folder, done)
    else:
        _run_workers(processes, manifest, questions, folder, done)
    lock.close()


def _run_workers(
    processes: int, manifest: Path, questions: Path | None, folder: Path, done: Path
) -> None:
    """What torchrun does, in this process: its errors become ours, without its tracebacks."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the workers'
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port: two runs never meet
        max_restarts=0,
    )
    arguments = ["--manifest", str(manifest), "--folder", str(folder), "--done", str(done)]
    arguments += ["--questions", str(questions)] if questions else []
    try:
        elastic_launch(config, sys.executable)(str(Path(sys.argv[0]).resolve()), *arguments)
    except SignalException:  # workers had the signal too, and 30 seconds to save
        raise SystemExit(STOPPED) from None
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == STOPPED:
            raise SystemExit(STOPPED) from None
        raise ValueError(
            f"process {failure.local_rank} of the run ended with exit code {failure.exitcode}; the "
            f"first error above says why. Checkpoints in {folder / 'checkpoints'} are kept; the "
            "same command goes on from the newest"
        ) from None
