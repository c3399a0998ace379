"""Matrix products with GELU or its gradient on their way out, and the loss in one pass.

By quack-kernels, where it is installed and the GPU is a Hopper. GELU by itself reads and writes
the widest activations once more each, forward and backward.
"""

import functools
import importlib.util
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.library import custom_op

from miniseries.data.shards import PADDED_VOCAB_SIZE, VOCAB_SIZE
from miniseries.model import formulas, kernels

NAME = "GELU within the products, by quack-kernels"
GELU = "gelu_tanh_approx"  # quack's name for the tanh form
# Columns of the tiles that were the fastest on an H200, the first that divides the layer's; else
# two groups of threads share a tile (LOG.md)
FORWARD_COLUMNS, BACKWARD_COLUMNS = (192, 160), (160,)
# Channels, and rows: below them tiles would be mostly empty, and nothing was tried
SMALLEST, FEWEST_ROWS = 128, 256


@functools.cache
def quack() -> SimpleNamespace | None:
    """What is used of the package; None where it is missing or does not load."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not on_hopper or importlib.util.find_spec("quack") is None:
        return None
    try:
        from quack.cross_entropy import cross_entropy_fwd_out
        from quack.epilogue.library import dgelu_dbias_mod
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_act
    except Exception as error:  # a package of compilers: it can fail in many ways
        return _refuse(error)
    return SimpleNamespace(
        config=GemmConfig,
        linear_act=gemm_act,
        act_backward=dgelu_dbias_mod,
        cross_entropy=cross_entropy_fwd_out,
    )


@functools.cache
def work(channels: int) -> bool:
    """Whether the package is here, and right for layers of this width: tried once, on few rows."""
    package = quack()
    if package is None:
        return False
    try:
        _check(package, channels)
    except Exception as error:
        return bool(_refuse(error))
    return True


def _refuse(error: Exception) -> None:
    warnings.warn(f"quack-kernels cannot be used ({error}); all else stays", stacklevel=3)


def _config(package: SimpleNamespace, columns: int, widths: tuple[int, ...]):
    """How a product with so many columns is cut into tiles."""
    width = next((w for w in widths if columns % w == 0), None)
    return package.config(
        tile_m=128,
        tile_n=width or 256,
        pingpong=width is not None,
        cluster_m=2,
        cluster_n=1,
        swap_ab=False,
        device_capacity=9,
        is_dynamic_persistent=False,
    )


def _linear_gelu(package: SimpleNamespace, rows, weight, bias):
    config = _config(package, len(weight), FORWARD_COLUMNS)
    options = {"activation": GELU, "tuned": False, "config": config}
    return package.linear_act(rows, weight.t(), bias=bias, **options)


def _gelu_linear_backward(package: SimpleNamespace, upstream, proj_weight, hidden):
    config = _config(package, hidden.shape[1], BACKWARD_COLUMNS)
    out = {"D": torch.empty_like(hidden), "postact": torch.empty_like(hidden)}
    options = {"out": out, "tuned": False, "config": config}
    for_bias = package.act_backward(upstream, proj_weight, hidden, **options)["dbias"]
    return out["D"], for_bias.float().view(-1), out["postact"]


def _gradients_of_logits(package: SimpleNamespace, logits, targets, vocab_size):
    logits[:, vocab_size:] = float("-inf")  # so that padding takes no part
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    package.cross_entropy(logits, targets, None, losses, None, logits, None, -100)
    return losses.sum(), logits


def _check(package: SimpleNamespace, channels: int, device: str = "cuda") -> None:
    """Raise unless the loss, and products in the tiles of this width, are right on random rows."""
    channels = channels if _fits(channels) else SMALLEST
    shapes = {"x": (FEWEST_ROWS, channels), "weight": (4 * channels, channels)}
    shapes |= {"bias": (4 * channels,), "proj_weight": (channels, 4 * channels)}
    shapes["logits"] = (16, PADDED_VOCAB_SIZE)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    x, weight, bias, proj_weight, logits = drawn.values()
    weight, proj_weight = weight / channels**0.5, proj_weight / channels**0.5
    hidden = F.linear(x, weight, bias)
    active = F.gelu(hidden, approximate="tanh")
    gradient = torch.ops.aten.gelu_backward(x @ proj_weight, hidden, approximate="tanh")
    for_bias = gradient.float().sum(dim=0)
    of_logits = torch.arange(len(logits), device=device), VOCAB_SIZE
    loss, for_logits = formulas.gradients_of_logits(logits, *of_logits)
    pairs = zip(
        (*_linear_gelu(package, x, weight, bias),
         *_gelu_linear_backward(package, x, proj_weight, hidden),
         *_gradients_of_logits(package, logits, *of_logits)),
        (hidden, active, gradient, for_bias, active, loss, for_logits),
        strict=True,
    )  # fmt: skip
    for ours, theirs in pairs:
        distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        if not distance < 1e-2:  # bf16's rounding: 4e-3
            raise ValueError(f"its products or its loss are {distance:.1%} away from PyTorch's")


def fit(x: torch.Tensor) -> bool:
    """Whether these products are for a stream like this one, (B, T, C)."""
    batch, length, channels = x.shape
    return _fits(channels) and batch * length >= FEWEST_ROWS and x.dtype == torch.bfloat16


def _fits(channels: int) -> bool:
    return channels >= SMALLEST and channels % 8 == 0


@custom_op("miniseries::linear_gelu", mutates_args=())
def linear_gelu(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear layer of (N, C), and tanh-GELU of it, both (N, F); weight (F, C), bias (F,)."""
    return _linear_gelu(quack(), rows, weight, bias)


@linear_gelu.register_fake
def _(rows, weight, bias):
    out = rows.new_empty(len(rows), len(weight))
    return out, torch.empty_like(out)


@custom_op("miniseries::gelu_linear_backward", mutates_args=())
def gelu_linear_backward(
    upstream: torch.Tensor, proj_weight: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Back through a linear layer of GELU.

    Args:
        upstream: (N, C), contiguous, by the layer's output.
        proj_weight: (C, F).
        hidden: (N, F), contiguous; what GELU was applied to.

    Returns:
        Gradient by `hidden`, (N, F); its sum over rows, (F,) float32; GELU of `hidden`, (N, F).
    """
    return _gelu_linear_backward(quack(), upstream, proj_weight, hidden)


@gelu_linear_backward.register_fake
def _(upstream, proj_weight, hidden):
    for_bias = hidden.new_empty(hidden.shape[1], dtype=torch.float32)
    return torch.empty_like(hidden), for_bias, torch.empty_like(hidden)


def gradients_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`; reads a row once, and puts the gradient in its place."""
    # tried in bf16; and without padding rows begin where no wide load can
    if logits.dtype != torch.bfloat16 or logits.shape[1] % 8:
        return kernels.gradients_of_logits(logits, targets, vocab_size)
    return _gradients_of_logits(quack(), logits, targets, vocab_size)
