"""Legs one after the other: budget, needs, failures, and what a second call does again."""

import time

import pytest
from stand_ins import pretend_checkpoint

from miniseries.metrics import append_record, read_json
from miniseries.speed import legs
from miniseries.speed.commands import Finished
from miniseries.speed.legs import Course, Leg


class Commands:
    """In place of `run_command`: notes the targets, and does to a run's folder what is told."""

    def __init__(self):
        self.calls, self.codes, self.effects, self.is_late = [], {}, {}, set()
        self.configfiles = []

    def __call__(self, command, place, log, deadline, look):
        words = command[3 : command.index("--configfile")]
        self.calls.append(words[0])
        log.parent.mkdir(exist_ok=True)
        self.configfiles.append(command[command.index("--configfile") + 1 :])
        self.effects.get(words[0], lambda: None)()
        look()
        look()
        code, is_late = self.codes.get(words[0], 0), words[0] in self.is_late
        return Finished(code, 1.5, is_late, [], [])


@pytest.fixture
def commands(monkeypatch):
    found = Commands()
    monkeypatch.setattr(legs, "run_command", found)
    return found


@pytest.fixture
def course(tmp_path):
    def make(seconds=60.0, asked=None, **circumstances):
        overlays, deadline = [tmp_path / "a.yaml"], time.monotonic() + seconds
        return Course(tmp_path, tmp_path / "out", overlays, deadline, circumstances, asked)

    return make


def test_legs_run_in_their_order_each_with_its_configuration(commands, course, tmp_path):
    records = course().run(
        {"one": Leg(["a"]), "two": Leg(["b"], configfile=(tmp_path / "b.yaml",))}
    )
    assert commands.calls == ["a", "b"]
    assert commands.configfiles[0] == [str(tmp_path / "a.yaml")]
    assert commands.configfiles[1] == [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    assert [record["state"] for record in records.values()] == ["done", "done"]
    assert records["one"]["seconds"] == 1.5


def test_a_failure_is_recorded_and_stops_only_the_legs_that_need_it(commands, course):
    commands.codes = {"a": 1}
    records = course().run(
        {"one": Leg(["a"]), "two": Leg(["b"], needs=("one",)), "three": Leg(["c"])}
    )
    assert commands.calls == ["a", "c"]
    assert (records["one"]["state"], records["one"]["reason"]) == (
        "failed",
        "exit code 1; see one.txt",
    )
    assert records["two"]["state"] == "not run"
    assert records["two"]["reason"] == "needs one, which is failed"
    assert records["three"]["state"] == "done"


def test_no_leg_begins_when_the_time_is_over(commands, course):
    records = course(seconds=-1.0).run({"one": Leg(["a"])})
    assert commands.calls == []
    assert (records["one"]["state"], records["one"]["reason"]) == ("not run", "out of time")


def test_a_leg_that_was_cut_short_is_not_run_and_keeps_its_figures(commands, course):
    commands.is_late = {"a"}
    leg = Leg(["a"], figures=lambda: {"num_steps": 7})
    record = course().run({"one": leg})["one"]
    assert record["state"] == "not run"
    assert record["reason"].startswith("out of time before its end")
    assert record["num_steps"] == 7


def test_a_leg_without_its_figures_has_failed(commands, course):
    def figures():
        raise ValueError("out of memory with 16 sequences at once")

    record = course().run({"one": Leg(["a"], figures=figures)})["one"]
    assert record["state"] == "failed"
    assert record["reason"] == "no figures: out of memory with 16 sequences at once"


def test_what_the_machine_cannot_do_is_not_run(commands, course):
    record = course().run({"one": Leg(["a"], impossible="needs two GPUs")})["one"]
    assert (record["state"], record["reason"], commands.calls) == ("not run", "needs two GPUs", [])


def test_a_second_call_does_what_is_missing_and_under_other_circumstances_all(commands, course):
    commands.codes = {"b": 1}
    both = {"one": Leg(["a"]), "two": Leg(["b"])}
    course(commit="c1").run(both)
    commands.codes = {}
    records = course(commit="c1").run(both)
    assert commands.calls == ["a", "b", "b"]
    assert [record["state"] for record in records.values()] == ["done", "done"]
    assert "circumstances" not in records["one"]
    course(commit="c2").run(both)
    assert commands.calls == ["a", "b", "b", "a", "b"]


def test_legs_that_are_not_asked_for_wait_for_a_call_that_asks(commands, course):
    both = {"one": Leg(["a"]), "two": Leg(["b"], needs=("one",))}
    records = course(asked=["one"]).run(both)
    assert (records["two"]["state"], records["two"]["reason"]) == ("not run", "not asked for")
    assert course(asked=["two"]).run(both)["two"]["state"] == "done"
    assert commands.calls == ["a", "b"]


def test_what_an_earlier_call_found_of_a_leg_that_is_not_asked_for_is_kept(commands, course):
    commands.is_late = {"a"}
    both = {"one": Leg(["a"], figures=lambda: {"num_steps": 7}), "two": Leg(["b"])}
    course().run(both)
    record = course(asked=["two"]).run(both)["one"]
    assert record["reason"].startswith("out of time before its end")
    assert record["num_steps"] == 7


def test_what_needs_a_leg_that_is_done_again_is_done_again(commands, course, tmp_path):
    run = tmp_path / "run"
    commands.effects["a"] = lambda: train(run, 0, 3)
    chain = {"one": Leg(["a"], run), "two": Leg(["b"], needs=("one",))}
    chain |= {"three": Leg(["c"], needs=("two",)), "four": Leg(["d"])}
    course().run(chain)
    (run / "metrics.jsonl").unlink()
    course().run(chain)
    assert commands.calls == ["a", "b", "c", "d", "a", "b", "c"]


def test_nccl_s_watchdog_is_looked_for_in_a_leg_s_own_log_too(commands, course, tmp_path):
    commands.effects["a"] = lambda: (tmp_path / "row.log").write_text("fine\nNCCL watchdog\n")
    record = course().run({"one": Leg(["a"], log=tmp_path / "row.log")})["one"]
    assert record["watchdog"] == ["NCCL watchdog"]
    assert (tmp_path / "out/one.log").exists()


def test_a_leg_is_done_again_when_its_run_is_gone(commands, course, tmp_path):
    run = tmp_path / "run"
    commands.effects["a"] = lambda: train(run, 0, 3)
    course().run({"one": Leg(["a"], run)})
    course().run({"one": Leg(["a"], run)})
    assert commands.calls == ["a"]
    assert (tmp_path / "out/run.metrics.jsonl").exists()
    (run / "metrics.jsonl").unlink()
    course().run({"one": Leg(["a"], run)})
    assert commands.calls == ["a", "a"]


def test_what_an_earlier_call_left_goes_before_a_leg_begins(commands, course, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("old")
    (tmp_path / "row.json").write_text("old")
    course().run(
        {"one": Leg(["a"], old=tmp_path / "run"), "two": Leg(["b"], old=tmp_path / "row.json")}
    )
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "row.json").exists()


# ---- stopped legs ---------------------------------------------------------------------------


def train(folder, first, last, saved=None):
    """A trainer's traces: steps `first` to `last`, and the checkpoint after the last."""
    folder.mkdir(exist_ok=True)
    (folder / "lock").write_text("1")
    for step in range(first, last + 1):
        append_record(folder / "metrics.jsonl", "train", step=step, step_time_ms=0.0)
    if saved:
        pretend_checkpoint(folder, saved)


@pytest.fixture
def kills(monkeypatch):
    found = []
    monkeypatch.setattr("miniseries.speed.commands.os.kill", lambda *a: found.append(a))
    return found


def test_a_stopped_leg_is_done_when_its_last_step_is_saved(commands, course, kills, tmp_path):
    run = tmp_path / "run"
    commands.codes = {"a": 1, "b": 1}  # Snakemake calls a stopped job an error
    commands.effects = {"a": lambda: train(run, 0, 2, 3), "b": lambda: train(run, 3, 4, 5)}
    records = course().run(
        {"one": Leg(["a"], run, stop_after=3), "two": Leg(["b"], run, stop_after=2, is_last=True)}
    )
    assert [record["state"] for record in records.values()] == ["done", "done"]
    assert [record["stopped_at"] for record in records.values()] == [3, 5]
    assert all(0 <= record["seconds_to_stop"] < 60 for record in records.values())
    assert len(kills) == 2
    assert not (run / "checkpoints").exists(), "room for the next run"


def test_an_impossible_last_leg_leaves_checkpoints_to_the_legs_before_it(
    commands, course, tmp_path
):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    last = Leg(["b"], run, needs=("one",), impossible="needs two GPUs", is_last=True)
    for code in (1, 0):
        commands.codes = {"a": code}
        course().run({"one": Leg(["a"]), "two": last})
        assert (run / "checkpoints").exists() == bool(code)


@pytest.mark.parametrize(
    ("last", "saved", "reason"),
    [(2, None, "stopped, but the last step was not saved"), (1, 2, "before it was stopped")],
)
def test_a_leg_that_was_not_stopped_or_not_saved_has_failed(
    commands, course, kills, tmp_path, last, saved, reason
):
    run = tmp_path / "run"
    commands.effects = {"a": lambda: train(run, 0, last, saved)}
    leg = Leg(["a"], run, stop_after=3, is_last=True)
    record = course().run({"one": leg})["one"]
    assert record["state"] == "failed"
    assert reason in record["reason"]
    assert "stopped_at" not in record
    assert read_json(tmp_path / "out/legs/one.json")["reason"] == record["reason"]
    assert (run / "checkpoints").exists() == bool(saved), "the same command may go on from it"
