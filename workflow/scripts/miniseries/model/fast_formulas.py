"""The formulas of `formulas.py` for NVIDIA GPUs: kernels with their gradients, and the choice."""

from typing import Any

import torch
import torch.nn.functional as F

from miniseries.model import cudnn_attention, formulas, kernels
from miniseries.model.formulas import Formulas


class _AddNorm(torch.autograd.Function):
    """One kernel forward, and one backward that also sums for the three vectors."""

    @staticmethod
    def forward(ctx, x, delta, delta_bias, weight, bias):
        rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
        total, normed, mean, rstd, _, _ = kernels.add_norm(*rows, delta_bias, weight, bias, False)
        ctx.save_for_backward(total, mean, rstd, weight)
        return total.view_as(x), normed.view_as(x)

    @staticmethod
    def backward(ctx, residual, upstream):
        return add_norm_gradients(ctx.saved_tensors, residual, upstream)


def add_norm_gradients(
    saved: tuple[torch.Tensor, ...], residual: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients by x, delta, delta's bias, and the norm's weight and bias."""
    weight = saved[-1]
    rows = upstream.contiguous().flatten(0, -2), residual.contiguous().flatten(0, -2)
    gradient, sums = kernels.add_norm_backward(*saved, *rows)
    gradient = gradient.view_as(upstream)
    for_weight, for_bias, for_delta_bias = sums.to(weight.dtype).unbind(0)
    return gradient, gradient, for_delta_bias, for_weight, for_bias


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return _AddNorm.apply(x, delta, delta_bias, weight, bias)


class _Mlp(torch.autograd.Function):
    """One kernel makes the gradients of GELU and of the bias before it."""

    @staticmethod
    def forward(ctx, x, weight, bias, proj_weight):
        rows = x.flatten(0, -2)
        hidden = F.linear(rows, weight, bias)
        active = kernels.gelu(hidden)
        ctx.save_for_backward(rows, hidden, active, weight, proj_weight)
        return F.linear(active, proj_weight).view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        rows, hidden, active, weight, proj_weight = ctx.saved_tensors
        upstream_rows = upstream.contiguous().flatten(0, -2)
        gradient, for_bias = kernels.gelu_backward(hidden, upstream_rows @ proj_weight)
        for_proj_weight = upstream_rows.t() @ active
        for_x = (gradient @ weight).view_as(upstream)
        return for_x, gradient.t() @ rows, for_bias.to(weight.dtype), for_proj_weight


def mlp(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, proj_weight: torch.Tensor
) -> torch.Tensor:
    """See `formulas`."""
    return _Mlp.apply(x, weight, bias, proj_weight)


def choose() -> Formulas:
    """The fastest implementations that this GPU and its software have."""
    compiled_losses = torch.compile(formulas.losses_of_logits, dynamic=False)
    if torch.cuda.get_device_capability() < (8, 0):  # our kernels are tried on Hopper alone
        compiled_gradients = torch.compile(formulas.gradients_of_logits, dynamic=False)
        return Formulas(losses_of_logits=compiled_losses, gradients_of_logits=compiled_gradients)
    chosen: dict[str, Any] = {}
    if torch.cuda.get_device_capability() >= (9, 0):
        name = "PyTorch's; pip install -c constraints.txt '.[gpu]' makes it faster"
        chosen = {"attention_name": name}
    if cudnn_attention.is_available():
        chosen = {"attention": cudnn_attention.attention}
        chosen |= {"attention_name": cudnn_attention.describe()}
    return Formulas(
        add_norm=add_norm,
        mlp=mlp,
        losses_of_logits=compiled_losses,
        gradients_of_logits=kernels.gradients_of_logits,
        **chosen,
    )
