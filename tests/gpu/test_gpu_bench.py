"""The bench on a real GPU: the breakdown of a real trace, the ladder, and starts with caches."""

import json
from dataclasses import asdict

import pytest
import torch
from stand_ins import make_dataset, make_settings

from miniseries.speed.breakdown import KINDS, PHASES, read_trace
from miniseries.speed.rows import LADDER, row_of_settings, run_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# wide enough for the fast kernels, and for a step that the GPU, not Python, takes the time of
SHAPE = {"num_layers": 4, "num_heads": 8, "channels": 512, "sequence_length": 512}
SHAPE |= {"micro_batch": 16, "total_batch_tokens": 16384, "warmup_steps": 0}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"), train_tokens=200_000)


def row_with(tmp_path, **changes):
    settings = make_settings(tmp_path / "s.json", **SHAPE | changes)
    return row_of_settings(json.loads(settings.read_text()))


def result_of(row, manifest, tmp_path, profile=None, steps=5):
    run_row(row, manifest, tmp_path / "out.json", steps, profile)
    return json.loads((tmp_path / "out.json").read_text())


def test_the_breakdown_of_a_real_step_adds_up_and_holds_kernels_only(manifest, tmp_path):
    row = row_with(tmp_path, precision="bf16", compile=True)
    row["starts"] = ["cold", "warm"]
    found = result_of(row, manifest, tmp_path, profile=tmp_path / "profile")
    start = found["seconds_to_first_step"]
    assert start["warm"] < start["cold"]
    assert found["recompiles_after_step_3"] == 0
    assert 0 < found["peak_gib"] <= found["reserved_gib"]
    parts = found["breakdown"]
    for table in (parts["kinds"], parts["phases"]):
        total = sum(part["ms"] for part in table.values()) + parts["idle_ms"]
        assert total == pytest.approx(parts["step_ms"], rel=1e-6)
    assert 0 <= parts["idle_ms"] < parts["step_ms"]
    assert {"matrix products", "attention", "optimizer", "norms", "loss"} <= parts["kinds"].keys()
    assert set(parts["kinds"]) <= {*KINDS, "other"}
    names = " ".join(kernel["kernel"] for kernel in parts["top_kernels"])
    assert not any(marker in names for marker in ("FSDP::", "Optimizer.step", "## Call", "step 7"))


def test_every_phase_of_a_real_step_has_kernels_and_ranges(manifest, tmp_path):
    row = row_with(tmp_path, precision="bf16", compile=True)
    found = result_of(row, manifest, tmp_path, profile=tmp_path / "profile")
    phases = found["breakdown"]["phases"]
    assert set(PHASES) - {"other"} <= phases.keys()
    assert phases["backward"]["ms"] > phases["forward"]["ms"] > phases["encoder"]["ms"]
    assert phases.get("other", {"share": 0})["share"] < 0.1
    names = {event["name"] for event in read_trace(tmp_path / "profile/trace.json.gz")}
    assert {f"layer {number}" for number in range(4)} <= names
    assert any(name.startswith("step ") for name in names)


@pytest.mark.parametrize("name", LADDER)
def test_every_rung_takes_steps_or_says_why_not(manifest, tmp_path, name):
    rung = asdict(LADDER[name])
    row = row_with(tmp_path, precision=rung["precision"], compile=rung["compile"])
    row |= {"measure": "rung", "rung": name}
    found = result_of(row, manifest, tmp_path)
    if found["not_measured"] is None:
        assert found["loss_nats"] < 11 and found["tokens_per_second"]["median"] > 0
    else:
        assert "compute capability" in found["not_measured"]


@pytest.mark.parametrize("measure", ["huggingface", "hellaswag"])
def test_the_yardstick_and_hellaswag_run_on_a_gpu(manifest, tmp_path, measure):
    row = row_with(tmp_path, precision="bf16", compile=True)
    row |= {"measure": measure, "num_items": 50}
    found = result_of(row, manifest, tmp_path)
    assert found["not_measured"] is None
    assert found.get("tokens_per_second") or found["hellaswag_seconds"] > 0
