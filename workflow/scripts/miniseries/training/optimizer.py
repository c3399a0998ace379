"""AdamW as GPT-3 used it, gradient clipping, and the detector of odd steps."""

import math
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from miniseries.training.bits import scramble
from miniseries.training.distributed import local_part

BETAS = (0.9, 0.95)  # GPT-3 paper, appendix B, as llm.c
EPSILON = 1e-8  # the same
MAX_GRAD_NORM = 1.0  # the same
DETECTOR_WINDOW = 128  # llm.c `outlier_detector.h`
FIRST_LOSS_SCALE = 2.0**16  # this and the next as in PyTorch's GradScaler
STEPS_BEFORE_GROWTH = 2000
CHUNK_ELEMENTS = 1 << 24  # of a weight that are updated at once, where temporaries are not fused


def make_optimizer(model: nn.Module, weight_decay: float, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW over all parameters; only tensors of two dimensions decay, as in GPT-2.

    The state (first and second moment, fp32) exists from the start, so that memory is constant
    from the first step and a checkpoint can be read into it in place. Weights in bf16 have no fp32
    copies: their updates are rounded by chance, with bits that `seed` decides.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    if parameters[0].dtype == torch.bfloat16:
        optimizer = RoundingAdamW(groups, seed)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)
    for parameter in parameters:
        moment = {"dtype": torch.float32, "requires_grad": False}
        optimizer.state[parameter] = {
            # the fused kernel wants the counter on the parameter's device
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, **moment),
            "exp_avg_sq": torch.zeros_like(parameter, **moment),
        }
    return optimizer


def round_by_chance(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Float32 to one of the two nearest bf16, the nearer one more often: right on average.

    Args:
        values: float32, finite.
        noise: int64 of the same shape; its last 16 bits decide.

    Returns:
        bf16; a value that bf16 holds exactly, 0 among them, stays what it is.
    """
    bits = values.view(torch.int32) + (noise & 0xFFFF).int()
    return (bits & -0x10000).view(torch.float32).bfloat16()


def _update_rounded(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: torch.Tensor,
    key: torch.Tensor,
    rate: torch.Tensor,
    decay: float,
    first: int,
) -> None:
    """AdamW on some elements of a bf16 weight, in place; moments in fp32.

    Args:
        step: number of this update, from 1; key: int64, other for each weight and update.
        first: place of the first element in the whole weight, so that a rank's part is rounded as
            it would be in the whole.
    """
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - BETAS[0])
    square.lerp_(gradient.square(), 1 - BETAS[1])
    unbiased_mean = mean / (1 - BETAS[0] ** step)
    unbiased_square = square / (1 - BETAS[1] ** step)
    update = unbiased_mean / (unbiased_square.sqrt() + EPSILON) + decay * weight.float()
    places = torch.arange(weight.numel(), device=weight.device) + first
    weight.copy_(round_by_chance(weight.float() - rate * update, scramble(places + key)))


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW on bf16 weights without fp32 copies of them, as llm.c's `-w 0`.

    An update far smaller than a weight's last bit changes it now and then instead of never.
    """

    def __init__(self, groups: list[dict[str, Any]], seed: int) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.seed = seed
        self._update = _update_rounded

    def compile(self) -> None:
        """One kernel in place of some thirty."""
        self._update = torch.compile(_update_rounded, dynamic=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all weights with the gradients that they have."""
        weights = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (parameter, group) in enumerate(weights):
            state = self.state[parameter]
            step = state["step"].add_(1)
            # the key hangs on nothing but seed, update and weight: a resumed run draws the same
            key = scramble(scramble(step.long() + (self.seed << 24)) + number)
            rate = torch.full_like(step, group["lr"])  # no number: compiled code serves all rates
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            pieces = [local_part(t).view(-1).split(CHUNK_ELEMENTS) for t in tensors]
            first = _first_element(parameter)
            for piece in zip(*pieces, strict=True):
                self._update(*piece, step, key, rate, group["weight_decay"], first)
                first += len(piece[0])


def _first_element(tensor: torch.Tensor) -> int:
    """Place of this rank's first element in the whole tensor, which is shared out by rows."""
    if not isinstance(tensor, DTensor):
        return 0
    (dimension,) = (i for i, p in enumerate(tensor.placements) if p.is_shard(0))
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size(dimension))  # as torch.chunk divides them
    row = min(rows * mesh.get_local_rank(dimension), len(tensor))
    return row * (tensor.numel() // len(tensor))


class LossScale:
    """The factor that keeps fp16 gradients from becoming 0, found by trial as the run goes on.

    It halves when gradients overflow, and doubles after 2,000 steps without an overflow.
    """

    def __init__(self) -> None:
        self.value, self.good_steps = FIRST_LOSS_SCALE, 0

    def update(self, overflowed: bool) -> None:
        """Take in whether the gradients of a step were too large for fp16.

        Raises:
            ValueError: they overflow without any scale: no fault of fp16.
        """
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value /= 2
        elif self.good_steps % STEPS_BEFORE_GROWTH == 0:
            self.value *= 2
        if self.value < 1:
            raise ValueError(
                "gradients are not finite even with a loss scale below 1; lower learning_rate, "
                "or set precision to bf16 or fp32"
            )

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what was saved."""
        self.value, self.good_steps = state["value"], state["good_steps"]


def clip_gradients(
    model: nn.Module, shards: dist.ProcessGroup | None = None, loss_scale: float = 1.0
) -> torch.Tensor:
    """Take `loss_scale` out of all gradients and make their joint norm at most 1.

    The squares are summed in float64: in float32 the norm of one gradient of the token table
    differs by 3e-5 with the number of ranks that share it.

    Args:
        shards: the ranks that together hold each gradient once; None for a whole model.

    Returns:
        The norm before clipping, float64, equal on every rank. If it is not finite the gradients
        are spoilt and must not be used.
    """
    gradients = [local_part(p.grad) for p in model.parameters()]
    norms = torch._foreach_norm(gradients, 2, torch.float64)  # what PyTorch's own clipping calls
    total = torch.stack(norms).square().sum()
    if shards is not None:
        dist.all_reduce(total, group=shards)
    norm = total.sqrt() / loss_scale
    scale = ((MAX_GRAD_NORM / norm).clamp(max=1.0) / loss_scale).float()
    torch._foreach_mul_(gradients, scale)
    return norm


class ZScore:
    """How far a value lies from the last 128, in standard deviations (llm.c's detector).

    The value itself is in the window; before 128 values were seen the answer is NaN (llm.c's is
    for the 128th, too).
    """

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=DETECTOR_WINDOW)

    def update(self, value: float) -> float:
        """Take in one value and give its z-score; a value that is not finite is left out."""
        if not math.isfinite(value):
            return math.nan
        self.window.append(value)
        if len(self.window) < DETECTOR_WINDOW:
            return math.nan
        mean = math.fsum(self.window) / DETECTOR_WINDOW
        variance = math.fsum((v - mean) ** 2 for v in self.window) / DETECTOR_WINDOW
        return 0.0 if variance == 0 else (value - mean) / math.sqrt(variance)

    def ceiling(self, limit: float) -> float:
        """The value above which the next one's z-score is more than `limit`.

        Infinite before 127 values were seen, and for limits that no value of 128 can exceed; 0 is
        no limit. With d the distance from the mean of the 127 others and v their variance,
        z^2 = 127 d^2 / (128 v + d^2).
        """
        others = list(self.window)[1 - DETECTOR_WINDOW :]
        room = len(others) - limit**2
        if not limit or len(others) < DETECTOR_WINDOW - 1 or room <= 0:
            return math.inf
        mean = math.fsum(others) / len(others)
        variance = math.fsum((v - mean) ** 2 for v in others) / len(others)
        return mean + limit * math.sqrt(DETECTOR_WINDOW * variance / room)

    def state_dict(self) -> list[float]:
        """The window, oldest first; JSON keeps every bit of a float."""
        return list(self.window)

    def load_state_dict(self, state: Any) -> None:
        """Put back a saved window."""
        self.window = deque(state, maxlen=DETECTOR_WINDOW)
