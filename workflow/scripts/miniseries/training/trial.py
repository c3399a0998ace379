"""The largest micro-batch that a GPU holds, found by trying; in a process that ends afterwards."""

import gc
from pathlib import Path
from typing import Any

import torch

from miniseries.metrics import die_with_parent, read_json
from miniseries.model.gpt import VOCAB_SIZE, GPTConfig
from miniseries.training.assembly import attention_kernels, make_model
from miniseries.training.distributed import COMPUTE_DTYPES
from miniseries.training.microbatch import powers_of_two, remember, windows_per_process
from miniseries.training.supervisor import Heartbeat

HEADROOM = 0.04  # of the GPU's memory: for collectives, fragments, and the odd temporary


def find_micro_batch(folder: Path, processes: int) -> None:
    """Write the largest power of two that fits into the run's folder.

    Args:
        processes: of the run; each has as many GPUs as this one: one.

    Raises:
        ValueError: not even one sequence fits.
    """
    die_with_parent()  # beside a later trial it would take the memory that this one measures
    Heartbeat().beat()  # the launcher may have died while PyTorch was loading
    settings = read_json(folder / "settings.json")
    device = torch.device("cuda", 0)
    windows = windows_per_process(settings["recipe"], processes)
    for size in powers_of_two(windows):
        fits = _fits(settings, size, processes, device)
        print(f"micro_batch {size}: {'fits' if fits else 'out of memory'}", flush=True)
        if fits:
            name = torch.cuda.get_device_name(device)
            return remember(folder, settings, processes, name, size, "the largest that fits")
    raise ValueError(
        "the GPU's memory does not hold a single sequence of this model; use more GPUs, which "
        "share the optimizer's state, or a smaller model"
    )


def kept_bytes(recipe: dict[str, Any], processes: int) -> float:
    """Bytes a parameter that a run keeps besides what the trial's plain model has."""
    own = 4 if recipe.get("master_weights", True) else 2
    moments = 8
    shared_out = own + moments + own  # weight, and gradient of its type once it is summed
    computed = COMPUTE_DTYPES[recipe["precision"]] or torch.float32
    # a whole gradient is added up over micro-steps in fp32, and the plain model has it as computed
    return shared_out / processes + 4 - computed.itemsize


def _fits(settings: dict[str, Any], size: int, processes: int, device: torch.device) -> bool:
    try:
        with attention_kernels(device, settings["machine"]["deterministic"]):
            _two_micro_steps(settings, size, processes, device)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.compiler.reset()  # other sizes would count as recompilations
        gc.collect()
        torch.cuda.empty_cache()


def _two_micro_steps(
    settings: dict[str, Any], size: int, processes: int, device: torch.device
) -> None:
    """Forward and backward of the model as it is before it is sharded, beside a dead weight."""
    recipe = settings["recipe"]
    model, _ = make_model(GPTConfig.of_recipe(recipe), recipe, settings["machine"], device)
    model.to(COMPUTE_DTYPES[recipe["precision"]] or torch.float32)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.data.zero_()
    elements = sum(p.numel() for p in model.parameters())
    total = torch.cuda.get_device_properties(device).total_memory
    dead = int(elements * kept_bytes(recipe, processes) + HEADROOM * total)
    dead_weight = torch.empty(dead, dtype=torch.uint8, device=device)
    shape = (size, recipe["sequence_length"] + 1)
    for _ in range(2):  # the second one adds to gradients that exist
        tokens = torch.randint(VOCAB_SIZE, shape, device=device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.cuda.synchronize()
    del dead_weight
