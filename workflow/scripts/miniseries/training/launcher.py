"""Start the processes of a run: claim its folder, freeze its settings, one process a GPU.

Starts them again when one crashes or hangs; what the user has to mend, and a stop, ends the run.
"""

import contextlib
import fcntl
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from miniseries.data.shards import load_manifest
from miniseries.metrics import append_record, read_json, write_json
from miniseries.settings import LATER_MACHINE_KEYS, check_frozen, frozen_start
from miniseries.shapes import flops_per_step
from miniseries.training import microbatch
from miniseries.training.supervisor import (
    CRASHED,
    GPUS_SEEN,
    OUT_OF_MEMORY,
    REFUSED,
    STOPPED,
    Ears,
    Outcome,
    supervise,
)

# A step that takes a laptop's cores more than a quarter of an hour: nobody means to do that
MAX_FLOPS_ON_CPU = 1e14
MAX_RESTARTS = 3  # in a row, without a new checkpoint in between
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA in WSL, AMD


@dataclass(frozen=True)
class LocalRun:
    """A run on this machine."""

    settings: dict[str, Any]  # frozen
    folder: Path
    processes: int
    device: str  # name of the GPUs, or cpu
    ears: Ears

    @property
    def place(self) -> tuple[Path, dict[str, Any], int, str]:
        """What a micro-batch is remembered for."""
        return self.folder, self.settings, self.processes, self.device

    def start(self, command: list[str], processes: int) -> Outcome:
        """One attempt."""
        if self.device != "cpu":
            os.environ[GPUS_SEEN] = self.device
        return supervise(command, processes, self.settings["machine"]["stall_seconds"], self.ears)

    def say(self, text: str) -> None:
        """To the terminal and, as the processes do, to `train.log`."""
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(text, file=sys.stderr, flush=True)
        with (self.folder / "train.log").open("a", encoding="utf-8") as log:
            log.write(text + "\n")


def local_processes(gpus: int | str) -> tuple[int, str]:
    """Processes to start on this node, one a GPU or one on the CPU; and the device's name.

    Raises:
        ValueError: more GPUs asked for than there are.
    """
    found, name = _visible_gpus()
    if gpus == "auto":
        return max(1, found), name
    if found and int(gpus) > found:
        raise ValueError(
            f"machine.gpus is {gpus}, but this machine shows {found}; set it to `auto` or less, "
            "or check CUDA_VISIBLE_DEVICES"
        )
    return int(gpus), name


def _visible_gpus() -> tuple[int, str]:
    """How many, and the first one's name. To ask PyTorch takes the seconds in which it loads."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return 0, "cpu"
    names = _names_by_driver()
    if names:
        return len(names), names[0]
    import torch

    count = torch.cuda.device_count()
    return count, torch.cuda.get_device_name(0) if count else "cpu"


def _names_by_driver() -> list[str]:
    """Names of all GPUs, by nvidia-smi; empty where PyTorch may see other ones than it does.

    That is where the user or a scheduler has chosen among them, where they are divided (MIG) or
    differ (PyTorch orders them by speed), and with a PyTorch that was built without CUDA.
    """
    package = Path(importlib.util.find_spec("torch").origin)
    for_cuda = runpy.run_path(str(package.with_name("version.py")))["cuda"]
    if not for_cuda or "CUDA_VISIBLE_DEVICES" in os.environ:
        return []
    query = ["nvidia-smi", "--query-gpu=name,mig.mode.current", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [line.rpartition(", ") for line in answer.stdout.splitlines()]
    is_plain = len(set(gpus)) == 1 and gpus[0][2] != "Enabled"
    return [name for name, _, _ in gpus] if is_plain else []


def _check_work(recipe: dict[str, Any]) -> None:
    """Refuse what no CPU can do; more likely the GPUs that were paid for are not seen.

    Raises:
        ValueError: a step is too much.
    """
    flops = flops_per_step(recipe)
    if recipe["max_steps"] and flops > MAX_FLOPS_ON_CPU:  # without steps it is only measured
        raise ValueError(
            f"no GPU is seen here, and a step of this run is {flops / 1e12:,.0f} TFLOP, hours on a "
            "CPU; does nvidia-smi list the GPUs, does the container pass them on, is PyTorch built "
            "for CUDA, and is CUDA_VISIBLE_DEVICES not empty? On a CPU take a smaller model or a "
            "smaller `total_batch_tokens`"
        )


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
            "wait for it, or stop it with `kill`, which saves, and give the same command again"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def freeze(
    settings: Path, manifest: Path, folder: Path, init_from: Path | None = None
) -> dict[str, Any]:
    """Keep the run's settings beside its checkpoints; later starts must agree in the recipe.

    Returns:
        The settings with the machine part of today and the recipe of the first start.

    Raises:
        ValueError: recipe, data, or first weights differ from the first start's; names the keys.
    """
    present = read_json(settings)
    present["data_fingerprint"] = load_manifest(manifest).fingerprint
    frozen = folder / "settings.json"
    check_frozen(present, frozen, manifest)
    if before := frozen_start(folder):
        present["start"] = before
    if init_from:
        from miniseries.training.pretrained import freeze_start  # loads PyTorch

        present["start"] = freeze_start(init_from, folder)
    write_json(frozen, present)
    return present


def launch(
    settings: Path,
    manifest: Path,
    questions: Path | None,
    folder: Path,
    done: Path,
    init_from: Path | None = None,
) -> None:
    """Train one run on this machine and return when it is complete.

    Args:
        init_from: file that stands for the weights to start from, see `pretrained`.

    Raises:
        ValueError: it cannot start or it failed; the message says what to do.
        SystemExit: stopped by a signal; everything is saved.
    """
    with Ears() as ears, claim(folder):
        frozen = freeze(settings, manifest, folder, init_from)
        run = LocalRun(frozen, folder, *local_processes(frozen["machine"]["gpus"]), ears)
        # refuses a batch that cannot be shared once, and not once in each process
        microbatch.windows_per_process(frozen["recipe"], run.processes)
        if run.device == "cpu":
            _check_work(frozen["recipe"])
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), "--manifest", str(manifest)]
        command += ["--folder", str(folder), "--done", str(done)]
        command += ["--questions", str(questions)] if questions else []
        _try_micro_batches(command, run)
        _until_complete(command, run)


def launch_replay(folder: Path, manifest: Path, step: int, output: Path) -> None:
    """Do one step of a run twice, on as many processes as the run would take now.

    Raises:
        ValueError: there is no such run, it was started on other tokens, or a process was killed,
            crashed, or hung.
        SystemExit: it failed, and has said why; or a signal came.
    """
    frozen = folder / "settings.json"
    settings = read_json(frozen, ["recipe", "machine"])
    check_frozen(settings, frozen, manifest)
    output.parent.mkdir(parents=True, exist_ok=True)
    # on a disk that holds checkpoints: the trainer wants room for one
    place = tempfile.TemporaryDirectory(dir=output.parent, prefix=".replay-")
    with Ears() as ears, place as scratch:
        settings["machine"] = LATER_MACHINE_KEYS | settings["machine"]
        run = LocalRun(settings, folder, *local_processes(settings["machine"]["gpus"]), ears)
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), "--folder", str(folder)]
        command += ["--manifest", str(manifest), "--step", str(step), "--output", str(output)]
        command += ["--scratch", scratch]
        outcome = run.start(command, run.processes)
        if ears.heard:
            raise SystemExit(STOPPED)
        _check_trial(outcome)


def _try_micro_batches(command: list[str], run: LocalRun) -> None:
    """Find out what `micro_batch: auto` is here, in a process of its own, unless it is known.

    Raises:
        ValueError: the process was killed, crashed, or hung.
        SystemExit: nothing fits, and the process has said so; or a signal came.
    """
    wanted = run.settings["machine"]["micro_batch"] == "auto" and run.device != "cpu"
    if not wanted or microbatch.remembered(*run.place):
        return
    outcome = run.start([*command, "--find-micro-batch", str(run.processes)], 1)
    if run.ears.heard or outcome.is_stop:
        raise SystemExit(STOPPED)
    _check_trial(outcome)


def _check_trial(outcome: Outcome) -> None:
    """Raise unless all processes of what is not started again did their work."""
    if REFUSED in outcome.codes:
        raise SystemExit(REFUSED)  # that process has said why
    if any(outcome.codes):
        raise ValueError(f"{outcome.reason()}; give the same command again")


def _until_complete(command: list[str], run: LocalRun) -> None:
    """Start the processes, and again after a crash or a hang, until the run is complete."""
    restarts, newest, is_said = 0, newest_checkpoint(run.folder), False
    while not run.ears.heard:
        outcome = run.start(command, run.processes)
        is_said = outcome.is_stop
        before, newest = newest, newest_checkpoint(run.folder)
        if not any(outcome.codes):
            return
        if outcome.is_late:
            run.say(f"saving took too long and was ended; step {newest} is kept")
        if run.ears.heard or outcome.is_stop:
            break
        if OUT_OF_MEMORY in outcome.codes:
            failed, size = microbatch.lower(*run.place)
            reason = f"out of memory with micro_batch {failed}, now {size}"
        else:
            restarts = 1 if newest != before else restarts + 1
            _check_restart(outcome, restarts, run.folder)
            reason = outcome.reason()
        run.say(f"{reason}; starting again from step {newest}")
        append_record(run.folder / "metrics.jsonl", "restart", step=newest, reason=reason)
    if not is_said:
        run.say(f"stopped at step {newest}; the same command goes on from here")
    raise SystemExit(STOPPED)


def _check_restart(outcome: Outcome, restarts: int, folder: Path) -> None:
    """Raise unless another start may help."""
    if REFUSED in outcome.codes:
        raise SystemExit(REFUSED)  # that process has said why
    remedy = (
        f"the first error above says why. Checkpoints in {folder / 'checkpoints'} are kept; the "
        "same command goes on from the newest"
    )
    if CRASHED in outcome.codes and not outcome.num_steps:
        raise ValueError(f"{outcome.reason()} before its first step; {remedy}")
    if restarts > MAX_RESTARTS:
        raise ValueError(
            f"{outcome.reason()}, after {MAX_RESTARTS} restarts without a new checkpoint; {remedy}"
        )


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest complete checkpoint that is there, by its marker; 0 if there is none."""
    markers = [path for path in (folder / "saved").glob("*.json") if path.stem.isdecimal()]
    there = [m for m in markers if (folder / read_json(m, ["checkpoint"])["checkpoint"]).is_dir()]
    return max((int(marker.stem) for marker in there), default=0)
