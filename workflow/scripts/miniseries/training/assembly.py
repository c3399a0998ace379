"""A run's model before it is shared out: its formulas, compilation, and attention kernels."""

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from miniseries.model.gpt import GPT, GPTConfig
from miniseries.training import determinism

# First choice first: on Hopper cuDNN's kernels take about half of FlashAttention-2's time
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention_kernels(
    device: torch.device, deterministic: bool = False
) -> contextlib.AbstractContextManager:
    """Context in which attention takes the fastest kernels that the device has."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    backends = determinism.ATTENTION_BACKENDS if deterministic else ATTENTION_BACKENDS
    return sdpa_kernel(backends, set_priority=True)


def make_model(
    config: GPTConfig, recipe: dict[str, Any], machine: dict[str, Any], device: torch.device
) -> tuple[GPT, bool]:
    """A model on no device yet, with the formulas for this one; and whether it is compiled.

    Raises:
        ValueError: this device, or this shape, is none for the precision.
    """
    with torch.device("meta"):
        model = GPT(config)
    if not recipe.get("master_weights", True):
        model.to(torch.bfloat16)
    model.recompute(machine["recompute"])
    compiled = device.type == "cuda" if machine["compile"] == "auto" else machine["compile"]
    if recipe["precision"] == "fp8" and not (compiled and device.type == "cuda"):
        raise ValueError("precision fp8 needs a GPU and machine.compile; set it to bf16")
    for key in ("sequence_length", "channels") if recipe["precision"] == "fp8" else ():
        if getattr(config, key) % 16:  # what its products take
            raise ValueError(
                f"precision fp8 needs {key} to be a multiple of 16, and it is "
                f"{getattr(config, key)}; change it, or set precision to bf16"
            )
    if compiled:
        # whether what the extra `gpu` brings repeats bit by bit was not tried
        model.compile(device, recipe["precision"], with_extra=not machine["deterministic"])
    if machine["deterministic"]:
        determinism.use_repeatable_attention(model)
    return model, compiled
