"""Linear layers in fp8 for NVIDIA GPUs from Hopper on, gradients included.

Both factors of a product are float8_e4m3fn. Forward and for the gradient by the input each of the
vectors that are multiplied has a scale of its own. The gradient by a weight is a sum over all
tokens; its factors have one scale each, and lie transposed. Scales are made anew each time, so
there is no state to keep. Norms and GELU are not kept but made again for it on the way, whatever
`recompute` says.

Stays as it is: head, embeddings, norms, attention, and the gradient by the weight of attention's
own projection, whose factors would cost as much as it saves. Without gradients (evaluation)
everything is bf16.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from miniseries.model import fast_formulas, fp8_kernels
from miniseries.model.formulas import Formulas
from miniseries.model.quantization import quantize_rows, scales_of, transpose_quantized

# Of a bound on products: norms are of numbers before they were rounded, by a 16th at most, twice
ROUNDING = (1 + 2**-4) ** 2
STEEPEST_GELU = 1.13  # the largest slope of GELU's tanh form is 1.1290


class Quantized(NamedTuple):
    """As `quantize_rows` gives it: (N, F) fp8; scales and Euclidean norms of its rows, (N, 1)."""

    values: torch.Tensor
    scales: torch.Tensor
    norms: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> "Quantized":
        """A matrix, (N, F)."""
        return cls(*quantize_rows(x))

    def transposed(self, with_sums: bool = False) -> tuple["Transposed", torch.Tensor]:
        """The same numbers for a gradient by a weight; and for that by a bias their sum, (F,)."""
        scale = self.scales.amax()
        values, sums = transpose_quantized(self.values, self.scales, scale, with_sums)
        return Transposed(values, scale), sums


class Transposed(NamedTuple):
    """(N, F) as (F, N) fp8 with one scale, ()."""

    values: torch.Tensor
    scale: torch.Tensor


def _product(rows: Quantized, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows, (N, K), times weight, (M, K), transposed, in bf16 (N, M)."""
    return torch._scaled_mm(
        rows.values,
        weight.values.t(),
        rows.scales,
        weight.scales.t(),
        bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _weight_gradient(upstream: Transposed, inputs: Transposed) -> torch.Tensor:
    """Sum over N of upstream, (N, M), times inputs, (N, K), in bf16 (M, K)."""
    return torch._scaled_mm(
        upstream.values,
        inputs.values.t(),
        upstream.scale,
        inputs.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,  # the sum is long
    )


def _bounds(rows: Quantized, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What no number of a row of `_product` is larger than, by Cauchy and Schwarz; (N, 1)."""
    bounds = rows.norms * (ROUNDING * weight.norms.amax())
    return bounds if bias is None else bounds + bias.abs().amax().float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows, weight)
        return _product(Quantized.of(rows), Quantized.of(weight)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        rows = upstream.contiguous().flatten(0, -2)
        for_x = _product(Quantized.of(rows), Quantized.of(weight.t().contiguous()))
        return for_x.view(*upstream.shape[:-1], -1), rows.t() @ x


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, delta_bias, norm_weight, norm_bias, weight, bias):
        norm, normed = _added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        ctx.save_for_backward(*norm, weight)
        out = _product(normed, Quantized.of(weight), bias)
        return norm[0].view_as(x), out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight,) = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        gradient = Quantized.of(upstream.contiguous().flatten(0, -2))
        transposed, for_bias = gradient.transposed(with_sums=True)
        for_weight = _weight_gradient(transposed, _transposed_norm(norm))
        for_normed = _product(gradient, Quantized.of(weight.t().contiguous()))
        for_norm, _ = fast_formulas.add_norm_gradients(norm[:5], residual, for_normed)
        return *for_norm, for_weight, for_bias.to(weight.dtype)


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, delta_bias, norm_weight, norm_bias, weight, bias, proj_weight):
        norm, normed = _added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        quantized_weight = Quantized.of(weight)
        hidden = _product(normed, quantized_weight, bias)
        # GELU of a number is no larger than it
        scales = scales_of(_bounds(normed, quantized_weight, bias))
        ctx.save_for_backward(*norm, weight, proj_weight, hidden, scales.amax())
        active = Quantized(fp8_kernels.gelu_quantized(hidden, scales), scales, scales)
        return norm[0].view_as(x), _product(active, Quantized.of(proj_weight)).view_as(x)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight, proj_weight, hidden, active_scale) = (
            ctx.saved_tensors[:6],
            ctx.saved_tensors[6:],
        )
        rows = Quantized.of(upstream.contiguous().flatten(0, -2))
        quantized_weight = Quantized.of(proj_weight.t().contiguous())
        scales = scales_of(STEEPEST_GELU * _bounds(rows, quantized_weight))
        scale = scales.amax()
        gradient, transposed, active, for_bias = fp8_kernels.gelu_backward_quantized(
            hidden, _product(rows, quantized_weight), scales, scale, active_scale
        )
        for_proj_weight = _weight_gradient(rows.transposed()[0], Transposed(active, active_scale))
        for_weight = _weight_gradient(Transposed(transposed, scale), _transposed_norm(norm))
        gradient = Quantized(gradient, scales, scales)
        for_normed = _product(gradient, Quantized.of(weight.t().contiguous()))
        for_norm, _ = fast_formulas.add_norm_gradients(norm[:5], residual, for_normed)
        return *for_norm, for_weight, for_bias.to(weight.dtype), for_proj_weight


def _added_and_normed(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], Quantized]:
    """As in bf16; the sixth of the tensors is the scale for the norm transposed."""
    rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
    total, mean, rstd, *normed = fp8_kernels.add_norm_quantized(
        *rows, delta_bias, norm_weight, norm_bias
    )
    normed = Quantized(*normed)
    return (total, mean, rstd, norm_weight, norm_bias, normed.scales.amax()), normed


def _transposed_norm(norm: tuple[torch.Tensor, ...]) -> Transposed:
    return Transposed(fp8_kernels.transposed_norm(*norm), norm[5])


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `formulas`."""
    return _Linear.apply(x, weight) if torch.is_grad_enabled() else F.linear(x, weight)


def norm_linear(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    if not torch.is_grad_enabled():
        return fast_formulas.norm_linear(*inputs)
    return _NormLinear.apply(*inputs[:-1])


def norm_mlp(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    if not torch.is_grad_enabled():
        return fast_formulas.norm_mlp(*inputs)
    return _NormMlp.apply(*inputs[:-1])


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
    return replace(fast, norm_linear=norm_linear, linear=linear, norm_mlp=norm_mlp, mlp_name="fp8")
