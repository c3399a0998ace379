"""Attention by cuDNN's own front end, with queries, keys, and values in one tensor.

PyTorch calls the same kernels, but leaves three gradients that must be packed again. Where
FlashAttention-4 is installed the backward is its: on Hopper it takes 0.8 of cuDNN's time (LOG.md).
"""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from miniseries.model import formulas

LARGEST_HEAD = 128  # channels, a multiple of 8: more is not for every backward


class _CudnnAttention:
    """cuDNN's graphs for one shape, forward and backward."""

    def __init__(self, batch: int, length: int, heads: int, size: int) -> None:
        import cudnn

        self.cudnn, self.shape = cudnn, (batch, heads, length, size)
        self.handle = cudnn.create_handle()
        packed = (3 * length * heads * size, size, 3 * heads * size, 1)
        plain = (length * heads * size, size, heads * size, 1)
        self.forward, self.forward_tensors = self._forward_graph(packed, plain)
        self.backward, self.backward_tensors = self._backward_graph(packed, plain)

    def _graph(self):
        types = self.cudnn.data_type
        return self.cudnn.pygraph(
            io_data_type=types.BFLOAT16,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )

    def _stats(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        batch, heads, length, _ = self.shape
        return (batch, heads, length, 1), (heads * length, length, 1, 1)

    def _build(self, graph) -> None:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()

    def _inputs(self, graph, names: str, stride: tuple[int, ...]):
        bf16 = self.cudnn.data_type.BFLOAT16
        return [graph.tensor(name=n, dim=self.shape, stride=stride, data_type=bf16) for n in names]

    def _forward_graph(self, packed, plain):
        graph = self._graph()
        q, k, v = self._inputs(graph, "qkv", packed)
        scale = 1 / math.sqrt(self.shape[-1])
        out, stats = graph.sdpa(
            name="attention", q=q, k=k, v=v,
            generate_stats=True, attn_scale=scale, use_causal_mask=True,
        )  # fmt: skip
        out.set_output(True).set_dim(self.shape).set_stride(plain)
        dim, stride = self._stats()
        stats.set_output(True).set_dim(dim).set_stride(stride)
        stats.set_data_type(self.cudnn.data_type.FLOAT)
        self._build(graph)
        return graph, (q, k, v, out, stats)

    def _backward_graph(self, packed, plain):
        graph = self._graph()
        q, k, v = self._inputs(graph, "qkv", packed)
        out, upstream = self._inputs(graph, "ou", plain)
        dim, stride = self._stats()
        float32 = self.cudnn.data_type.FLOAT
        stats = graph.tensor(name="stats", dim=dim, stride=stride, data_type=float32)
        gradients = graph.sdpa_backward(
            name="attention_backward", q=q, k=k, v=v, o=out, dO=upstream, stats=stats,
            attn_scale=1 / math.sqrt(self.shape[-1]), use_causal_mask=True,
        )  # fmt: skip
        for gradient in gradients:
            gradient.set_output(True).set_dim(self.shape).set_stride(packed)
        self._build(graph)
        return graph, (q, k, v, out, upstream, stats, *gradients)

    def run(self, graph, places, tensors) -> None:
        """Execute one graph on the current stream."""
        device = tensors[0].device
        workspace = torch.empty(
            max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8
        )
        stream = torch.cuda.current_stream(device).cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        graph.execute(dict(zip(places, tensors, strict=True)), workspace, handle=self.handle)


@functools.cache
def _cudnn_attention(batch: int, length: int, heads: int, size: int) -> _CudnnAttention:
    return _CudnnAttention(batch, length, heads, size)


def _try(backward: Callable[..., torch.Tensor], device: str = "cuda") -> None:
    """Raise unless cuDNN's forward and this backward agree with PyTorch's attention."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 128, 3, 4, 64, generator=generator).to(device, torch.bfloat16)
    exact = qkv.float().requires_grad_()
    expected = formulas.attention(exact)
    upstream = torch.randn(expected.shape, generator=generator).to(device, torch.bfloat16)
    (for_exact,) = torch.autograd.grad(expected, exact, upstream.float())
    out, stats = _forward(qkv)
    gradient = backward(qkv, out, stats, upstream)
    for ours, theirs in ((out, expected), (gradient, for_exact)):
        distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        if not distance < 2e-2:  # bf16's rounding: 4e-3
            raise ValueError(f"it is {distance:.1%} away from PyTorch's")


def _forward(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, _, heads, size = qkv.shape
    out = qkv.new_empty(batch, length, heads, size)
    stats = torch.empty(batch, heads, length, 1, device=qkv.device, dtype=torch.float32)
    graphs = _cudnn_attention(batch, length, heads, size)
    graphs.run(graphs.forward, graphs.forward_tensors, (*qkv.unbind(2), out, stats))
    return out, stats


def _cudnn_backward(qkv, out, stats, upstream) -> torch.Tensor:
    gradient = torch.empty_like(qkv)
    batch, length, _, heads, size = qkv.shape
    graphs = _cudnn_attention(batch, length, heads, size)
    tensors = (*qkv.unbind(2), out, upstream, stats, *gradient.unbind(2))
    graphs.run(graphs.backward, graphs.backward_tensors, tensors)
    return gradient


def _flash_backward(function: Callable[..., Any], qkv, out, stats, upstream) -> torch.Tensor:
    gradient = torch.empty_like(qkv)
    (q, k, v), (dq, dk, dv) = qkv.unbind(2), gradient.unbind(2)
    function(q, k, v, out, upstream, stats.squeeze(-1), causal=True, dq=dq, dk=dk, dv=dv)
    return gradient


@torch.library.custom_op("miniseries::attention", mutates_args=())
def attention_forward(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of (B, T, 3, H, D) bf16; (B, T, H, D), and what the backward needs."""
    return _forward(qkv)


@attention_forward.register_fake
def _(qkv):
    batch, length, _, heads, size = qkv.shape
    stats = qkv.new_empty(batch, heads, length, 1, dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, size), stats


@functools.cache
def flash_attention_4() -> Callable[..., torch.Tensor] | None:
    """FlashAttention-4's backward, which takes what cuDNN's forward leaves; None without it.

    The package names it as its own business: no public function does one without the other.
    """
    on_hopper = torch.cuda.get_device_capability()[0] == 9  # where it was tried
    if not on_hopper or importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn.cute.interface import _flash_attn_bwd

        backward = functools.partial(_flash_backward, _flash_attn_bwd)
        _try(backward)
    except Exception as error:  # a package of compilers: it can fail in many ways
        warnings.warn(
            f"FlashAttention-4 cannot be used ({error}); attention's backward stays with cuDNN",
            stacklevel=2,
        )
        return None
    return backward


@torch.library.custom_op("miniseries::attention_backward", mutates_args=())
def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Gradient by (B, T, 3, H, D) queries, keys and values."""
    return (flash_attention_4() or _cudnn_backward)(qkv, out, stats, upstream)


@attention_backward.register_fake
def _(qkv, out, stats, upstream):
    return torch.empty_like(qkv)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv):
        qkv = qkv.contiguous()
        out, stats = attention_forward(qkv)
        ctx.save_for_backward(qkv, out, stats)
        return out

    @staticmethod
    def backward(ctx, upstream):
        return attention_backward(*ctx.saved_tensors, upstream.contiguous())


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """See `formulas`; cuDNN through its front end when training in bf16, else PyTorch's choice."""
    size = qkv.shape[-1]
    fits = size % 8 == 0 and size <= LARGEST_HEAD
    if fits and qkv.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return _Attention.apply(qkv)
    return formulas.attention(qkv)


def is_available() -> bool:
    """Whether the GPU is Hopper or newer, and nvidia-cudnn-frontend is installed and works."""
    on_hopper = torch.cuda.get_device_capability() >= (9, 0)
    return on_hopper and importlib.util.find_spec("cudnn") is not None and _works()


@functools.cache
def _works() -> bool:
    try:
        _try(_cudnn_backward)
    except Exception as error:  # a library that is missing, or older than its front end
        warnings.warn(
            f"nvidia-cudnn-frontend cannot be used ({error}); attention is PyTorch's", stacklevel=2
        )
        return False
    return True


def describe() -> str:
    """What computes attention, for the table at the start."""
    backward = "FlashAttention-4" if flash_attention_4() else "cuDNN"
    return f"forward cuDNN, backward {backward} (evaluation: PyTorch's choice)"
