"""What is measured: rungs and yardstick against the trainer, questions, and what cannot be done."""

import json
import math
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from stand_ins import PROJECT, make_dataset, make_settings

from miniseries.data.shards import load_manifest
from miniseries.evaluation.choices import LLMC
from miniseries.model.formulas import attention
from miniseries.speed import bench, rungs
from miniseries.speed.bench import MEASURES, Job, made_up_questions, measure, not_measurable
from miniseries.speed.rows import LADDER
from miniseries.speed.rungs import plain_attention
from miniseries.training.distributed import start_world
from miniseries.training.trainer import Trainer


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def world():
    yield start_world("gloo")
    dist.destroy_process_group()


@pytest.fixture
def job(manifest, world, tmp_path):
    settings = json.loads(make_settings(tmp_path / "s.json", warmup_steps=0).read_text())
    row = {"measure": "step", "settings": settings, "num_items": 3}
    return Job(row, settings, load_manifest(manifest), world, 2, 0.0, 0.0, None)


def last_loss(job, **row):
    job = replace(job, row=job.row | row)
    return MEASURES[job.row["measure"]](job)["loss_nats"]


def test_what_the_trainer_does_not_load_is_no_part_of_the_start():
    code = "import sys, miniseries.speed.bench; print('transformers' in sys.modules)"
    command = [sys.executable, "-c", code]
    folder = PROJECT / "workflow/scripts"
    assert subprocess.check_output(command, cwd=folder, text=True).strip() == "False"


def test_plain_attention_is_attention():
    qkv = torch.randn(2, 8, 3, 2, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain_attention(qkv), attention(qkv))


def test_the_bench_takes_the_trainers_own_steps(job, tmp_path):
    run = Trainer(job.settings, job.manifest, None, tmp_path, job.world)
    losses = [run.train_step(step).loss for step in range(4)]
    assert last_loss(job) == losses[-1]


def test_figures_of_timed_steps_by_hand(monkeypatch):
    counters = {"stats": {"unique_graphs": 5}, "graph_break": {"reason": 2}}
    monkeypatch.setattr(torch._dynamo.utils, "counters", counters)
    run = types.SimpleNamespace(
        tokens_per_step=100,
        loader=types.SimpleNamespace(micro_batch_at=lambda: time.sleep(0.02)),
        journal=types.SimpleNamespace(mfu_percent=lambda speed: speed / 2),
    )

    def train_step(step, **more):
        run.loader.micro_batch_at()
        counters["stats"]["unique_graphs"] += step in (1, 2, 5)
        return types.SimpleNamespace(seconds={1: 99.0}.get(step, step - 1.0), loss=10.0 - step)

    run.train_step = train_step  # 1, 2, 3, 4, and 5 seconds are timed
    found = bench.time_steps(run, 5)
    assert found.pop("data_wait_share") == pytest.approx(5 * 0.02 / 15, rel=0.5)
    assert found.pop("tokens_per_second") == pytest.approx(
        {"median": 100 / 3, "p10": 22, "p90": 80}
    )
    assert found == {
        "step_ms": 3000,
        "mfu_percent": pytest.approx(100 / 6),
        "p99_by_median": pytest.approx(4.96 / 3),
        "recompiles_after_step_3": 1,
        "graph_breaks": 2,
        "repetitions": 5,
        "loss_nats": 4.0,
    }


@pytest.mark.parametrize("rung", ["fp32", "flash", "padded"])
def test_every_rung_trains_the_same_model(job, rung, monkeypatch):
    small = replace(LADDER[rung], precision="fp32", compile=False)
    monkeypatch.setitem(LADDER, rung, small)
    assert last_loss(job, measure="rung", rung=rung) == pytest.approx(last_loss(job), abs=1e-4)


def test_an_unpadded_rung_has_the_published_vocabulary(job, tmp_path):
    arguments = (job.settings, job.manifest, None, tmp_path, job.world)
    run = rungs.RungTrainer(LADDER["fp32"], *arguments)
    assert run.model.wte.weight.shape[0] == 50257
    assert run.model.h[0].formulas.attention is plain_attention


def test_the_yardstick_learns_like_the_trainer_and_has_a_profile(job, tmp_path):
    # other weights, the same tokens and shape
    job = replace(job, row=job.row | {"measure": "huggingface"}, profile=tmp_path)
    found = MEASURES["huggingface"](job)
    assert found["loss_nats"] == pytest.approx(math.log(50257), abs=0.3)
    assert found["breakdown"]["step_ms"] > 0 and "matrix products" in found["breakdown"]["kinds"]


def test_hellaswag_is_scored_as_in_training(job):
    found = MEASURES["hellaswag"](job)
    assert found["num_items"] == 3 and found["hellaswag_seconds"] > 0


def test_made_up_questions_are_the_same_each_time_and_need_192_positions():
    questions = made_up_questions(500)
    assert questions == made_up_questions(500)
    lengths = [len(c.tokens) for q in questions for c in q.candidates[LLMC]]
    assert 128 < max(lengths) - 1 <= 192
    assert 70 < sum(lengths) / len(lengths) < 110


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "tf32"}, "only GPUs have it"),
        ({"precision": "bf16", "num_layers": 48, "channels": 1600}, "needs a GPU"),
        ({"precision": "bf16"}, None),
    ],
)
def test_what_a_cpu_cannot_do_is_said(job, changes, reason):
    size = {"total_batch_tokens": 131072} if "channels" in changes else {}
    settings = job.settings | {"recipe": job.settings["recipe"] | changes | size}
    assert not_measurable(job.row, settings, 1) == reason


@pytest.mark.parametrize(
    ("capability", "rung", "reason"),
    [
        ((7, 5), "bf16", "unsupported: needs compute capability 8.0, this GPU has 7.5"),
        ((7, 5), "tf32", "unsupported: needs compute capability 8.0, this GPU has 7.5"),
        ((7, 5), "fp32", None),
        ((7, 5), "flash", None),
        ((7, 5), "kernels", "unsupported: needs compute capability 8.0, this GPU has 7.5"),
        ((6, 1), "compile", "unsupported: needs compute capability 7.0, this GPU has 6.1"),
        ((9, 0), "kernels", None),
        ((8, 9), "fp8", "unsupported: needs compute capability 9.0, this GPU has 8.9"),
        ((9, 0), "fp8", None),
    ],
)
def test_what_an_older_gpu_cannot_do_is_said(monkeypatch, capability, rung, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert rungs.missing(LADDER[rung], torch.device("cuda")) == reason


@pytest.mark.parametrize(
    ("capability", "rung", "precision"),
    [((7, 5), "bf16", "bf16"), ((7, 5), "padded", "fp32"), ((9, 0), "padded", "bf16")],
)
def test_rungs_after_bf16_are_measured_without_it_where_it_lacks(
    monkeypatch, capability, rung, precision
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert rungs.precision_on(LADDER[rung], torch.device("cuda")) == precision


def test_a_row_for_more_gpus_than_there_are_says_so(job, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = not_measurable(job.row, job.settings, 2)
    assert found == "needs 2 GPUs, this machine has 1"


def test_the_yardstick_is_measured_in_a_single_process(job):
    row = job.row | {"measure": "huggingface"}
    assert not_measurable(row, job.settings, 1) is None
    assert not_measurable(row, job.settings, 2) == "the yardstick is a single process"


def test_running_out_of_memory_is_a_result(job, manifest, monkeypatch, tmp_path):
    def run_out(job):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(bench.MEASURES, "step", run_out)
    monkeypatch.setattr(bench, "start_world", lambda: job.world)
    monkeypatch.setattr(bench.dist, "destroy_process_group", lambda: None)
    measure(job.row, manifest, tmp_path / "out.json", 2, None, 0.0)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["not_measured"] == "out of memory with 4 sequences at once"
