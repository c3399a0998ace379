"""Attention by cuDNN's own front end, with queries, keys, and values in one tensor.

PyTorch calls the same kernels, but leaves three gradients that must be packed again. Where
FlashAttention-4 is installed the backward is its: on Hopper it takes 0.8 of cuDNN's time (LOG.md).
"""

import functools
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from miniseries.model import formulas


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


@torch.library.custom_op("miniseries::attention", mutates_args=())
def attention_forward(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of (B, T, 3, H, D) bf16; (B, T, H, D), and what the backward needs."""
    batch, length, _, heads, size = qkv.shape
    out = qkv.new_empty(batch, length, heads, size)
    stats = torch.empty(batch, heads, length, 1, device=qkv.device, dtype=torch.float32)
    graphs = _cudnn_attention(batch, length, heads, size)
    graphs.run(graphs.forward, graphs.forward_tensors, (*qkv.unbind(2), out, stats))
    return out, stats


@attention_forward.register_fake
def _(qkv):
    batch, length, _, heads, size = qkv.shape
    stats = qkv.new_empty(batch, heads, length, 1, dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, size), stats


@functools.cache
def flash_attention_4() -> Callable[..., Any] | None:
    """FlashAttention-4's backward, which takes what cuDNN's forward leaves; None without it.

    The package names it as its own business: no public function does one without the other.
    """
    on_hopper = torch.cuda.get_device_capability()[0] == 9  # where it was tried
    if not on_hopper or importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn.cute.interface import _flash_attn_bwd
    except Exception as error:  # a package of compilers: it can fail in many ways
        warnings.warn(
            f"FlashAttention-4 cannot be loaded ({error}); attention's backward stays with cuDNN",
            stacklevel=2,
        )
        return None
    known = inspect.signature(_flash_attn_bwd).parameters
    needed = {"q", "k", "v", "out", "dout", "lse", "causal", "dq", "dk", "dv"}
    return _flash_attn_bwd if needed <= set(known) else None


@torch.library.custom_op("miniseries::attention_backward", mutates_args=())
def attention_backward(
    qkv: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Gradient by (B, T, 3, H, D) queries, keys and values."""
    gradient = torch.empty_like(qkv)
    (q, k, v), (dq, dk, dv) = qkv.unbind(2), gradient.unbind(2)
    backward = flash_attention_4()
    if backward is not None:
        figures = stats.squeeze(-1)
        backward(q, k, v, out, upstream, figures, causal=True, dq=dq, dk=dk, dv=dv)
        return gradient
    batch, length, _, heads, size = qkv.shape
    graphs = _cudnn_attention(batch, length, heads, size)
    tensors = (q, k, v, out, upstream, stats, dq, dk, dv)
    graphs.run(graphs.backward, graphs.backward_tensors, tensors)
    return gradient


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
    if qkv.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return _Attention.apply(qkv)
    return formulas.attention(qkv)


def is_available() -> bool:
    """Whether the package nvidia-cudnn-frontend is installed and the GPU is Hopper or newer."""
    found = importlib.util.find_spec("cudnn") is not None
    return found and torch.cuda.get_device_capability() >= (9, 0)


def describe() -> str:
    """What computes attention, for the table at the start."""
    backward = "FlashAttention-4" if flash_attention_4() else "cuDNN"
    return f"forward cuDNN, backward {backward} (evaluation: PyTorch's choice)"
