import copy

import pytest

from miniseries.settings import is_kept
from miniseries.training.branches import branch_problems, note_branches, with_step

TRUNK = {"learning_rate": 6e-4, "lr_schedule": "wsd", "warmup_steps": 100, "max_steps": 1000}
TRUNK |= {"final_lr_fraction": 0.1, "seed": 42, "precision": "bf16"}


def catalogue(**branch):
    """A trunk of 1,000 steps and a run that differs from it in these keys."""
    machine = {"checkpoint_every_steps": 0, "keep_every_steps": 0, "keep_checkpoints": 2}
    runs = {
        name: {"recipe": dict(TRUNK), "machine": {**machine, "export_steps": []}}
        for name in ("trunk", "branch")
    }
    runs["branch"]["recipe"] |= branch
    return copy.deepcopy(runs)


def test_a_branch_begins_where_its_own_decay_does():
    assert with_step("trunk", 500) == "trunk@400"
    assert with_step("trunk@300", 500) == "trunk@300"
    assert with_step("", 500) == ""


def test_a_trunk_keeps_the_checkpoints_that_its_branches_need():
    runs = catalogue(branch_from="trunk@400", max_steps=500)
    assert list(branch_problems(runs)) == []
    assert not is_kept(runs["trunk"], 400)
    note_branches(runs)
    assert is_kept(runs["trunk"], 400)
    assert runs["trunk"]["machine"]["branch_steps"] == [400]
    assert "branch_steps" not in runs["branch"]["machine"]


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ({"branch_from": "trunc@400"}, "'trunc@400' is no run, or run@step, of the configuration"),
        ({"branch_from": "trunk@half"}, "'trunk@half' is no run"),
        ({"branch_from": "branch@400"}, "'branch' must be another run, and no branch itself"),
        ({"branch_from": "trunk@1200", "max_steps": 2000}, "step 1200 is not between 1 and 1000"),
        ({"branch_from": "trunk@0"}, "step 0 is not between 1 and 1000"),
        (
            {"branch_from": "trunk@400", "max_steps": 500, "seed": 1, "precision": "fp32"},
            "seed, precision must be those of its trunk 'trunk'",
        ),
        (  # the trunk itself has decayed before
            {"branch_from": "trunk@900", "max_steps": 2000},
            "before step 900 its learning rate is not that of 'trunk' (step ",
        ),
        (
            {"branch_from": "trunk@400", "max_steps": 500, "lr_schedule": "cosine"},
            "use lr_schedule wsd for both, and a step of at most 400",
        ),
    ],
)
def test_branches_that_do_not_fit_their_trunk_are_refused(branch, message):
    (problem,) = branch_problems(catalogue(**branch))
    assert problem.startswith("runs.branch.branch_from: ") and message in problem


def test_a_decay_of_another_kind_may_branch_off_a_constant_trunk():
    runs = catalogue(branch_from="trunk@400", max_steps=500, final_lr_fraction=0.0)
    assert list(branch_problems(runs)) == []
