"""Linear layers in fp8 for NVIDIA GPUs from Hopper on: forward and the gradient by the input.

Both factors are float8_e4m3fn, and each of their vectors that are multiplied is scaled so that
its largest value becomes 448. Scales are made anew each time, so there is no state to keep. The
gradient by a weight, a sum over all tokens, is made in bf16, as in torchao's recipe
`rowwise_with_gw_hp`. Head, embeddings, norms and attention stay as they are, and without gradients
(evaluation) everything is bf16.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from miniseries.model import fast_formulas, kernels
from miniseries.model.formulas import Formulas
from miniseries.model.quantization import quantize_rows


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows, weight)
        return _product(quantize_rows(rows), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        rows = upstream.contiguous().flatten(0, -2)
        for_x = _product(quantize_rows(rows), weight.t().contiguous())
        return for_x.view(*upstream.shape[:-1], -1), rows.t() @ x


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, delta_bias, norm_weight, norm_bias, weight, bias, recompute):
        norm, normed, quantized = _added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        ctx.save_for_backward(*norm, weight, *([] if recompute == 2 else [normed]))
        return norm[0].view_as(x), _product(quantized, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight, *kept) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        normed = kept[0] if kept else kernels.norm_again(*norm)
        rows = upstream.contiguous().flatten(0, -2)
        for_normed = _product(quantize_rows(rows), weight.t().contiguous())
        for_norm = fast_formulas.add_norm_gradients(norm, residual, for_normed)
        return *for_norm, rows.t() @ normed, rows.sum(dim=0), None


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, delta, delta_bias, norm_weight, norm_bias, weight, bias, proj_weight, recompute
    ):
        norm, normed, quantized = _added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        hidden = _product(quantized, weight, bias)
        active = kernels.gelu(hidden)
        kept = [normed, active][: 2 - recompute]
        ctx.save_for_backward(*norm, weight, proj_weight, hidden, *kept)
        return norm[0].view_as(x), _product(quantize_rows(active), proj_weight).view_as(x)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight, proj_weight, hidden, *kept) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        rows = upstream.contiguous().flatten(0, -2)
        for_active = _product(quantize_rows(rows), proj_weight.t().contiguous())
        gradient, for_bias, active = kernels.gelu_backward(hidden, for_active, len(kept) < 2)
        normed = kept[0] if kept else kernels.norm_again(*norm)
        for_proj_weight = rows.t() @ (kept[1] if len(kept) == 2 else active)
        for_normed = _product(quantize_rows(gradient), weight.t().contiguous())
        for_norm = fast_formulas.add_norm_gradients(norm, residual, for_normed)
        for_layer = gradient.t() @ normed, for_bias.to(rows.dtype)
        return *for_norm, *for_layer, for_proj_weight, None


def _added_and_normed(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """As in bf16; the norm also comes as fp8 and its scales."""
    rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
    total, normed, mean, rstd, *quantized = kernels.add_norm(
        *rows, delta_bias, norm_weight, norm_bias, True
    )
    return (total, mean, rstd, norm_weight, norm_bias), normed, tuple(quantized)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `formulas`."""
    return _Linear.apply(x, weight) if torch.is_grad_enabled() else F.linear(x, weight)


def norm_linear(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return (_NormLinear.apply if torch.is_grad_enabled() else fast_formulas.norm_linear)(*inputs)


def norm_mlp(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return (_NormMlp.apply if torch.is_grad_enabled() else fast_formulas.norm_mlp)(*inputs)


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
    return replace(fast, norm_linear=norm_linear, linear=linear, norm_mlp=norm_mlp)
