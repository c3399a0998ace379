"""Triton kernels for what costs time beside the matrix products, each as one PyTorch operator.

Libraries come first: matrix products are cuBLAS's, attention is cuDNN's. A kernel here does in one
pass over memory what would take several; `fast_formulas.py` puts them together, and tests hold
each against its plain one. N rows are B x T tokens.
"""

import torch
import triton
import triton.language as tl
from torch.library import custom_op

from miniseries.model.formulas import LAYER_NORM_EPSILON
from miniseries.model.quantization import num_programs, row_block, store_quantized

# Block sizes and warps: the fastest of those tried on an H200 for the shapes of 124M and 1558M
CLASSIFIER_COLUMNS, CLASSIFIER_WARPS = 2048, 4
CLASSIFIER_PROGRAMS_PER_PROCESSOR = 8
GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, GELU_WARPS = 8, 128, 256, 4
# Of the norm's backward: rows at once, stages of its pipeline
NORM_ROWS, NORM_STAGES, NORM_COLUMNS_PER_WARP, NORM_PROGRAMS_PER_PROCESSOR = 1, 1, 1024, 8
TWO_SQRT_2_OVER_PI = tl.constexpr(2 * 0.7978845608028654)
CUBIC = tl.constexpr(0.044715)  # GELU's tanh form, Hendrycks and Gimpel 2016


# ---- head and cross-entropy ---------------------------------------------------------------


@triton.jit
def _sum_of_exponentials(row_ptr, reference, vocab_size, COLUMNS: tl.constexpr):
    """Sum of e^(x - reference) over a row; lanes add alone, so that loads need not wait."""
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, vocab_size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        sums += tl.exp(x.to(tl.float32) - reference)
    return tl.sum(sums)


@triton.jit
def _classifier_kernel(
    logits_ptr, targets_ptr, losses_ptr, num_rows,
    vocab_size: tl.constexpr, padded_size: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every so many rows: the loss, and in place of the logits their gradient.

    The largest of the first logits stands in for the row's; where that is too far off for float32,
    the row is done again with the true one.
    """
    first_columns = tl.arange(0, COLUMNS)
    row_size = tl.full((), padded_size, dtype=tl.int64)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * row_size
        target = tl.load(targets_ptr + row)
        target_logit = tl.load(row_ptr + target).to(tl.float32)
        there = first_columns < vocab_size  # a tiny vocabulary ends before them
        first = tl.load(row_ptr + first_columns, mask=there, other=float("-inf"))
        reference = tl.max(first.to(tl.float32))
        total = _sum_of_exponentials(row_ptr, reference, vocab_size, COLUMNS)
        if (total > 1e37) | (total < 1e-30) | (total != total):
            largest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
            for start in range(0, vocab_size, COLUMNS):
                columns = start + first_columns
                x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
                largest = tl.maximum(largest, x.to(tl.float32))
            reference = tl.max(largest)
            total = _sum_of_exponentials(row_ptr, reference, vocab_size, COLUMNS)
        logsumexp = reference + tl.log(total)
        tl.store(losses_ptr + row, logsumexp - target_logit)
        for start in range(0, padded_size, COLUMNS):
            columns = start + first_columns
            x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
            gradient = tl.exp(x.to(tl.float32) - logsumexp) - tl.where(columns == target, 1.0, 0.0)
            stored = gradient.to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + columns, stored, mask=columns < padded_size)


def gradients_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`; the gradient takes the place of the logits."""
    rows, padded_size = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    programs = num_programs(logits, CLASSIFIER_PROGRAMS_PER_PROCESSOR)
    _classifier_kernel[(programs,)](
        logits, targets, losses, rows, vocab_size, padded_size,
        CLASSIFIER_COLUMNS, num_warps=CLASSIFIER_WARPS,
    )  # fmt: skip
    return losses.sum(), logits


# ---- GELU -----------------------------------------------------------------------------------


@triton.jit
def gelu_gate(x):
    """GELU's tanh form is x times this: (1 + tanh u) / 2 = 1 / (1 + e^-2u)."""
    return 1.0 / (1.0 + tl.exp((x + x * x * x * CUBIC) * -TWO_SQRT_2_OVER_PI))


@triton.jit
def gelu_gradient(x, upstream):
    """Gradient by GELU's input."""
    gate = gelu_gate(x)
    slope = (1.0 + x * x * 3.0 * CUBIC) * TWO_SQRT_2_OVER_PI
    return upstream * gate * (1.0 + x * (1.0 - gate) * slope)


@triton.jit
def _gelu_kernel(x_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
    """GELU of one row."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = tl.program_id(0).to(tl.int64) * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (x * gelu_gate(x)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward_kernel(
    x_ptr, upstream_ptr, gradient_ptr, active_ptr, sums_ptr, num_rows, num_columns,
    WITH_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """A strip of columns: the gradient by GELU's input, and its sum over this program's rows;
    if asked for, GELU once more.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    in_columns = columns < num_columns
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # added up once, at the end
    for start in range(0, ROWS_PER_PROGRAM, ROWS):
        rows = (first + start + tl.arange(0, ROWS)).to(tl.int64)
        place = rows[:, None] * num_columns + columns[None, :]
        inside = (rows < num_rows)[:, None] & in_columns[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(upstream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        gradient = gelu_gradient(x, upstream)
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        if WITH_ACTIVE:
            active = x * gelu_gate(x)
            tl.store(active_ptr + place, active.to(active_ptr.dtype.element_ty), mask=inside)
        sums += gradient
    sums_place = tl.program_id(1) * num_columns + columns
    tl.store(sums_ptr + sums_place, tl.sum(sums, axis=0), mask=in_columns)


@custom_op("miniseries::gelu", mutates_args=())
def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form of (N, F), contiguous."""
    out = torch.empty_like(x)
    _gelu_kernel[(len(x),)](x, out, x.shape[1], **row_block(x.shape[1]))
    return out


@gelu.register_fake
def _(x):
    return torch.empty_like(x)


@custom_op("miniseries::gelu_backward", mutates_args=())
def gelu_backward(
    x: torch.Tensor, upstream: torch.Tensor, with_active: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient by the input of tanh-GELU, and its sum over all rows: the gradient of a bias.

    Args:
        x: (N, F), contiguous; what GELU was applied to.
        upstream: (N, F), contiguous.
        with_active: whether GELU of x, which was not kept, comes as well.

    Returns:
        (N, F) of x's type, (F,) float32, and what `gelu` gives, or an empty tensor.
    """
    rows, columns = x.shape
    gradient, active = torch.empty_like(x), torch.empty_like(x if with_active else x[:0])
    strips = triton.cdiv(rows, GELU_ROWS_PER_PROGRAM)
    sums = torch.empty((strips, columns), device=x.device, dtype=torch.float32)
    _gelu_backward_kernel[(triton.cdiv(columns, GELU_COLUMNS), strips)](
        x, upstream, gradient, active, sums, rows, columns, with_active,
        GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, num_warps=GELU_WARPS,
    )  # fmt: skip
    return gradient, sums.sum(dim=0), active


@gelu_backward.register_fake
def _(x, upstream, with_active):
    active = torch.empty_like(x if with_active else x[:0])
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32), active


# ---- residual addition and layer norm --------------------------------------------------------


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, delta_bias_ptr, weight_ptr, bias_ptr,
    sum_ptr, normed_ptr, scales_ptr, norms_ptr, mean_ptr, rstd_ptr,
    num_columns, EPSILON: tl.constexpr, QUANTIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: x + delta + its bias, mean and reciprocal standard deviation, and the norm, as fp8
    if so wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = row * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    delta_bias = tl.load(delta_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    stored = (x + delta + delta_bias).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + place, stored, mask=inside)
    total = stored.to(tl.float32)  # the norm is of what later layers read, rounded
    mean = tl.sum(total) / num_columns
    centred = tl.where(inside, total - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred) / num_columns + EPSILON)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rstd * weight + bias
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    if QUANTIZE:
        store_quantized(normed, normed_ptr, scales_ptr, norms_ptr, row, place, inside)
    else:
        tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward_kernel(
    sum_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, upstream_ptr, residual_ptr,
    gradient_ptr, normed_ptr, sums_ptr, num_rows, num_columns,
    WITH_NORM: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every so many rows, some at once: the gradient by x and by delta, and this program's three
    sums: for the norm's weight, for its bias, and for delta's bias; if asked for, the norm again.
    """
    columns = tl.arange(0, COLUMNS)
    in_columns = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    weight_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    bias_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    delta_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, num_rows, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        in_rows = rows < num_rows
        inside = in_rows[:, None] & in_columns[None, :]
        place = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        total = tl.load(sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(upstream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=in_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)[:, None]
        normed = tl.where(inside, (total - mean) * rstd, 0.0)
        weighted = upstream * weight
        along = (tl.sum(weighted * normed, axis=1) / num_columns)[:, None]
        level = (tl.sum(weighted, axis=1) / num_columns)[:, None]
        gradient = (weighted - along * normed - level) * rstd + residual
        gradient = tl.where(inside, gradient, 0.0)
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        if WITH_NORM:
            bias = tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
            again = (normed * weight + bias).to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + place, again, mask=inside)
        weight_sums += tl.sum(upstream * normed, axis=0)
        bias_sums += tl.sum(upstream, axis=0)
        delta_sums += tl.sum(gradient, axis=0)
    place = tl.program_id(0) * 3 * num_columns + columns
    tl.store(sums_ptr + place, weight_sums, mask=in_columns)
    tl.store(sums_ptr + place + num_columns, bias_sums, mask=in_columns)
    tl.store(sums_ptr + place + 2 * num_columns, delta_sums, mask=in_columns)


@custom_op("miniseries::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + delta + delta_bias, (N, C), and its layer norm.

    Returns:
        Sum and norm, (N, C); mean and reciprocal deviation of the rows, (N,) float32.
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    mean = x.new_empty(len(x), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    add_norm_kernel[(len(x),)](
        x, delta, delta_bias, weight, bias, total, normed, normed, normed, mean, rstd,
        x.shape[1], LAYER_NORM_EPSILON, False, **row_block(x.shape[1]),
    )  # fmt: skip
    return total, normed, mean, rstd


@add_norm.register_fake
def _(x, delta, delta_bias, weight, bias):
    row = x.new_empty(len(x), dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), row, torch.empty_like(row)


@custom_op("miniseries::add_norm_backward", mutates_args=())
def add_norm_backward(
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    upstream: torch.Tensor,
    residual: torch.Tensor,
    with_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `add_norm`.

    Args:
        total: (N, C), x + delta + delta_bias.
        upstream: (N, C), gradient by the norm.
        residual: (N, C), gradient by the sum from all that follows.
        with_norm: whether the norm, which was not kept, comes as well.

    Returns:
        By x and by delta, (N, C); by the norm's weight and bias and delta's bias, (3, C) float32;
        the norm, (N, C), or an empty tensor.
    """
    programs, columns = num_programs(total, NORM_PROGRAMS_PER_PROCESSOR), total.shape[1]
    gradient, normed = torch.empty_like(total), torch.empty_like(total if with_norm else total[:0])
    sums = total.new_empty(programs, 3, columns, dtype=torch.float32)
    _add_norm_backward_kernel[(programs,)](
        total, mean, rstd, weight, bias, upstream, residual, gradient, normed, sums,
        *total.shape, with_norm, NORM_STAGES, NORM_ROWS,
        **row_block(columns, NORM_COLUMNS_PER_WARP),
    )  # fmt: skip
    return gradient, sums.sum(dim=0), normed


@add_norm_backward.register_fake
def _(total, mean, rstd, weight, bias, upstream, residual, with_norm):
    normed = torch.empty_like(total if with_norm else total[:0])
    sums = total.new_empty(3, total.shape[1], dtype=torch.float32)
    return torch.empty_like(total), sums, normed
