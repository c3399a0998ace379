"""GPT-2, top to bottom.

Letters in shape comments: B sequences, T tokens, C channels, H heads, D channels per head,
V vocabulary entries (50,257), Vp the same padded to a multiple of 128 (50,304).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB_SIZE = 50257  # GPT-2's byte-pair encoding: 256 bytes, 50,000 merges, <|endoftext|>
PADDED_VOCAB_SIZE = 50304  # next multiple of 128: the matrix units want whole tiles
LAYER_NORM_EPSILON = 1e-5  # GPT-2's own, as in the released model's configuration
INIT_STD = 0.02  # GPT-2 paper, section 2.3; the residual projections are scaled by 1/sqrt(2L)


@dataclass(frozen=True)
class GPTConfig:
    """Shape of one model; `channels` must be a multiple of `num_heads`."""

    num_layers: int
    num_heads: int
    channels: int
    sequence_length: int
    vocab_size: int = VOCAB_SIZE
    padded_vocab_size: int = PADDED_VOCAB_SIZE


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = nn.Linear(config.channels, 3 * config.channels)
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, channels = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.num_heads, -1)  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # 3 x (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, channels))  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers around GELU in its tanh form, as GPT-2 has it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.channels, 4 * config.channels)
        self.c_proj = nn.Linear(4 * config.channels, config.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each on a normalised copy of the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.channels, eps=LAYER_NORM_EPSILON)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.channels, eps=LAYER_NORM_EPSILON)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 with a tied head; parameter names are Hugging Face's without `transformer.`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.channels)
        self.wpe = nn.Embedding(config.sequence_length, config.channels)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.channels, eps=LAYER_NORM_EPSILON)
        self._chunk_losses, self._chunk_gradients = _chunk_losses, _chunk_gradients

    def compile_kernels(self) -> None:
        """Compile what is worth it: one block (all share its code) and the loss formulas."""
        for block in self.h:
            block.compile(dynamic=False)  # a few fixed shapes; symbolic ones are slower
        self._chunk_losses = torch.compile(_chunk_losses, dynamic=False)
        self._chunk_gradients = torch.compile(_chunk_gradients, dynamic=False)

    @property
    def num_parameters(self) -> int:
        """Parameters of the published model: padding rows are not counted."""
        padding = self.config.padded_vocab_size - self.config.vocab_size
        return sum(p.numel() for p in self.parameters()) - padding * self.config.channels

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """Next-token losses, or logits when there are no targets.

        Args:
            tokens: (B, T) int64, T at most `config.sequence_length`.
            targets: (B, T) int64, the token that follows each position.
            reduction: "mean" for training; "none" for scoring, without gradients.

        Returns:
            With targets a scalar or (B, T), float32 nats; else logits (B, T, V), float32.

        Raises:
            ValueError: more tokens than the model has positions.
        """
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            raise ValueError(
                f"{length} tokens, but the model has {self.config.sequence_length} positions"
            )
        x = self.wte(tokens) + self.wpe.weight[:length]  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        head = self.wte.weight  # (Vp, C)
        if targets is None:
            return F.linear(x, head)[..., : self.config.vocab_size].float()
        hidden, answers = x.flatten(0, 1), targets.flatten()
        vocab_size = self.config.vocab_size
        if reduction == "mean":
            return mean_loss(hidden, head, answers, vocab_size, self._chunk_gradients)
        return token_losses(hidden, head, answers, vocab_size, self._chunk_losses).view(
            targets.shape
        )


def chunk_rows(head: torch.Tensor) -> int:
    """Positions whose logits are held at once.

    On a CPU a buffer below glibc's 32 MiB limit is reused; a larger one is mapped anew, page by
    page, on every call. On a GPU chunks only need to be large enough to fill the chip.
    """
    return 16384 if head.is_cuda else max(1, (24 << 20) // (4 * head.shape[0]))


def _chunk_losses(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return F.cross_entropy(logits[:, :vocab_size].float(), targets, reduction="none")


def token_losses(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    chunk_losses: Callable[..., torch.Tensor] = _chunk_losses,
) -> torch.Tensor:
    """Cross-entropy of each position, without gradients.

    Args:
        hidden: (N, C) final activations.
        head: (Vp, C) output weights; rows from `vocab_size` on are padding and take no part.
        targets: (N,) int64; a negative one does not count and costs 0.
        chunk_losses: the formula or its compiled version.

    Returns:
        (N,) float32 nats.
    """
    losses = torch.zeros(len(targets), device=hidden.device)
    # On a GPU shapes stay fixed, so that nothing compiles again; a CPU is spared the rest: most
    # positions of a HellaSwag row do not count, and the head is most of a small model's work.
    counted = slice(None) if head.is_cuda else (targets >= 0).nonzero().squeeze(1)
    rows = chunk_rows(head)
    parts = zip(hidden[counted].split(rows), targets[counted].split(rows), strict=True)
    chunks = [chunk_losses(F.linear(h, head), t, vocab_size) for h, t in parts]
    if chunks:
        losses[counted] = torch.cat(chunks)
    return losses


def _chunk_gradients(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss and the gradient of `scale * loss` by the logits: softmax minus one-hot.

    Padded columns get exactly 0, so padded rows of the head stay 0 for ever.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    masked = torch.where(columns < vocab_size, logits.float(), -math.inf)
    logsumexp = masked.logsumexp(dim=1, keepdim=True)  # (N, 1)
    loss = (logsumexp.squeeze(1) - masked.gather(1, targets[:, None]).squeeze(1)).sum()
    one_hot = columns == targets[:, None]
    gradient = ((masked - logsumexp).exp() - one_hot.float()) * scale
    return loss, gradient.to(logits.dtype)


class _MeanLoss(torch.autograd.Function):
    """Head and cross-entropy in one: both gradients are made while a chunk's logits exist.

    The full (N, Vp) logits, 13 GB for 64 sequences in fp32, are never stored, and nothing is
    computed twice. The gradient by the head is summed over chunks in fp32.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, vocab_size, chunk_gradients):  # noqa: ANN001, ANN205
        total = hidden.shape[0]
        loss = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros(head.shape, device=head.device)
        rows = chunk_rows(head)
        for start in range(0, total, rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], head)  # (rows, Vp)
            chunk_loss, gradient = chunk_gradients(logits, targets[part], vocab_size, 1 / total)
            loss += chunk_loss
            torch.mm(gradient, head, out=hidden_gradient[part])
            head_gradient += gradient.T @ hidden[part]
        ctx.save_for_backward(hidden_gradient, head_gradient.to(head.dtype))
        return loss / total

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        hidden_gradient, head_gradient = ctx.saved_tensors
        scale = upstream.to(hidden_gradient.dtype)
        return hidden_gradient * scale, head_gradient * scale, None, None, None


def mean_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    chunk_gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _chunk_gradients,
) -> torch.Tensor:
    """Mean cross-entropy over all positions, with gradients for `hidden` and `head`.

    Shapes as in `token_losses`; `chunk_gradients` is the formula or its compiled version.

    Returns:
        Scalar float32 nats.
    """
    return _MeanLoss.apply(hidden, head, targets, vocab_size, chunk_gradients)


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Draw the same weights as PyTorch's GPT-2 and llm.c do, on any number of processes.

    One CPU generator in fp32; order: token rows (padding stays 0), positions, then per layer
    c_attn, attn.c_proj, c_fc, mlp.c_proj. Biases are 0, norms 1 (formats of llm.c, "Init").
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.config.num_layers)
    drawn = [(model.wte.weight, INIT_STD), (model.wpe.weight, INIT_STD)]
    for block in model.h:
        drawn += [(block.attn.c_attn.weight, INIT_STD), (block.attn.c_proj.weight, residual_std)]
        drawn += [(block.mlp.c_fc.weight, INIT_STD), (block.mlp.c_proj.weight, residual_std)]
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0)
    for parameter, std in drawn:
        full = torch.zeros(parameter.shape)
        rows = model.config.vocab_size if parameter is model.wte.weight else len(full)
        full[:rows].normal_(0.0, std, generator=generator)
        set_parameter(parameter, full)


@torch.no_grad()
def set_parameter(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor into a parameter; of a sharded one each rank takes its own part."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(
            full.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,
        )
    parameter.copy_(full)
