"""Matrices as fp8 on NVIDIA GPUs, float8_e4m3fn: values, and scales that give the numbers back.

All scales are powers of two, so that values keep their bits when they change from one scale to
another. The launch helpers for kernels that hold a whole row stand here, too, since the kernels of
`kernels.py` quantise on the way.
"""

import torch
import triton
import triton.language as tl
from torch.library import custom_op

COLUMNS_PER_WARP = 1024  # of kernels that hold a whole row
# Rows and columns of a tile that is stored transposed, and warps; not yet tuned
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 128, 64, 8
FP8_LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-30  # a row of zeros has no largest value
_LARGEST, _SMALLEST = tl.constexpr(FP8_LARGEST), tl.constexpr(SMALLEST_SCALE)


def row_block(columns: int, columns_per_warp: int = COLUMNS_PER_WARP) -> dict[str, int]:
    """Launch arguments of a kernel that holds a whole row, or several."""
    block = triton.next_power_of_2(columns)
    return {"COLUMNS": block, "num_warps": max(1, block // columns_per_warp)}


def num_programs(rows: torch.Tensor, per_processor: int) -> int:
    """Programs of a kernel in which each takes many rows: as many as run at once."""
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    return min(len(rows), per_processor * processors)


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """Scales of vectors whose numbers are no larger than these; float32, powers of two."""
    scales = (largest / FP8_LARGEST).clamp(min=SMALLEST_SCALE)
    # adding to the bits of a positive number carries into its exponent, unless it is a power of two
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


@triton.jit
def store_quantized(values, quantized_ptr, scales_ptr, norms_ptr, row, place, inside):
    """One row as fp8 with its own scale, see `scales_of`, and its Euclidean norm.

    Outside of the row `values` must be 0.
    """
    scale = tl.maximum(tl.max(tl.abs(values)) / _LARGEST, _SMALLEST)
    bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = bits.to(tl.float32, bitcast=True)
    quantized = (values * (1.0 / scale)).to(quantized_ptr.dtype.element_ty)
    tl.store(quantized_ptr + place, quantized, mask=inside)
    tl.store(scales_ptr + row, scale)
    tl.store(norms_ptr + row, tl.sqrt(tl.sum(values * values)))


@triton.jit
def _quantize_rows_kernel(
    x_ptr, quantized_ptr, scales_ptr, norms_ptr, num_columns, COLUMNS: tl.constexpr
):  # fmt: skip
    """One row as fp8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = row * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    store_quantized(x, quantized_ptr, scales_ptr, norms_ptr, row, place, inside)


@triton.jit
def store_transposed(
    values, out_ptr, scale, rows, columns, num_rows, inside
):  # fmt: skip
    """A tile of fp8 with one scale in the place that it has in the transposed matrix."""
    place = columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
    quantized = (values * (1.0 / scale)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, tl.trans(quantized), mask=tl.trans(inside))


@triton.jit
def _transpose_quantized_kernel(
    x_ptr, scales_ptr, scale_ptr, out_ptr, sums_ptr, num_rows, num_columns,
    WITH_SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile, from a scale a row to one for all; if asked for, the sums of its columns."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    place = rows[:, None] * num_columns + columns[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    store_transposed(x, out_ptr, tl.load(scale_ptr), rows, columns, num_rows, inside)
    if WITH_SUMS:
        sums_place = tl.program_id(1) * num_columns + columns
        tl.store(sums_ptr + sums_place, tl.sum(x, axis=0), mask=columns < num_columns)


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Grid of a kernel that goes over a matrix in tiles; neighbours share rows."""
    return triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, TILE_ROWS)


def quantized_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for what `quantize_rows` gives."""
    scales = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales, torch.empty_like(scales)


def transposed_like(x: torch.Tensor) -> torch.Tensor:
    """Room for an (N, F) matrix as fp8, transposed."""
    return x.new_empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn)


@custom_op("miniseries::quantize_rows", mutates_args=())
def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, F), contiguous, as fp8: a row is values times scale.

    Returns:
        Values (N, F); scales and the rows' Euclidean norms, (N, 1) float32.
    """
    quantized, scales, norms = quantized_like(x)
    _quantize_rows_kernel[(len(x),)](
        x, quantized, scales, norms, x.shape[1], **row_block(x.shape[1])
    )
    return quantized, scales, norms


@quantize_rows.register_fake
def _(x):
    return quantized_like(x)


@custom_op("miniseries::transpose_quantized", mutates_args=())
def transpose_quantized(
    x: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, with_sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposed fp8, with one scale in place of one a row.

    Args:
        x: (N, F) fp8, contiguous.
        scales: (N, 1) float32, powers of two.
        scale: () float32, the largest of them.
        with_sums: whether the sum of all rows is wanted.

    Returns:
        (F, N) fp8; the sum, (F,) float32, or an empty tensor.
    """
    rows, columns = x.shape
    out, grid = transposed_like(x), tiles(rows, columns)
    sums = x.new_empty(grid[1] if with_sums else 0, columns, dtype=torch.float32)
    _transpose_quantized_kernel[grid](
        x, scales, scale, out, sums, rows, columns,
        with_sums, TILE_ROWS, TILE_COLUMNS, num_warps=TILE_WARPS,
    )  # fmt: skip
    return out, sums.sum(dim=0) if with_sums else sums[:, 0].clone()


@transpose_quantized.register_fake
def _(x, scales, scale, with_sums):
    return transposed_like(x), x.new_empty(x.shape[1] if with_sums else 0, dtype=torch.float32)
