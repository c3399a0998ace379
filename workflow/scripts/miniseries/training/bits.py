"""Bits that look random and depend on a number alone: the same on every device and any split."""

import torch

# Constants of SplitMix64's last step (Steele, Lea, Flood 2014), as signed 64-bit integers
FIRST_FACTOR, SECOND_FACTOR = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _shift_right(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """Zeros come in from the left; PyTorch's own shift of a signed number copies its sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)


def scramble(numbers: torch.Tensor) -> torch.Tensor:
    """A one-to-one shuffle of all 64-bit numbers in which each bit hangs on every bit.

    Args:
        numbers: int64, any shape.

    Returns:
        int64 of the same shape.
    """
    numbers = (numbers ^ _shift_right(numbers, 30)) * FIRST_FACTOR
    numbers = (numbers ^ _shift_right(numbers, 27)) * SECOND_FACTOR
    return numbers ^ _shift_right(numbers, 31)
