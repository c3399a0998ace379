import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from miniseries.summary import write_summary

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
SMALLEST = {"num_layers": 12, "num_heads": 12, "channels": 768, "sequence_length": 1024}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def make_run(results, name, records, max_steps=2, dataset="fineweb-edu"):
    recipe = {"dataset": dataset, "total_batch_tokens": 1000, "max_steps": max_steps, **SMALLEST}
    write(results / f"settings/{name}.json", {"recipe": recipe})
    folder = results / "train" / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def train(step, seconds=3.6, speed=100.0, mfu=None, loss=4.0):
    record = {"kind": "train", "step": step, "tokens_seen": 1000 * (step + 1)}
    record |= {"step_time_ms": 1000 * seconds, "tokens_per_second": speed, "mfu_percent": mfu}
    return record | {"train_loss_nats": loss}


def val(step, loss):
    return {"kind": "val", "step": step, "tokens_seen": 1000 * step, "val_loss_nats": loss}


def score(step, num_correct, num_items=10042):
    record = {"kind": "hellaswag", "step": step, "tokens_seen": 1000 * step, "num_items": num_items}
    return record | {"num_correct": num_correct, "acc_norm_token_mean": num_correct / num_items}


DONE = {"kind": "done", "step": 2, "wall_seconds": 9.0}


def table_of(results, *runs):
    write_summary(results, list(runs), results / "summary.tsv")
    return pd.read_csv(results / "summary.tsv", sep="\t", dtype=str, keep_default_na=False)


def test_a_finished_run_has_its_figures_in_one_row(tmp_path):
    records = [train(0, 7.2, 90.0, 40.0, 6.0), train(1, 3.6, 110.0, 50.0, 4.0), DONE]
    make_run(tmp_path, "a", [*records, val(0, 11.0), val(1, 3.2), val(2, 3.0), score(2, 3000)])
    row = table_of(tmp_path, "a").loc[0]
    assert (row["run"], row["status"], row["data_set"]) == ("a", "finished", "FineWeb-Edu")
    assert (row["step"], row["max_steps"], row["tokens_seen"]) == ("2", "2", "2000")
    assert (row["parameters"], row["tokens_per_step"]) == ("124439808", "1000")
    assert (row["tokens_per_second"], row["mfu_percent"]) == ("100.0", "45.0")
    assert row["train_hours"] == "0.003"  # 10.8 s
    assert (row["val_loss_nats"], row["perplexity"]) == ("3.0", "20.085537")  # e^3
    assert row["val_loss_from"] == "training"
    assert (row["hellaswag_acc_norm_token_mean"], row["hellaswag_num_items"]) == (
        "0.298745",
        "10042",
    )
    # sqrt(0.298745 * 0.701255 / 10041)
    assert row["hellaswag_acc_norm_token_mean_stderr"] == "0.004568"
    assert (row["gpt2_val_loss_nats"], row["gpt2_val_loss_data_set"]) == ("3.2924", "FineWeb-Edu")
    assert row["first_step_below_gpt2_val_loss"] == "1"
    assert row["first_step_above_gpt2_hellaswag"] == "2"  # 3000 right answers against 2957


def test_scores_of_the_export_come_before_those_of_training(tmp_path):
    make_run(tmp_path, "a", [train(1), val(2, 3.5), score(2, 2600), DONE])
    losses = {"val_loss_nats": 3.25, "val_loss_stderr": 0.002, "weights_sha256": "ab12"}
    write(tmp_path / "evaluate/a/val_loss.json", losses)
    rules = {
        "token_mean": {"acc": 0.27, "acc_norm": 0.29, "acc_stderr": 0.1, "acc_norm_stderr": 0.0045},
        "harness": {"acc": 0.28, "acc_norm": 0.31},
    }
    write(tmp_path / "evaluate/a/hellaswag.json", {"num_items": 10042, **rules})
    row = table_of(tmp_path, "a").loc[0]
    assert (row["val_loss_nats"], row["val_loss_stderr"]) == ("3.25", "0.002")
    assert (row["val_loss_from"], row["weights_sha256"]) == ("export", "ab12")
    assert row["hellaswag_acc_norm_token_mean"] == "0.29"
    assert row["hellaswag_acc_norm_token_mean_stderr"] == "0.0045"
    assert (row["hellaswag_acc_harness"], row["hellaswag_acc_norm_harness"]) == ("0.28", "0.31")


def test_what_is_not_known_is_an_empty_cell(tmp_path):
    make_run(tmp_path, "young", [train(0)])
    table = table_of(tmp_path, "young", "absent")
    young, absent = table.loc[0], table.loc[1]
    assert (young["status"], young["step"], young["tokens_seen"]) == ("running", "1", "1000")
    unknown = ["val_loss_nats", "perplexity", "mfu_percent", "weights_sha256"]
    unknown += ["hellaswag_acc_harness", "first_step_below_gpt2_val_loss"]
    assert [young[key] for key in unknown] == [""] * len(unknown)
    assert (absent["status"], absent["max_steps"], absent["train_loss_nats"]) == (
        "not started",
        "",
        "",
    )


def test_counts_stay_whole_numbers_beside_empty_cells(tmp_path):
    make_run(tmp_path, "a", [train(1), val(2, 3.0)])
    table = table_of(tmp_path, "a", "absent")
    assert table["tokens_seen"].tolist() == ["2000", ""]
    assert table["first_step_below_gpt2_val_loss"].tolist() == ["2", ""]


def test_half_written_files_and_losses_that_are_not_finite_are_empty_cells(tmp_path):
    make_run(tmp_path, "a", [train(0, loss=float("nan")), val(1, float("inf"))])
    with (tmp_path / "train/a/metrics.jsonl").open("a") as log:
        log.write('{"kind": "val", "st')
    (tmp_path / "evaluate/a").mkdir(parents=True)
    (tmp_path / "evaluate/a/val_loss.json").write_text('{"val_loss_na')
    row = table_of(tmp_path, "a").loc[0]
    assert (row["train_loss_nats"], row["val_loss_nats"], row["perplexity"]) == ("", "", "")


def test_the_settings_that_the_run_was_started_with_count(tmp_path):
    make_run(tmp_path, "a", [train(0), DONE], max_steps=7)
    assert table_of(tmp_path, "a").loc[0, "status"] == "running"
    write(tmp_path / "train/a/settings.json", {"recipe": {"max_steps": 2}})
    assert table_of(tmp_path, "a").loc[0, ["status", "max_steps"]].tolist() == ["finished", "2"]


def test_no_runs_give_the_header_alone(tmp_path):
    table = table_of(tmp_path)
    assert len(table) == 0 and table.columns[0] == "run"


def test_the_script_writes_the_table(tmp_path):
    make_run(tmp_path, "a", [train(0)])
    line = [sys.executable, SCRIPTS / "write_summary.py", "--results", tmp_path, "--runs", "a"]
    subprocess.run([*line, "--output", tmp_path / "t.tsv", "--smoothing", "0.9"], check=True)
    table = pd.read_csv(tmp_path / "t.tsv", sep="\t")
    assert table.loc[0, "train_loss_nats"] == pytest.approx(4.0)
