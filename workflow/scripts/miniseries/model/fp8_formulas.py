"""Linear layers in fp8 for NVIDIA GPUs from Hopper on: forward and the gradient by the input.

Both factors are float8_e4m3fn, and each of their vectors that are multiplied is scaled so that
its largest value becomes 448. Scales are made anew each time, so there is no state to keep. The
gradient by a weight, a sum over all tokens, is made in bf16, as in torchao's recipe
`rowwise_with_gw_hp`. Head, embeddings, norms and attention stay as they are, and without gradients
(evaluation) everything is bf16.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from miniseries.model import fast_formulas, kernels
from miniseries.model.formulas import Formulas
from miniseries.model.quantization import quantize_rows


class Activation(NamedTuple):
    """(B, T, C) with its rows as fp8, (N, C), and their scales, (N, 1)."""

    values: torch.Tensor
    quantized: torch.Tensor
    scales: torch.Tensor


def _product(
    rows: tuple[torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows as fp8, (N, K) and their scales, times weight (M, K) transposed, in bf16 (N, M)."""
    quantized, scales = quantize_rows(weight)
    return torch._scaled_mm(
        rows[0],
        quantized.t(),
        rows[1],
        scales.t(),
        bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class _AddNorm(torch.autograd.Function):
    """As in bf16; the norm also comes as fp8."""

    @staticmethod
    def forward(ctx, x, delta, delta_bias, weight, bias):
        rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
        total, normed, mean, rstd, quantized, scales = kernels.add_norm(
            *rows, delta_bias, weight, bias, True
        )
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.mark_non_differentiable(quantized, scales)
        return total.view_as(x), normed.view_as(x), quantized, scales

    @staticmethod
    def backward(ctx, residual, upstream, _quantized, _scales):
        return fast_formulas.add_norm_gradients(ctx.saved_tensors, residual, upstream)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantized, scales, weight, bias):
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return _product((quantized, scales), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        rows = upstream.contiguous().flatten(0, -2)
        for_x = _product(quantize_rows(rows), weight.t().contiguous()).view_as(x)
        for_weight = rows.t() @ x.flatten(0, -2)
        return for_x, None, None, for_weight, rows.sum(dim=0) if ctx.has_bias else None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantized, scales, weight, bias, proj_weight):
        hidden = _product((quantized, scales), weight, bias)
        active = kernels.gelu(hidden)
        ctx.save_for_backward(x, hidden, active, weight, proj_weight)
        return _product(quantize_rows(active), proj_weight).view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        x, hidden, active, weight, proj_weight = ctx.saved_tensors
        rows = upstream.contiguous().flatten(0, -2)
        for_active = _product(quantize_rows(rows), proj_weight.t().contiguous())
        for_proj_weight = rows.t() @ active
        gradient, for_bias = kernels.gelu_backward(hidden, for_active)
        for_x = _product(quantize_rows(gradient), weight.t().contiguous()).view_as(x)
        for_weight = gradient.t() @ x.flatten(0, -2)
        return for_x, None, None, for_weight, for_bias.to(rows.dtype), for_proj_weight


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """See `formulas`; while training the norm is an `Activation`."""
    if not torch.is_grad_enabled():
        return fast_formulas.add_norm(x, delta, delta_bias, weight, bias)
    total, *normed = _AddNorm.apply(x, delta, delta_bias, weight, bias)
    return total, Activation(*normed)


def linear(x: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `formulas`; x is a tensor or an `Activation`."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not isinstance(x, Activation):
        x = Activation(x, *quantize_rows(x.detach().flatten(0, -2)))
    return _Linear.apply(*x, weight, bias)


def mlp(
    x: Any, weight: torch.Tensor, bias: torch.Tensor, proj_weight: torch.Tensor
) -> torch.Tensor:
    """See `formulas`; while training x is an `Activation`."""
    if not torch.is_grad_enabled():
        return fast_formulas.mlp(x, weight, bias, proj_weight)
    return _Mlp.apply(*x, weight, bias, proj_weight)


def choose(fast: Formulas) -> Formulas:
    """These formulas in place of those for bf16.

    Raises:
        ValueError: this GPU has no fp8 products.
    """
    if torch.cuda.get_device_capability() < (9, 0):
        raise ValueError(
            f"precision fp8 needs a Hopper GPU or a newer one, and this is "
            f"{torch.cuda.get_device_name()}; set precision to bf16"
        )
    return replace(fast, add_norm=add_norm, linear=linear, mlp=mlp)
