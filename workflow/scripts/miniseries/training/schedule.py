"""Learning-rate schedules of llm.c, as functions of the step alone."""

import math
from typing import Any

WSD_DECAY_FRACTION = 0.2  # llm.c `schedulers.h`: the last fifth of the run decays


def decay_start(max_steps: int) -> int:
    """First step at which `wsd` decays."""
    return int((1 - WSD_DECAY_FRACTION) * max_steps)


def rate_of_recipe(recipe: dict[str, Any], step: int) -> float:
    """Learning rate of update number `step` (0-based) of a run."""
    return learning_rate_at(
        step,
        peak=recipe["learning_rate"],
        schedule=recipe["lr_schedule"],
        warmup_steps=recipe["warmup_steps"],
        max_steps=recipe["max_steps"],
        final_fraction=recipe["final_lr_fraction"],
    )


def learning_rate_at(
    step: int,
    *,
    peak: float,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    final_fraction: float,
) -> float:
    """Learning rate of update number `step` (0-based).

    Warm-up rises in a straight line and reaches `peak` at its last step; afterwards
    cosine, linear or wsd (warm-up, stable, decay by 1 - sqrt) fall to `final_fraction * peak`.
    `constant` has no warm-up, as in llm.c.

    Raises:
        ValueError: an unknown schedule.
    """
    lowest = final_fraction * peak
    if schedule == "constant":
        return peak
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "wsd":
        start = decay_start(max_steps)
        if step < start:
            return peak
        ratio = (step - start) / max(1, max_steps - start)
        return lowest + (1 - math.sqrt(ratio)) * (peak - lowest)
    ratio = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    if schedule == "cosine":
        return lowest + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - lowest)
    if schedule == "linear":
        return peak - ratio * (peak - lowest)
    raise ValueError(f"lr_schedule {schedule!r}: choose cosine, linear, constant or wsd")
