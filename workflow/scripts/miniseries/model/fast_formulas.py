"""The formulas of `formulas.py` for NVIDIA GPUs: kernels with their gradients, and the choice."""

from typing import Any

import torch
import torch.nn.functional as F

from miniseries.model import cudnn_attention, formulas, fused_products, kernels
from miniseries.model.formulas import Formulas


class _AddNorm(torch.autograd.Function):
    """One kernel forward, and one backward that also sums for the three vectors."""

    @staticmethod
    def forward(ctx, x, delta, delta_bias, norm_weight, norm_bias):
        norm, normed = added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        ctx.save_for_backward(*norm)
        return norm[0].view_as(x), normed.view_as(x)

    @staticmethod
    def backward(ctx, residual, upstream):
        rows = upstream.contiguous().flatten(0, -2)
        return add_norm_gradients(ctx.saved_tensors, residual, rows)[0]


class _NormLinear(torch.autograd.Function):
    """Addition, norm and a linear layer; the norm is kept for its weights, or made again."""

    @staticmethod
    def forward(ctx, x, delta, delta_bias, norm_weight, norm_bias, weight, bias, recompute):
        norm, normed = added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        ctx.save_for_backward(*norm, weight, *([] if recompute == 2 else [normed]))
        return norm[0].view_as(x), F.linear(normed, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight, *kept) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        rows = upstream.contiguous().flatten(0, -2)
        for_norm, again = add_norm_gradients(norm, residual, rows @ weight, len(kept) == 0)
        normed = kept[0] if kept else again
        return *for_norm, rows.t() @ normed, rows.sum(dim=0), None


class _NormMlp(torch.autograd.Function):
    """As above; one kernel makes the gradients of GELU and of the bias before it.

    With `fused` that kernel is the product before it, and makes GELU again for nothing.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        delta,
        delta_bias,
        norm_weight,
        norm_bias,
        weight,
        bias,
        proj_weight,
        recompute,
        fused,
    ):
        norm, normed = added_and_normed(x, delta, delta_bias, norm_weight, norm_bias)
        if fused:
            hidden, active = fused_products.linear_gelu(normed, weight, bias)
        else:
            hidden = F.linear(normed, weight, bias)
            active = kernels.gelu(hidden)
        kept = [normed, active][: 2 - max(recompute, int(fused))]
        ctx.save_for_backward(*norm, weight, proj_weight, hidden, *kept)
        ctx.fused = fused
        return norm[0].view_as(x), F.linear(active, proj_weight).view_as(x)

    @staticmethod
    def backward(ctx, residual, upstream):
        norm, (weight, proj_weight, hidden, *kept) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        rows = upstream.contiguous().flatten(0, -2)
        if ctx.fused:
            gradient, for_bias, again = fused_products.gelu_linear_backward(
                rows, proj_weight, hidden
            )
        else:
            gradient, for_bias, again = kernels.gelu_backward(
                hidden, rows @ proj_weight, len(kept) < 2
            )
        active = kept[1] if len(kept) == 2 else again
        for_proj_weight = rows.t() @ active
        for_norm, again = add_norm_gradients(norm, residual, gradient @ weight, len(kept) == 0)
        normed = kept[0] if kept else again
        for_layer = gradient.t() @ normed, for_bias.to(weight.dtype)
        return *for_norm, *for_layer, for_proj_weight, None, None


def added_and_normed(
    x: torch.Tensor,
    delta: torch.Tensor,
    delta_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """What `add_norm_gradients` wants, sum first; and the norm, (N, C)."""
    rows = x.contiguous().flatten(0, -2), delta.contiguous().flatten(0, -2)
    total, normed, mean, rstd = kernels.add_norm(*rows, delta_bias, norm_weight, norm_bias)
    return (total, mean, rstd, norm_weight, norm_bias), normed


def add_norm_gradients(
    norm: tuple[torch.Tensor, ...],
    residual: torch.Tensor,
    upstream: torch.Tensor,
    with_norm: bool = False,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Gradients by x, delta, delta's bias, and the norm's weight and bias.

    Args:
        norm: sum, mean, reciprocal deviation, weight and bias, as of the forward pass.
        residual: (B, T, C), by the sum.
        upstream: (N, C), by the norm.
        with_norm: whether the norm, which was not kept, comes as well.

    Returns:
        The gradients; the norm, (N, C), or an empty tensor.
    """
    rows = residual.contiguous().flatten(0, -2)
    gradient, sums, again = kernels.add_norm_backward(*norm, upstream, rows, with_norm)
    for_weight, for_bias, for_delta_bias = sums.to(norm[3].dtype).unbind(0)
    gradient = gradient.view_as(residual)
    return (gradient, gradient, for_delta_bias, for_weight, for_bias), again


def add_norm(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return _AddNorm.apply(*inputs)


def norm_linear(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return _NormLinear.apply(*inputs)


def norm_mlp(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return _NormMlp.apply(*inputs, False)


def fused_norm_mlp(x: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `formulas`."""
    return _NormMlp.apply(x, *inputs, fused_products.fit(x))


def choose(channels: int, with_extra: bool = True) -> Formulas:
    """The fastest implementations that this GPU and its software have.

    Args:
        channels: of the model; the tiles for this width are tried.
        with_extra: whether the packages of the extra `gpu` may take part.
    """
    compiled_losses = torch.compile(formulas.losses_of_logits, dynamic=False)
    if torch.cuda.get_device_capability() < (8, 0):  # our kernels are tried on Hopper alone
        return Formulas(
            losses_of_logits=compiled_losses,
            gradients_of_logits=torch.compile(formulas.gradients_of_logits, dynamic=False),
        )
    chosen: dict[str, Any] = {}
    if torch.cuda.get_device_capability() >= (9, 0):
        name = "PyTorch's; pip install -c constraints.txt '.[gpu]' makes it faster"
        chosen = {"attention_name": name}
    if with_extra and cudnn_attention.is_available():
        chosen = {"attention": cudnn_attention.attention}
        chosen |= {"attention_name": cudnn_attention.describe()}
    own_or_fused: Any = kernels
    if with_extra and fused_products.work(channels):
        own_or_fused = fused_products
        chosen |= {"norm_mlp": fused_norm_mlp, "mlp_name": fused_products.NAME}
    return Formulas(
        add_norm=add_norm,
        norm_linear=norm_linear,
        losses_of_logits=compiled_losses,
        gradients_of_logits=own_or_fused.gradients_of_logits,
        **({"norm_mlp": norm_mlp} | chosen),
    )
