"""What a reference run's records say, by numbers worked out by hand."""

import copy

import pytest

from miniseries.metrics import append_record, write_json
from miniseries.speed.comparison import read_devices, readme_table
from miniseries.speed.verdicts import (
    bench_row,
    compare_steps,
    one_gpu_speed,
    result_text,
    shard_mib,
    speed_figures,
    verdicts,
)

RECIPE = {"total_batch_tokens": 1_048_576, "max_steps": 32_000}


def log(folder, kind, **values):
    folder.mkdir(exist_ok=True)
    append_record(folder / "metrics.jsonl", kind, **values)


def train(folder, step, loss=5.0, batch="a", milliseconds=1000.0):
    log(
        folder,
        "train",
        step=step,
        train_loss_nats=loss,
        batch_hash=f"{batch}{step}",
        step_time_ms=milliseconds,
        tokens_per_second=1e6 / milliseconds,
        mfu_percent=50.0,
    )


# ---- figures --------------------------------------------------------------------------------


def test_speed_is_that_of_the_steps_after_the_first_two(tmp_path):
    run = tmp_path / "run"
    for step, milliseconds in enumerate([30_000, 4_000, 1_000, 1_000, 1_000, 2_000]):
        train(run, step, milliseconds=float(milliseconds))
    found = speed_figures(run, RECIPE, gpus=8, price=2.0)
    assert (found["num_steps"], found["num_timed"]) == (6, 4)
    assert found["tokens_per_second"] == 1000.0
    # the 99th percentile of 1, 1, 1, 2 lies 0.97 of the way from the third to the last
    assert found["p99_by_median"] == pytest.approx(1.97)
    hours = 1_048_576 * 32_000 / 1000 / 3600
    assert found["hours"] == pytest.approx(hours)
    assert found["dollars"] == pytest.approx(hours * 8 * 2.0)


def test_without_a_price_there_are_no_dollars_and_without_steps_no_speed(tmp_path):
    run = tmp_path / "run"
    assert speed_figures(run, RECIPE, 1, 2.0)["tokens_per_second"] is None
    for step in range(3):
        train(run, step)
    assert speed_figures(run, RECIPE, 1, None)["dollars"] is None


def test_a_speed_becomes_a_line_of_the_readme_s_table(tmp_path):
    run = tmp_path / "run"
    versions = {"python": "3.12.3", "torch": "2.11.0", "commit": "abc1234", "host": "here"}
    sizes = {"tokens_per_step": 1_048_576, "micro_batch": 32, "grad_accum_steps": 4}
    sizes |= {"attention": "flash", "mlp": "GELU within the products"}
    log(run, "start", step=0, world_size=8, versions=versions, **sizes)
    for step, milliseconds in enumerate([9000.0, 9000.0, 2000.0, 2500.0, 2500.0]):
        train(run, step, milliseconds=milliseconds)
    log(run, "memory", step=0, peak_mib=98_304.0, reserved_mib=None, adamw_m_mib=742.8)
    row = bench_row(speed_figures(run, RECIPE, 8, None), "1558m", "bf16", 1024, 2)
    assert (row["attention"], row["mlp"]) == ("flash", "GELU within the products")
    write_json(tmp_path / "GPU.json", {"device": "NVIDIA H200", "rows": [row]})
    table = readme_table(read_devices([tmp_path / "GPU.json"]), [])
    cells = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert cells[:5] == ["`1558m`", "8 x H200", "bf16, recompute 2", "32", "1,048,576"]
    assert cells[5:8] == ["400", "50.0 %", "96.0 GiB"]
    assert cells[-1] == "abc1234"


def test_the_fastest_row_of_one_gpu_of_the_kind_and_precision_counts():
    def row(speed, **changes):
        usual = {"work": "1558m", "measure": "step", "device": "GPU", "precision": "bf16"}
        speeds = {"tokens_per_second": {"median": speed}}
        return usual | {"processes": 1} | speeds | changes

    rows = [row(50.0), row(55.0), row(101.0, processes=2), row(60.0, precision="fp8")]
    rows += [row(70.0, device="other"), row(80.0, work="124m"), row(90.0, measure="huggingface")]
    rows += [row(0.0) | {"tokens_per_second": None}]
    assert one_gpu_speed(rows, "1558m", "GPU", "bf16") == 55.0
    assert one_gpu_speed(rows, "350m", "GPU", "bf16") is None


def test_a_process_holds_an_eighth_of_1558m_s_optimizer_as_in_llm_c():
    # llm.c's log of discussion 677: "allocating 742 MiB for AdamW optimizer state m"
    recipe = {"channels": 1600, "num_layers": 48, "sequence_length": 1024}
    assert int(shard_mib(recipe, 8)) == 742


# ---- equality -------------------------------------------------------------------------------


def make_broken(folder, losses, starts):
    for step, processes in starts:
        log(folder, "start", step=step, world_size=processes)
    for step, loss in enumerate(losses):
        train(folder, step, loss)


def test_each_start_of_a_broken_run_is_compared_with_the_unbroken_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for step in range(10):
        train(whole, step, 5.0)
    make_broken(broken, [5.0, 5.0, 5.0, 5.001, 4.997, 5.0], [(0, 8), (2, 8), (4, 4)])
    found = compare_steps(whole, broken)
    assert [(p["first_step"], p["processes"], p["num_steps"]) for p in found] == [
        (0, 8, 2),
        (2, 8, 2),
        (4, 4, 2),
    ]
    differences = [part["largest_loss_difference"] for part in found]
    assert differences == pytest.approx([0.0, 0.001, 0.003])
    assert [part["first_step_of_other_tokens"] for part in found] == [None] * 3


def test_other_token_ids_are_found_at_their_first_step(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for step in range(4):
        train(whole, step)
        train(broken, step, batch="a" if step < 2 else "b")
    log(broken, "start", step=0, world_size=2)
    assert compare_steps(whole, broken)[0]["first_step_of_other_tokens"] == 2


# ---- verdicts -------------------------------------------------------------------------------


def leg(**figures):
    return {
        "state": "done",
        "reason": None,
        "seconds": 10.0,
        "leftovers": [],
        "watchdog": [],
    } | figures


def compared(**changes):
    part = {"first_step": 0, "processes": 8, "num_steps": 4, "largest_loss_difference": 1e-4}
    return {"compared": [part | {"first_step_of_other_tokens": None} | changes]}


MEMORY = {"adamw_m": 742.8, "adamw_v": 742.8, "master_copy": 742.8, "peak": 90_000.0}
SPEED = {"p99_by_median": 1.02, "mfu_percent": 55.0, "hours": 20.0, "dollars": None}
RESULT = {
    "device": "NVIDIA H200",
    "gpus": 8,
    "commit": "abc1234",
    "date": "2026-11-29",
    "seconds": 400.0,
    "budget_seconds": 540.0,
    "large": "1558m",
    "small": "124m",
    "second_precision": "fp8",
    "large_precision": "bf16",
    "small_precision": "bf16",
    "one_gpu": {"1558m": 55_000.0, "124m": 560_000.0},
    "shard_mib": 742.8,
    "legs": {
        "large": leg(tokens_per_second=455_000.0, memory_mib=MEMORY, num_steps=60, **SPEED),
        "resumed": leg(**compared()),
        "halved": leg(**compared(processes=4)),
        "small": leg(tokens_per_second=4_300_000.0, **SPEED),
        "profile": leg(exposed_share=0.03),
        "fp8": leg(num_steps=30, largest_loss_difference=0.02, last_loss_difference=0.001),
    },
}


def words(result):
    return {verdict.aim: verdict.word for verdict in verdicts(result)}


def changed(name, **figures):
    result = copy.deepcopy(RESULT)
    result["legs"][name] |= figures
    return result


def test_a_run_that_reaches_every_aim():
    assert set(words(RESULT).values()) == {"met"}
    assert len(words(RESULT)) == 13


@pytest.mark.parametrize(
    ("name", "figures", "missed"),
    [
        ("large", {"tokens_per_second": 449_000.0}, "1558m: speed"),
        ("large", {"tokens_per_second": 426_000.0}, "1558m: speed against one GPU"),
        ("large", {"p99_by_median": 1.06}, "1558m: p99 / median of the step time"),
        ("large", {"hours": 20.8}, "1558m: the whole run"),
        (
            "large",
            {"memory_mib": MEMORY | {"adamw_v": 5942.0}},
            "1558m: m, v, master of each process",
        ),
        ("profile", {"exposed_share": 0.051}, "communication that hides behind nothing"),
        ("resumed", compared(first_step_of_other_tokens=3), "stopped, resumed: token ids"),
        ("resumed", compared(largest_loss_difference=0.0021), "stopped, resumed: losses"),
        ("halved", compared(largest_loss_difference=0.0021), "resumed on half the GPUs: losses"),
        ("small", {"tokens_per_second": 4_200_000.0}, "124m: speed against one GPU"),
        ("small", {"leftovers": ["python train_run.py"]}, "processes left behind"),
        ("fp8", {"watchdog": ["Watchdog caught"]}, "lines of NCCL's watchdog"),
    ],
)
def test_each_aim_can_be_missed(name, figures, missed):
    found = words(changed(name, **figures))
    assert found.pop(missed) == "not met"
    # too slow for one aim of speed may be too slow for the other
    assert {v for aim, v in found.items() if "speed" not in aim} == {"met"}


def test_what_was_not_run_is_judged_by_nothing_and_says_why():
    result = changed("halved", state="not run", reason="out of time")
    del result["legs"]["halved"]["compared"]
    result["one_gpu"]["124m"] = None
    found = {verdict.aim: verdict for verdict in verdicts(result)}
    assert found["resumed on half the GPUs: losses"].word == "not run"
    assert found["resumed on half the GPUs: losses"].found == "out of time"
    alone = found["124m: speed against one GPU"]
    assert (alone.word, alone.found) == (
        "not run",
        "no row of one GPU in benchmarks/ (124m, bf16, NVIDIA H200)",
    )


def test_a_leg_that_failed_misses_its_aims():
    result = changed("resumed", state="failed", reason="exit code 1; see resumed.txt")
    found = {verdict.aim: verdict for verdict in verdicts(result)}
    for what in ("token ids", "losses"):
        verdict = found[f"stopped, resumed: {what}"]
        assert (verdict.word, verdict.found) == ("not met", "exit code 1; see resumed.txt")


def test_one_gpu_has_no_communication_to_judge():
    found = words(copy.deepcopy(RESULT) | {"gpus": 1})
    assert found["communication that hides behind nothing"] == "not run"


def test_aims_are_those_of_each_gpu():
    result = copy.deepcopy(RESULT) | {"gpus": 2, "shard_mib": 2971.2}
    result["legs"]["large"] |= {"tokens_per_second": 113_000.0, "hours": 82.0}
    found = {verdict.aim: verdict for verdict in verdicts(result)}
    assert found["1558m: speed"].wanted == ">= 112,500 tokens/s"
    assert found["1558m: the whole run"].wanted == "<= 82.8 hours"
    assert found["1558m: speed"].is_met and found["1558m: the whole run"].is_met


def test_the_text_holds_every_leg_every_aim_and_what_a_run_would_cost():
    text = result_text(RESULT)
    assert "8 x NVIDIA H200, commit abc1234, 2026-11-29; 400 s of 540 s" in text
    for name in RESULT["legs"]:
        assert f"\n| {name} " in text
    for verdict in verdicts(RESULT):
        assert f"| {verdict.aim} " in text
    assert "no price configured" in text
    assert "$ 560" in result_text(changed("large", dollars=560.0))
    assert "nats of bf16's, 30 steps; at the last one 1.00e-03 apart." in text
