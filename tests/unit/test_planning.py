"""Predictions: held against what was measured on GPUs, and against counts made by hand."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from miniseries.model.gpt import GPT, GPTConfig
from miniseries.settings import resolve_runs
from miniseries.shapes import flops_per_step, num_elements, num_parameters
from miniseries.speed.planning import (
    counted_bytes,
    largest_micro_batch,
    memory_parts,
    needs,
    peak_gib,
    plan_row,
    plan_text,
    tokens_per_second,
    write_plan,
)
from miniseries.training.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/config.schema.yaml").read_text())
CONFIG = yaml.safe_load((ROOT / "config/config.yaml").read_text())
RUNS = resolve_runs(CONFIG, SCHEMA).runs
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def measured_rows():
    """Steps of the trainer that the repository keeps: (device, row)."""
    contents = [json.loads(p.read_text()) for p in sorted((ROOT / "benchmarks").glob("*.json"))]
    return [
        pytest.param(content["device"], row, id=f"{row['work']}-{row['micro_batch']}")
        for content in contents
        for row in content["rows"]
        if row["measure"] == "step" and row.get("peak_gib") and row["work"] in RUNS
    ]


def recipe_of(row):
    recipe = RUNS[row["work"]]["recipe"]
    return recipe | {"total_batch_tokens": row["tokens_per_step"], "precision": row["precision"]}


@pytest.mark.parametrize(("device", "row"), measured_rows())
def test_predicted_peaks_are_within_a_tenth_of_measured_ones(device, row):
    more = {"recompute": row["recompute"], "fused": "within" in row.get("mlp", "")}
    predicted = peak_gib(recipe_of(row), row["micro_batch"], row["processes"], **more)
    assert predicted == pytest.approx(row["peak_gib"], rel=0.1)


@pytest.mark.parametrize(("device", "row"), measured_rows())
def test_predicted_speeds_are_within_a_tenth_of_measured_ones(device, row):
    predicted = tokens_per_second(recipe_of(row), row["micro_batch"], device, row["processes"])
    assert predicted == pytest.approx(row["tokens_per_second"]["median"], rel=0.1)


@pytest.mark.parametrize(("precision", "measured"), [("bf16", 339_401), ("fp8", 209_221)])
def test_short_micro_steps_take_the_time_of_python(precision, measured):
    # rungs of the ladder, where the kernels take half of the time and a third (LOG.md)
    recipe = RUNS["124m"]["recipe"] | {"total_batch_tokens": 131072, "precision": precision}
    assert tokens_per_second(recipe, 16, H200) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("gpus", "hours"),
    # llm.c's run on eight took 24.4 hours; its author reckons with 8 days on one and 12 h on 16
    [(1, 8.2 * 24), (8, 24.4), (16, 12.2)],
)
def test_the_plan_of_1558m_on_h100_is_what_llm_c_took(gpus, hours):
    row = plan_row(RUNS["1558m"], H100, gpus, price=3.5)
    assert row["hours"] == pytest.approx(hours, rel=0.1)
    assert row["dollars"] == pytest.approx(row["hours"] * gpus * 3.5)
    assert row["micro_batch"] == 16


@pytest.mark.parametrize("positions", [0, 128])
def test_elements_are_those_of_the_model(positions):
    recipe = {"num_layers": 3, "num_heads": 2, "channels": 32, "sequence_length": 64}
    recipe["num_positions"] = positions
    with torch.device("meta"):
        model = GPT(GPTConfig.of_recipe(recipe))
    assert num_elements(recipe) == sum(p.numel() for p in model.parameters())
    assert num_parameters(recipe) == model.num_parameters
    flops = flops_per_step(recipe | {"total_batch_tokens": 10})
    assert flops == 60 * sum(p.numel() for p in model.parameters())


def test_memory_by_hand():
    recipe = {"num_layers": 2, "channels": 10, "sequence_length": 8, "precision": "bf16"}
    recipe["total_batch_tokens"] = 4 * 2 * 8
    elements = num_elements(recipe)
    parts = {name: part * 2**30 for name, part in memory_parts(recipe, 2, processes=2).items()}
    assert parts["master_weights"] == pytest.approx(2 * elements)  # 4 bytes, over two processes
    assert parts["optimizer_state"] == pytest.approx(4 * elements)
    assert parts["weights"] == pytest.approx(2 * elements)
    assert parts["gradients"] == pytest.approx(4 * elements)  # two micro-steps: summed in whole
    assert parts["activations"] == pytest.approx(2 * 16 * 10 * 2 * 8 * 2)
    alone = memory_parts(recipe | {"total_batch_tokens": 2 * 2 * 8}, 2, processes=2)
    assert alone["gradients"] == pytest.approx(parts["gradients"] / 2 / 2**30)


def test_recompute_and_precision_change_what_is_kept():
    recipe = RUNS["1558m"]["recipe"]
    peaks = [peak_gib(recipe, 16, recompute=level) for level in (0, 1, 2)]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peak_gib(recipe | {"precision": "fp32"}, 16) > 1.5 * peaks[0]


@pytest.mark.parametrize("run", ["124m", "350m", "774m", "1558m"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_micro_batch_fits_and_twice_of_it_does_not(run, device):
    recipe, memory = RUNS[run]["recipe"], DEVICES[device].memory_gib
    size = largest_micro_batch(recipe, memory)
    assert size is None or peak_gib(recipe, size) < 0.92 * memory
    twice = 1 if size is None else 2 * size
    assert peak_gib(recipe, twice) > 0.92 * memory


def test_a_micro_batch_that_does_not_fit_is_halved():
    row = plan_row(RUNS["1558m"], "NVIDIA A100-SXM4-40GB", 1, price=None)
    assert row["micro_batch"] in (1, 2, 4, 8)  # 16 is the run's
    assert row["peak_gib"] < 0.92 * 39.4
    assert (row["hours"] > 0, row["dollars"]) == (True, None)


def test_what_fits_nowhere_says_so(tmp_path, capsys):
    large = {"num_layers": 96, "channels": 12288}
    settings = RUNS["1558m"] | {"recipe": RUNS["1558m"]["recipe"] | large}
    assert plan_row(settings, H200, 1, price=None)["micro_batch"] is None
    write_plan([settings], [1], {H200: None}, tmp_path / "plan.md")
    assert "does not fit" in capsys.readouterr().out


def test_no_speed_is_guessed_for_a_precision_without_a_measurement():
    assert tokens_per_second(RUNS["124m"]["recipe"] | {"precision": "fp32"}, 16, H200) is None


def test_the_batch_is_shared_equally_or_not_at_all():
    recipe = {"num_layers": 1, "channels": 8, "sequence_length": 8, "precision": "bf16"}
    assert largest_micro_batch(recipe | {"total_batch_tokens": 8 * 12}, 80.0) == 4
    assert largest_micro_batch(recipe | {"total_batch_tokens": 8 * 12}, 80.0, processes=5) is None


def test_needs_of_a_run():
    found = needs(RUNS["124m"])
    assert found["tokens"] == 524288 * 18865
    assert found["tokens_per_parameter"] == pytest.approx(79.5, abs=0.1)
    assert found["epochs"] == pytest.approx(0.989, abs=0.001)
    # made at 5000, 10000, 15000 and the end: four in all, fewer than are kept
    assert found["checkpoint_gb"] == pytest.approx(12 * 124475904 * 4 / 1e9)
    assert found["data_gb"] == pytest.approx(20.2, abs=0.01)
    assert needs(RUNS["tiny"])["data_gb"] is None
    recipe = RUNS["124m"]["recipe"]
    small = recipe | {"data": recipe["data"] | {"num_shards": 10, "shard_tokens": 1_000_000}}
    own = needs(RUNS["124m"] | {"recipe": small})
    assert (own["epochs"], own["data_gb"]) == pytest.approx(
        (found["tokens"] / 1e7, 0.022), rel=1e-2
    )


def test_the_planned_micro_batch_is_the_one_that_the_trainer_takes():
    run = RUNS["124m"] | {"machine": RUNS["124m"]["machine"] | {"micro_batch": 48}}
    assert plan_row(run, H200, 1, price=None)["micro_batch"] == 32
    assert plan_row(run, H200, 6, price=None)["micro_batch"] is None
    assert "cannot share the batch" in plan_text([run], [6], {H200: None})


def test_counted_bytes_by_hand():
    recipe = {"num_layers": 2, "channels": 10, "sequence_length": 8, "precision": "bf16"}
    recipe["total_batch_tokens"] = 2 * 8
    found = counted_bytes(recipe, micro_batch=2)
    row = 2 * 10 * 16  # bytes of one pass over the residual stream
    assert found["encoder"] == {"products": 0, "others": 3 * row}
    assert found["forward"]["products"] == 20 * row * 2 + 2 * 12 * 100 * 2
    assert found["forward"]["others"] == 16 * row * 2
    assert found["classifier"]["others"] == 2 * 2 * 50304 * 16
    assert found["optimizer"]["others"] == 46 * num_elements(recipe)  # one micro-step


def test_the_plan_names_devices_that_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="nothing is known of H300"):
        write_plan([RUNS["124m"]], [1], {"H300": 1.0}, tmp_path / "plan.md")
