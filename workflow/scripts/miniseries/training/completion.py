"""The file that marks a run as complete; written last of all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from miniseries.metrics import write_json
from miniseries.training import checkpoint
from miniseries.training.branches import trunk_and_step


def mark_done(
    done: Path,
    run_folder: Path,
    settings: dict[str, Any],
    *,
    val_loss: float,
    wall_seconds: float,
    unique_tokens: int,
    beat: Callable[[], None],
) -> None:
    """Write done.json: the last checkpoint with its files' hashes, and what the run came to.

    Args:
        settings: the run's frozen ones.
        val_loss: of the last weights, nats.
        wall_seconds: over all starts.
        unique_tokens: training tokens that there are.
        beat: called before each file that is hashed.
    """
    recipe = settings["recipe"]
    step, tokens_per_step = recipe["max_steps"], recipe["total_batch_tokens"]
    _, first = trunk_and_step(recipe) or ("", 0)  # the first step that this run did itself
    folder = checkpoint.checkpoint_folder(run_folder, step)
    content = {
        "run": settings["run"],
        "step": step,
        "fingerprint": settings["fingerprint"],
        "data_fingerprint": settings["data_fingerprint"],
        "checkpoint": str(folder.relative_to(run_folder)),
        "files": checkpoint.describe_files(folder, run_folder, beat),
        "val_loss_nats": val_loss,
        "wall_seconds": wall_seconds,
        "tokens_seen": step * tokens_per_step,
        "unique_tokens": unique_tokens,
        "trained_tokens": (step - first) * tokens_per_step,
    }
    write_json(done, content)
