"""What the plain command does after kills, Ctrl-C, failures, and edits, with the real scripts.

The faults are those of other people's projects: R01 and so on are entries of a list of reports.
"""

import json
import os
import re
import signal
import time

import numpy as np
import pytest
from real_project import ROOT, RealProject, Terminal, wait_until

from miniseries.data.shards import HEADER_BYTES, read_header
from miniseries.training.loader import WindowOrder

pytestmark = pytest.mark.slow
TRAIN = {"train": 1, "train_tiny": 1}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """A project with its data made; not to be changed."""
    folder = tmp_path_factory.mktemp("prepared") / "project"
    project = RealProject(folder, ROOT / "tests/config/faults.yaml")
    project.succeed("data_builtin")
    return project


@pytest.fixture(scope="session")
def complete(prepared, tmp_path_factory):
    """A project in which the default target is complete; not to be changed."""
    project = prepared.copy_to(tmp_path_factory.mktemp("complete") / "project")
    project.succeed()
    return project


@pytest.fixture(scope="session")
def unbroken(complete):
    """Loss and gradient norm of each step of a run from beginning to end."""
    losses = complete.losses()
    assert [step for step, _, _ in losses] == list(range(60))
    return losses


@pytest.fixture
def project(prepared, tmp_path):
    project = prepared.copy_to(tmp_path / "project")
    yield project
    project.end_all()


@pytest.fixture
def finished(complete, tmp_path):
    project = complete.copy_to(tmp_path / "project")
    yield project
    project.end_all()


def assert_nothing_is_left(project, seconds):
    deadline = time.monotonic() + seconds
    while project.processes():
        assert time.monotonic() < deadline, project.processes()
        time.sleep(0.1)


def steps_logged(project, run="tiny"):
    """Steps of the training records as they stand in metrics.jsonl, and of main.log's lines."""
    folder = project.path(f"train/{run}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log = re.findall(r"^s:(\d+) trl:", (folder / "main.log").read_text(), re.MULTILINE)
    return [r["step"] for r in records if r["kind"] == "train"], [int(step) for step in log]


# ---- the trainer dies ---------------------------------------------------------------------


def test_a_killed_process_is_started_again_and_ends_as_an_unbroken_run(project, unbroken):
    """R01, within one command."""
    command = project.start_training(45)
    (worker,) = project.processes("train_run.py --manifest")
    os.kill(worker, signal.SIGKILL)
    code, text = project.finish(command)
    assert code == 0, text
    assert "process 0 was killed by SIGKILL; starting again from step 40" in text
    assert "resuming at step 40 of 60" in text
    assert project.losses() == unbroken
    assert project.checkpoints() == [20, 40, 60]


def test_term_to_the_trainer_saves_and_ends_for_good(project, unbroken):
    """R01: nothing starts it again but the user."""
    command = project.start_training(45)
    os.kill(project.trainer(), signal.SIGTERM)
    code, text = project.finish(command)
    assert code != 0 and "Trying to restart" not in text, text
    stop = re.search(r"stopped at step (\d+);", text)[1]
    assert_nothing_is_left(project, seconds=5)
    assert f"resuming at step {stop} of 60" in project.succeed("train_tiny")
    assert project.losses() == unbroken


def test_a_job_that_was_killed_keeps_its_checkpoints_and_the_same_command_goes_on(
    project, unbroken
):
    """R01: the job fails for good, the command is repeated."""
    command = project.start_training(45)
    os.kill(project.trainer(), signal.SIGKILL)
    code, _ = project.finish(command)
    assert code != 0
    assert_nothing_is_left(project, seconds=5)
    assert project.checkpoints() == [20, 40]
    assert not project.path("train/tiny/done.json").exists()
    assert "resuming at step 40 of 60" in project.succeed("train_tiny")
    assert project.losses() == unbroken
    assert project.jobs("train_tiny") == {}


def poison(project, step, token_id):
    """Put this id into the tokens that the step will read; gives the one that was there."""
    shard = next(project.path("data/builtin").glob("*_train_*.bin"))
    order = WindowOrder([read_header(shard)], sequence_length=64, seed=42)
    _, first = order.locate(step * 2)  # two windows a step
    tokens = np.memmap(shard, dtype="<u2", mode="r+", offset=HEADER_BYTES)
    before = int(tokens[first + 10])
    tokens[first + 10] = token_id
    tokens.flush()
    return before


def test_a_trainer_that_fails_is_no_success_and_its_half_trained_model_is_never_used(
    project, unbroken
):
    """R04 and R28: half-way under --keep-incomplete, through the rule with its logging."""
    before = poison(project, 45, token_id=60000)
    text = project.fail("evaluate_tiny", "--keep-incomplete")
    assert "Trying to restart job" not in text, "another start would not help"
    error = r"error: results/data/builtin/builtin_train_000001\.bin: token \d+ has id 60000"
    assert re.search(error, "\n".join(text.splitlines()[-12:])), text
    assert re.search(error, project.path("logs/train/tiny.log").read_text())
    assert not project.path("train/tiny/done.json").exists()
    assert not project.path("export").exists()
    poison(project, 45, token_id=before)
    project.succeed("plots")
    assert not project.path("export").exists()
    assert project.jobs("evaluate_tiny") == {
        "train": 1,
        "export": 1,
        "score": 1,
        "evaluate_tiny": 1,
    }
    assert "resuming at step 40 of 60" in project.succeed("evaluate_tiny")
    assert project.losses() == unbroken
    scores = json.loads(project.path("evaluate/tiny/val_loss.json").read_text())
    assert scores["step"] == 60


# ---- the user stops it --------------------------------------------------------------------


def test_ctrl_c_twice_and_the_same_command_each_time_give_every_step_once(project, unbroken):
    """R07, R30, and R50."""
    stopped_at = []
    for step in (15, 30):
        terminal = Terminal(project, "train_tiny")
        terminal.wait_for_step(step)
        terminal.press_ctrl_c()
        assert_nothing_is_left(project, seconds=30)
        assert terminal.process.wait() != 0
        terminal.reader.join(10)
        said = re.search(r"stopped at step (\d+); the same command goes on", terminal.text)
        assert said, terminal.text
        if stopped_at:
            assert f"resuming at step {stopped_at[-1]} of 60" in terminal.text
        stopped_at.append(int(said[1]))
        assert re.search(r"\d+%\|.*\| \d+/60 \[", terminal.text), "no progress bar"
        assert stopped_at[-1] in project.checkpoints()
    assert f"resuming at step {stopped_at[-1]} of 60" in project.succeed("train_tiny")
    assert project.losses() == unbroken
    assert steps_logged(project) == (list(range(60)), list(range(60)))
    log = project.path("train/tiny/train.log").read_text()
    assert log.count("resuming at step") == 2
    assert [int(n) for n in re.findall(r"^step +(\d+)/60", log, re.MULTILINE)] == [*range(1, 61)]
    project.succeed("plots")
    assert project.path("plots/tiny.png").exists()


def test_ctrl_c_ends_all_processes_of_a_run_on_several(project, unbroken):
    """R30, with the processes of torchrun."""
    project.configure({"machine": {"gpus": 2}})
    command = project.start_training(25)
    workers = project.processes("train_run.py --manifest")
    assert len(workers) >= 2
    os.killpg(command.pid, signal.SIGINT)
    assert_nothing_is_left(project, seconds=30)
    code, text = project.finish(command)
    assert code != 0
    assert "Traceback" not in text, text
    stop = re.search(r"stopped at step (\d+); the same command goes on", text)[1]
    project.configure({"machine": {"gpus": 1}})
    assert f"resuming at step {stop} of 60" in project.succeed("train_tiny")
    for ours, expected in zip(project.losses(), unbroken, strict=True):
        assert ours[:2] == pytest.approx(expected[:2], rel=1e-4)


def test_a_lost_connection_leaves_no_process_and_the_same_command_goes_on(project, unbroken):
    """R49: the terminal goes away, as with a broken ssh."""
    terminal = Terminal(project, "train_tiny")
    terminal.wait_for_step(30)
    terminal.hang_up()
    assert_nothing_is_left(project, seconds=30)
    terminal.process.wait()
    newest = project.checkpoints()[-1]
    assert f"resuming at step {newest} of 60" in project.succeed("train_tiny")
    assert project.losses() == unbroken


# ---- Snakemake dies -----------------------------------------------------------------------


def test_after_a_killed_snakemake_the_living_trainer_is_named_and_then_gone_on_from(project):
    """R49 and R30: the recipe is that of the message and of the README."""
    command = project.start_training(110, run="long")
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    trainer = project.trainer("long")
    text = project.fail("train_long")
    assert f"error: results/train/long: process {trainer} is training this run;" in text
    assert project.trainer("long") == trainer, "the first one goes on alone"
    os.kill(trainer, signal.SIGTERM)
    assert_nothing_is_left(project, seconds=30)
    steps, kept = project.train_steps("long"), project.checkpoints("long")
    assert 100 in kept and kept[-1] == len(steps)
    command = project.start_training(len(steps) + 2, run="long")
    _, text = project.interrupt(command)
    assert f"resuming at step {len(steps)} of 100000" in text
    metrics, log = steps_logged(project, "long")
    assert metrics == log == list(range(len(metrics)))


def test_after_a_crash_of_the_machine_the_same_command_goes_on(project, unbroken):
    """R49: all processes end at once; neither a lock nor a flag is in the way."""
    command = project.start_training(45)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    assert_nothing_is_left(project, seconds=5)
    assert "resuming at step 40 of 60" in project.succeed("train_tiny")
    assert project.losses() == unbroken
    assert project.jobs("train_tiny") == {}


def test_a_killed_snakemake_whose_trainer_came_to_the_end_loses_nothing(project, unbroken):
    command = project.start_training(40)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    assert_nothing_is_left(project, seconds=120)
    assert project.path("train/tiny/done.json").exists()
    project.succeed("train_tiny")
    assert project.losses() == unbroken
    assert project.checkpoints() == [20, 40, 60]
    assert project.jobs("train_tiny") == {}


def test_term_to_snakemake_alone_lets_the_training_come_to_its_end(project, unbroken):
    """R30: as the README says."""
    command = project.start_training(20)
    os.kill(command.pid, signal.SIGTERM)
    _, text = project.finish(command)
    assert "Will exit after finishing currently running jobs" in text
    assert_nothing_is_left(project, seconds=5)
    assert project.losses() == unbroken
    assert project.path("train/tiny/done.json").exists()
    assert project.jobs("train_tiny") == {}


# ---- edits after and between --------------------------------------------------------------


def test_edits_and_touched_data_schedule_no_training_and_delete_nothing(finished):
    """R29, checked with -n and with real commands."""
    before = finished.snapshot("train", "export", "evaluate", "samples", "data")
    scripts = finished.folder / "workflow/scripts"
    files = [finished.folder / "Snakefile", *(finished.folder / "workflow/rules").iterdir()]
    files += [scripts / "train_run.py", *(scripts / "miniseries").rglob("*.py")]
    for file in files:
        with file.open("a") as stream:
            stream.write("# a comment\n")
    for shard in finished.path("data/builtin").glob("*.bin"):
        shard.touch()
        before[shard] = shard.stat().st_mtime_ns
    assert finished.jobs() == finished.jobs("plots") == {}
    assert "Nothing to be done" in finished.succeed()
    finished.configure({"plots": {"dpi": 60}})
    figures = {"plot_run": 1, "plot_series": 1}
    assert finished.jobs() == figures | {"all": 1}
    assert finished.jobs("plots") == figures | {"plots": 1}
    size = finished.path("plots/tiny.png").stat().st_size
    finished.succeed("plots")
    assert finished.path("plots/tiny.png").stat().st_size < size
    assert finished.jobs() == finished.jobs("plots") == {}
    assert finished.snapshot("train", "export", "evaluate", "samples", "data") == before


def test_another_learning_rate_is_refused_and_the_finished_run_stays(finished):
    """R23."""
    before = finished.snapshot(".")
    finished.configure({"runs": {"tiny": {"learning_rate": 2.0e-3}}})
    for targets in (["-n"], [], ["train_tiny"], ["-n", "evaluate_tiny"]):
        text = finished.fail(*targets)
        assert "learning_rate: 0.001 -> 0.002" in text
        assert "add a run with another name that says `extends: tiny`" in text
        assert finished.snapshot(".") == before
    finished.configure({"runs": {"tiny-2": {"extends": "tiny"}, "tiny": {"learning_rate": 1e-3}}})
    finished.configure({"runs": {"tiny-2": {"learning_rate": 2.0e-3}}})
    assert finished.jobs() == {}
    assert finished.jobs("train_tiny-2") == {"write_settings": 1, "train": 1, "train_tiny-2": 1}


def test_another_speed_schedules_no_training_of_a_finished_run(finished):
    before = finished.snapshot("train")
    faster = {"micro_batch": 1, "checkpoint_every_steps": 7, "keep_checkpoints": 1}
    finished.configure({"machine": {"gpus": 2, "compile": False}, "runs": {"tiny": faster}})
    assert "train" not in finished.jobs()
    finished.succeed()
    assert finished.snapshot("train") == before
    assert finished.jobs() == {}


def test_another_micro_batch_does_not_hide_what_is_still_to_be_done(finished, unbroken):
    """Snakemake passes over jobs behind an `ancient` file that has to be made again."""
    for name in ("evaluate/tiny/val_loss.json", "evaluate/tiny/hellaswag.json"):
        finished.path(name).unlink()
    finished.configure({"runs": {"tiny": {"micro_batch": 1}}})
    assert finished.jobs("evaluate_tiny") == {"score": 1, "evaluate_tiny": 1}
    finished.path("train/tiny/done.json").unlink()
    assert finished.jobs("train_tiny") == TRAIN | {"write_settings": 1}
    assert "=> setting grad_accum_steps=2" in finished.succeed("train_tiny")
    assert finished.losses() == unbroken


def test_other_data_before_the_first_step_do_not_hide_the_training(project):
    project.succeed("results/settings/tiny.json")
    project.configure({"datasets": {"builtin": {"num_questions": 10}}})
    jobs = {"prepare_dataset": 1, "write_settings": 1} | TRAIN
    assert project.jobs("train_tiny") == jobs


# ---- side by side -------------------------------------------------------------------------


def test_plots_are_drawn_while_a_run_trains_and_do_not_disturb_it(project):
    training = project.start_training(5, run="long")
    for _ in range(2):
        steps = len(project.train_steps("long"))
        project.succeed("plots")
        assert project.path("plots/long.png").exists()
        assert project.path("summary.tsv").read_text().count("\n") == 2
    assert training.poll() is None
    wait_until(lambda: len(project.train_steps("long")) > steps, training)
    code, text = project.interrupt(training)
    assert code != 0 and "stopped at step" in text
    metrics, log = steps_logged(project, "long")
    assert metrics == log == list(range(len(metrics)))
    with project.path("train/long/metrics.jsonl").open("a") as file:  # as after a kill
        file.write('{"kind": "train", "step": 7, "train_loss_nats": 9.0}\n{"kind": "train", "st')
    project.succeed("plots")
    assert project.jobs("plots") == {}


def test_a_second_terminal_is_refused_the_same_run_and_the_first_goes_on(project):
    first = project.start_training(5, run="long")
    text = project.fail("train_long")
    assert f"process {project.trainer('long')} is training this run; wait for it" in text
    assert "Trying to restart" not in text
    assert first.poll() is None
    steps = len(project.train_steps("long"))
    wait_until(lambda: len(project.train_steps("long")) > steps, first)
    project.interrupt(first)
    metrics, log = steps_logged(project, "long")
    assert metrics == log == list(range(len(metrics)))


def test_two_runs_of_one_command_never_train_at_the_same_time(project):
    """R42: there are cores enough for both, so only `gpu_slot` keeps them apart."""
    project.succeed("train_tiny", "train_other", "--cores", "4", "--set-threads", "train=1")
    times = []
    for run in ("tiny", "other"):
        with project.path(f"train/{run}/metrics.jsonl").open() as file:
            start = json.loads(file.readline())["time"]
        times.append((start, project.path(f"train/{run}/done.json").stat().st_mtime))
    (_, first_end), (second_start, _) = sorted(times)
    assert first_end <= second_start
