"""Matrices as fp8 on NVIDIA GPUs, each row with a scale of its own.

The launch helpers for kernels that hold a whole row stand here, too, since the kernels of
`kernels.py` quantise on the way.
"""

import torch
import triton
import triton.language as tl
from torch.library import custom_op

COLUMNS_PER_WARP = 1024  # of kernels that hold a whole row
FP8_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
SMALLEST_SCALE = tl.constexpr(1e-30)  # a row of zeros has no largest value


def row_block(columns: int) -> dict[str, int]:
    """Launch arguments of a kernel that holds a whole row."""
    block = triton.next_power_of_2(columns)
    return {"COLUMNS": block, "num_warps": max(1, block // COLUMNS_PER_WARP)}


def num_programs(rows: torch.Tensor, per_processor: int) -> int:
    """Programs of a kernel in which each takes many rows: as many as run at once."""
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
    return min(len(rows), per_processor * processors)


@triton.jit
def store_quantized(values, quantized_ptr, scales_ptr, row, place, inside):
    """One row as fp8 and the factor that gives it back: its largest value becomes 448.

    Outside of the row `values` must be 0.
    """
    scale = tl.maximum(tl.max(tl.abs(values)) / FP8_LARGEST, SMALLEST_SCALE)
    quantized = (values * (1.0 / scale)).to(quantized_ptr.dtype.element_ty)
    tl.store(quantized_ptr + place, quantized, mask=inside)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, quantized_ptr, scales_ptr, num_columns, COLUMNS: tl.constexpr
):  # fmt: skip
    """One row as fp8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    place = row * num_columns + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    store_quantized(x, quantized_ptr, scales_ptr, row, place, inside)


def quantized_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for rows as fp8 and for their scales, (N, 1) float32."""
    scales = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@custom_op("miniseries::quantize_rows", mutates_args=())
def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, F), contiguous, as fp8, and (N, 1) float32 scales: a row is values times scale."""
    quantized, scales = quantized_like(x)
    _quantize_rows_kernel[(len(x),)](x, quantized, scales, x.shape[1], **row_block(x.shape[1]))
    return quantized, scales


@quantize_rows.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized_like(x)
