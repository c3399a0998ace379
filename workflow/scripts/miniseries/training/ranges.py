"""How large weights and activations are, layer by layer: what grows long before a loss diverges."""

import math
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from miniseries.model.gpt import GPT
from miniseries.training.distributed import local_part, reshard

BIAS_LIMIT = 50.0  # GPT-2's attention biases were seen to creep there before a run broke down

# kind of tensor -> one figure a layer, or one where there is one tensor; absolute maximum, root
# mean square
Ranges = dict[str, dict[str, list[float]]]


def _by_kind(names: list[str], values: list[float]) -> dict[str, list[float]]:
    """`h.3.mlp.c_fc.weight` is the entry of layer 3 of the kind `mlp.c_fc.weight`."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in zip(names, values, strict=True):
        parts = name.split(".")
        found[".".join(parts[2:] if parts[0] == "h" else parts)].append(value)
    return dict(found)


def _ranges(
    names: list[str], largest: torch.Tensor, squares: torch.Tensor, counts: list[int]
) -> Ranges:
    rms = [math.sqrt(s / n) for s, n in zip(squares.tolist(), counts, strict=True)]
    return {"absmax": _by_kind(names, largest.tolist()), "rms": _by_kind(names, rms)}


@torch.no_grad()
def weight_ranges(model: GPT, shards: dist.ProcessGroup) -> Ranges:
    """Of every weight; all ranks of `shards`, which hold each weight once, call it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    local = [local_part(p) for p in parameters]
    local = [t if t.numel() else t.new_zeros(1) for t in local]  # a rank may have no row of one
    largest = torch.stack(torch._foreach_norm(local, torch.inf)).float()
    squares = torch.stack(torch._foreach_norm(local, 2)).double().square()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shards)
    dist.all_reduce(squares, group=shards)
    return _ranges(list(names), largest, squares, [p.numel() for p in parameters])


@torch.no_grad()
def activation_ranges(model: GPT, tokens: torch.Tensor) -> Ranges:
    """Of the residual stream and of what attention and MLP add to it, after each layer.

    Args:
        tokens: (B, T) int64; other ones on each rank.
    """
    names: list[str] = []
    largest: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    counts: list[int] = []

    def note(name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.float()
        names.append(name)
        largest.append(tensor.abs().max())
        squares.append(tensor.double().square().sum())
        counts.append(tensor.numel() * dist.get_world_size())

    def after(layer: int, part: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            stream, added, _ = output  # the next part adds them, see `Block`
            note(f"h.{layer}.{part}", stream + added if part == "residual" else added)

        return hook

    with ExitStack() as stack, torch.compiler.set_stance("force_eager"):
        for layer, block in enumerate(model.h):
            parts = (("attention", block.attn), ("mlp", block.mlp), ("residual", block))
            for part, module in parts:
                stack.enter_context(module.register_forward_hook(after(layer, part)))
        model(tokens, tokens, reduction="none")
    reshard(model)
    most, total = torch.stack(largest), torch.stack(squares)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return _ranges(names, most, total, counts)


def all_ranges(model: GPT, tokens: torch.Tensor, shards: dist.ProcessGroup) -> dict[str, Any]:
    """Both of the above, as a record of metrics.jsonl: `weights`, `activations`, and `seconds`."""
    start = time.monotonic()
    weights, activations = weight_ranges(model, shards), activation_ranges(model, tokens)
    seconds = time.monotonic() - start
    return {"weights": weights, "activations": activations, "seconds": seconds}


def alarms(weights: Ranges) -> list[str]:
    """A sentence on each layer whose attention biases have grown too large."""
    largest = weights["absmax"].get("attn.c_attn.bias", [])
    return [
        f"layer {layer}: attn.c_attn.bias reaches {value:.1f}, more than {BIAS_LIMIT:.0f}"
        for layer, value in enumerate(largest)
        if value > BIAS_LIMIT
    ]
