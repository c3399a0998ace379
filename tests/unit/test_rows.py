"""Rows of the bench and rungs of the ladder: from the configuration to settings and processes."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stand_ins import PROJECT, make_dataset, make_settings

from miniseries.settings import resolve_runs
from miniseries.speed import rows
from miniseries.speed.rows import LADDER, resolve_rows, row_of_settings, run_row

SCHEMA = yaml.safe_load((PROJECT / "workflow/schemas/config.schema.yaml").read_text())
CONFIG = yaml.safe_load((PROJECT / "config/config.yaml").read_text())


def resolve(**section):
    return resolve_rows(CONFIG | {"bench": CONFIG["bench"] | section}, SCHEMA)[0]


def test_a_row_is_its_run_but_for_what_it_states():
    (row,) = resolve(rows=[{"run": "1558m", "micro_batch": 4, "total_batch_tokens": 8192}]).values()
    plain = resolve_runs(CONFIG, SCHEMA).runs["1558m"]
    changed = {"total_batch_tokens": 8192, "dataset": "builtin-large"}
    changed["data"] = CONFIG["datasets"]["builtin-large"] | row["settings"]["recipe"]["data"]
    assert row["settings"]["recipe"] == plain["recipe"] | changed
    assert row["settings"]["machine"] == plain["machine"] | {"micro_batch": 4, "gpus": 1}
    assert (row["measure"], row["starts"], row["profile"]) == ("step", ["kept"], False)


def test_rows_are_named_by_what_tells_them_apart():
    names = list(resolve())
    assert names[:4] == [
        "tiny-fp32-b8-t1024",
        "124m-bf16-b64-t524288",
        "124m-bf16-b32-t32768",
        "124m-bf16-b64-t524288-2gpus",
    ]
    assert "124m-bf16-b32-t131072-huggingface" in names
    assert resolve()["124m-bf16-b64-t524288"]["starts"] == ["cold", "warm"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"run": "125m"}, r"bench\.rows\.0.*no run '125m'"),
        ({"run": "124m", "precision": "bf8"}, r"bench\.rows\.0\.precision: 'bf8'"),
        ({"run": "124m", "total_batch_tokens": 1000}, r"bench\.rows\.0\.total_batch_tokens"),
    ],
)
def test_wrong_rows_are_refused_by_their_own_place(row, message):
    with pytest.raises(ValueError, match=message):
        resolve(rows=[row])


def test_the_same_row_twice_is_refused():
    with pytest.raises(ValueError, match="124m-bf16-b64-t524288 stands there twice"):
        resolve(rows=[{"run": "124m"}, {"run": "124m", "micro_batch": 64}])


def test_rungs_differ_in_precision_and_compilation_and_have_a_shape_for_cpus():
    rungs = resolve_rows(CONFIG, SCHEMA)[1]
    assert list(rungs) == list(LADDER)
    precisions = [row["settings"]["recipe"]["precision"] for row in rungs.values()]
    assert precisions[:4] == ["fp32", "tf32", "bf16", "bf16"]
    compiled = [row["settings"]["machine"]["compile"] for row in rungs.values()]
    assert compiled[:4] == [False, False, False, True]
    assert {row["settings"]["recipe"]["num_layers"] for row in rungs.values()} == {12}
    assert {row["settings_on_cpu"]["recipe"]["num_layers"] for row in rungs.values()} == {4}


def test_each_rung_adds_one_thing():
    features = [
        (r.precision, r.compile, r.flash_attention, r.padded_vocabulary, r.own_kernels)
        for r in LADDER.values()
    ]
    for before, after in itertools.pairwise(features):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_rows_and_their_processes_load_no_pytorch():
    code = "import sys, miniseries.speed.rows; print('torch' in sys.modules)"

    command = [sys.executable, "-c", code]
    folder = PROJECT / "workflow/scripts"
    assert subprocess.check_output(command, cwd=folder, text=True).strip() == "False"


@pytest.fixture
def started(monkeypatch):
    """What would be started: (options, environment, processes); each takes 7 s more to start.

    All but the first find everything in the caches.
    """
    calls = []

    def start(options, processes, environment):
        calls.append((options, environment, processes))
        output = Path(options[options.index("--output") + 1])
        content = {"not_measured": None, "was_cold": len(calls) == 1}
        content["first_step_after_seconds"] = 7 * len(calls)
        output.write_text(json.dumps(content))

    monkeypatch.setattr(rows, "_start_process", start)
    return calls


def test_cold_and_warm_starts_share_caches_of_their_own(started, tmp_path):
    row = row_of_settings(json.loads(make_settings(tmp_path / "s.json").read_text()))
    row["starts"] = ["cold", "warm"]
    run_row(row, tmp_path / "m.json", tmp_path / "out.json", steps=5, profile=tmp_path / "p")
    (cold, environment, _), (warm, second, _) = started
    assert cold[cold.index("--steps") + 1] == "0" and "--profile" not in cold
    assert warm[warm.index("--steps") + 1] == "5" and "--profile" in warm
    assert environment == second
    assert not Path(environment["TRITON_CACHE_DIR"]).exists()  # gone when all is done
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["seconds_to_first_step"] == {"cold": 7, "warm": 14}


def test_a_start_with_the_kept_caches_is_warm_if_they_held_everything(started, tmp_path):
    row = row_of_settings(json.loads(make_settings(tmp_path / "s.json").read_text()))
    for seconds in (None, 14):  # the first compiles a part, nobody knows how much
        run_row(row, tmp_path / "m.json", tmp_path / "out.json", steps=5, profile=None)
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["seconds_to_first_step"] == {"cold": None, "warm": seconds}
    assert str(tmp_path) not in started[0][1]["TORCHINDUCTOR_CACHE_DIR"]
    assert started[0][1]["TORCHINDUCTOR_CACHE_DIR"].endswith("results/cache/inductor")


def test_a_measurement_that_fails_leaves_no_result(tmp_path):
    row = row_of_settings(json.loads(make_settings(tmp_path / "s.json").read_text()))
    with pytest.raises(ValueError, match="ended with exit code 2"):
        run_row(row, tmp_path / "m.json", tmp_path / "out.json", steps="many", profile=None)
    assert not (tmp_path / "out.json").exists()


def test_a_row_is_measured_in_a_process_of_its_own(tmp_path):
    manifest = make_dataset(tmp_path / "data")
    row = row_of_settings(json.loads(make_settings(tmp_path / "s.json").read_text()))
    run_row(row, manifest, tmp_path / "out.json", steps=3, profile=tmp_path / "profile")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["not_measured"] is None
    assert (found["work"], found["micro_batch"], found["tokens_per_step"]) == ("made", 4, 256)
    speed = found["tokens_per_second"]
    assert 0 < speed["p10"] <= speed["median"] <= speed["p90"]
    assert found["step_ms"] == pytest.approx(256e3 / speed["median"])
    assert found["repetitions"] == 3 and found["recompiles_after_step_3"] == 0
    assert 0 < found["data_wait_share"] < 1 and found["p99_by_median"] >= 1
    start = found["start"]
    assert sum(start.values()) == pytest.approx(found["seconds_to_first_step"]["warm"])
    assert start["import_seconds"] > 0.1  # counted from the start of the process
    parts = found["breakdown"]
    total = sum(row["ms"] for row in parts["kinds"].values()) + parts["idle_ms"]
    assert total == pytest.approx(parts["step_ms"])
    assert {"encoder", "forward", "classifier", "backward", "optimizer"} <= parts["phases"].keys()
    assert parts["kinds"]["matrix products"]["ms"] > 0
    assert {p.name for p in (tmp_path / "profile").iterdir()} == {"trace.json.gz", "kernels.csv"}


def test_two_processes_measure_together(tmp_path):
    manifest = make_dataset(tmp_path / "data")
    settings = make_settings(tmp_path / "s.json", gpus=2)
    row = row_of_settings(json.loads(settings.read_text()))
    run_row(row, manifest, tmp_path / "out.json", steps=2, profile=None)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["processes"], found["repetitions"]) == (2, 2)
