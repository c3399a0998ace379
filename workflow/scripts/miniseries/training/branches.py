"""Runs that go on from a step of another run: trainings of several lengths from one trunk.

With `lr_schedule: wsd` the learning rate does not know the length of the training before the last
fifth. So a short training is a long one's beginning and a decay of its own, and what both have in
common is trained once.
"""

from collections.abc import Iterator
from typing import Any

from miniseries.training.schedule import decay_start, rate_of_recipe

# what a branch may have of its own; all else decides what it has in common with its trunk
OWN_KEYS = {"branch_from", "max_steps", "lr_schedule", "final_lr_fraction"}
NUM_RATES = 200  # places at which the learning rates of both are compared


def with_step(branch_from: str, max_steps: int) -> str:
    """`trunk` as `trunk@step`: without a step of its own a branch begins where its decay does."""
    if not branch_from or "@" in branch_from:
        return branch_from
    return f"{branch_from}@{decay_start(max_steps)}"


def trunk_and_step(recipe: dict[str, Any]) -> tuple[str, int] | None:
    """Where a run branches off; None if it is no branch."""
    trunk, _, step = recipe.get("branch_from", "").partition("@")
    return (trunk, int(step)) if step.isdecimal() else None


def note_branches(runs: dict[str, dict[str, Any]]) -> None:
    """Let each trunk keep the checkpoints that its branches need."""
    for run in runs.values():
        found = trunk_and_step(run["recipe"])
        if found and found[0] in runs:
            steps = runs[found[0]]["machine"].setdefault("branch_steps", [])
            steps[:] = sorted({*steps, found[1]})


def branch_problems(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One sentence for each branch that does not fit its trunk."""
    for name, run in runs.items():
        asked = run["recipe"].get("branch_from", "")
        if not asked:
            continue
        found = trunk_and_step(run["recipe"])
        if found is None or found[0] not in runs:
            yield f"runs.{name}.branch_from: {asked!r} is no run, or run@step, of the configuration"
        elif problem := _misfit(name, run["recipe"], runs[found[0]]["recipe"], *found):
            yield f"runs.{name}.{problem}"


def _misfit(name: str, recipe: dict, trunk: dict, trunk_name: str, step: int) -> str | None:
    """What keeps a run from going on from a step of its trunk; None if nothing does."""
    if trunk_name == name or trunk.get("branch_from"):
        return f"branch_from: {trunk_name!r} must be another run, and no branch itself"
    last = min(trunk["max_steps"], recipe["max_steps"])
    if not 1 <= step <= last:
        return f"branch_from: step {step} is not between 1 and {last}, which both runs have"
    keys = [key for key in {**trunk, **recipe} if trunk.get(key) != recipe.get(key)]
    other = [key for key in keys if key not in OWN_KEYS]
    if other:
        return f"branch_from: {', '.join(other)} must be those of its trunk {trunk_name!r}"
    for place in {*range(0, step, max(1, step // NUM_RATES)), step - 1}:
        ours, theirs = rate_of_recipe(recipe, place), rate_of_recipe(trunk, place)
        if ours != theirs:
            return (
                f"branch_from: before step {step} its learning rate is not that of {trunk_name!r} "
                f"(step {place}: {ours:.3e}, {theirs:.3e}); use lr_schedule wsd for both, and a "
                f"step of at most {decay_start(last)}"
            )
    return None
