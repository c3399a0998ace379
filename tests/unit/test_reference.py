"""The legs of a reference run: what runs they train, with what settings, in what order."""

import shutil
from pathlib import Path

import pytest
import yaml
from stand_ins import PROJECT

from miniseries.settings import resolve_runs
from miniseries.speed import reference
from miniseries.speed.reference import LEAST_LARGE_STEPS, Options, Reference, read_config
from miniseries.validation import validate_config


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that makes a reference run as on a machine with so many GPUs."""
    for name in ("config", "workflow/schemas", "benchmarks"):
        shutil.copytree(PROJECT / name, tmp_path / name)

    def build(visible=8, **changes):
        def processes(gpus):
            return (visible if gpus == "auto" else gpus), "NVIDIA H200"

        monkeypatch.setattr(reference, "local_processes", processes)
        monkeypatch.setattr(reference, "missing_for_precision", lambda *_: None)
        usual = {
            "large": "1558m",
            "small": "124m",
            "large_steps": 60,
            "second_precision": "fp8",
            "second_steps": 30,
            "small_steps": 100,
            "dataset": "builtin-large",
            "gpus": None,
            "micro_batch": None,
            "budget_seconds": 540,
            "legs": None,
            "configfile": [],
            "output": tmp_path / "output",
        }
        return Reference(Options(**usual | changes), tmp_path)

    return build


def settings_of(made):
    """What Snakemake would make of the written configuration."""
    config = read_config(made.root, [*made.options.configfile, made.overlay])
    validate_config(config, made.schema)
    return resolve_runs(config, made.schema).runs


def test_on_eight_gpus_the_runs_have_the_real_settings_but_for_length_and_data(make):
    made = make()
    runs = settings_of(made)
    for real, short, steps in (("1558m", "reference-1558m", 60), ("124m", "reference-124m", 100)):
        expected = runs[real]["recipe"] | {"max_steps": steps, "warmup_steps": steps}
        expected |= {"dataset": "builtin-large"}
        found = runs[short]["recipe"]
        assert {k: v for k, v in found.items() if k != "data"} == {
            k: v for k, v in expected.items() if k != "data"
        }
        assert runs[short]["machine"]["micro_batch"] == runs[real]["machine"]["micro_batch"]
    assert runs["reference-1558m-fp8"]["recipe"]["precision"] == "fp8"


def test_on_fewer_gpus_each_has_the_same_share_of_a_step(make):
    runs = settings_of(make(visible=2, micro_batch=32))
    large, small = runs["reference-1558m"], runs["reference-124m"]
    assert large["recipe"]["total_batch_tokens"] == 2 * 131_072
    assert small["recipe"]["total_batch_tokens"] == 2 * 65_536
    assert (large["machine"]["gpus"], large["machine"]["micro_batch"]) == (2, 32)


def test_the_run_that_is_stopped_has_the_recipe_of_the_unbroken_one(make):
    runs = settings_of(make())
    assert runs["reference-1558m-stopped"]["recipe"] == runs["reference-1558m"]["recipe"]
    assert runs["reference-1558m-stopped"]["machine"] == runs["reference-1558m"]["machine"]


def test_the_last_resumption_takes_half_the_gpus(make):
    made = make()
    half = yaml.safe_load(made.half_overlay.read_text())
    assert half == {"runs": {"reference-1558m-stopped": {"gpus": 4}}}
    assert made.legs["halved"].configfile == (made.half_overlay,)
    assert make(visible=1).legs["halved"].impossible == "needs two GPUs"


def test_what_matters_most_comes_first(make):
    legs = ["data", "large", "stopped", "resumed", "halved", "small", "profile", "fp8", "export"]
    assert list(make().legs) == legs


def test_the_profile_is_a_row_of_the_bench_of_its_own(make):
    made = make()
    name = "reference-1558m-bf16-b16-t1048576-8gpus"
    assert made.legs["profile"].targets == [f"results/bench/rows/{name}.json"]
    assert made.legs["profile"].old == made.root / f"results/bench/rows/{name}.json"


def test_options_that_cannot_be_are_refused(make):
    with pytest.raises(ValueError, match=r"there is no run 1\.5b"):
        make(large="1.5b")
    with pytest.raises(ValueError, match=f"at least {LEAST_LARGE_STEPS} are needed"):
        make(large_steps=LEAST_LARGE_STEPS - 1)
    with pytest.raises(ValueError, match="are both 124m"):
        make(large="124m")
    with pytest.raises(ValueError, match="no leg fp16; there are data, large"):
        make(legs=["large", "fp16"])
    with pytest.raises(ValueError, match="--gpus is 0"):
        make(gpus=0)
    with pytest.raises(ValueError, match=r"reference-1558m.*micro_batch: -1 is not allowed"):
        make(micro_batch=-1)


def test_the_circumstances_of_two_calls_are_equal_but_for_their_budget(make, tmp_path):
    first = make().circumstances()
    assert (
        make(budget_seconds=10, legs=["data"], output=tmp_path / "elsewhere").circumstances()
        == first
    )
    assert make(large_steps=61).circumstances() != first
    assert make(visible=4).circumstances() != first


def test_overlays_are_merged_as_by_snakemake(make, tmp_path):
    file = Path(tmp_path / "mine.yaml")
    file.write_text("runs: {124m: {micro_batch: 8}}\nplan: {prices: {NVIDIA H200: 3.0}}\n")
    made = make(configfile=[file])
    assert settings_of(made)["reference-124m"]["machine"]["micro_batch"] == 8
    assert made.config["plan"]["prices"]["NVIDIA H200"] == 3.0
    assert made.config["plan"]["prices"]["NVIDIA H100 80GB HBM3"] == 3.5
