"""What a run's launcher does when processes die, hang, or are told to stop."""

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from stand_ins import (
    FAULTY,
    TRAIN_SCRIPT,
    losses,
    make_dataset,
    make_settings,
    pretend_checkpoint,
    train_command,
    train_here,
)

from miniseries.metrics import read_json, read_metrics
from miniseries.training import launcher, microbatch, replay, supervisor, trial
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights, saved_steps
from miniseries.training.distributed import start_world
from miniseries.training.launcher import (
    LocalRun,
    _try_micro_batches,
    _until_complete,
    freeze,
    launch,
    launch_replay,
    newest_checkpoint,
)
from miniseries.training.supervisor import (
    CRASHED,
    GPUS_SEEN,
    REFUSED,
    STOPPED,
    Ears,
    Outcome,
    _reserved_port,
    supervise,
)

LEAVES_WITHIN = 25.0  # seconds after a signal, at any moment
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TRAIN_SCRIPT.parent)}
SLOW_STEPS = {"fault": "slow steps", "FAULT_SECONDS": 0.2}  # so that a run is not over too soon

PLAIN = "NVIDIA H200, Disabled\n"


@pytest.mark.parametrize(
    ("answer", "environment", "built_for", "expected"),
    [
        (8 * PLAIN, {}, "13.0", (8, "NVIDIA H200")),
        ("NVIDIA A10G, [N/A]\n", {}, "13.0", (1, "NVIDIA A10G")),
        # PyTorch is asked, and has no GPU in this test
        (8 * PLAIN, {"CUDA_VISIBLE_DEVICES": "2,3"}, "13.0", (0, "cpu")),
        (8 * PLAIN, {}, None, (0, "cpu")),
        (2 * "NVIDIA H200, Enabled\n", {}, "13.0", (0, "cpu")),
        (PLAIN + "NVIDIA T400, [N/A]\n", {}, "13.0", (0, "cpu")),
        ("", {}, "13.0", (0, "cpu")),
    ],
)
def test_gpus_are_counted_without_pytorch_where_it_sees_what_the_driver_sees(
    tmp_path, monkeypatch, answer, environment, built_for, expected
):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(launcher, "GPU_DRIVERS", [str(tmp_path)])
    found = runpy.run_path(Path(torch.__file__).with_name("version.py"))
    assert found["cuda"] == torch.version.cuda
    monkeypatch.setattr("runpy.run_path", lambda path: found | {"cuda": built_for})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert launcher.local_processes("auto") == (max(1, expected[0]), expected[1])


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(manifest, tmp_path_factory):
    """Losses of a run of 12 steps on two processes from beginning to end."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = train_here(make_settings(folder / "in.json", gpus=2), manifest, folder)
    assert result.returncode == 0, result.stderr
    return losses(folder)


def start(settings, manifest, folder, fault="", **environment):
    """Start a run with a fault; its output goes to `said.txt`."""
    command = train_command(settings, manifest, folder)
    command[1] = str(FAULTY)
    environment = {key: str(value) for key, value in environment.items()}
    with (folder / "said.txt").open("w") as said:
        return subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, "FAULT": fault, **environment}
        )


def said(folder):
    return (folder / "said.txt").read_text()


def wait_until(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def steps_done(folder):
    return len(read_metrics(folder / "metrics.jsonl").get("train", []))


def workers(process):
    """The processes of the run, by their rank."""
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def assert_none_is_left(folder):
    listing = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True)
    assert listing.stdout == ""


def test_the_newest_checkpoint_is_one_that_is_there_beside_files_of_other_names(tmp_path):
    assert newest_checkpoint(tmp_path) == 0
    for step in (8, 12, 16):
        pretend_checkpoint(tmp_path, step)
    (tmp_path / "saved/notes.json").touch()
    (tmp_path / "checkpoints/step-00000016").rename(tmp_path / "moved away")
    assert newest_checkpoint(tmp_path) == 12


def test_what_a_run_starts_from_is_kept_when_a_later_start_does_not_name_it(manifest, tmp_path):
    settings, weights = make_settings(tmp_path / "in.json"), tmp_path / "model_00000010.bin"
    weights.touch()
    first = freeze(settings, manifest, tmp_path, weights)
    assert first["start"]["path"] == str(weights)
    (tmp_path / "metrics.jsonl").touch()
    assert freeze(settings, manifest, tmp_path) == first == read_json(tmp_path / "settings.json")


def test_a_process_whose_launcher_dies_while_it_loads_leaves_the_run_alone(manifest, tmp_path):
    process = start(make_settings(tmp_path / "in.json", max_steps=10000), manifest, tmp_path)
    wait_until(lambda: workers(process), process)
    (orphan,) = workers(process)
    process.kill()
    process.wait()
    assert not psutil.wait_procs([orphan], timeout=60)[1]
    assert not (tmp_path / "metrics.jsonl").exists(), "the next launcher has the folder to itself"


@pytest.mark.parametrize(
    ("module", "begin"),
    [
        (trial, lambda folder: trial.find_micro_batch(folder, 1)),
        (replay, lambda folder: replay.replay(folder, folder, 3, folder, folder)),
    ],
)
def test_a_trial_or_replay_whose_launcher_died_while_it_loaded_ends(
    tmp_path, monkeypatch, module, begin
):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(supervisor.PIPE, str(writer))
    monkeypatch.setattr(module, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match=str(CRASHED)):
        begin(tmp_path)
    os.close(writer)


def test_a_run_that_was_stopped_as_by_ctrl_z_does_not_count_as_hanging(tmp_path):
    busy = "import os, time\nos.write(int(os.environ['MINISERIES_HEARTBEAT']), b's')\n"
    busy += "while time.process_time() < 1.5: pass"
    program = "import sys; from miniseries.training.supervisor import Ears, supervise\n"
    program += (
        "with Ears() as ears: print(supervise([sys.executable, '-c', sys.argv[1]], 1, 3, ears))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, busy], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    wait_until(lambda: psutil.Process(process.pid).children(), process)
    time.sleep(0.5)
    both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    for each in both:
        each.suspend()
    time.sleep(4)
    for each in both:
        each.resume()
    outcome = process.communicate(timeout=60)[0]
    assert "codes=[0]" in outcome and "silent=[]" in outcome, outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_started_again_and_loses_nothing(unbroken, manifest, tmp_path, rank):
    settings = make_settings(tmp_path / "in.json", gpus=2)
    process = start(settings, manifest, tmp_path, **SLOW_STEPS)
    wait_until(lambda: steps_done(tmp_path) >= 6, process)
    workers(process)[rank].kill()
    assert process.wait(timeout=300) == 0, said(tmp_path)
    assert f"process {rank} was killed by SIGKILL; starting again from step 4" in said(tmp_path)
    assert "Traceback" not in said(tmp_path), "of the one that waited for it"
    assert losses(tmp_path) == unbroken
    (restart,) = read_metrics(tmp_path / "metrics.jsonl")["restart"]
    assert restart["step"] == 4


def test_a_process_killed_while_all_save_or_load_costs_no_checkpoint(manifest, tmp_path):
    """What the others notice is a lost connection, which says nothing of disk or checkpoint."""
    settings = make_settings(tmp_path / "in.json", gpus=2)
    for attempts, step in ((1, 8), (2, 12)):
        process = start(settings, manifest, tmp_path, "die at checkpoints", NOTES=tmp_path)
        assert process.wait(timeout=300) == 0, said(tmp_path)
        assert f"process 1 was killed by SIGKILL; starting again from step {step}" in said(tmp_path)
        assert len(read_metrics(tmp_path / "metrics.jsonl")["restart"]) == attempts
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
            checkpoint_folder(tmp_path, saved).name for saved in (4, 8, 12)
        ]
        (tmp_path / "done.json").unlink()


def test_a_crash_is_mended_when_nobody_hears_of_it_any_more(manifest, tmp_path):
    """As after `snakemake 2>&1 | less`, left by q."""
    settings = make_settings(tmp_path / "in.json")
    command = [sys.executable, str(FAULTY), *train_command(settings, manifest, tmp_path)[2:]]
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "FAULT": "slow steps", "FAULT_SECONDS": "0.2"}
    process = subprocess.Popen(command, stdout=writer, stderr=writer, env=environment)
    wait_until(lambda: steps_done(tmp_path) >= 6, process)
    workers(process)[0].kill()
    assert process.wait(timeout=300) == 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")["restart"]) == 1
    assert (tmp_path / "done.json").exists()


def test_a_process_that_is_started_again_refuses_other_tokens(tmp_path):
    settings = make_settings(tmp_path / "in.json")
    freeze(settings, make_dataset(tmp_path / "data"), tmp_path / "run")
    manifest = make_dataset(tmp_path / "data", val_tokens=999)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    result = train_here(settings, manifest, tmp_path / "run", env=environment)
    assert result.returncode == REFUSED and "Traceback" not in result.stderr
    assert f"was started on other tokens than {manifest.parent} holds now" in result.stderr


def test_a_hung_process_is_asked_where_it_is_killed_and_started_again(unbroken, manifest, tmp_path):
    settings = make_settings(tmp_path / "in.json", gpus=2, stall_seconds=20)
    process = start(settings, manifest, tmp_path, **SLOW_STEPS)
    wait_until(lambda: steps_done(tmp_path) >= 6, process)
    workers(process)[1].suspend()
    assert process.wait(timeout=300) == 0, said(tmp_path)
    text = said(tmp_path)
    assert re.search(r"no sign of life from process .*1; starting again from step 4", text), text
    assert "in train_step" in text, "the stack of the process that waits"
    assert losses(tmp_path) == unbroken
    assert_none_is_left(tmp_path)


def test_out_of_memory_starts_the_run_again_with_less_at_a_time_for_good(
    unbroken, manifest, tmp_path
):
    settings = make_settings(tmp_path / "in.json", gpus=2, micro_batch=4)
    process = start(settings, manifest, tmp_path, "out of memory")
    assert process.wait(timeout=300) == 0, said(tmp_path)
    text = said(tmp_path)
    assert "out of memory with micro_batch 4, now 2; starting again from step 4" in text, text
    assert "micro_batch 2: out of memory with 4" in text
    assert "the checkpoint was made with micro_batch 4, now it is 2: the same batches" in text
    for ours, expected in zip(losses(tmp_path), unbroken, strict=True):
        assert ours[:2] == pytest.approx(expected[:2], rel=1e-5)
    starts = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [r["micro_batch"] for r in starts if r["kind"] == "start"] == [4, 2]
    assert microbatch.choose(tmp_path, read_json(settings), 2, "cpu")[0] == 2, "a later start"


def test_auto_tries_the_powers_of_two_that_divide_a_process_s_share(tmp_path):
    assert microbatch.powers_of_two(48) == [16, 8, 4, 2, 1]
    recipe = {"total_batch_tokens": 6144, "sequence_length": 32}
    settings = {"recipe": recipe, "machine": {"micro_batch": "auto", "compile": True}}
    settings["fingerprint"] = "a"
    with pytest.raises(ValueError, match="`auto` is tried by"):
        microbatch.choose(tmp_path, settings, 4, "GPU A")
    (tmp_path / microbatch.RECORD).write_text("[]")
    with pytest.raises(ValueError, match=r"micro_batch\.json: damaged, .*; delete it"):
        microbatch.choose(tmp_path, settings, 4, "GPU A")
    microbatch.remember(tmp_path, settings, 4, "GPU A", 16, "the largest that fits")
    assert microbatch.choose(tmp_path, settings, 4, "GPU A") == (16, "the largest that fits")
    assert microbatch.remembered(tmp_path, settings, 2, "GPU A") is None, "other memory"
    assert microbatch.remembered(tmp_path, settings, 4, "GPU B") is None
    other = settings | {"fingerprint": "b"}
    assert microbatch.remembered(tmp_path, other, 4, "GPU A") is None, "another recipe"
    assert microbatch.choose(tmp_path, settings, 4, "cpu") == (microbatch.ON_CPU, None)
    steps = []
    while steps[-1:] != [1]:
        steps.append(microbatch.lower(tmp_path, settings, 4, "GPU A")[1])
    assert steps == [8, 4, 2, 1]
    with pytest.raises(ValueError, match="does not hold a single sequence"):
        microbatch.lower(tmp_path, settings, 4, "GPU A")


def test_the_trial_keeps_the_largest_that_fits_for_the_run_s_processes(
    manifest, tmp_path, monkeypatch, capsys
):
    settings = make_settings(tmp_path / "in.json", micro_batch="auto", total_batch_tokens=1024)
    frozen = freeze(settings, manifest, tmp_path)
    monkeypatch.setattr(trial, "die_with_parent", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU A")
    monkeypatch.setattr(trial, "_fits", lambda _settings, size, *_more: size <= 4)
    trial.find_micro_batch(tmp_path, processes=2)
    assert capsys.readouterr().out.splitlines() == [
        "micro_batch 16: out of memory",
        "micro_batch 8: out of memory",
        "micro_batch 4: fits",
    ]
    assert microbatch.choose(tmp_path, frozen, 2, "GPU A") == (4, "the largest that fits")
    monkeypatch.setattr(trial, "_fits", lambda *_: False)
    with pytest.raises(ValueError, match="does not hold a single sequence"):
        trial.find_micro_batch(tmp_path, processes=2)


def test_what_a_process_takes_at_once_divides_its_share():
    assert [microbatch.largest_divisor(wanted, 12) for wanted in (1, 5, 8, 100)] == [1, 4, 6, 12]


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("slow compile", signal.SIGTERM),
        ("slow evaluation", signal.SIGINT),
        ("slow save", signal.SIGTERM),
    ],
)
def test_a_signal_at_any_moment_ends_the_run_in_time(manifest, tmp_path, moment, number):
    # of a slow save there are two, the older step's and the last one's, which sync six times each
    wait = {"slow compile": 60, "slow evaluation": 1, "slow save": 0.5}[moment]
    word = {"slow compile": "compiling", "slow evaluation": "evaluating", "slow save": "syncing"}
    every = 3 if moment == "slow evaluation" else 0
    settings = make_settings(tmp_path / "in.json", gpus=2, val_every_steps=every)
    process = start(settings, manifest, tmp_path, moment, FAULT_SECONDS=wait)
    wait_until(lambda: word[moment] in said(tmp_path), process)
    process.send_signal(number)
    began = time.monotonic()
    assert process.wait(timeout=60) == STOPPED, said(tmp_path)
    assert time.monotonic() - began < LEAVES_WITHIN
    assert "Traceback" not in said(tmp_path), said(tmp_path)
    assert f"stopped at step {steps_done(tmp_path)};" in said(tmp_path)
    assert saved_steps(tmp_path)[-1:] == ([steps_done(tmp_path)] if steps_done(tmp_path) else [])
    assert_none_is_left(tmp_path)


def test_a_save_that_cannot_end_in_time_is_given_up_and_not_torn(manifest, tmp_path):
    settings = make_settings(tmp_path / "in.json", max_steps=100)
    process = start(settings, manifest, tmp_path)
    wait_until(lambda: steps_done(tmp_path) >= 6, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == STOPPED
    (kept, *_), newest = saved_steps(tmp_path), saved_steps(tmp_path)[-1]
    assert kept == 4
    process = start(settings, manifest, tmp_path, "slow save", FAULT_SECONDS=60)
    wait_until(lambda: "syncing" in said(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=60) == STOPPED
    assert time.monotonic() - began < LEAVES_WITHIN
    assert f"saving took too long and was ended; step {newest} is kept" in said(tmp_path)
    assert saved_steps(tmp_path)[-1] == newest
    assert_none_is_left(tmp_path)


@pytest.mark.slow
def test_a_stop_while_a_complete_run_is_marked_as_such_is_quiet(manifest, tmp_path):
    settings = make_settings(tmp_path / "in.json", max_steps=2)
    assert train_here(settings, manifest, tmp_path).returncode == 0
    (tmp_path / "done.json").unlink()
    process = start(settings, manifest, tmp_path, "slow finish", FAULT_SECONDS=60)
    wait_until(lambda: "finishing" in said(tmp_path), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == STOPPED
    assert "Traceback" not in said(tmp_path), said(tmp_path)
    assert train_here(settings, manifest, tmp_path).returncode == 0
    assert (tmp_path / "done.json").exists()


@pytest.mark.slow
def test_a_stop_while_an_older_step_is_saved_keeps_that_one_when_there_is_no_time_for_both(
    manifest, tmp_path
):
    settings = make_settings(tmp_path / "in.json", max_steps=500, checkpoint_every_steps=100)
    # a save syncs six times in a row: 18 of the 21 seconds that there are
    process = start(settings, manifest, tmp_path, "slow save", FAULT_SECONDS=3)
    wait_until(lambda: "syncing" in said(tmp_path), process)
    wait_until(lambda: steps_done(tmp_path) > 101, process)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=60) == STOPPED
    assert time.monotonic() - began < LEAVES_WITHIN
    assert "saving took too long and was ended; step 100 is kept" in said(tmp_path)
    assert saved_steps(tmp_path) == [100]
    process = start(settings, manifest, tmp_path)
    wait_until(lambda: "resuming at step 100" in said(tmp_path), process)
    process.kill()


def batches(file):
    """Hashes of the rows of each global batch in their order; of a repeated step the last time."""
    steps = {}
    for line in file.read_text().splitlines():
        part = json.loads(line)
        steps.setdefault(part["step"], {})[part["micro_step"], part["rank"]] = part["rows"]
    return {
        step: [row for key in sorted(parts) for row in parts[key]] for step, parts in steps.items()
    }


def uninterrupted(manifest, folder, **changes):
    """Folder of a run that noted its batches, from beginning to end."""
    folder.mkdir()
    settings = make_settings(folder / "in.json", **changes)
    process = start(settings, manifest, folder, BATCHES=folder / "batches")
    assert process.wait(timeout=300) == 0, said(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_stops_at_random_steps_by_each_signal_change_no_batch_and_no_bit(manifest, tmp_path, gpus):
    changes = {"gpus": gpus, "max_steps": 60, "checkpoint_every_steps": 10, "micro_batch": 2}
    expected = uninterrupted(manifest, tmp_path / "expected", **changes)
    folder = tmp_path / "stopped"
    folder.mkdir()
    settings = make_settings(folder / "in.json", **changes)
    random = np.random.RandomState(gpus)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        process = start(settings, manifest, folder, BATCHES=folder / "batches")
        target = steps_done(folder) + random.randint(2, 12)
        wait_until(lambda target=target: steps_done(folder) >= target, process)
        process.send_signal(number)
        assert process.wait(timeout=60) in (STOPPED, -signal.SIGKILL), said(folder)
    assert start(settings, manifest, folder, BATCHES=folder / "batches").wait(timeout=300) == 0
    assert batches(folder / "batches") == batches(expected / "batches")
    assert losses(folder) == losses(expected)
    ours, theirs = (load_model_weights(checkpoint_folder(f, 60)) for f in (folder, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 21 starts, on a machine that may be busy
def test_twenty_kills_during_saves_never_leave_a_torn_checkpoint(manifest, tmp_path):
    """R09, on one process and on two in turns."""
    changes = {"max_steps": 10000, "checkpoint_every_steps": 2, "keep_checkpoints": 3}
    random = np.random.RandomState(0)
    newest = 0
    for attempt in range(20):
        settings = make_settings(tmp_path / "in.json", gpus=1 + attempt % 2, **changes)
        process = start(settings, manifest, tmp_path, "slow save", FAULT_SECONDS=0.2)
        wait_until(lambda: "complete" in said(tmp_path), process)
        time.sleep(random.random() * 1.5)  # a save takes a second, and the next one follows
        ranks = workers(process)
        for each in [process, *ranks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(ranks, timeout=10)
        if attempt:
            assert f"resuming at step {newest} of" in said(tmp_path), said(tmp_path)
        assert "put aside" not in said(tmp_path)
        assert saved_steps(tmp_path)[-1] > newest
        newest = saved_steps(tmp_path)[-1]
    settings = make_settings(tmp_path / "in.json", **changes)
    process = start(settings, manifest, tmp_path)
    wait_until(lambda: "resuming" in said(tmp_path), process)
    assert not list(tmp_path.glob("checkpoints/*.tmp")), "what a kill left is cleared away"
    process.kill()


@pytest.mark.slow
def test_a_save_slower_than_collectives_may_be_keeps_nobody_waiting_in_one(manifest, tmp_path):
    """R31: in the middle of a run and at its end."""
    settings = make_settings(tmp_path / "in.json", gpus=2, checkpoint_every_steps=6)
    limits = {"FAULT_SECONDS": 10, "COLLECTIVE_SECONDS": 20}
    process = start(settings, manifest, tmp_path, "slow save", **limits)
    assert process.wait(timeout=300) == 0, said(tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")["checkpoint"]
    assert [r["step"] for r in records] == [6, 12]
    assert all(r["seconds"] > 25 for r in records)
    assert records[0]["training_waited_seconds"] < 5, "training goes on meanwhile"
    assert "imeout" not in said(tmp_path) and "Traceback" not in said(tmp_path), said(tmp_path)
    assert (tmp_path / "done.json").exists()


@pytest.mark.slow
def test_under_torchrun_a_hung_process_ends_the_job_when_a_collective_has_waited_too_long(
    manifest, tmp_path
):
    settings = make_settings(tmp_path / "in.json", gpus=2, max_steps=2000, stall_seconds=5)
    freeze(settings, manifest, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FAULTY)]
    command = train_command(settings, manifest, tmp_path)
    command[1:2] = torchrun
    with (tmp_path / "said.txt").open("w") as said_there:
        limits = {**os.environ, "COLLECTIVE_SECONDS": "15"}  # an hour, where it is not set
        process = subprocess.Popen(command, stdout=said_there, stderr=said_there, env=limits)
    wait_until(lambda: steps_done(tmp_path) >= 6, process)
    children = psutil.Process(process.pid).children()
    (second,) = [child for child in children if child.environ().get("RANK") == "1"]
    second.suspend()
    began = time.monotonic()
    assert process.wait(timeout=120) != 0
    assert time.monotonic() - began > 10, "no sooner, whatever stall_seconds says"
    assert saved_steps(tmp_path)[0] == 4 and "restart" not in read_metrics(
        tmp_path / "metrics.jsonl"
    )
    assert_none_is_left(tmp_path)


def test_the_port_of_a_run_is_nobody_else_s_and_free_for_its_processes():
    with _reserved_port() as holder:
        address = holder.getsockname()
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(address)
        store = torch.distributed.TCPStore(
            *address, 1, is_master=True, timeout=timedelta(seconds=9)
        )
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_signal_that_ends_a_process_is_named():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with Ears() as ears:
        outcome = supervise([sys.executable, "-c", program], 2, 60, ears)
    assert -signal.SIGSEGV in outcome.codes
    assert re.search(r"process [01] was killed by SIGSEGV", outcome.reason())


def outcomes(monkeypatch, folder, *attempts):
    """A run whose attempts end so: (exit codes, steps done, step of a new checkpoint or 0)."""
    folder.mkdir()
    left = list(attempts)

    def start_again(_run, _command, _processes):
        codes, steps, saved = left.pop(0)
        if saved:
            pretend_checkpoint(folder, saved)
        return Outcome(list(codes), steps)

    monkeypatch.setattr(LocalRun, "start", start_again)
    with Ears() as ears:
        _until_complete([], LocalRun({}, folder, 2, "cpu", ears))
    assert not left


def test_a_signal_between_two_attempts_is_answered_as_one_to_the_processes(
    tmp_path, monkeypatch, capsys
):
    def crash_while_somebody_stops_it(run, _command, _processes):
        pretend_checkpoint(tmp_path, 4)
        run.ears.heard = signal.SIGTERM
        return Outcome([-signal.SIGSEGV, 0], 5)

    monkeypatch.setattr(LocalRun, "start", crash_while_somebody_stops_it)
    ears = types.SimpleNamespace(heard=None)
    with pytest.raises(SystemExit, match=f"^{STOPPED}$"):
        _until_complete([], LocalRun({}, tmp_path, 2, "cpu", ears))
    assert "stopped at step 4; the same command goes on from here" in capsys.readouterr().err


def test_a_run_that_dies_again_and_again_without_a_new_checkpoint_is_given_up(
    tmp_path, monkeypatch
):
    dies, lives = (-signal.SIGSEGV, 0), (0, 0)
    without = [(dies, 5, 0)] * 3
    outcomes(monkeypatch, tmp_path / "a", *without, (lives, 5, 0))
    with_one = [*without, (dies, 5, 100), *without[:2], (lives, 5, 0)]
    outcomes(monkeypatch, tmp_path / "b", *with_one)
    assert len(read_metrics(tmp_path / "b/metrics.jsonl")["restart"]) == 6
    with pytest.raises(ValueError, match="by SIGSEGV, after 3 restarts without a new checkpoint"):
        outcomes(monkeypatch, tmp_path / "c", *without, (dies, 5, 0))
    with pytest.raises(ValueError, match="process 1 ended with 70 before its first step"):
        outcomes(monkeypatch, tmp_path / "d", ((0, CRASHED), 0, 0))
    with pytest.raises(SystemExit, match=str(REFUSED)):
        outcomes(monkeypatch, tmp_path / "e", ((0, REFUSED), 5, 0))


def test_a_replay_or_trial_that_is_killed_is_named_and_one_that_refuses_has_said_why(
    manifest, tmp_path, monkeypatch
):
    frozen = freeze(make_settings(tmp_path / "in.json", micro_batch="auto"), manifest, tmp_path)
    run, killed = LocalRun(frozen, tmp_path, 2, "GPU A", Ears()), -signal.SIGKILL
    for begin in (
        lambda: launch_replay(tmp_path, manifest, 3, tmp_path / "replay.json"),
        lambda: _try_micro_batches([], run),
    ):
        monkeypatch.setattr(LocalRun, "start", lambda *_: Outcome([killed, 0], 0))
        with pytest.raises(ValueError, match="0 was killed by SIGKILL; give the same command agai"):
            begin()
        monkeypatch.setattr(LocalRun, "start", lambda *_: Outcome([killed, REFUSED], 0, killed=[0]))
        with pytest.raises(SystemExit, match=f"^{REFUSED}$"):
            begin()


def test_before_its_first_step_a_process_may_be_silent_for_half_an_hour():
    child = types.SimpleNamespace(poll=lambda: None)

    def is_silent(seconds, num_steps, stall_seconds=300):
        beat = time.monotonic() - seconds
        process = types.SimpleNamespace(child=child, last_beat=beat, num_steps=num_steps)
        return supervisor._Process.is_silent(process, stall_seconds)

    assert [is_silent(310, steps) for steps in (0, 1)] == [False, True]
    assert [is_silent(seconds, 0) for seconds in (1790, 1810)] == [False, True]
    assert not is_silent(1810, 0, stall_seconds=3600)


def test_the_process_that_failed_is_named_and_not_the_one_that_waited_for_it():
    program = "import os, time; os.environ['RANK'] == '1' and os._exit(70); time.sleep(60)"
    with Ears() as ears:
        outcome = supervise([sys.executable, "-c", program], 2, 60, ears)
    assert outcome.codes == [-signal.SIGKILL, 70] and outcome.killed == [0]
    assert outcome.reason() == "process 1 ended with 70"


def test_a_process_that_is_told_to_stop_alone_does_not_leave_the_others_waiting(monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 1.0)
    program = "import os, time; os.environ['RANK'] == '1' and os._exit(130); time.sleep(300)"
    with Ears() as ears:
        outcome = supervise([sys.executable, "-c", program], 2, 600, ears)
    assert outcome.codes == [-signal.SIGKILL, STOPPED] and outcome.is_stop


@pytest.mark.parametrize(
    ("code", "grace_seconds", "is_late"), [(CRASHED, 60.0, False), (STOPPED, 1.0, True)]
)
def test_a_save_is_too_slow_only_if_no_process_failed_at_something_else(
    monkeypatch, code, grace_seconds, is_late
):
    def send_to_the_deaf(process, number):
        if number == signal.SIGKILL:
            process.child.kill()

    monkeypatch.setattr(supervisor._Process, "send", send_to_the_deaf)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", grace_seconds)
    monkeypatch.setattr(supervisor, "SECONDS_FOR_THE_OTHERS", 0.2)
    program = f"import os, time; os.environ['RANK'] == '1' and os._exit({code}); time.sleep(300)"
    ears = types.SimpleNamespace(heard=signal.SIGTERM)
    assert supervise([sys.executable, "-c", program], 2, 600, ears).is_late == is_late


def test_a_batch_that_cannot_be_shared_is_refused_before_any_process_starts(
    manifest, tmp_path, monkeypatch
):
    monkeypatch.delattr(LocalRun, "start")
    settings = make_settings(tmp_path / "in.json", gpus=3)
    with pytest.raises(ValueError, match="which 3 processes cannot share equally"):
        launch(settings, manifest, None, tmp_path, tmp_path / "done.json")


def test_a_large_model_is_not_trained_on_a_cpu_because_the_gpus_are_not_seen(manifest, tmp_path):
    shape = {"num_layers": 12, "num_heads": 12, "channels": 768, "total_batch_tokens": 524288}
    result = train_here(make_settings(tmp_path / "in.json", **shape), manifest, tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: no GPU is seen here, and a step of this run is 389 TFLOP" in result.stderr
    recipe = read_json(tmp_path / "in.json")["recipe"]
    launcher._check_work(recipe | {"max_steps": 0})  # it is only measured


def test_gpus_that_the_launcher_sees_and_pytorch_cannot_use_are_an_error(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(launcher, "supervise", lambda *_: seen.append(os.environ[GPUS_SEEN]))
    monkeypatch.setenv(GPUS_SEEN, "")  # so that it is taken back after the test
    LocalRun({"machine": {"stall_seconds": 1}}, tmp_path, 8, "NVIDIA H200", None).start([], 8)
    assert seen == ["NVIDIA H200"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"the driver shows NVIDIA H200, but PyTorch .* cannot"):
        start_world()


def test_ctrl_c_while_modules_load_is_no_traceback(manifest, tmp_path):
    command = train_command(make_settings(tmp_path / "in.json"), manifest, tmp_path)
    for delay in (0.0, 0.2, 0.5, 1.5, 2.5):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda maps=maps: "numpy" in maps.read_text(), process)  # Python itself is up
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[0].decode()
        assert process.returncode != 0 and "Traceback" not in text, text
    assert_none_is_left(tmp_path)
