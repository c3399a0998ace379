"""The formulas of GPT-2 that cost time, each a plain function that a GPU kernel may replace.

Letters in shape comments: B sequences, T tokens, C channels, H heads, D channels per head, N rows
(B x T), V vocabulary entries (50,257), Vp the same padded to a multiple of 128 (50,304).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

LAYER_NORM_EPSILON = 1e-5  # GPT-2's own, as in the released model's configuration
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

# a compiled region may hold no in-place operation, PyTorch says each time; ours hold none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention; (B, T, 3, H, D) of queries, keys and values to (B, T, H, D)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # 3 x (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream after `delta` and its bias are added, and its layer norm.

    x and delta are (B, T, C), the rest (C,). The bias of the layer that made `delta` is added
    here, where a kernel adds it, and sums its gradient, on the way.
    """
    x = x + (delta + delta_bias)
    return x, F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_NORM_EPSILON)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer without bias, (B, T, C) to (B, T, F); weight (F, C)."""
    return F.linear(x, weight)


def _again_if(
    is_wanted: bool, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """`function(*inputs)`, whose backward pass may do again what stands before its product."""
    if not (is_wanted and torch.is_grad_enabled()):
        return function(*inputs)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if torch.compiler.is_compiling():  # which, unlike PyTorch itself, would do the product again
        options["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return checkpoint(function, *inputs, **options)


def _linear_of_norm(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, LAYER_NORM_EPSILON)
    return F.linear(normed, weight, bias)


def _linear_of_gelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(x, approximate="tanh"), weight)


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    recompute: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream as `add_norm` gives it, and a linear layer of its norm, (B, T, F).

    weight is (F, C), bias (F,); `recompute` 2 makes the norm again in the backward pass.
    """
    x = x + (delta + delta_bias)
    return x, _again_if(recompute == 2, _linear_of_norm, x, norm_weight, norm_bias, weight, bias)


def norm_mlp(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    proj_weight: torch.Tensor,
    recompute: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm_linear`, then GELU in its tanh form, as GPT-2 has it, and a layer without bias.

    weight is (4C, C), bias (4C,), proj_weight (C, 4C); `recompute` 1 makes GELU again in the
    backward pass, 2 the norm as well.
    """
    norm = (norm_weight, norm_bias)
    x, hidden = norm_linear(x, delta, delta_bias, *norm, weight, bias, recompute)
    return x, _again_if(recompute > 0, _linear_of_gelu, hidden, proj_weight)


def losses_of_logits(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cross-entropy of each row; logits (N, Vp), targets (N,) int64 -> (N,) float32 nats."""
    return F.cross_entropy(logits[:, :vocab_size].float(), targets, reduction="none")


def gradients_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss, and its gradient by the logits: softmax minus one-hot.

    Padded columns get exactly 0, so padded rows of the head stay 0 for ever.

    Args:
        logits: (N, Vp); a kernel may put the gradient in their place.
        targets: (N,) int64.

    Returns:
        Scalar float32 nats; (N, Vp) of the logits' type.
    """
    answers = targets[:, None]  # (N, 1)
    log_probabilities = F.log_softmax(logits[:, :vocab_size].float(), dim=1)  # (N, V)
    loss = -log_probabilities.gather(1, answers).sum()
    gradient = torch.zeros_like(logits)
    difference = log_probabilities.exp_()
    difference.scatter_add_(1, answers, torch.full_like(answers, -1, dtype=torch.float32))
    gradient[:, :vocab_size] = difference
    return loss, gradient


@dataclass(frozen=True)
class Formulas:
    """One implementation of each formula; those of this module are the plain ones."""

    attention_name: str = "PyTorch's scaled_dot_product_attention"
    mlp_name: str = "products and GELU apart"
    attention: Callable[..., torch.Tensor] = attention
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_norm
    norm_linear: Callable[..., tuple[torch.Tensor, torch.Tensor]] = norm_linear
    linear: Callable[..., torch.Tensor] = linear
    norm_mlp: Callable[..., tuple[torch.Tensor, torch.Tensor]] = norm_mlp
    losses_of_logits: Callable[..., torch.Tensor] = losses_of_logits
    gradients_of_logits: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gradients_of_logits


def chunk_rows(head: torch.Tensor) -> int:
    """Rows whose logits are held at once.

    On a CPU a buffer below glibc's 32 MiB limit is reused; a larger one is mapped anew, page by
    page, on every call. On a GPU chunks only need to be large enough to fill the chip.
    """
    return 16384 if head.is_cuda else max(1, (24 << 20) // (4 * head.shape[0]))


def token_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    formulas: Formulas,
) -> torch.Tensor:
    """Cross-entropy of each row, without gradients.

    Args:
        hidden: (N, C) final activations.
        head: (Vp, C) output weights; rows from `vocab_size` on are padding and take no part.
        targets: (N,) int64; a negative one does not count and costs 0.

    Returns:
        (N,) float32 nats.
    """
    losses = torch.zeros(len(targets), device=hidden.device)
    # On a GPU shapes stay fixed, so that nothing compiles again; a CPU is spared the rest: most
    # positions of a HellaSwag row do not count, and the head is most of a small model's work.
    counted = slice(None) if head.is_cuda else (targets >= 0).nonzero().squeeze(1)
    rows = chunk_rows(head)
    chunks = zip(hidden[counted].split(rows), targets[counted].split(rows), strict=True)
    parts = [formulas.losses_of_logits(F.linear(h, head), t, vocab_size) for h, t in chunks]
    if parts:
        losses[counted] = torch.cat(parts)
    return losses


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Add `scale` times the product of a and b to `total`, float32, without rounding it before."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, alpha=scale, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b, alpha=scale)


class _MeanLoss(torch.autograd.Function):
    """Head and cross-entropy in one: both gradients are made while a chunk's logits exist.

    The full (N, Vp) logits, 13 GB for 64 sequences in fp32, are never stored, and nothing is
    computed twice. The gradient by the head is summed over chunks in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, vocab_size, formulas, scale):  # noqa: ANN001, ANN205
        total, rows = len(hidden), chunk_rows(head)
        loss = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros(head.shape, device=head.device)
        for start in range(0, total, rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], head)  # (rows, Vp)
            part_loss, gradient = formulas.gradients_of_logits(logits, targets[part], vocab_size)
            loss += part_loss
            out = hidden_gradient[part]
            torch.addmm(out, gradient, head, beta=0, alpha=scale / total, out=out)
            add_product(head_gradient, gradient.T, hidden[part], scale / total)
            del logits, gradient  # before the next ones are made: 1.6 GB on a GPU
        ctx.save_for_backward(hidden_gradient, head_gradient.to(head.dtype))
        return loss / total

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        hidden_gradient, head_gradient = ctx.saved_tensors
        scale = upstream.to(hidden_gradient.dtype)
        return hidden_gradient * scale, head_gradient * scale, None, None, None, None


def mean_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    formulas: Formulas,
    gradient_scale: float = 1.0,
) -> torch.Tensor:
    """Mean cross-entropy of all rows, with gradients for `hidden` and `head`.

    Shapes as in `token_losses`; all targets count. The gradients, not the loss, come multiplied by
    `gradient_scale`, so that in fp16 small ones are not rounded to 0.

    Returns:
        Scalar float32 nats.
    """
    return _MeanLoss.apply(hidden, head, targets, vocab_size, formulas, gradient_scale)
