"""Checkpoints: complete or absent, readable on any number of processes.

A checkpoint is a folder `step-00000200` that PyTorch's distributed checkpoint fills: each rank
writes its part of weights and moments, and `trainer.json` holds the rest. It is written under a
temporary name, synced, and renamed once all ranks are done: a folder with the final name is whole.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from miniseries.data.shards import file_sha256
from miniseries.metrics import num_cores, read_json, write_json
from miniseries.training.distributed import World, local_part

# what saving and loading can raise; PyTorch's own is no Exception
FAULTS = (Exception, CheckpointException)
# Files that are missing or cut off; other numbers are of a disk that is out of reach
ERRNOS_OF_DAMAGE = (None, errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ENOTDIR)
NOT_HERE = "bring it back from a copy"  # of a file that nothing can make again
STATE, SUMS = "trainer.json", "checksums.json"
PINNED = "pinned"  # a file in a checkpoint that is kept for good
DIVERGED = "diverged"  # ending of one that is later than the one to go back to
STATE_KEYS = ("step", "adam_step", "fingerprint", "loss_detector", "norm_detector", "wall_seconds")
STATE_KEYS += ("world_size", "micro_batch")
STEP_FOLDER = re.compile(r"step-(\d{8})")
# Threads, and so files, of a rank: one copies 1 to 3 GB/s into the page cache, less than most disks
# take, and some wait for the disk while others copy; still more would only make more files
MIN_WRITERS, MAX_WRITERS = 4, 8
SUMMED_AT_ONCE = 1 << 24  # words, whose int64 take 134 MB


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates lies."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def saved_steps(run_folder: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    found = (STEP_FOLDER.fullmatch(p.name) for p in (run_folder / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def state_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """What training changes and a checkpoint holds, by name: weights and both moments."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sum of each whole tensor's words, modulo 2^64, by name; all that share them call it.

    One flipped bit changes it, and how many ranks share the tensors does not. Unlike a hash of
    files it takes no second on a GPU, and holds all the way from there and back.
    """
    sums = torch.stack([_sum_of_words(local_part(t)) for t in tensors.values()])
    whole = next(iter(tensors.values()))  # all are shared out alike
    if isinstance(whole, DTensor):
        for dimension, placement in enumerate(whole.placements):
            if placement.is_shard():
                dist.all_reduce(sums, group=whole.device_mesh.get_group(dimension))
    return dict(zip(tensors, sums.tolist(), strict=True))


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    words = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()
    if len(words) <= SUMMED_AT_ONCE:
        return words.sum(dtype=torch.int64)
    # piece by piece: PyTorch makes an int64 of each word before it adds
    return torch.stack([p.sum(dtype=torch.int64) for p in words.split(SUMMED_AT_ONCE)]).sum()


def write_state(folder: Path, state: dict[str, Any], sums: dict[str, int]) -> None:
    """Write all that is no tensor, and with what to find out later whether it is still the same.

    Args:
        sums: `checksums` of the tensors; empty if nobody knows them.
    """
    write_json(folder / STATE, state)
    write_json(folder / SUMS, {STATE: file_sha256(folder / STATE), "tensors": sums})


def changed_since(folder: Path, tensors: dict[str, torch.Tensor]) -> str | None:
    """Name of something in a checkpoint that is not what was saved; all that read it call it.

    Args:
        tensors: as they were read from it.

    Returns:
        None if all is as it was, or if there are no sums: they came later than checkpoints.
    """
    found = checksums(tensors)
    try:
        if not (folder / SUMS).exists():
            return None
        saved = read_json(folder / SUMS, [STATE, "tensors"])
        if file_sha256(folder / STATE) != saved[STATE]:
            return STATE
    except (ValueError, OSError):
        return SUMS
    return next((n for n, value in found.items() if saved["tensors"].get(n, value) != value), None)


def num_writers(cores: int, local_processes: int) -> int:
    """Threads with which each of a node's processes writes."""
    return min(max(cores // local_processes, MIN_WRITERS), MAX_WRITERS)


class Writer(dcp.FileSystemWriter):
    """PyTorch's writer, which itself passes over what its other threads raise (2.11, 2.13).

    A checkpoint without their files would take the place of older ones that are whole.
    """

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """See PyTorch.

        Raises:
            Exception: what any of the threads raised.
        """
        raised: list[BaseException | None] = []
        hook, threading.excepthook = threading.excepthook, lambda a: raised.append(a.exc_value)
        try:
            results = super().write_data(plan, planner)
        finally:
            for thread in threading.enumerate():
                if "_write_files_from_queue" in thread.name:  # left behind when this one failed
                    thread.join()
            threading.excepthook = hook
        if len(results.value()) < len(plan.items):
            raise next(filter(None, raised), OSError("a part is missing"))
        return results


def save_checkpoint(
    run_folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
    sums: dict[str, int],
    world: World,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint whole or not at all; every rank calls it, in any thread.

    Args:
        tensors: by `state_tensors`, or a copy of them.
        state: all else, for `trainer.json`.
        sums: `checksums` of what the tensors are a copy of.
        group: all ranks; the one through which they agree here and nowhere else.

    Raises:
        OSError: it could not be written (disk full); nothing is left of it and all older
            checkpoints are as they were.
    """
    final = checkpoint_folder(run_folder, step)
    if final.exists():
        return
    temporary = final.with_name(f"{final.name}.tmp")
    try:
        writers = num_writers(num_cores(), world.size // world.num_nodes)
        writer = Writer(temporary, thread_count=writers)  # syncs each file
        # a third of the time of writing, and loading never looks at these checksums
        torch.serialization.set_crc32_options(False)
        dcp.save(tensors, storage_writer=writer, process_group=group)  # returns when all are done
        if not world.is_main:
            return
        write_state(temporary, state, sums)
        _sync_folder(temporary)
        temporary.rename(final)
    except FAULTS as error:
        if isinstance(error, RuntimeError):
            raise  # a lost connection: what another rank raised comes wrapped
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        free, reason = shutil.disk_usage(final.parent).free, _reason(error)
        is_full = any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))
        raise OSError(
            f"{final}: the checkpoint could not be written ({free:,} bytes free): {reason}; older "
            f"ones are intact; {'make room and ' if is_full else ''}give the same command again"
        ) from error
    _sync_folder(final.parent)
    write_marker(run_folder, state["run"], step)


def write_marker(run_folder: Path, run: str, step: int) -> None:
    """Write `saved/{step}.json`, which exports and branches wait for."""
    relative = str(checkpoint_folder(run_folder, step).relative_to(run_folder))
    marker = {"run": run, "step": step, "checkpoint": relative}
    write_json(run_folder / "saved" / f"{step}.json", marker)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Read a checkpoint into model and optimizer in place, whatever the number of ranks was.

    Returns:
        The trainer's own state, as it was given to `save_checkpoint`.

    Raises:
        ValueError: damaged by one bit or more, or not all numbers in it are finite; names the
            folder.
        OSError: the disk does not give it out, which says nothing of the checkpoint.
        RuntimeError: another rank is gone, which does not either.
    """
    state = _read_state(folder)
    tensors = state_tensors(model, optimizer)
    try:
        dcp.load(tensors, checkpoint_id=folder)
    except FAULTS as error:
        if isinstance(error, RuntimeError):
            raise
        raise _fault_of_reading(folder, error) from error
    for parameter in model.parameters():
        optimizer.state[parameter]["step"].fill_(state["adam_step"])
    changed = changed_since(folder, tensors)
    finite = torch.stack([local_part(t).isfinite().all() for t in tensors.values()]).all()
    sound = torch.stack([finite, torch.full_like(finite, changed is None)]).float()
    dist.all_reduce(sound, op=dist.ReduceOp.MIN)  # all ranks go on, or none
    if not sound[1]:
        what = changed or "what another process read"
        raise ValueError(f"{folder}: the checkpoint is damaged ({what} is not what was saved)")
    if not sound[0]:
        raise ValueError(f"{folder}: the checkpoint holds numbers that are not finite")
    return state


def _read_state(folder: Path) -> dict[str, Any]:
    """The trainer's own state, read by one rank: all go on with it, or none."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [read_json(folder / STATE, STATE_KEYS, NOT_HERE)]
        except ValueError as error:
            found = [error]
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    if isinstance(found[0], ValueError):
        raise found[0]
    return found[0]


def _fault_of_reading(folder: Path, error: BaseException) -> Exception:
    """What a failed load, of any rank, says of the checkpoint."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno not in ERRNOS_OF_DAMAGE:
            return OSError(
                f"{folder}: could not be read ({cause}); nothing was changed: mend the disk, or "
                "what connects it, and give the same command again; or move this folder away to "
                "go on from the checkpoint before it"
            )
    return ValueError(f"{folder}: the checkpoint is damaged ({_reason(error)})")


def load_newest(
    run_folder: Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    world: World,
    until: int | None = None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Read the newest checkpoint that is sound; every rank calls it.

    Damaged ones are put aside, as `step-00000200.damaged`, once one before them has been read; then
    those go, too, that a return to an older one has put aside.

    Args:
        until: the last step that will do; None for all.

    Returns:
        State as by `load_checkpoint`, None if there never was a checkpoint; and a sentence on
        each damaged one.

    Raises:
        ValueError: there were some, but they are gone, or all are damaged; a run is never
            silently begun anew.
    """
    problems: list[str] = []
    steps = [step for step in saved_steps(run_folder) if until is None or step <= until]
    for number, step in enumerate(reversed(steps)):
        try:
            state = load_checkpoint(checkpoint_folder(run_folder, step), model, optimizer)
        except ValueError as error:
            problems.append(str(error))
            continue
        dist.barrier()
        if world.is_main:
            for damaged in steps[len(steps) - number :]:
                forget(run_folder, damaged, aside="damaged")
            for later in (run_folder / "checkpoints").glob(f"step-*.{DIVERGED}"):
                shutil.rmtree(later, ignore_errors=True)
        return state, problems
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. No older checkpoint is left: bring a sound one back from a "
            f"copy, or delete {run_folder} to begin the run anew"
        )
    if any((run_folder / "saved").glob("*.json")):
        raise ValueError(
            f"{run_folder / 'checkpoints'}: the checkpoints of this run are gone; if they lie on "
            f"a disk of their own see that it is there, or delete {run_folder} to begin anew"
        )
    return None, []


def pin(run_folder: Path, steps: list[int]) -> None:
    """Keep these checkpoints for good, whatever `rotate` is asked to keep."""
    for step in steps:
        (checkpoint_folder(run_folder, step) / PINNED).touch()


def forget(run_folder: Path, step: int, aside: str = "") -> None:
    """Take a checkpoint away: delete it, or keep it under a name that nothing looks for."""
    folder = checkpoint_folder(run_folder, step)
    (run_folder / "saved" / f"{step}.json").unlink(missing_ok=True)
    # a kill halfway must not leave a part of it under the name of a whole one
    target = folder.with_name(f"{folder.name}.{aside or 'tmp'}")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)
    if not aside:  # what somebody still reads on a network disk goes at the next start
        shutil.rmtree(target, ignore_errors=True)


def load_model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Full fp32 weights of a checkpoint on the CPU, in one process.

    Raises:
        ValueError: damaged; names the folder.
    """
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.items()
            if name.startswith("model.")
        }
        with warnings.catch_warnings():  # PyTorch warns that one process reads alone, as it should
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    except FAULTS as error:
        raise ValueError(
            f"{folder}: the checkpoint is damaged or not complete ({_reason(error)})"
        ) from error
    if changed := changed_since(folder, tensors):
        raise ValueError(f"{folder}: the checkpoint is damaged ({changed} is not what was saved)")
    return {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}


def read_marker(marker: Path) -> tuple[Path, dict[str, Any]]:
    """Checkpoint folder and settings, with `step`, of a done.json or saved/{step}.json.

    Raises:
        ValueError: the marker belongs to no run folder, or the checkpoint is another run's.
    """
    content = read_json(marker, ["step", "checkpoint"])
    run_folder = marker.parent.parent if marker.parent.name == "saved" else marker.parent
    settings = read_json(run_folder / "settings.json", ["recipe", "fingerprint"], NOT_HERE)
    checkpoint = run_folder / content["checkpoint"]
    state = read_json(checkpoint / STATE, ["step", "fingerprint"], NOT_HERE)
    for key, wanted in (("step", content["step"]), ("fingerprint", settings["fingerprint"])):
        if state[key] != wanted:
            raise ValueError(
                f"{checkpoint}: its {key} is {state[key]}, but {marker} and the run's "
                f"settings.json say {wanted}; the folder holds parts of two runs"
            )
    return checkpoint, {**settings, "step": content["step"]}


def describe_files(
    folder: Path, run_folder: Path, beat: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file of a checkpoint, by its path in the run's folder.

    Args:
        beat: called before each file; one of some gigabytes takes seconds.
    """
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        beat()
        name = str(path.relative_to(run_folder))
        found[name] = {"num_bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return found


def clean_up(run_folder: Path) -> None:
    """Remove what a killed save left behind, and write the marker that it did not come to."""
    for leftover in (run_folder / "checkpoints").glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for step in saved_steps(run_folder):
        if not (run_folder / "saved" / f"{step}.json").exists():
            with contextlib.suppress(ValueError):  # damaged: loading says so
                state = read_json(checkpoint_folder(run_folder, step) / STATE, ["run"])
                write_marker(run_folder, state["run"], step)


def rotate(run_folder: Path, keep: int, keep_every: int, pinned: set[int]) -> None:
    """Remove old checkpoints: all but the newest `keep`, every `keep_every`-th, and pinned ones.

    A `keep` of 0 keeps all. A folder that holds a file `pinned` stays too.
    """
    if keep == 0:
        return
    for step in saved_steps(run_folder)[:-keep]:
        folder = checkpoint_folder(run_folder, step)
        if step in pinned or (folder / PINNED).exists() or (keep_every and step % keep_every == 0):
            continue
        forget(run_folder, step)


def check_space(run_folder: Path, tensors: dict[str, torch.Tensor], held: int) -> list[str]:
    """Refuse to begin when not even one checkpoint of these could be written.

    Args:
        tensors: by `state_tensors`; of sharded ones the whole counts.
        held: checkpoints that there will be at once.

    Returns:
        A warning when not all of them will fit beside what fills the disk today.

    Raises:
        OSError: names the bytes needed and the bytes free, or the folder that is closed.
    """
    for folder in (run_folder / "checkpoints", run_folder / "saved"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(f"{folder}: may not be written to; change its permissions or its owner")
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free = shutil.disk_usage(run_folder / "checkpoints").free
    if free < needed:
        raise OSError(
            f"{run_folder}: a checkpoint takes {needed:,} bytes, but only {free:,} are free; "
            "make room, or put results/ on a larger disk"
        )
    more = held - len(saved_steps(run_folder))
    if free < more * needed:
        return [
            f"warning: {held} checkpoints will take {held * needed:,} bytes, and {free:,} are "
            "free; lower `keep_checkpoints`, or make room before they are written"
        ]
    return []


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The last line of an error; PyTorch's hold the tracebacks of all ranks."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
