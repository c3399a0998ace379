"""AdamW as GPT-3 used it, gradient clipping, and the detector of odd steps."""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

BETAS = (0.9, 0.95)  # GPT-3 paper, appendix B, as llm.c
EPSILON = 1e-8  # the same
MAX_GRAD_NORM = 1.0  # the same
DETECTOR_WINDOW = 128  # llm.c `outlier_detector.h`


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over all parameters; only tensors of two dimensions decay, as in GPT-2.

    The state (first and second moment, fp32) exists from the start, so that memory is constant
    from the first step and a checkpoint can be read into it in place.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            # the fused kernel wants the counter on the parameter's device
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def clip_gradients(model: nn.Module, shards: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most 1.

    The squares are summed in float64: in float32 the norm of one gradient of the token table
    differs by 3e-5 with the number of ranks that share it.

    Args:
        shards: the ranks that together hold each gradient once; None for a whole model.

    Returns:
        The norm before clipping, float64, equal on every rank. If it is not finite the gradients
        are spoilt and must not be used.
    """
    gradients = [_local(p.grad) for p in model.parameters()]
    norms = torch._foreach_norm(gradients, 2, torch.float64)  # what PyTorch's own clipping calls
    total = torch.stack(norms).square().sum()
    if shards is not None:
        dist.all_reduce(total, group=shards)
    norm = total.sqrt()
    scale = (MAX_GRAD_NORM / norm).clamp(max=1.0).float()
    torch._foreach_mul_(gradients, scale)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ZScore:
    """How far a value lies from the last 128, in standard deviations (llm.c's detector).

    The value itself is in the window; before 128 values were seen the answer is NaN.
    """

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=DETECTOR_WINDOW)

    def update(self, value: float) -> float:
        """Take in one value and give its z-score; a value that is not finite is left out."""
        if not math.isfinite(value):
            return math.nan
        self.window.append(value)
        if len(self.window) < DETECTOR_WINDOW:
            return math.nan
        mean = math.fsum(self.window) / DETECTOR_WINDOW
        variance = math.fsum((v - mean) ** 2 for v in self.window) / DETECTOR_WINDOW
        return 0.0 if variance == 0 else (value - mean) / math.sqrt(variance)

    def state_dict(self) -> list[float]:
        """The window, oldest first; JSON keeps every bit of a float."""
        return list(self.window)

    def load_state_dict(self, state: Any) -> None:
        """Put back a saved window."""
        self.window = deque(state, maxlen=DETECTOR_WINDOW)
