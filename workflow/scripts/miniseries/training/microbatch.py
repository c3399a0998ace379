"""How many sequences a process takes at once: as many as fit, found by trial and remembered.

Knows no PyTorch: the launcher and its processes share what stands in the run's `micro_batch.json`.
"""

from pathlib import Path
from typing import Any

from miniseries.metrics import read_json, write_json

ON_CPU = 8  # sequences for `auto` without a GPU; more bring a CPU nothing
RECORD = "micro_batch.json"
# What decides how much memory a sequence takes, besides the recipe
DECIDED_BY = ("micro_batch", "compile", "deterministic", "recompute")


def windows_per_process(recipe: dict[str, Any], processes: int) -> int:
    """Sequences of one process in a global batch.

    Raises:
        ValueError: the processes cannot share a batch equally.
    """
    tokens, length = recipe["total_batch_tokens"], recipe["sequence_length"]
    windows, rest = divmod(tokens // length, processes)
    if rest or windows == 0:
        raise ValueError(
            f"total_batch_tokens {tokens} is {tokens // length} sequences of {length} tokens, "
            f"which {processes} processes cannot share equally; set machine.gpus to a number "
            "that divides it"
        )
    return windows


def micro_steps(folder: Path, recipe: dict[str, Any], processes: int, size: int) -> int:
    """Micro-steps of `size` sequences that a process makes in a step.

    Raises:
        ValueError: the processes cannot share a batch equally, or `size` does not divide a share.
    """
    windows = windows_per_process(recipe, processes)
    if windows % size:
        raise ValueError(
            f"{folder / RECORD}: micro_batch {size} does not divide the {windows} sequences that a "
            "process has in a step; delete the file to have it found anew"
        )
    return windows // size


def largest_divisor(wanted: int, windows: int) -> int:
    """The largest number of sequences, at most `wanted`, that divides a process's share."""
    return max(size for size in range(1, min(wanted, windows) + 1) if windows % size == 0)


def powers_of_two(windows: int) -> list[int]:
    """What `auto` tries, largest first: the powers of two that divide a process's share."""
    return [1 << power for power in reversed(range(20)) if windows % (1 << power) == 0]


def _circumstances(settings: dict[str, Any], processes: int, device: str) -> dict[str, Any]:
    asked = {key: settings["machine"][key] for key in DECIDED_BY if key in settings["machine"]}
    # a run that was stopped before its first step may change its recipe
    found = {"asked": asked, "processes": processes, "device": device}
    return found | {"fingerprint": settings["fingerprint"]}


def remembered(
    folder: Path, settings: dict[str, Any], processes: int, device: str
) -> dict[str, Any] | None:
    """What was found for this run on as many devices of this name: `micro_batch` and `reason`."""
    path = folder / RECORD
    if not path.exists():
        return None
    record = read_json(path, ["micro_batch", "reason", "circumstances"])
    now = _circumstances(settings, processes, device)
    # a record that was made before it had the recipe's fingerprint stays
    before = {"fingerprint": now["fingerprint"]} | record["circumstances"]
    return record if before == now else None


def remember(
    folder: Path, settings: dict[str, Any], processes: int, device: str, size: int, reason: str
) -> None:
    """Keep a finding for this and all later starts."""
    circumstances = _circumstances(settings, processes, device)
    record = {"micro_batch": size, "reason": reason, "circumstances": circumstances}
    write_json(folder / RECORD, record)


def choose(
    folder: Path, settings: dict[str, Any], processes: int, device: str
) -> tuple[int, str | None]:
    """Sequences that each process takes at once in this start, and why if that was found out.

    Raises:
        ValueError: the processes cannot share a batch equally, or `auto` was not tried yet.
    """
    windows = windows_per_process(settings["recipe"], processes)
    record = remembered(folder, settings, processes, device)
    if record is not None:
        return record["micro_batch"], record["reason"]
    asked = settings["machine"]["micro_batch"]
    if asked == "auto" and device != "cpu":
        raise ValueError(
            "micro_batch `auto` is tried by train_run.py when it starts the processes itself; "
            "under torchrun set it to a number"
        )
    return largest_divisor(ON_CPU if asked == "auto" else asked, windows), None


def lower(folder: Path, settings: dict[str, Any], processes: int, device: str) -> tuple[int, int]:
    """After memory ran out: remember the next lower value, and give it after the one that failed.

    Raises:
        ValueError: it ran out with a single sequence.
    """
    failed, _ = choose(folder, settings, processes, device)
    if failed == 1:
        raise ValueError(
            "the GPU's memory does not hold a single sequence of this model; use more GPUs, which "
            "share the optimizer's state, or a smaller model"
        )
    size = largest_divisor(failed // 2, windows_per_process(settings["recipe"], processes))
    remember(folder, settings, processes, device, size, f"out of memory with {failed}")
    return failed, size
