"""The same bits from the same state, every time on the same machine; a little slower."""

import os
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend

from miniseries.model import formulas
from miniseries.model.gpt import GPT

# cuDNN's backward and the memory-efficient one add up gradients in the order in which their
# threads happen to finish; FlashAttention-2 has a mode that does not, the plain formula never does
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def enforce() -> None:
    """Allow this process only operations that repeat bit by bit.

    Best called before collectives are set up: NCCL reads its variables then.
    """
    # cuBLAS: workspaces of its own for each stream (NVIDIA's manual, "Results reproducibility")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of summation
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # none in the switch, whose order varies
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and we read none
    torch.backends.cudnn.benchmark = False
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # no choice of kernels by a race between them


def use_repeatable_attention(model: GPT) -> None:
    """Attention by PyTorch, which keeps to `ATTENTION_BACKENDS`; our other kernels repeat as is."""
    name = "PyTorch's FlashAttention-2, deterministic"
    repeatable = {"attention": formulas.attention, "attention_name": name}
    in_blocks = replace(model.h[0].formulas, **repeatable)
    model.use(replace(model.formulas, **repeatable), in_blocks)
