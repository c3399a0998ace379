"""GPT-2, top to bottom.

Letters in shape comments: B sequences, T tokens, C channels, H heads, D channels per head,
V vocabulary entries (50,257), Vp the same padded to a multiple of 128 (50,304).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

from miniseries.data.shards import PADDED_VOCAB_SIZE, VOCAB_SIZE
from miniseries.model.formulas import Formulas, mean_loss, token_losses

INIT_STD = 0.02  # GPT-2 paper, section 2.3; the residual projections are scaled by 1/sqrt(2L)


@dataclass(frozen=True)
class GPTConfig:
    """Shape of one model; `channels` must be a multiple of `num_heads`.

    It is trained and scored on `sequence_length` tokens, and may have more positions than that.
    """

    num_layers: int
    num_heads: int
    channels: int
    sequence_length: int
    vocab_size: int = VOCAB_SIZE
    padded_vocab_size: int = PADDED_VOCAB_SIZE
    num_positions: int = 0  # rows of `wpe`; 0 is as many as `sequence_length`

    @classmethod
    def of_recipe(cls, recipe: dict[str, Any]) -> "GPTConfig":
        """The shape that a run's recipe asks for."""
        keys = ("num_layers", "num_heads", "channels", "sequence_length", "num_positions")
        return cls(**{key: recipe[key] for key in keys if key in recipe})

    @property
    def positions(self) -> int:
        """Rows of the table of positions."""
        return self.num_positions or self.sequence_length


# The residual stream, what is to be added to it, both (B, T, C), and the latter's bias, (C,)
Stream = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = nn.Linear(config.channels, 3 * config.channels)
        self.c_proj = nn.Linear(config.channels, config.channels)

    def forward(
        self, stream: Stream, norm: nn.LayerNorm, formulas: Formulas, recompute: int
    ) -> Stream:
        vectors = (norm.weight, norm.bias)
        layer = (self.c_attn.weight, self.c_attn.bias)
        x, qkv = formulas.norm_linear(*stream, *vectors, *layer, recompute)  # (B, T, 3C)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D)
        out = formulas.attention(qkv).flatten(2)  # (B, T, C)
        return x, formulas.linear(out, self.c_proj.weight), self.c_proj.bias


class MLP(nn.Module):
    """Two linear layers around GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.channels, 4 * config.channels)
        self.c_proj = nn.Linear(4 * config.channels, config.channels)

    def forward(
        self, stream: Stream, norm: nn.LayerNorm, formulas: Formulas, recompute: int
    ) -> Stream:
        vectors = (norm.weight, norm.bias)
        layers = (self.c_fc.weight, self.c_fc.bias, self.c_proj.weight)
        x, delta = formulas.norm_mlp(*stream, *vectors, *layers, recompute)
        return x, delta, self.c_proj.bias


class Block(nn.Module):
    """One transformer layer: attention and MLP, each on a normalised copy of the residual stream.

    What each adds at its end, and its bias, are handed on beside the stream, so that the next one
    adds and normalises in one go.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.channels)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.channels)
        self.mlp = MLP(config)
        self.formulas = Formulas()
        self.recompute = 0

    def forward(self, *stream: torch.Tensor) -> Stream:
        how = (self.formulas, self.recompute)
        x, delta, delta_bias = self.mlp(self.attn(stream, self.ln_1, *how), self.ln_2, *how)
        # a copy: FSDP2 hangs hooks on what leaves a block, and on a parameter they would pile up
        return x, delta, delta_bias.clone()


class GPT(nn.Module):
    """GPT-2 with a tied head; parameter names are Hugging Face's without `transformer.`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.channels)
        self.wpe = nn.Embedding(config.positions, config.channels)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.channels)
        self.formulas = Formulas()

    def use(self, formulas: Formulas, in_blocks: Formulas | None = None) -> None:
        """Compute with these implementations of the formulas from now on."""
        self.formulas = formulas
        for block in self.h:
            block.formulas = in_blocks or formulas

    def recompute(self, level: int) -> None:
        """Keep fewer activations: 0 keeps all, 1 computes GELU again, 2 the norms as well."""
        for block in self.h:
            block.recompute = level

    def compile(
        self, device: torch.device, precision: str = "bf16", with_extra: bool = True
    ) -> None:
        """Take the fastest formulas for this device, and compile a block; all share its code.

        Args:
            with_extra: whether the packages of the extra `gpu` may take part.

        Raises:
            ValueError: this device cannot compute in this precision.
        """
        if device.type == "cuda":
            from miniseries.model import (  # Triton is on GPU machines alone
                fast_formulas,
                fp8_formulas,
            )

            fast = fast_formulas.choose(self.config.channels, with_extra)
            self.use(fast, fp8_formulas.choose(fast) if precision == "fp8" else fast)
        # with and without gradients, training, validation, questions of a few lengths
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for block in self.h:
            block.compile(dynamic=False)  # a few fixed shapes; symbolic ones are slower

    @property
    def implementations(self) -> dict[str, str]:
        """What computes attention and the MLP, in words."""
        formulas = self.h[0].formulas
        return {"attention": formulas.attention_name, "mlp": formulas.mlp_name}

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
        gradient_scale: float = 1.0,
    ) -> torch.Tensor:
        """Next-token losses, or logits when there are no targets.

        Args:
            tokens: (B, T) int64, T at most `config.positions`.
            targets: (B, T) int64, the token that follows each position.
            reduction: "mean" for training; "none" for scoring, without gradients.
            gradient_scale: what the gradients of the mean, not the mean, are multiplied with.

        Returns:
            With targets a scalar or (B, T), float32 nats; else logits (B, T, V), float32.

        Raises:
            ValueError: more tokens than the model has positions.
        """
        length = tokens.shape[1]
        if length > self.config.positions:
            raise ValueError(
                f"{length} tokens, but the model has {self.config.positions} positions"
            )
        x = self.wte(tokens)  # (B, T, C)
        # as they come from a block, so that the first one needs no code of its own
        delta = self.wpe.weight[:length].expand_as(x).contiguous()
        delta_bias = x.new_zeros(x.shape[-1], requires_grad=torch.is_grad_enabled())
        for block in self.h:
            x, delta, delta_bias = block(x, delta, delta_bias)
        _, x = self.formulas.add_norm(x, delta, delta_bias, self.ln_f.weight, self.ln_f.bias)
        head = self.wte.weight  # (Vp, C)
        if targets is None:
            return F.linear(x, head)[..., : self.config.vocab_size].float()
        hidden, answers = x.flatten(0, 1), targets.flatten()
        vocab_size = self.config.vocab_size
        if reduction == "mean":
            return mean_loss(hidden, head, answers, vocab_size, self.formulas, gradient_scale)
        losses = token_losses(hidden, head, answers, vocab_size, self.formulas)
        return losses.view(targets.shape)


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by its name, padding rows included; takes no memory."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}


def draw_weights(config: GPTConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that are drawn by chance: the same as PyTorch's GPT-2 and llm.c draw.

    One CPU generator; order: token rows (padding stays 0), positions, then per layer c_attn,
    attn.c_proj, c_fc, mlp.c_proj (llm.c, train_gpt2.py).

    Yields:
        Name and values, float32, whole.
    """
    width = config.channels
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
    plan = [("wte.weight", (config.vocab_size, width), INIT_STD)]
    plan += [("wpe.weight", (config.positions, width), INIT_STD)]
    for layer in range(config.num_layers):
        plan += [(f"h.{layer}.attn.c_attn.weight", (3 * width, width), INIT_STD)]
        plan += [(f"h.{layer}.attn.c_proj.weight", (width, width), residual_std)]
        plan += [(f"h.{layer}.mlp.c_fc.weight", (4 * width, width), INIT_STD)]
        plan += [(f"h.{layer}.mlp.c_proj.weight", (width, 4 * width), residual_std)]
    generator = torch.Generator().manual_seed(seed)
    for name, shape, std in plan:
        values = torch.empty(shape).normal_(0.0, std, generator=generator)
        if name == "wte.weight":
            values = F.pad(values, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        yield name, values


@torch.no_grad()
def init_weights(model: GPT, drawn: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fresh weights, on any number of processes: those of `draw_weights`, biases 0, norms 1."""
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0)
    for name, values in drawn:
        set_parameter(model.get_parameter(name), values)


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
