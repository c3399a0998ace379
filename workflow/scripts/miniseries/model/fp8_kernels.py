"""Triton kernels that make fp8 on the way, each as one PyTorch operator; see `quantization`.

Where a row's largest value is known only after the whole row is made, its scale comes from a bound,
so that a kernel need not hold rows: fp8 is floating, and a bound ten times too large costs nothing.
"""

import torch
import triton
import triton.language as tl
from torch.library import custom_op

from miniseries.model import quantization
from miniseries.model.formulas import LAYER_NORM_EPSILON
from miniseries.model.kernels import add_norm_kernel, gelu_gate, gelu_gradient
from miniseries.model.quantization import (
    quantized_like,
    row_block,
    store_transposed,
    tiles,
    transposed_like,
)

# Tile of GELU's backward, rows of one program, warps; not yet tuned
GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, GELU_WARPS = 64, 64, 256, 8


# ---- residual addition and layer norm --------------------------------------------------------


@custom_op("miniseries::add_norm_quantized", mutates_args=())
def add_norm_quantized(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """As `kernels.add_norm`, with the norm as fp8 alone.

    Returns:
        Sum, (N, C); mean and reciprocal deviation, (N,); the norm as `quantize_rows` gives it.
    """
    total, mean = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    quantized, scales, norms = quantized_like(x)
    add_norm_kernel[(len(x),)](
        x, delta, delta_bias, weight, bias, total, quantized, scales, norms, mean, rstd,
        x.shape[1], LAYER_NORM_EPSILON, True, **row_block(x.shape[1]),
    )  # fmt: skip
    return total, mean, rstd, quantized, scales, norms


@add_norm_quantized.register_fake
def _(x, delta, delta_bias, weight, bias):
    row = x.new_empty(len(x), dtype=torch.float32)
    return torch.empty_like(x), row, torch.empty_like(row), *quantized_like(x)


@triton.jit
def _transposed_norm_kernel(
    total_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr,
    num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of the norm, made again from what `add_norm_quantized` gave, transposed."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    inside = in_rows[:, None] & in_columns[None, :]
    place = rows[:, None] * num_columns + columns[None, :]
    total = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + rows, mask=in_rows, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)
    normed = (total - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
    store_transposed(normed, out_ptr, tl.load(scale_ptr), rows, columns, num_rows, inside)


@custom_op("miniseries::transposed_norm", mutates_args=())
def transposed_norm(
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """The norm of `add_norm_quantized` once more, transposed, (C, N) fp8 with one scale, ()."""
    out = transposed_like(total)
    _transposed_norm_kernel[tiles(*total.shape)](
        total, mean, rstd, weight, bias, scale, out, *total.shape,
        quantization.TILE_ROWS, quantization.TILE_COLUMNS, num_warps=quantization.TILE_WARPS,
    )  # fmt: skip
    return out


@transposed_norm.register_fake
def _(total, mean, rstd, weight, bias, scale):
    return transposed_like(total)


# ---- GELU -----------------------------------------------------------------------------------


@triton.jit
def _gelu_quantized_kernel(x_ptr, scales_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
    """GELU of one row as fp8 with a given scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = row * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    active = x * gelu_gate(x) * (1.0 / tl.load(scales_ptr + row))
    tl.store(out_ptr + place, active.to(out_ptr.dtype.element_ty), mask=inside)


@custom_op("miniseries::gelu_quantized", mutates_args=())
def gelu_quantized(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """tanh-GELU of (N, F), contiguous, as fp8 with these scales, (N, 1) float32."""
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    _gelu_quantized_kernel[(len(x),)](x, scales, out, x.shape[1], **row_block(x.shape[1]))
    return out


@gelu_quantized.register_fake
def _(x, scales):
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


@triton.jit
def _gelu_backward_quantized_kernel(
    x_ptr, upstream_ptr, scales_ptr, scale_ptr, active_scale_ptr,
    gradient_ptr, transposed_ptr, active_ptr, sums_ptr, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """A strip of columns: the gradient by GELU's input with a scale a row, once more transposed
    with one scale, GELU transposed, and the gradient's sum over this program's rows.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    in_columns = columns < num_columns
    scale, active_scale = tl.load(scale_ptr), tl.load(active_scale_ptr)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # added up once, at the end
    for start in range(0, ROWS_PER_PROGRAM, ROWS):
        rows = (first + start + tl.arange(0, ROWS)).to(tl.int64)
        place = rows[:, None] * num_columns + columns[None, :]
        inside = (rows < num_rows)[:, None] & in_columns[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(upstream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scales = tl.load(scales_ptr + rows, mask=rows < num_rows, other=1.0)
        gradient = gelu_gradient(x, upstream)
        quantized = (gradient * (1.0 / scales)[:, None]).to(gradient_ptr.dtype.element_ty)
        tl.store(gradient_ptr + place, quantized, mask=inside)
        store_transposed(gradient, transposed_ptr, scale, rows, columns, num_rows, inside)
        active = x * gelu_gate(x)
        store_transposed(active, active_ptr, active_scale, rows, columns, num_rows, inside)
        sums += gradient
    sums_place = tl.program_id(1) * num_columns + columns
    tl.store(sums_ptr + sums_place, tl.sum(sums, axis=0), mask=in_columns)


@custom_op("miniseries::gelu_backward_quantized", mutates_args=())
def gelu_backward_quantized(
    x: torch.Tensor,
    upstream: torch.Tensor,
    scales: torch.Tensor,
    scale: torch.Tensor,
    active_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient by the input of tanh-GELU and GELU itself as the products that follow want them.

    Args:
        x: (N, F), contiguous; what GELU was applied to.
        upstream: (N, F), contiguous.
        scales: (N, 1) float32, of the gradient's rows.
        scale: () float32, of the gradient transposed.
        active_scale: () float32, of GELU transposed.

    Returns:
        The gradient as fp8, (N, F) and transposed, (F, N); GELU as fp8 transposed; the gradient's
        sum over all rows, (F,) float32.
    """
    rows, columns = x.shape
    gradient = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    transposed, active = transposed_like(x), transposed_like(x)
    strips = triton.cdiv(rows, GELU_ROWS_PER_PROGRAM)
    sums = torch.empty((strips, columns), device=x.device, dtype=torch.float32)
    _gelu_backward_quantized_kernel[(triton.cdiv(columns, GELU_COLUMNS), strips)](
        x, upstream, scales, scale, active_scale, gradient, transposed, active, sums, rows, columns,
        GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, num_warps=GELU_WARPS,
    )  # fmt: skip
    return gradient, transposed, active, sums.sum(dim=0)


@gelu_backward_quantized.register_fake
def _(x, upstream, scales, scale, active_scale):
    gradient = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    sums = x.new_empty(x.shape[1], dtype=torch.float32)
    return gradient, transposed_like(x), transposed_like(x), sums
