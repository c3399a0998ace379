import dataclasses
import errno
import gc
import hashlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from stand_ins import (
    FAULTY,
    PROJECT,
    TRAIN_SCRIPT,
    batch_hashes,
    losses,
    make_dataset,
    make_settings,
    train_command,
    train_here,
)

from miniseries.data.shards import load_manifest
from miniseries.metrics import read_json, read_metrics, write_json
from miniseries.model.gpt import GPTConfig, draw_weights
from miniseries.settings import LATER_KEYS
from miniseries.training import (
    checkpoint,
    memory,
    microbatch,
    ranges,
    replay,
    restorer,
    trainer,
)
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights, saved_steps
from miniseries.training.distributed import start_world
from miniseries.training.guards import Diverged
from miniseries.training.launcher import freeze, launch
from miniseries.training.loader import Loader
from miniseries.training.trial import kept_bytes

CONSOLE_LINE = re.compile(  # the one that llm.c's users parse with
    r"^step +(\d+)/(\d+) \| loss ([\d.]+|-?nan|inf) \(([+-][\w.]+)z\)\| norm (\S+) "
    r"\(([+-][\w.]+)z\)\| lr (\S+) \| (\S+) ms \| (\S+)% bf16 MFU \| (\d+) tok/s$"
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(manifest, tmp_path_factory):
    """A run of 12 steps from beginning to end, in one process."""
    folder = tmp_path_factory.mktemp("unbroken")
    result = train_here(make_settings(folder / "in.json"), manifest, folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def load_parameter(folder, name):
    entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[name]
    tensors = {name: torch.empty(entry.size)}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors[name]


def weights_hash(folder, step):
    weights = load_model_weights(checkpoint_folder(folder, step))
    return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in weights.items()}


def test_a_run_writes_all_its_files_and_its_lines_are_llm_cs(unbroken):
    folder, output = unbroken
    settings = read_json(folder / "settings.json")
    done = read_json(folder / "done.json")
    assert (done["step"], done["checkpoint"]) == (12, "checkpoints/step-00000012")
    for name, facts in done["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == tuple(facts.values())
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert [int(CONSOLE_LINE.match(line)[1]) for line in lines] == list(range(1, 13))
    assert "=> setting grad_accum_steps=2" in output
    for key in (
        *settings["recipe"],
        *settings["machine"],
        "device",
        "attention",
        "torch",
        "commit",
    ):
        assert re.search(rf"^\| {key} +\| \S", output, re.MULTILINE), key
    assert "19,968 training tokens and 1,025 validation tokens; the run reads 0.15 epochs" in output
    assert re.search(r"^peak memory \d+ MiB$", output, re.MULTILINE)
    log = (folder / "main.log").read_text().splitlines()
    assert next(line for line in log if line.startswith("s:11 ")).startswith("s:11 trl:")
    assert re.fullmatch(r"s:0 trl:\d+\.\d{4} lr:0\.001000 norm:\d+\.\d\d", log[0])
    assert re.fullmatch(r"s:12 tel:\d+\.\d{4}", log[-1])
    assert saved_steps(folder) == [4, 8, 12]
    state = read_json(checkpoint_folder(folder, 8) / "trainer.json")
    assert (state["step"], state["recipe"]) == (8, LATER_KEYS | settings["recipe"])
    assert re.match(r"step 12\n---\n.+\n---\n$", (folder / "samples.txt").read_text(), re.DOTALL)
    assert (folder / "train.log").read_text().splitlines() == output.splitlines()


def test_padding_rows_stay_zero_and_a_padded_id_is_never_drawn(
    unbroken, manifest, tmp_path, one_world
):
    weights = load_model_weights(checkpoint_folder(unbroken[0], 12))["wte.weight"]
    assert weights.shape == (50304, 16) and weights[50257:].abs().max() == 0
    run = in_this_process(tmp_path, manifest, sample_tokens=30)
    with torch.no_grad():
        run.model.wte.weight.to_local()[50257:] = 100.0  # likelier than all others, if they counted
    text = run.evaluator.draw_text()  # decoding an id from 50,257 on would fail
    assert text and run.evaluator.draw_text() == text


def test_the_loss_falls(unbroken):
    values = [loss for _, loss, _ in losses(unbroken[0])]
    assert values[0] == pytest.approx(math.log(50257), abs=0.15)
    assert values[-1] < values[0] - 0.3


def assert_losses_agree(folder, other, rel):
    """Norms get ten times the room: AdamW turns rounding of near-zero gradients into steps."""
    for ours, expected in zip(losses(folder), losses(other), strict=True):
        assert ours[:2] == pytest.approx(expected[:2], rel=rel)
        assert ours[2] == pytest.approx(expected[2], rel=rel if ours[0] == 0 else 10 * rel)


@pytest.mark.parametrize(("gpus", "micro_batch"), [(1, 8), (1, 1), (2, 2), (2, 4), (4, 1)])
def test_every_split_of_a_batch_gives_the_same_losses_norms_and_weights(
    unbroken, manifest, tmp_path, gpus, micro_batch
):
    settings = make_settings(tmp_path / "in.json", gpus=gpus, micro_batch=micro_batch)
    result = train_here(settings, manifest, tmp_path)
    assert result.returncode == 0, result.stderr
    assert_losses_agree(tmp_path, unbroken[0], rel=1e-5)
    assert batch_hashes(tmp_path) == batch_hashes(unbroken[0])
    ours = load_model_weights(checkpoint_folder(tmp_path, 12))
    for name, expected in load_model_weights(checkpoint_folder(unbroken[0], 12)).items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=2e-4)


def three_steps(rank, port, local_size, settings, manifest, folder):
    """One of four ranks of a run; writes down losses, norms, and its gathered weights as hashes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % local_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    torch.set_num_threads(1)
    run = trainer.Trainer(read_json(settings), load_manifest(manifest), None, folder, start_world())
    hashes = [hash_of(run.model.named_parameters())]
    rms = ranges.activation_ranges(run.model, torch.arange(32)[None])["rms"]["residual"]
    reports = [run.train_step(step) for step in range(3)]
    hashes.append(hash_of(run.model.named_parameters()))
    run.save(3)
    run.wait_for_save()
    losses = [(r.step, r.loss, r.grad_norm) for r in reports]
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    parts = [sum(t.to_local().numel() for t in own) for own in (run.model.parameters(), moments)]
    found = {"hashes": hashes, "losses": losses, "parts": parts, "rms": rms}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def hash_of(weights):
    """Of all weights by name, gathered."""
    whole = [(n, t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in weights]
    content = b"".join(t.detach().float().numpy().tobytes() for _, t in sorted(whole))
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("local_size", "changes"),
    [
        (2, {"num_layers": 6}),  # as on two nodes; more blocks than travel together
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "bf16", "master_weights": False}, marks=pytest.mark.slow),
    ],
)
def test_four_ranks_begin_with_the_weights_of_one_and_gather_and_save_the_same_later(
    manifest, tmp_path, one_world, local_size, changes
):
    settings = make_settings(tmp_path / "in.json", gpus=4, micro_batch=1, **changes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, local_size, settings, manifest, tmp_path)
    torch.multiprocessing.spawn(three_steps, arguments, nprocs=4)
    first, *others = [read_json(tmp_path / f"{rank}.json") for rank in range(4)]
    assert all(other == first for other in others)
    alone = in_this_process(tmp_path / "alone", manifest, **changes)
    assert first["parts"] == [sum(p.numel() for p in alone.model.parameters()) // local_size] * 2
    rms = ranges.activation_ranges(alone.model, torch.arange(32)[None])["rms"]["residual"]
    assert first["rms"] == pytest.approx(rms, rel=1e-5)
    saved = hash_of(load_model_weights(checkpoint_folder(tmp_path, 3)).items())
    assert first["hashes"] == [hash_of(alone.model.named_parameters()), saved]
    for step, (_, *ours) in enumerate(first["losses"]):
        report = alone.train_step(step)
        rel = 1e-2 if "precision" in changes else 1e-4
        assert ours == pytest.approx([report.loss, report.grad_norm], rel=rel)


def kill_at(folder, settings, manifest, step, number):
    """Start the run and send it a signal once `step` steps are in the metrics."""
    command = train_command(settings, manifest, folder)
    command[1] = str(FAULTY)
    slow = {**os.environ, "FAULT": "slow steps", "FAULT_SECONDS": "0.15"}  # or it ends too soon
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=slow, **pipe)
    deadline = time.monotonic() + 300
    while len(read_metrics(folder / "metrics.jsonl").get("train", [])) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[0].decode())
        time.sleep(0.02)
    os.kill(process.pid, number)
    output = process.communicate()[0].decode()
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_and_resumed_is_bitwise_what_an_unbroken_run_is(
    unbroken, manifest, tmp_path, number
):
    settings = make_settings(tmp_path / "in.json")
    code, output = kill_at(tmp_path, settings, manifest, 6, number)
    assert code == (-9 if number == signal.SIGKILL else trainer.STOPPED)
    if number != signal.SIGKILL:
        assert re.search(r"stopped at step (\d+); the same command goes on", output)
    assert not (tmp_path / "done.json").exists()
    newest = saved_steps(tmp_path)[-1]
    result = train_here(settings, manifest, tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"resuming at step {newest} of 12" in result.stdout
    assert losses(tmp_path) == losses(unbroken[0])
    assert batch_hashes(tmp_path) == batch_hashes(unbroken[0])
    assert weights_hash(tmp_path, 12) == weights_hash(unbroken[0], 12)


def test_four_processes_then_two_then_one_then_four_go_on_with_the_same_batches_and_losses(
    unbroken, manifest, tmp_path
):
    for gpus, steps in [(4, 4), (2, 8), (1, 10), (4, 12)]:
        if steps < 12:
            settings = make_settings(tmp_path / "in.json", gpus=gpus, micro_batch=2)
            kill_at(tmp_path, settings, manifest, steps - 2, signal.SIGTERM)
            assert not (tmp_path / "done.json").exists()
        else:
            settings = make_settings(tmp_path / "in.json", gpus=gpus, micro_batch=2)
            assert train_here(settings, manifest, tmp_path).returncode == 0
    starts = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [s["world_size"] for s in starts if s["kind"] == "start"] == [4, 2, 1, 4]
    assert_losses_agree(tmp_path, unbroken[0], rel=1e-4)
    assert batch_hashes(tmp_path) == batch_hashes(unbroken[0])


def test_a_long_run_reads_the_same_batches_however_often_it_is_stopped(manifest, tmp_path):
    many = {"max_steps": 60, "checkpoint_every_steps": 1, "keep_checkpoints": 2}
    settings = make_settings(tmp_path / "in.json", **many)
    for stop in (20, 40):
        kill_at(tmp_path, settings, manifest, stop, signal.SIGTERM)
    assert train_here(settings, manifest, tmp_path).returncode == 0
    hashes = batch_hashes(tmp_path)
    assert len(set(hashes)) == len(hashes) == 60
    loader = Loader(
        load_manifest(manifest).train_shards,
        read_json(settings)["recipe"],
        micro_batch=8,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    )
    for step, ours in enumerate(hashes):
        assert int(ours, 16) == loader.hash_of(0, *loader.micro_batch_at(step, 0)).item() % 2**64


def test_a_batch_that_is_trained_on_again_and_again_is_learnt_by_heart(manifest, tmp_path):
    changes = {"max_steps": 50, "learning_rate": 1e-2, "channels": 64, "warmup_steps": 5}
    changes |= {
        "checkpoint_every_steps": 0,
        "total_batch_tokens": 128,
        "weight_decay": 0.0,
        "lr_schedule": "linear",
    }
    settings = make_settings(tmp_path / "in.json", overfit_batch=True, **changes)
    result = train_here(settings, manifest, tmp_path)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path)[-1][1] < 0.1
    assert len(set(batch_hashes(tmp_path))) == 1
    assert "warning: the run reads its training tokens 50.00 times" in result.stdout
    assert "the training tokens have been read 32.00 times" in result.stdout
    assert read_json(tmp_path / "done.json")["unique_tokens"] == 128


def test_a_second_writer_in_the_same_folder_is_refused(manifest, tmp_path):
    settings = make_settings(tmp_path / "in.json", max_steps=2000)
    first = subprocess.Popen(train_command(settings, manifest, tmp_path), stdout=subprocess.DEVNULL)
    try:
        while not read_metrics(tmp_path / "metrics.jsonl").get("train"):
            assert first.poll() is None
            time.sleep(0.05)
        second = train_here(settings, manifest, tmp_path)
        assert second.returncode == 1
        assert f"process {first.pid} is training this run" in second.stderr
    finally:
        first.kill()
        first.wait()


def in_this_process(folder, manifest, **changes):
    """A trainer that has not begun, for faults that only a test can make."""
    settings = freeze(make_settings(folder / "in.json", **changes), manifest, folder)
    return trainer.Trainer(settings, load_manifest(manifest), None, folder, start_world())


@pytest.fixture
def one_world():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(manifest, tmp_path, one_world, poison):
    run = in_this_process(tmp_path, manifest)
    forward = run.model.forward
    calls = []

    def poisoned(*arguments):
        calls.append(1)
        return forward(*arguments) * (poison if len(calls) == 11 else 1.0)  # step 5, micro-step 0

    run.model.forward = poisoned
    with pytest.raises(ValueError, match=r"step 5: loss (nan|inf), .* stopped before this update"):
        run.run()
    assert saved_steps(tmp_path) == [4]
    assert all(t.isfinite().all() for t in run.model.state_dict().values())


def test_a_checkpoint_with_a_number_that_is_not_finite_is_not_resumed_from(
    manifest, tmp_path, one_world
):
    run = in_this_process(tmp_path, manifest)
    for step in range(4):
        run.train_step(step)
    with torch.no_grad():
        run.model.ln_f.weight.to_local()[3] = math.inf
    run.save(4)
    run.wait_for_save()
    torch.distributed.destroy_process_group()
    with pytest.raises(
        ValueError, match=r"step-00000004: .* numbers that are not finite\. No older"
    ):
        in_this_process(tmp_path, manifest)


def save_after(manifest, folder, *steps, **changes):
    """A run that trained to the last of these steps in this process, with a checkpoint of each."""
    run = in_this_process(folder, manifest, **changes)
    for step in range(steps[-1]):
        run.train_step(step)
        if step + 1 in steps:
            run.save(step + 1)
            run.wait_for_save()
    torch.distributed.destroy_process_group()


def test_a_lone_truncated_checkpoint_is_named_with_a_remedy(manifest, tmp_path, one_world):
    save_after(manifest, tmp_path, 1)
    part = next(checkpoint_folder(tmp_path, 1).glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-00000001: the checkpoint is damaged .* No older"):
        in_this_process(tmp_path, manifest)


def test_a_disk_that_is_out_of_reach_is_no_damage_and_moves_no_checkpoint(
    manifest, tmp_path, one_world, monkeypatch
):
    save_after(manifest, tmp_path, 1, 2)

    def stale(*_arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoint.dcp.FileSystemReader, "read_data", stale)
    with pytest.raises(OSError, match=r"step-00000002: could not be read .* Stale.*same command"):
        in_this_process(tmp_path, manifest)
    assert saved_steps(tmp_path) == [1, 2]


def test_while_all_checkpoints_are_damaged_none_is_put_aside(manifest, tmp_path, one_world):
    save_after(manifest, tmp_path, 1, 2)
    for part in tmp_path.glob("checkpoints/*/*.distcp"):
        part.write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000002: .*damaged.*00000001: .*damaged .* No older"):
        in_this_process(tmp_path, manifest)
    assert saved_steps(tmp_path) == [1, 2]


def test_gradients_do_not_depend_on_a_micro_batch_that_is_no_power_of_two(
    manifest, tmp_path, one_world
):
    norms = []
    for size in (15, 1):
        changes = {"micro_batch": size, "total_batch_tokens": 15 * 32, "precision": "bf16"}
        run = in_this_process(tmp_path / str(size), manifest, **changes)
        norms.append(run.train_step(0).grad_norm)
        torch.distributed.destroy_process_group()
    assert norms[1] == pytest.approx(norms[0], rel=7e-4), "1 / 15 in bf16 is 0.34 % too large"


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(manifest, tmp_path, one_world):
    save_after(manifest, tmp_path, 1, 2)
    for step in (1, 2):
        shutil.rmtree(checkpoint_folder(tmp_path, step))
    with pytest.raises(ValueError, match=r"checkpoints: the checkpoints of this run are gone"):
        in_this_process(tmp_path, manifest)


def test_what_rounds_otherwise_than_before_is_said_in_one_line_each(manifest, tmp_path, one_world):
    save_after(manifest, tmp_path, 1)
    assert in_this_process(tmp_path, manifest).notes == []
    torch.distributed.destroy_process_group()
    run = in_this_process(tmp_path, manifest, recompute=2, deterministic=True, micro_batch=2)
    changed = [
        re.match(r"the checkpoint was made with (\w+) .*: the same batches", n) for n in run.notes
    ]
    assert [match[1] for match in changed][:3] == ["micro_batch", "recompute", "deterministic"]
    state = read_json(checkpoint_folder(tmp_path, 1) / "trainer.json")
    assert (state["recompute"], state["torch"]) == (0, torch.__version__)


def test_a_checkpoint_of_other_tokens_is_refused(manifest, tmp_path, one_world):
    save_after(manifest, tmp_path, 1)
    run = in_this_process(tmp_path, manifest)
    run.restorer.settings = run.settings | {"data_fingerprint": "0" * 64}
    with pytest.raises(ValueError, match=r"step 1 was trained on other tokens .* -> 0{12}\)"):
        run.restorer.begin(run.micro_batch, [])


def test_a_return_to_a_damaged_checkpoint_takes_the_one_before_and_loses_none(
    manifest, tmp_path, one_world
):
    save_after(manifest, tmp_path, 2, 4, 6, rollback_skip_steps=1)
    run = in_this_process(tmp_path, manifest, rollback_skip_steps=1)
    parts = {s: next(checkpoint_folder(tmp_path, s).glob("*.distcp")) for s in (2, 4)}
    sound = {step: part.read_bytes() for step, part in parts.items()}
    for part in parts.values():
        part.write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000004: .*damaged.*00000002: .*damaged .* No older"):
        run.restorer.go_back(6, Diverged("made", 4), run.journal)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006.diverged"]
    parts[2].write_bytes(sound[2])
    torch.distributed.destroy_process_group()
    run = in_this_process(tmp_path, manifest, rollback_skip_steps=1)
    assert (run.first_step, run.rollbacks.batch_of(3), run.rollbacks.batch_of(4)) == (2, 3, 8)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004.damaged"]


def test_while_the_loss_is_high_the_checkpoint_before_that_stays(manifest, tmp_path, one_world):
    run = in_this_process(tmp_path, manifest, keep_checkpoints=1)
    for since, kept in ((None, [1]), (1, [1, 2]), (1, [1, 3]), (None, [4])):
        run.guards.divergence.since = since
        run.save(max(saved_steps(tmp_path), default=0) + 1)
        run.wait_for_save()
        assert saved_steps(tmp_path) == kept


def test_a_run_that_only_lacks_its_mark_of_completion_needs_no_room(
    manifest, tmp_path, one_world, monkeypatch
):
    save_after(manifest, tmp_path, 2, max_steps=2, warmup_steps=1)
    full = checkpoint.shutil.disk_usage(tmp_path)._replace(free=9)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _path: full)
    assert in_this_process(tmp_path, manifest, max_steps=2, warmup_steps=1).first_step == 2


def test_a_signal_after_a_rollback_behind_the_first_step_tears_no_step(
    manifest, tmp_path, one_world, monkeypatch
):
    save_after(manifest, tmp_path, 4, 7, rollback_skip_steps=1)
    run = in_this_process(tmp_path, manifest, rollback_skip_steps=1)
    train_step, update, faults = run.train_step, run.optimizer.step, [Diverged("made", 6)]

    def diverging(step, **more):
        if step == 7 and faults:
            raise faults.pop()
        return train_step(step, **more)

    def stopped_in_step_7():
        update()
        if run.steps_done == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "train_step", diverging)
    monkeypatch.setattr(run.optimizer, "step", stopped_in_step_7)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.run()
    signal.signal(signal.SIGTERM, handler)
    newest = checkpoint_folder(tmp_path, saved_steps(tmp_path)[-1])
    state = read_json(newest / "trainer.json")
    assert state["step"] == state["adam_step"] == 8


def test_a_kill_while_a_run_goes_back_does_not_undo_the_decision(
    manifest, tmp_path, one_world, monkeypatch
):
    save_after(manifest, tmp_path, 4, rollback_skip_steps=1)
    run = in_this_process(tmp_path, manifest, rollback_skip_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_checkpoint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.restorer.go_back(6, Diverged("made", 4), run.journal)
    torch.distributed.destroy_process_group()
    run = in_this_process(tmp_path, manifest, rollback_skip_steps=1)
    assert (run.first_step, run.rollbacks.batch_of(4)) == (4, 4 + run.rollbacks.batches_skipped)
    assert run.rollbacks.batches_skipped > 0
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")["rollback"]] == [4]


@pytest.mark.parametrize("damage", ["short part", "no index", "not finite", "one bit", "no state"])
def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_is_taken(
    unbroken, manifest, tmp_path, damage
):
    settings = make_settings(tmp_path / "in.json")
    shutil.copytree(unbroken[0] / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(checkpoint_folder(tmp_path, 12))
    newest = checkpoint_folder(tmp_path, 8)
    if damage == "short part":
        part = next(newest.glob("*.distcp"))
        part.write_bytes(part.read_bytes()[:1000])
    elif damage == "no index":
        (newest / ".metadata").unlink()
    elif damage == "no state":
        (newest / "trainer.json").write_text('{"step": 8}')
    else:
        moment = load_parameter(newest, "exp_avg.ln_f.weight").numpy().tobytes()
        (part,) = (path for path in newest.glob("*.distcp") if moment in path.read_bytes())
        content = part.read_bytes()
        spoilt = bytes([moment[0] ^ 1]) + moment[1:]
        if damage == "not finite":  # in a checkpoint made before there were sums
            (newest / "checksums.json").unlink()
            spoilt = np.float32(np.inf).tobytes() + moment[4:]
        part.write_bytes(content.replace(moment, spoilt))
    result = train_here(settings, manifest, tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"step-00000008.*: .*; it is put aside, and an older one", result.stdout)
    assert "resuming at step 4 of 12" in result.stdout
    assert newest.with_name("step-00000008.damaged").exists()
    assert losses(tmp_path)[-1] == losses(unbroken[0])[-1]
    assert weights_hash(tmp_path, 12) == weights_hash(unbroken[0], 12)


def test_one_bit_of_a_weight_that_flipped_is_seen_by_an_export_of_any_step(unbroken, tmp_path):
    folder = shutil.copytree(checkpoint_folder(unbroken[0], 8), tmp_path / "step-00000008")
    assert load_model_weights(folder)
    weight = load_parameter(folder, "model.h.1.mlp.c_fc.weight").numpy().tobytes()
    (part,) = (path for path in folder.glob("*.distcp") if weight in path.read_bytes())
    flipped = weight[:100] + bytes([weight[100] ^ 4]) + weight[101:]
    part.write_bytes(part.read_bytes().replace(weight, flipped))
    with pytest.raises(
        ValueError, match=r"step-00000008: .*h\.1\.mlp\.c_fc\.weight is not what was"
    ):
        load_model_weights(folder)
    part.write_bytes(part.read_bytes().replace(flipped, weight))
    assert load_model_weights(folder)
    state, sums = folder / "trainer.json", folder / "checksums.json"
    sound = state.read_text()
    state.write_text(sound.replace('"adam_step": 8', '"adam_step": 9'))
    with pytest.raises(ValueError, match=r"008: .*trainer\.json is not what was saved"):
        load_model_weights(folder)
    sums.unlink()  # as in a checkpoint made before there were any
    assert load_model_weights(folder)
    sums.write_text('{"tensors": ')
    with pytest.raises(ValueError, match=r"008: .*checksums\.json is not what was saved"):
        load_model_weights(folder)


def test_other_settings_under_the_same_name_are_refused_and_nothing_is_lost(unbroken, manifest):
    folder, _ = unbroken
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    settings = make_settings(folder / "other.json", learning_rate=1e-3)
    with pytest.raises(ValueError, match="learning_rate"):
        freeze(settings, manifest, folder)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_checkpoint_of_other_settings_is_refused(unbroken, manifest, tmp_path, one_world):
    source = checkpoint_folder(unbroken[0], 8)
    shutil.copytree(source, checkpoint_folder(tmp_path, 8))
    with pytest.raises(ValueError, match="checkpoint of step 8 belongs to other settings than"):
        in_this_process(tmp_path, manifest, learning_rate=1e-3)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(28, "No space left on device"), "make room and give the same command again"),
        (OSError(5, "Input/output error"), "intact; give the same command again"),
    ],
)
def test_a_failed_save_leaves_no_part_and_keeps_the_older_checkpoint(
    manifest, tmp_path, one_world, monkeypatch, error, remedy
):
    run = in_this_process(tmp_path, manifest)
    run.train_step(0)
    run.save(1)
    run.wait_for_save()

    def failing(*_arguments, **_more):
        raise error

    monkeypatch.setattr(checkpoint.dcp, "save", failing)
    with pytest.raises(
        OSError, match=f"step-00000002: the checkpoint could not be written.*{remedy}"
    ):
        run.save(2)
        run.wait_for_save()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_checkpoint_s_size_is_known_before_its_first_step(manifest, tmp_path, one_world):
    for number, changes in enumerate(({}, {"precision": "bf16", "master_weights": False})):
        run = in_this_process(tmp_path / str(number), manifest, **changes)
        run.save(1)
        run.wait_for_save()
        tensors = checkpoint.state_tensors(run.model, run.optimizer)
        torch.distributed.destroy_process_group()
        files = checkpoint_folder(run.folder, 1).glob("*.distcp")
        written = sum(file.stat().st_size for file in files)
        counted = run.num_elements * (10 if changes else 12)
        assert counted <= written < 1.05 * counted
        few = checkpoint.shutil.disk_usage(tmp_path)._replace(free=counted - 1)
        with pytest.MonkeyPatch.context() as patch:
            asked = []
            patch.setattr(
                checkpoint.shutil, "disk_usage", lambda p, f=few, a=asked: a.append(p) or f
            )
            with pytest.raises(OSError, match=f"a checkpoint takes {counted:,} bytes"):
                checkpoint.check_space(tmp_path, tensors, held=3)
            assert asked == [tmp_path / "checkpoints"], "which may lie on a disk of its own"
            enough = few._replace(free=3 * counted)
            patch.setattr(checkpoint.shutil, "disk_usage", lambda _path, enough=enough: enough)
            assert checkpoint.check_space(tmp_path / "none", tensors, held=3) == []
            (warning,) = checkpoint.check_space(tmp_path / "none", tensors, held=4)
            assert f"4 checkpoints will take {4 * counted:,} bytes, and {3 * counted:,}" in warning
            assert checkpoint.check_space(run.folder, tensors, held=4) == []  # one is there


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"precision": "bf16", "master_weights": False}]
)
def test_what_the_trial_counts_is_what_a_run_keeps(manifest, tmp_path, one_world, changes):
    run = in_this_process(tmp_path, manifest, **changes)
    kept = memory.buffers(run.model, run.optimizer, run.recipe["precision"])
    shared_out = sum(mib or 0 for name, mib in kept.items() if name != "parameters")
    plain = 4 if not changes else 2  # bytes of a gradient in the trial's model
    expected = shared_out * memory.MEBIBYTE / run.num_elements + 4 - plain
    assert kept_bytes(run.recipe, 1) == pytest.approx(expected)
    assert kept_bytes(run.recipe, 4) == pytest.approx((expected - 4 + plain) / 4 + 4 - plain)


def test_the_weights_that_are_computed_with_are_a_copy_even_in_fp32_on_one_process(
    manifest, tmp_path, one_world
):
    run = in_this_process(tmp_path, manifest)
    own = run.model.ln_f.weight.to_local().data_ptr()
    used = []
    run.model.h[1].register_forward_hook(lambda *_: used.append(run.model.ln_f.weight))
    run.train_step(0)
    assert used and all(type(weight) is torch.nn.Parameter for weight in used)
    assert own not in [weight.data_ptr() for weight in used]


def test_too_little_space_for_one_checkpoint_is_refused_before_the_first_step(
    manifest, tmp_path, one_world, monkeypatch
):
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(OSError, match=r"a checkpoint takes [\d,]+ bytes, but only 1,000 are free"):
        in_this_process(tmp_path, manifest)


def test_a_folder_that_no_checkpoint_can_be_written_to_is_refused_before_the_first_step(
    manifest, tmp_path, one_world, monkeypatch
):
    # permissions do not bind root, whom tests may run as
    monkeypatch.setattr(checkpoint.os, "access", lambda path, _mode: path.name != "saved")
    with pytest.raises(OSError, match="saved: may not be written to"):
        in_this_process(tmp_path, manifest)


def test_old_checkpoints_go_but_majors_exports_and_pinned_ones_stay(manifest, tmp_path, one_world):
    changes = {"checkpoint_every_steps": 1, "keep_checkpoints": 2, "keep_every_steps": 5}
    run = in_this_process(tmp_path, manifest, export_steps=[3], **changes)
    for step in range(8):
        run.train_step(step)
        run.save(step + 1)
        run.wait_for_save()
        if step == 3:
            (checkpoint_folder(tmp_path, 4) / "pinned").touch()
    assert saved_steps(tmp_path) == [3, 4, 5, 7, 8]
    assert sorted(int(p.stem) for p in (tmp_path / "saved").iterdir()) == [3, 4, 5, 7, 8]


@pytest.mark.parametrize("what", ["loss", "grad"])
def test_an_outlier_is_skipped_counted_and_leaves_the_weights_alone(
    manifest, tmp_path, one_world, capsys, what
):
    run = in_this_process(tmp_path, manifest, **{f"skip_{what}_z": 5.0})
    detectors = {"loss": run.guards.loss_detector, "grad": run.guards.norm_detector}
    usual = run.train_step(0)
    middle = usual.loss if what == "loss" else usual.grad_norm
    detectors[what].load_state_dict([middle + 0.01 * (i % 2) for i in range(128)])
    before = run.model.ln_f.weight.to_local().clone()
    forward = run.model.forward
    run.model.forward = lambda *arguments: forward(*arguments) * 50
    report = run.train_step(1)
    run.journal.step(report)
    assert report.skipped and {"loss": report.loss_z, "grad": report.grad_z}[what] > 5
    assert torch.equal(run.model.ln_f.weight.to_local(), before)
    assert f"skipping update due to {what} z-score of" in capsys.readouterr().out
    assert read_metrics(tmp_path / "metrics.jsonl")["train"][0]["skipped"] is True


def test_garbage_is_collected_again_after_the_first_step(manifest, tmp_path, one_world):
    run = in_this_process(tmp_path, manifest)
    gc.disable()
    try:
        run.train_step(0)
        assert not gc.isenabled()
        run.train_step(1)
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_a_new_run_draws_its_weights_ahead_and_one_that_goes_on_not_at_all(
    manifest, tmp_path, one_world, monkeypatch
):
    drawn = []

    def watched(config, seed, processes):
        drawn.append(processes)
        return restorer.draw_ahead(config, seed, processes)

    monkeypatch.setattr(trainer, "draw_ahead", watched)
    first = in_this_process(tmp_path, manifest)
    for name, values in draw_weights(first.model.config, first.recipe["seed"]):
        assert torch.equal(first.model.get_parameter(name).full_tensor(), values), name
    first.train_step(0)
    first.save(1)
    first.wait_for_save()
    torch.distributed.destroy_process_group()
    in_this_process(tmp_path, manifest)
    assert drawn == [1]


def test_weights_are_drawn_no_further_ahead_than_memory_allows(monkeypatch):
    config, made = GPTConfig(8, 2, 32, 16, 211, 256), []

    def watched(*arguments):
        for entry in draw_weights(*arguments):
            made.append(entry)
            yield entry

    monkeypatch.setattr(restorer, "draw_weights", watched)
    monkeypatch.setattr(restorer, "AHEAD_BYTES", 2 * 3 * 4 * 4 * 32**2)  # three matrices for each
    ahead = restorer.draw_ahead(config, 5, processes=2)
    deadline = time.monotonic() + 60
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    assert len(made) == 4  # three, and one that waits for its place
    found, expected = list(ahead), list(draw_weights(config, 5))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_a_refusal_while_weights_are_drawn_is_one_and_comes_at_once():
    code = (
        "from miniseries.model.gpt import GPTConfig\n"
        "from miniseries.training.restorer import draw_ahead\n"
        "drawn = draw_ahead(GPTConfig(48, 25, 1600, 1024), 1, 8)\n"
        "next(iter(drawn))\n"
        "raise SystemExit(7)"
    )
    scripts = {**os.environ, "PYTHONPATH": str(PROJECT / "workflow/scripts")}
    pipe = {"capture_output": True, "text": True}
    result = subprocess.run([sys.executable, "-c", code], env=scripts, timeout=120, **pipe)
    assert (result.returncode, result.stderr) == (7, "")


def test_what_another_process_read_wrongly_stops_all_of_them(
    manifest, tmp_path, one_world, monkeypatch
):
    run = in_this_process(tmp_path, manifest)
    run.train_step(0)
    run.save(1)
    run.wait_for_save()
    all_reduce = torch.distributed.all_reduce

    def with_another(tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        all_reduce(tensor, op, group)
        if op == torch.distributed.ReduceOp.MIN and tensor.shape == (2,):
            tensor[1] = 0.0

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another)
    with pytest.raises(ValueError, match=r"step-00000001: .*another process read is not what was"):
        checkpoint.load_checkpoint(checkpoint_folder(tmp_path, 1), run.model, run.optimizer)


def test_memory_that_is_missing_while_weights_are_drawn_is_an_error_and_no_hang(monkeypatch):
    def broken(*_arguments):
        yield "wte.weight", torch.zeros(2, 2)
        raise MemoryError("no room")

    monkeypatch.setattr(restorer, "draw_weights", broken)
    with pytest.raises(MemoryError, match="no room"):
        list(restorer.draw_ahead(GPTConfig(1, 2, 32, 16), 5, processes=1))


def test_step_times_add_up_to_what_the_clock_says(manifest, tmp_path, one_world):
    run = in_this_process(tmp_path, manifest)
    run.train_step(0)
    shares = []
    for first in (1, 12, 23):  # another process may get the core between two steps, not always
        began = time.perf_counter()
        steps = [run.train_step(step).seconds for step in range(first, first + 11)]
        shares.append(sum(steps) / (time.perf_counter() - began))
    assert 0.98 < max(shares) < 1


def test_utilisation_is_of_the_peak_of_all_gpus_and_counts_attention(
    manifest, tmp_path, one_world, monkeypatch
):
    run = in_this_process(tmp_path, manifest)
    monkeypatch.setattr(trainer, "peak_tflops", lambda _device: 100.0)
    run.world = dataclasses.replace(run.world, size=8)
    journal = run._make_journal()
    assert journal.peak_flops == 8 * 100e12
    assert journal.flops_per_token == 6 * run.num_elements + 6 * 2 * 16 * 32  # layers, channels, T


def test_positions_that_no_text_reaches_are_named(manifest, tmp_path, one_world, capsys):
    in_this_process(tmp_path, manifest, num_positions=48)._announce()
    assert "warning: positions 32 to 47 are not trained" in capsys.readouterr().out


def test_deterministic_allows_repeatable_operations_alone(manifest, tmp_path, one_world):
    run = in_this_process(tmp_path, manifest, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert "deterministic" in run.model.formulas.attention_name
        assert run.train_step(0).loss == pytest.approx(math.log(50257), abs=0.15)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key", ["init_from", "branch_from"])
def test_a_run_that_starts_from_another_does_not_begin_with_random_weights(
    manifest, tmp_path, one_world, key
):
    settings = freeze(make_settings(tmp_path / "in.json"), manifest, tmp_path)
    settings["recipe"][key] = "trunk@4"
    with pytest.raises(ValueError, match="starts from trunk@4: name the file by `--init-from`"):
        trainer.Trainer(settings, load_manifest(manifest), None, tmp_path, start_world())


def test_no_sample_is_written_of_no_tokens(manifest, tmp_path, one_world):
    run = in_this_process(tmp_path, manifest, max_steps=3, sample_every_steps=1, sample_tokens=0)
    run.run()
    assert not (tmp_path / "samples.txt").exists()


def test_branches_of_one_trunk_are_the_runs_that_train_every_step_themselves(
    manifest, tmp_path, one_world
):
    wsd = {"lr_schedule": "wsd", "checkpoint_every_steps": 0, "skip_loss_z": 5.0}

    def train(name, marker=None, **changes):
        folder = tmp_path / name
        settings = make_settings(folder / "in.json", **(wsd | changes))
        settings = freeze(settings, manifest, folder, marker)
        run = trainer.Trainer(settings, load_manifest(manifest), None, folder, start_world())
        run.run()
        run.finish(folder / "done.json", 0.0)
        torch.distributed.destroy_process_group()
        return folder

    trunk = train("trunk", max_steps=20, export_steps=[4, 8])
    state = checkpoint_folder(trunk, 8) / "trainer.json"
    write_json(state, read_json(state) | {"wall_seconds": 1e6})
    state.with_name("checksums.json").unlink()  # which would not hold any more
    for last, step in [(5, 4), (10, 8)]:
        whole = train(f"whole-{last}", max_steps=last)
        branch = {"max_steps": last, "branch_from": f"trunk@{step}"}
        ours = train(f"branch-{last}", trunk / "saved" / f"{step}.json", **branch)
        assert losses(ours) == losses(whole)[step:]
        assert weights_hash(ours, last) == weights_hash(whole, last)
        done = read_json(ours / "done.json")
        assert done["trained_tokens"] == (last - step) * 256
        assert done["tokens_seen"] == last * 256 and done["wall_seconds"] < 1e5
        records = read_metrics(ours / "metrics.jsonl")
        assert records["start"][0]["branch_from"] == f"trunk@{step}"


PRECISIONS = [{"precision": "fp16"}, {"precision": "bf16", "master_weights": False}]


@pytest.mark.parametrize("changes", PRECISIONS)
def test_other_precisions_learn_as_fp32_does_and_resume_bit_by_bit(
    unbroken, manifest, tmp_path, one_world, changes
):
    def run_steps(folder, first, last):
        run = in_this_process(folder, manifest, **changes)
        assert run.first_step == first == len(run.guards.loss_detector.window)
        assert (run.wall_seconds_before > 0) == (first > 0)
        reports = [run.train_step(step) for step in range(first, last)]
        run.save(last)
        run.wait_for_save()
        torch.distributed.destroy_process_group()
        return reports

    whole = run_steps(tmp_path / "whole", 0, 12)
    for report, (_, loss, _) in zip(whole, losses(unbroken[0]), strict=True):
        assert report.loss == pytest.approx(loss, abs=2e-2)
    parts = run_steps(tmp_path / "parts", 0, 5) + run_steps(tmp_path / "parts", 5, 12)
    assert [(r.loss, r.grad_norm) for r in parts] == [(r.loss, r.grad_norm) for r in whole]
    assert weights_hash(tmp_path / "parts", 12) == weights_hash(tmp_path / "whole", 12)
    kept = load_model_weights(checkpoint_folder(tmp_path / "whole", 12))
    assert {t.dtype for t in kept.values()} == {torch.float32}


def test_a_gradient_too_large_for_fp16_is_skipped_said_and_halves_the_scale(
    manifest, tmp_path, one_world, capsys
):
    run = in_this_process(tmp_path, manifest, precision="fp16")
    run.guards.loss_scale.value = 2.0**32
    before = run.model.ln_f.weight.to_local().clone()
    report = run.train_step(0)
    assert report.skipped and not math.isfinite(report.grad_norm) and math.isfinite(report.loss)
    assert torch.equal(run.model.ln_f.weight.to_local(), before)
    assert run.guards.loss_scale.value == 2.0**31
    run.journal.step(report)
    said = capsys.readouterr().out
    assert "skipping update due to overflow with loss scale 4.29497e+09" in said
    assert CONSOLE_LINE.match(next(line for line in said.splitlines() if line.startswith("step")))
    record = read_metrics(tmp_path / "metrics.jsonl")["train"][0]
    assert (record["skipped"], record["grad_norm"]) == (True, None)
    run.guards.loss_scale.value = 1024.0
    assert not run.train_step(1).skipped


def test_processes_that_cannot_share_a_batch_equally_are_refused(manifest, tmp_path):
    settings = make_settings(tmp_path / "in.json", gpus=3)
    result = train_here(settings, manifest, tmp_path)
    assert result.returncode == 1
    assert "which 3 processes cannot share equally; set machine.gpus" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def test_under_torchrun_settings_that_were_put_there_by_hand_last_to_the_end(manifest, tmp_path):
    settings = make_settings(tmp_path / "settings.json", max_steps=3)
    command = train_command(settings, manifest, tmp_path)
    command[1:1] = ["-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    done, fingerprint = read_json(tmp_path / "done.json"), load_manifest(manifest).fingerprint
    assert done["data_fingerprint"] == fingerprint


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"val_tokens": 20}, "validation needs 33 tokens"),
        ({"train_tokens": 60}, "no training shard holds 33 tokens"),
    ],
)
def test_too_short_shards_are_refused_while_the_recipe_may_still_change(
    tmp_path, one_world, sizes, message
):
    short, folder = make_dataset(tmp_path / "data", **sizes), tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        in_this_process(folder, short)
    torch.distributed.destroy_process_group()
    assert in_this_process(folder, short, sequence_length=16).first_step == 0


def test_a_damaged_shard_ends_the_run_before_its_first_step(manifest, tmp_path):
    copy = make_dataset(tmp_path / "data")
    shard = sorted(copy.parent.glob("*train*.bin"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=shard.name):
        launch(make_settings(tmp_path / "in.json"), copy, None, tmp_path / "run", tmp_path / "done")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_metrics_hold_every_number_with_its_unit(unbroken):
    records = [json.loads(line) for line in (unbroken[0] / "metrics.jsonl").open()]
    train = next(r for r in records if r["kind"] == "train")
    assert {"tokens_seen", "train_loss_nats", "step_time_ms", "tokens_per_second"} <= set(train)
    assert train["tokens_seen"] == 256
    assert records[0]["kind"] == "start"
    assert records[-1]["kind"] == "done"
    val = next(r for r in records if r["kind"] == "val")
    assert (val["step"], val["tokens_seen"], val["num_tokens"]) == (12, 12 * 256, 1024)


def test_a_replay_takes_the_micro_batch_of_the_checkpoint_or_else_what_was_tried(
    manifest, tmp_path, one_world
):
    folder = tmp_path / "run"
    folder.mkdir()
    frozen = freeze(make_settings(tmp_path / "in.json", micro_batch="auto"), manifest, folder)
    microbatch.remember(folder, frozen, 1, "cpu", 2, "the largest that fits")
    world = start_world()
    for number, (made_with, expected) in enumerate(((None, 2), ("unknown", 2), (4, 4))):
        if made_with is not None:
            checkpoint_folder(folder, 3).mkdir(parents=True, exist_ok=True)
            state = checkpoint_folder(folder, 3) / "trainer.json"
            write_json(state, {"micro_batch": made_with})
        settings = read_json(folder / "settings.json")
        (tmp_path / str(number)).mkdir()
        replay._look_alike(folder, tmp_path / str(number), settings, 5, world)
        assert settings["machine"]["micro_batch"] == expected


def test_what_was_found_for_another_batch_never_leaves_out_a_part_of_one(
    manifest, tmp_path, one_world
):
    changes = {"micro_batch": "auto", "total_batch_tokens": 384}
    frozen = freeze(make_settings(tmp_path / "in.json", **changes), manifest, tmp_path)
    microbatch.remember(tmp_path, frozen, 1, "cpu", 8, "the largest that fits")
    record = read_json(tmp_path / microbatch.RECORD)
    del record["circumstances"]["fingerprint"]  # as before it came
    write_json(tmp_path / microbatch.RECORD, record)
    with pytest.raises(ValueError, match=r"batch\.json: micro_batch 8 does not divide the 12 seq"):
        in_this_process(tmp_path, manifest, **changes)


def test_steps_that_are_kept_are_named_beside_damaged_ones(tmp_path):
    for name in ("step-00000008", "step-00000012.damaged", "step-00000004"):
        write_json(tmp_path / "checkpoints" / name / "trainer.json", {})
    command = [sys.executable, str(TRAIN_SCRIPT.with_name("find_checkpoint.py")), "--run", "x"]
    command += ["--folder", str(tmp_path), "--step", "5", "--marker", str(tmp_path / "5.json")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "it keeps: 4, 8." in result.stderr
