"""What a process of a run keeps in memory, buffer by buffer."""

import gc
import resource
from collections.abc import Iterable

import torch
from torch import nn

from miniseries.training.distributed import COMPUTE_DTYPES, local_part

MEBIBYTE = 1 << 20


def _mib(tensors: Iterable[torch.Tensor]) -> float:
    return sum(local_part(t).nbytes for t in tensors) / MEBIBYTE


def buffers(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: str
) -> dict[str, float | None]:
    """MiB of each buffer that lasts from the first step to the last, in this process.

    Returns:
        parameters, whole and in the compute precision, which FSDP2 copies out of this process's
        part even if it is alone; and of that part: gradients; m and v of AdamW; the weights that
        are updated, which are a master copy where their precision is higher than the compute's.
    """
    weights = list(model.parameters())
    own = _mib(weights)
    dtype = COMPUTE_DTYPES[precision] or weights[0].dtype
    states = optimizer.state.values()
    has_master = weights[0].dtype != dtype
    return {
        "parameters": sum(p.numel() for p in weights) * dtype.itemsize / MEBIBYTE,
        "gradients": own,  # of the weights' own type once they are summed over processes
        "adamw_m": _mib(state["exp_avg"] for state in states),
        "adamw_v": _mib(state["exp_avg_sq"] for state in states),
        "master_copy": own if has_master else None,
        "weights_without_master_copy": None if has_master else own,
    }


def peak(device: torch.device) -> dict[str, float | None]:
    """MiB at most so far: allocated and reserved on a GPU, resident on a CPU."""
    if device.type != "cuda":
        # Linux counts in KiB
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "reserved": None}
    return {
        "peak": torch.cuda.max_memory_allocated(device) / MEBIBYTE,
        "reserved": torch.cuda.memory_reserved(device) / MEBIBYTE,
    }


def report(kept: dict[str, float | None], device: torch.device) -> dict[str, float | None]:
    """All buffers and the peak, after a step; what no buffer explains is the activations'."""
    found = peak(device)
    explained = sum(mib or 0 for mib in kept.values())
    activations = found["peak"] - explained if device.type == "cuda" else None
    return {**kept, "activations": activations, **found}


def collect_garbage_again() -> None:
    """Once the first step is done, if the command has put it off until then.

    What modules and compiler have made stays for good: Python would go through it a dozen times
    while they load, and later now and then between steps.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()
