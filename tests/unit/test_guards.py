"""Divergence and the way back, ranges of weights and activations, a step done twice."""

import json
import math
import subprocess
import sys

import pytest
import torch
from real_project import wait_until
from stand_ins import (
    PROJECT,
    losses,
    make_dataset,
    make_questions,
    make_settings,
    train_here,
)

from miniseries.data.shards import load_manifest
from miniseries.metrics import read_json, read_metrics, write_json
from miniseries.settings import LATER_MACHINE_KEYS
from miniseries.training import guards, ranges, trainer
from miniseries.training.checkpoint import checkpoint_folder, saved_steps, state_tensors
from miniseries.training.distributed import start_world
from miniseries.training.guards import DIVERGED_STEPS, Diverged, DivergenceDetector, Rollbacks
from miniseries.training.launcher import freeze


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(manifest):
    """Makes trainers in this process."""

    def make(folder, questions=None, **changes):
        settings = freeze(make_settings(folder / "in.json", **changes), manifest, folder)
        data = load_manifest(manifest)
        return trainer.Trainer(settings, data, questions, folder, start_world())

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def lead_astray(run, batches, poison=math.nan):
    """Multiply the loss of these global batches; gives the batches in the order they were read."""
    read, forward, fetch = [], run.model.forward, run.loader.micro_batch_at

    def noting(batch, micro_step):
        if micro_step == 0 and torch.is_grad_enabled():
            read.append(batch)
        return fetch(batch, micro_step)

    def poisoned(*arguments, **more):
        is_bad = read and read[-1] in batches and torch.is_grad_enabled()
        return forward(*arguments, **more) * (poison if is_bad else 1.0)

    run.loader.micro_batch_at, run.model.forward = noting, poisoned
    return read


def test_a_divergence_is_gone_back_from_and_its_batches_are_skipped(manifest, tmp_path, start):
    run = start(tmp_path, rollback_skip_steps=2, keep_checkpoints=2, ranges_every_steps=0)
    read = lead_astray(run, {9})
    run.run()
    # batch 9 was read at step 9; back to step 8, whose next batches, 8 to 11, are never used
    assert read == [*range(10), 12, 13, 14, 15]
    (event,) = read_metrics(tmp_path / "metrics.jsonl")["rollback"]
    assert (event["found_at"], event["back_to"], event["batches_skipped"]) == (9, 8, 4)
    assert saved_steps(tmp_path) == [4, 8, 12], "pinned ones stay although two are to be kept"
    assert all((checkpoint_folder(tmp_path, step) / "pinned").exists() for step in (4, 8))
    assert [step for step, _, _ in losses(tmp_path)] == list(range(12))
    records = read_metrics(tmp_path / "metrics.jsonl")["train"]
    per_epoch = run.loader.tokens_per_epoch / run.tokens_per_step
    expected = [(batch + 1) / per_epoch for batch in [*range(8), 12, 13, 14, 15]]
    assert [r["epoch"] for r in records] == pytest.approx(expected, abs=1e-4)
    assert records[-1]["tokens_seen"] == 12 * run.tokens_per_step
    assert all(math.isfinite(value) for record in losses(tmp_path) for value in record)


def test_what_was_skipped_stays_skipped_after_a_kill(tmp_path):
    rollbacks = Rollbacks(tmp_path)
    rollbacks.note(rollbacks.plan(found_at=9, back_to=8, more=2), write=True)
    rollbacks.note(rollbacks.plan(found_at=20, back_to=16, more=10), write=True)
    again = Rollbacks(tmp_path)
    assert [again.batch_of(step) for step in (7, 8, 15, 16)] == [7, 12, 19, 35]


def test_going_back_behind_an_older_return_skips_all_that_was_read(tmp_path):
    rollbacks = Rollbacks(tmp_path)
    rollbacks.note(rollbacks.plan(found_at=9, back_to=8, more=2), write=False)
    last_read = rollbacks.batch_of(10)
    rollbacks.note(rollbacks.plan(found_at=10, back_to=4, more=0), write=False)
    assert [rollbacks.batch_of(step) for step in (3, 4, 5)] == [3, last_read + 1, last_read + 2]
    assert rollbacks.batch_of(8) > rollbacks.batch_of(7)


def test_no_batch_is_left_out_twice_nor_read_again_when_it_goes_back_behind_a_return(tmp_path):
    rollbacks = Rollbacks(tmp_path)
    rollbacks.note(rollbacks.plan(found_at=110, back_to=100, more=4), write=True)  # 100 to 114
    second = rollbacks.plan(found_at=95, back_to=90, more=4)  # 90 to 99
    rollbacks.note(second, write=True)
    again = Rollbacks(tmp_path)
    assert [again.batch_of(step) for step in (89, 90, 91)] == [89, 115, 116]
    assert (second.batches_skipped, again.batches_skipped) == (10, 25)
    covered = Rollbacks(tmp_path / "none")
    for found_at, back_to, more in ((110, 100, 4), (103, 90, 0)):  # 118 is what step 103 read
        covered.note(covered.plan(found_at, back_to, more), write=False)
    assert (covered.batch_of(90), covered.batches_skipped) == (119, 29)


def test_returns_noted_by_an_older_version_hold(tmp_path):
    older = [{"found_at": 9, "back_to": 8, "batches_skipped": 4}]
    older += [{"found_at": 20, "back_to": 16, "batches_skipped": 15}]
    write_json(tmp_path / guards.RECORD, older)
    assert [Rollbacks(tmp_path).batch_of(step) for step in (7, 8, 15, 16)] == [7, 12, 19, 35]


def test_a_branch_reads_on_where_its_trunk_would_have(manifest, tmp_path, start):
    trunk = start(tmp_path / "trunk", rollback_skip_steps=2, lr_schedule="constant")
    read = lead_astray(trunk, {5, 13})  # found at the steps 5 and 9: back to 4 and to 8
    trunk.run()
    torch.distributed.destroy_process_group()
    assert read == [*range(6), *range(8, 14), 16, 17, 18, 19]
    folder = tmp_path / "branch"
    changes = {"branch_from": "trunk@4", "max_steps": 7, "rollback_skip_steps": 2}
    settings = make_settings(folder / "in.json", lr_schedule="constant", **changes)
    for _ in range(2):  # begun, and begun again before there is a checkpoint
        frozen = freeze(settings, manifest, folder, tmp_path / "trunk/saved/4.json")
        branch = trainer.Trainer(frozen, load_manifest(manifest), None, folder, start_world())
        read = lead_astray(branch, {})
        branch.train_step(4)
        torch.distributed.destroy_process_group()
    assert read == [8]


@pytest.mark.parametrize("text", ["", "{", '[{"found_at": 9}]', "[1]"])
def test_a_damaged_record_of_what_was_skipped_is_never_ignored(tmp_path, text):
    (tmp_path / guards.RECORD).write_text(text)
    with pytest.raises(ValueError, match=r"rollbacks\.json: .*; write it anew from the `rollback`"):
        Rollbacks(tmp_path)


def test_a_divergence_without_a_way_back_stops_the_run_and_pins(manifest, tmp_path, start):
    run = start(tmp_path, keep_checkpoints=2)
    lead_astray(run, {9}, math.inf)
    with pytest.raises(ValueError, match=r"step 9: loss inf, .* kept for good: \[4, 8\]"):
        run.run()
    assert saved_steps(tmp_path) == [4, 8]
    assert (checkpoint_folder(tmp_path, 8) / "pinned").exists()


def state_of(run):
    """Weights, moments and numbers of updates, copied."""
    counts = {f"step {n}": s["step"] for n, s in enumerate(run.optimizer.state.values())}
    tensors = state_tensors(run.model, run.optimizer) | counts
    return {n: getattr(t, "_local_tensor", t).clone() for n, t in tensors.items()}


BF16_ALONE = {"precision": "bf16", "master_weights": False}


@pytest.mark.parametrize("changes", [{}, {"divergence_z": 7.0}, BF16_ALONE], ids=str)
def test_a_gradient_that_is_not_finite_touches_nothing(manifest, tmp_path, start, changes):
    """Neither where the device decides nor where this process does."""
    run = start(tmp_path, **changes)
    run.train_step(0)
    before = state_of(run)
    lead_astray(run, {1})
    with pytest.raises(Diverged, match="step 1: loss nan"):
        run.train_step(1)
    after = state_of(run)
    assert all(torch.equal(after[name], before[name]) for name in before)
    run.optimizer.zero_grad()  # as who goes back does
    run.train_step(2)
    assert not torch.equal(state_of(run)["step 0"], before["step 0"])


def test_the_step_at_which_a_high_loss_is_a_divergence_touches_nothing(
    manifest, tmp_path, start, monkeypatch
):
    run = start(tmp_path, divergence_z=7.0)
    run.train_step(0)
    run.guards.divergence.load_state_dict(1)  # steps 1 to 4 were high
    monkeypatch.setattr(run.guards.loss_detector, "update", lambda _loss: 8.0)
    before = state_of(run)
    with pytest.raises(Diverged, match="steps 1 to 5: the loss is more than 7"):
        run.train_step(DIVERGED_STEPS)
    after = state_of(run)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_weights_are_gathered_early_where_a_step_follows_at_once(
    manifest, tmp_path, start, monkeypatch
):
    every = {"ranges_every_steps": 0, "val_every_steps": 3, "checkpoint_every_steps": 4}
    run, early = start(tmp_path / "run", **every), []
    gather = trainer.unshard
    monkeypatch.setattr(
        trainer, "unshard", lambda model: (early.append(run.steps_done), gather(model))
    )
    run.run()
    assert early == [s for s in range(12) if (s + 1) % 3 and (s + 1) % 4]
    torch.distributed.destroy_process_group()
    alone = start(tmp_path / "alone", **every)
    reports = [alone.train_step(step) for step in range(12)]
    assert [r.loss for r in reports] == [loss for _, loss, _ in losses(tmp_path / "run")]
    ours, theirs = state_of(run), state_of(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_diverges_wherever_it_goes_on_is_given_up(manifest, tmp_path, start):
    run = start(tmp_path, rollback_skip_steps=1)
    lead_astray(run, range(6, 1000))
    with pytest.raises(ValueError, match="gradient norm"):
        run.run()
    assert len(read_json(tmp_path / guards.RECORD)) == guards.MAX_ROLLBACKS


def test_a_loss_that_stays_high_is_a_divergence_since_its_first_step_and_a_spike_is_none():
    detector = DivergenceDetector(limit=3.0)
    for step, z in enumerate([0.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0, math.nan]):
        detector.check_course(step, z)
    for step in range(8, 8 + DIVERGED_STEPS - 1):
        detector.check_course(step, 4.0)
    kept = detector.state_dict()
    resumed = DivergenceDetector(limit=3.0)
    resumed.load_state_dict(kept)
    with pytest.raises(Diverged, match="steps 8 to 12: the loss is") as caught:
        resumed.check_course(12, 4.0)
    assert caught.value.since == 8
    resumed.load_state_dict(kept)
    with pytest.raises(Diverged, match="step 12: loss nan") as caught:
        resumed.check_finite(12, math.nan, 1.0)
    assert caught.value.since == 8, "it was on its way then"
    off = DivergenceDetector(limit=0.0)
    for step in range(20):
        off.check_course(step, 100.0)


def test_all_guards_go_on_from_a_checkpoint_as_they_were():
    recipe = {"skip_loss_z": 0.0, "skip_grad_z": 5.0, "precision": "fp16", "divergence_z": 3.0}
    watching, resumed = guards.Guards(recipe), guards.Guards(recipe)
    assert "overflow" in watching.judge(0, 3.0, math.inf).reason_to_skip
    for step in range(1, 200):
        watching.judge(step, 3.0 + 0.01 * (step % 2), 1.0 + 0.01 * (step % 2))
    for step in range(200, 203):
        assert watching.judge(step, 9.0, 1.0).reason_to_skip is None
    resumed.load_state_dict(json.loads(json.dumps(watching.state_dict())))
    assert resumed.scale == watching.scale == 2.0**15
    assert resumed.loss_scale.good_steps == 202
    assert "grad z-score" in resumed.judge(203, 9.0, 2.0).reason_to_skip
    with pytest.raises(Diverged, match="steps 200 to 204: the loss is more than 3"):
        resumed.judge(204, 9.0, 1.0)


def test_ranges_are_those_of_each_layer_and_the_steps_stay_the_same(manifest, tmp_path, start):
    run = start(tmp_path / "with", ranges_every_steps=3)
    with torch.no_grad():
        run.model.h[1].attn.c_attn.bias.to_local()[5] = -63.0
    found = ranges.weight_ranges(run.model, run.world.mesh.get_group("shard"))
    assert found["absmax"]["attn.c_attn.bias"] == [0.0, 63.0]
    bias = run.model.h[1].attn.c_attn.bias.to_local()
    expected = [0.0, bias.square().mean().sqrt().item()]
    assert found["rms"]["attn.c_attn.bias"] == pytest.approx(expected)
    assert len(found["rms"]["wte.weight"]) == 1
    (alarm,) = ranges.alarms(found)
    assert alarm == "layer 1: attn.c_attn.bias reaches 63.0, more than 50"
    tokens = torch.arange(32)[None]
    activations = ranges.activation_ranges(run.model, tokens)
    seen = {}
    run.model.h[0].register_forward_hook(lambda _m, _i, output: seen.update(after=sum(output)))
    run.model(tokens)
    assert activations["absmax"]["residual"][0] == pytest.approx(seen["after"].abs().max().item())
    assert set(activations["rms"]) == {"attention", "mlp", "residual"}
    assert len(activations["rms"]["mlp"]) == 2


def test_a_text_that_gave_no_question_is_trained_on(manifest, tmp_path, start):
    (tmp_path / "questions.jsonl").touch()
    run = start(tmp_path / "run", tmp_path / "questions.jsonl", hellaswag=True, max_steps=1)
    run.run()
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(records["train"]) == 1 and "hellaswag" not in records
    assert "is empty: no choice of endings" in (tmp_path / "run/train.log").read_text()


def test_ranges_validation_questions_and_samples_change_no_bit(manifest, tmp_path, start):
    questions = make_questions(tmp_path / "questions.jsonl", 3)
    often = {"ranges_every_steps": 3, "val_every_steps": 3, "sample_every_steps": 4}
    start(tmp_path / "with", questions, hellaswag=True, **often).run()
    torch.distributed.destroy_process_group()
    start(tmp_path / "without").run()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    records = read_metrics(tmp_path / "with" / "metrics.jsonl")["ranges"]
    assert [r["step"] for r in records] == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_step_done_twice_is_identical_and_the_run_is_left_alone(manifest, tmp_path, gpus):
    folder = tmp_path / "run"
    folder.mkdir()
    settings = make_settings(folder / "in.json", gpus=gpus)
    assert train_here(settings, manifest, folder).returncode == 0
    frozen = read_json(folder / "settings.json")
    for key in LATER_MACHINE_KEYS:  # as it was written before they came
        del frozen["machine"][key]
    write_json(folder / "settings.json", frozen)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    script = PROJECT / "workflow/scripts/replay_step.py"
    command = [sys.executable, str(script), "--folder", str(folder), "--manifest", str(manifest)]
    command += ["--step", "6", "--output", str(tmp_path / "verdict.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["from_step"], verdict["processes"]) == (
        "identical",
        4,
        gpus,
    )
    assert verdict["runs"][0]["loss_nats"] == verdict["recorded_loss_nats"] == losses(folder)[6][1]
    assert "step 6 of made, done twice from the same state: identical" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_replay_wants_the_run_s_tokens_and_leaves_nothing_when_stopped(manifest, tmp_path):
    folder = tmp_path / "run"
    settings = make_settings(tmp_path / "in.json")
    assert train_here(settings, manifest, folder).returncode == 0
    script = PROJECT / "workflow/scripts/replay_step.py"
    command = [sys.executable, str(script), "--folder", str(folder), "--step", "6"]
    command += ["--output", str(tmp_path / "replay/verdict.json"), "--manifest"]
    other = make_dataset(tmp_path / "other", train_tokens=10_000)
    result = subprocess.run([*command, str(other)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert result.stderr.startswith("error: run 'made' was started on other tokens than")
    process = subprocess.Popen([*command, str(manifest)])
    wait_until(lambda: list(tmp_path.glob("replay/.replay-*/checkpoints")), process)
    process.terminate()
    assert process.wait(timeout=60) != 0
    assert list((tmp_path / "replay").iterdir()) == []


@pytest.mark.parametrize(("calls", "verdict"), [({2, 3}, "identical"), ({2}, "different")])
def test_a_step_that_diverges_can_be_done_twice(manifest, tmp_path, start, calls, verdict, capsys):
    """By its batch it does so again; by a fault of the machine it does not."""
    from miniseries.training.replay import _do_twice, _report

    run = start(tmp_path, max_steps=8)
    forward, train_step, done = run.model.forward, run.train_step, []

    def poisoned(*arguments, **more):
        return forward(*arguments, **more) * (math.nan if len(done) - 1 in calls else 1.0)

    def counted(step, **more):
        done.append(step)
        return train_step(step, **more)

    run.model.forward, run.train_step = poisoned, counted
    result = _do_twice(run, 2)
    assert (done, result["verdict"]) == ([0, 1, 2, 2], verdict)
    assert "step 2: loss nan" in result["runs"][0]["diverged"]
    assert ("diverged" in result["runs"][1]) == (verdict == "identical")
    _report(result, tmp_path, "made", 2, tmp_path / "verdict.json")
    assert read_json(tmp_path / "verdict.json")["runs"] == result["runs"]
    said = capsys.readouterr().out
    assert f"step 2 of made, done twice from the same state: {verdict}" in said
    assert "losses step 2: loss nan, gradient norm nan" in said


def test_a_bit_that_flips_between_two_replays_is_found_and_named(manifest, tmp_path, start):
    from miniseries.training.replay import _do_twice

    run = start(tmp_path)
    train_step, calls = run.train_step, []

    def flaky(step, **more):
        report = train_step(step, **more)
        calls.append(step)
        if len(calls) == 4:  # steps 0 and 1, then step 2 twice
            with torch.no_grad():
                run.model.ln_f.bias.to_local().view(torch.int32)[3] ^= 1
        return report

    run.train_step = flaky
    result = _do_twice(run, 2)
    assert result["verdict"] == "different"
    assert result["differing_elements_by_rank"] == [{"model.ln_f.bias": 1}]
