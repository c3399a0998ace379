"""The rungs of the ladder as trainers, and what a device lacks for them."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from miniseries.model.formulas import Formulas
from miniseries.model.gpt import GPTConfig
from miniseries.speed.rows import Rung
from miniseries.training.trainer import Trainer

# Compute capabilities: tensor cores took up TF32 and bf16 with Ampere; scaling of single rows in
# fp8, see fp8_formulas, needs Hopper, and Triton Volta
NEEDED = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (9, 0)}
NEEDED_TO_COMPILE, NEEDED_FOR_KERNELS = (7, 0), (8, 0)


def missing_for_precision(precision: str, device: torch.device) -> str | None:
    """Why this device cannot compute in a precision; None if it can."""
    if device.type != "cuda":
        return "only GPUs have it" if precision in ("tf32", "fp8") else None
    return _missing_capability(NEEDED.get(precision, (0, 0)), device)


def _missing_capability(needed: tuple[int, int], device: torch.device) -> str | None:
    found = torch.cuda.get_device_capability(device)
    if found >= needed:
        return None
    wanted, there = (".".join(map(str, pair)) for pair in (needed, found))
    return f"unsupported: needs compute capability {wanted}, this GPU has {there}"


def missing(rung: Rung, device: torch.device) -> str | None:
    """Why this device cannot do a rung; None if it can."""
    if rung.own_kernels and device.type != "cuda":
        return "the kernels are for NVIDIA GPUs"
    if device.type != "cuda":
        return missing_for_precision(rung.precision, device)
    needed = NEEDED_FOR_KERNELS if rung.own_kernels else NEEDED_TO_COMPILE
    reason = _missing_capability(needed, device) if rung.compile else None
    return reason or missing_for_precision(precision_on(rung, device), device)


def precision_on(rung: Rung, device: torch.device) -> str:
    """A rung's precision; those that stand on bf16 show what they bring without it, too."""
    stands_on_bf16 = rung.compile and rung.precision == "bf16"
    if stands_on_bf16 and missing_for_precision("bf16", device):
        return "fp32"
    return rung.precision


def plain_attention(qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention with the whole square of scores; (B, T, 3, H, D) to (B, T, H, D)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # 3 x (B, H, T, D)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    length = q.shape[-2]
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(ahead, float("-inf")), dim=-1)
    return (weights @ v).transpose(1, 2)


class RungTrainer(Trainer):
    """The real trainer with a rung's formulas and vocabulary."""

    def __init__(self, rung: Rung, *arguments: Any) -> None:
        self.rung = rung
        super().__init__(*arguments)
        if rung.own_kernels:
            return
        if rung.flash_attention:
            self.model.use(Formulas())
        else:
            name = "plain, all scores in memory"
            self.model.use(Formulas(attention=plain_attention, attention_name=name))

    def _model_config(self) -> GPTConfig:
        config = super()._model_config()
        if self.rung.padded_vocabulary:
            return config
        return replace(config, padded_vocab_size=config.vocab_size)
