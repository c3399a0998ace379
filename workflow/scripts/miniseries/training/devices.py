"""What is published of the kinds of GPUs: for MFU while training, and for the plan.

Peaks and bandwidths are those of NVIDIA's data sheets (A100, H100, H200, HGX B200, L40S, A10G) and
of its Ada whitepaper (RTX 4090, accumulation in fp32), without sparsity; the two H100 entries as
llm.c's mfu.h has them, H200 as torchtitan (the same processor as H100 SXM). Memory is what PyTorch
reports, somewhat less than the data sheet's.
"""

from typing import NamedTuple


class Device(NamedTuple):
    """A kind of GPU."""

    bf16_tflops: float  # dense products, peak
    memory_gib: float  # as PyTorch shows it
    terabytes_per_second: float


# By the exact name that the driver gives
DEVICES = {
    "NVIDIA A100-SXM4-40GB": Device(312.0, 39.4, 1.555),
    "NVIDIA A100-SXM4-80GB": Device(312.0, 79.2, 2.039),
    "NVIDIA A100-PCIE-40GB": Device(312.0, 39.4, 1.555),
    "NVIDIA A100 80GB PCIe": Device(312.0, 79.2, 1.935),
    "NVIDIA H100 80GB HBM3": Device(988.8, 79.1, 3.35),
    "NVIDIA H100 PCIe": Device(756.0, 79.1, 2.0),
    "NVIDIA H200": Device(989.5, 139.8, 4.8),
    "NVIDIA B200": Device(2250.0, 178.3, 8.0),
    "NVIDIA L40S": Device(362.05, 44.4, 0.864),
    "NVIDIA GeForce RTX 4090": Device(165.2, 23.5, 1.008),
    "NVIDIA A10G": Device(70.0, 22.0, 0.6),
}
