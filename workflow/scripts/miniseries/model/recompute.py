"""Activations that are computed once more in the backward pass instead of being kept."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# a compiled region may hold no in-place operation, PyTorch says each time; ours hold none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn" not in record.getMessage()
)


def _policy(_context: Any, operation: Any, *_inputs: Any, **_options: Any) -> CheckpointPolicy:
    """Keep what matrix products and attention give; everything else is cheap to do again."""
    name = operation.name().partition("::")[2].partition(".")[0]
    is_dear = name.endswith("mm") or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)` of which the backward pass finds matrix products and attention only.

    The same operations on the same numbers are done again, so gradients keep every bit. It works
    inside a compiled block, where the compiler does the same by the same policy.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here is random
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
