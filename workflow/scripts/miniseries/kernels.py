"""The formulas of `formulas.py` for NVIDIA GPUs; tests hold each against its plain one.

Libraries come first: cuBLAS and cuDNN through PyTorch, and cuDNN's own front end for attention
where it is installed. The Triton kernels do in one pass over memory what would take several.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from miniseries import cudnn_attention, formulas
from miniseries.formulas import LAYER_NORM_EPSILON, Formulas

# Block sizes and warps: the fastest of those tried on an H200 for the shapes of 124M and 1558M
CLASSIFIER_COLUMNS, CLASSIFIER_WARPS = 2048, 4
GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, GELU_WARPS = 8, 128, 256, 4
NORM_COLUMNS_PER_WARP = 512
NORM_COLUMNS_PER_PROCESSOR = 8192  # of all programs of the norm's backward on one processor
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)  # GELU's tanh form, Hendrycks and Gimpel 2016


# ---- head and cross-entropy ---------------------------------------------------------------


@triton.jit
def _classifier_kernel(
    logits_ptr, targets_ptr, losses_ptr, scale,
    vocab_size: tl.constexpr, padded_size: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and in place of its logits their gradient.

    The first pass reads the row from memory, the second finds it in the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * padded_size
    target = tl.load(targets_ptr + row)
    target_logit = tl.load(row_ptr + target).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab_size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        block_largest = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - block_largest) + tl.sum(tl.exp(x - block_largest))
        largest = block_largest
    logsumexp = largest + tl.log(total)
    tl.store(losses_ptr + row, logsumexp - target_logit)
    for start in range(0, padded_size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
        gradient = tl.exp(x.to(tl.float32) - logsumexp) - tl.where(columns == target, 1.0, 0.0)
        stored = (gradient * scale).to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, stored, mask=columns < padded_size)


def gradients_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`; the gradient takes the place of the logits."""
    rows, padded_size = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    _classifier_kernel[(rows,)](
        logits,
        targets,
        losses,
        scale,
        vocab_size,
        padded_size,
        CLASSIFIER_COLUMNS,
        num_warps=CLASSIFIER_WARPS,
    )
    return losses.sum(), logits


# ---- GELU -----------------------------------------------------------------------------------


@triton.jit
def _gelu_gradient(x, upstream):
    inner = SQRT_2_OVER_PI * (x + CUBIC * x * x * x)
    # tanh by exp: 2 / (1 + e^-2u) - 1 stays finite for every u
    tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
    slope = SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
    return upstream * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)


@triton.jit
def _gelu_backward_kernel(
    x_ptr, upstream_ptr, gradient_ptr, sums_ptr, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """A strip of columns: the gradient by GELU's input, and its sum over this program's rows."""
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
        gradient = _gelu_gradient(x, upstream)
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        sums += gradient
    sums_place = tl.program_id(1) * num_columns + columns
    tl.store(sums_ptr + sums_place, tl.sum(sums, axis=0), mask=in_columns)


@torch.library.custom_op("miniseries::gelu_backward", mutates_args=())
def gelu_backward(x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient by the input of tanh-GELU, and its sum over all rows: the gradient of a bias.

    Args:
        x: (N, F), contiguous; what GELU was applied to.
        upstream: (N, F), contiguous.

    Returns:
        (N, F) of x's type, and (F,) float32.
    """
    rows, columns = x.shape
    gradient = torch.empty_like(x)
    strips = triton.cdiv(rows, GELU_ROWS_PER_PROGRAM)
    sums = torch.empty((strips, columns), device=x.device, dtype=torch.float32)
    _gelu_backward_kernel[(triton.cdiv(columns, GELU_COLUMNS), strips)](
        x, upstream, gradient, sums, rows, columns,
        GELU_ROWS, GELU_COLUMNS, GELU_ROWS_PER_PROGRAM, num_warps=GELU_WARPS,
    )  # fmt: skip
    return gradient, sums.sum(dim=0)


@gelu_backward.register_fake
def _(x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[1], dtype=torch.float32)


class _Gelu(torch.autograd.Function):
    """GELU whose backward also gives the gradient of the bias that was added before."""

    @staticmethod
    def forward(ctx, x, _bias):
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        gradient, sums = gelu_backward(x.flatten(0, -2), upstream.contiguous().flatten(0, -2))
        return gradient.view_as(x), sums.to(x.dtype)


def gelu_of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `formulas`; one kernel makes the gradients of GELU and of the bias."""
    return _Gelu.apply(F.linear(x, weight, bias.detach()), bias)


# ---- residual addition and layer norm --------------------------------------------------------


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, sum_ptr, normed_ptr, mean_ptr, rstd_ptr,
    num_columns, epsilon, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: x + delta, its mean and reciprocal standard deviation, and the norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = row * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    stored = (x + delta).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + place, stored, mask=inside)
    total = stored.to(tl.float32)  # the norm is of what later layers read, rounded
    mean = tl.sum(total) / num_columns
    centred = tl.where(inside, total - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred) / num_columns + epsilon)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rstd * weight + bias
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _add_norm_backward_kernel(
    sum_ptr, mean_ptr, rstd_ptr, weight_ptr, upstream_ptr, residual_ptr,
    gradient_ptr, weight_sums_ptr, bias_sums_ptr, num_rows, num_columns, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every so many rows: the gradient by x and by delta; this program's sums for the norm."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    bias_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        place = row * num_columns.to(tl.int64) + columns
        total = tl.load(sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(upstream_ptr + place, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        normed = tl.where(inside, (total - mean) * rstd, 0.0)
        weighted = upstream * weight
        along = tl.sum(weighted * normed) / num_columns
        level = tl.sum(weighted) / num_columns
        gradient = (weighted - along * normed - level) * rstd + residual
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
        weight_sums += upstream * normed
        bias_sums += upstream
    sums_place = tl.program_id(0) * num_columns + columns
    tl.store(weight_sums_ptr + sums_place, weight_sums, mask=inside)
    tl.store(bias_sums_ptr + sums_place, bias_sums, mask=inside)


@torch.library.custom_op("miniseries::add_norm", mutates_args=())
def add_norm_forward(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + delta and its norm, (N, C); mean and reciprocal deviation of the rows, (N,) float32."""
    rows, columns = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    mean = torch.empty(rows, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    block = triton.next_power_of_2(columns)
    _add_norm_kernel[(rows,)](
        x, delta, weight, bias, total, normed, mean, rstd,
        columns, LAYER_NORM_EPSILON, block, num_warps=max(1, block // NORM_COLUMNS_PER_WARP),
    )  # fmt: skip
    return total, normed, mean, rstd


@add_norm_forward.register_fake
def _(x, delta, weight, bias):
    row = x.new_empty(x.shape[0], dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), row, torch.empty_like(row)


@torch.library.custom_op("miniseries::add_norm_backward", mutates_args=())
def add_norm_backward(
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    upstream: torch.Tensor,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient by x and by delta, (N, C); by weight and bias of the norm, (2, C) float32.

    Args:
        total: (N, C), x + delta.
        upstream: (N, C), gradient by the norm.
        residual: (N, C), gradient by the sum from all that follows.
    """
    rows, columns = total.shape
    processors = torch.cuda.get_device_properties(total.device).multi_processor_count
    block = triton.next_power_of_2(columns)
    programs = min(rows, processors * max(1, NORM_COLUMNS_PER_PROCESSOR // block))
    gradient = torch.empty_like(total)
    sums = torch.empty((2, programs, columns), device=total.device, dtype=torch.float32)
    _add_norm_backward_kernel[(programs,)](
        total, mean, rstd, weight, upstream, residual, gradient, sums[0], sums[1],
        rows, columns, block, num_warps=max(1, block // NORM_COLUMNS_PER_WARP),
    )  # fmt: skip
    return gradient, sums.sum(dim=1)


@add_norm_backward.register_fake
def _(total, mean, rstd, weight, upstream, residual):
    return torch.empty_like(total), total.new_empty(2, total.shape[1], dtype=torch.float32)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, bias):
        shape = x.shape
        rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
        total, normed, mean, rstd = add_norm_forward(*rows, weight, bias)
        ctx.save_for_backward(total, mean, rstd, weight)
        return total.view(shape), normed.view(shape)

    @staticmethod
    def backward(ctx, residual, upstream):
        total, mean, rstd, weight = ctx.saved_tensors
        rows = upstream.contiguous().flatten(0, -2), residual.contiguous().flatten(0, -2)
        gradient, parameters = add_norm_backward(total, mean, rstd, weight, *rows)
        gradient = gradient.view(upstream.shape)
        return gradient, gradient, *parameters.to(weight.dtype).unbind(0)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`; one kernel forward, and one backward that also sums for weight and bias."""
    return _AddNorm.apply(x, delta, weight, bias)


def fast_formulas() -> Formulas:
    """The fastest implementations that this GPU and its software have."""
    compiled_losses = torch.compile(formulas.losses_of_logits, dynamic=False)
    if torch.cuda.get_device_capability() < (8, 0):  # our kernels are tried on Hopper alone
        compiled_gradients = torch.compile(formulas.gradients_of_logits, dynamic=False)
        return Formulas(losses_of_logits=compiled_losses, gradients_of_logits=compiled_gradients)
    chosen: dict[str, Any] = {}
    if cudnn_attention.is_available():
        name = "cuDNN through its front end (evaluation: PyTorch's choice)"
        chosen = {"attention": cudnn_attention.attention, "attention_name": name}
    return Formulas(
        add_norm=add_norm,
        gelu_of_linear=gelu_of_linear,
        losses_of_logits=compiled_losses,
        gradients_of_logits=gradients_of_logits,
        **chosen,
    )
