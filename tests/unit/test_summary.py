import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from miniseries.reporting.crossover import paired_p_value
from miniseries.reporting.summary import write_summary

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
SMALLEST = {"num_layers": 12, "num_heads": 12, "channels": 768, "sequence_length": 1024}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def make_run(results, name, records, max_steps=2, dataset="fineweb-edu", **changes):
    recipe = {"dataset": dataset, "total_batch_tokens": 1000, "max_steps": max_steps, **SMALLEST}
    recipe |= changes
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


def table_of(results):
    outputs = [results / name for name in ("summary.tsv", "summary.json", "baselines.tsv", "x.md")]
    write_summary(results, *outputs)
    return pd.read_csv(results / "summary.tsv", sep="\t", dtype=str, keep_default_na=False)


def test_a_finished_run_has_its_figures_in_one_row(tmp_path):
    records = [train(0, 7.2, 90.0, 40.0, 6.0), train(1, 3.6, 110.0, 50.0, 4.0), DONE]
    records.append({"kind": "start", "step": 0, "unique_tokens": 1600})
    make_run(tmp_path, "a", [*records, val(0, 11.0), val(1, 3.2), val(2, 3.0), score(2, 3000)])
    row = table_of(tmp_path).loc[0]
    assert (row["run"], row["status"], row["data_set"]) == ("a", "finished", "FineWeb-Edu")
    assert (row["step"], row["max_steps"], row["tokens_seen"]) == ("2", "2", "2000")
    assert (row["unique_tokens"], row["epochs"]) == ("1600", "1.25")
    assert (row["num_parameters"], row["tokens_per_step"]) == ("124439808", "1000")
    assert (row["tokens_per_second"], row["mfu_percent"]) == ("100.0", "45.0")
    assert row["train_hours"] == "0.003"  # 10.8 s
    assert (row["val_loss_nats"], row["perplexity"]) == ("3.0", "20.085537")  # e^3
    assert (row["val_loss_from"], row["val_loss_step"]) == ("training", "2")
    assert (row["hellaswag_llmc_acc_token_mean"], row["hellaswag_num_items"]) == (
        "0.298745",
        "10042",
    )
    # sqrt(0.298745 * 0.701255 / 10041)
    assert row["hellaswag_llmc_acc_token_mean_stderr"] == "0.004568"
    assert (row["questions"], row["num_parameters_padded"]) == ("HellaSwag", "124475904")
    assert (row["gpt2_val_loss_nats"], row["gpt2_val_loss_data_set"]) == ("3.2924", "FineWeb-Edu")
    assert row["first_step_below_gpt2_val_loss"] == "1"
    assert row["first_step_above_gpt2_hellaswag"] == "2"  # 3000 right answers against 2957


def test_scores_of_the_export_come_before_those_of_training(tmp_path):
    make_run(tmp_path, "a", [train(1), val(2, 3.5), score(2, 2600), DONE])
    losses = {"val_loss_nats": 3.25, "val_loss_stderr": 0.002, "weights_sha256": "ab12", "step": 1}
    write(tmp_path / "evaluate/a/val_loss.json", losses)
    rules = {
        "llmc": {"acc": 0.27, "acc_token_mean": 0.29, "acc_token_mean_stderr": 0.0045},
        "harness": {"acc": 0.28, "acc_characters": 0.31},
    }
    write(tmp_path / "evaluate/a/hellaswag.json", {"num_items": 10042, **rules})
    row = table_of(tmp_path).loc[0]
    assert (row["val_loss_nats"], row["val_loss_stderr_nats"]) == ("3.25", "0.002")
    assert (row["val_loss_from"], row["val_loss_step"]) == ("export", "1")
    assert row["weights_sha256"] == "ab12"
    assert row["hellaswag_llmc_acc_token_mean"] == "0.29"
    assert row["hellaswag_llmc_acc_token_mean_stderr"] == "0.0045"
    assert (row["hellaswag_harness_acc"], row["hellaswag_harness_acc_characters"]) == (
        "0.28",
        "0.31",
    )


def test_what_is_not_known_is_an_empty_cell(tmp_path):
    make_run(tmp_path, "young", [train(0)])
    make_run(tmp_path, "absent", [])
    absent, young = table_of(tmp_path).loc[0], table_of(tmp_path).loc[1]
    assert (young["status"], young["step"], young["tokens_seen"]) == ("running", "1", "1000")
    unknown = ["val_loss_nats", "perplexity", "mfu_percent", "weights_sha256"]
    unknown += ["hellaswag_harness_acc", "first_step_below_gpt2_val_loss", "mmlu_acc"]
    assert [young[key] for key in unknown] == [""] * len(unknown)
    assert (absent["status"], absent["train_loss_nats"]) == ("not started", "")


def test_a_loss_that_training_measured_before_its_newest_step_says_so(tmp_path):
    make_run(tmp_path, "a", [train(0), val(1, 5.0), train(1), train(2)])
    row = table_of(tmp_path).loc[0]
    assert (row["step"], row["val_loss_step"]) == ("3", "1")


def test_restarts_skips_and_divergences_are_counted(tmp_path):
    events = [{"kind": "restart", "step": 1}, {"kind": "divergence", "step": 1}]
    back = [{"kind": "rollback", "step": 0, "back_to": 0, "batches_skipped": n} for n in (4, 3)]
    skipped = [{**train(step), "skipped": step > 0} for step in range(3)]
    make_run(tmp_path, "a", [*events, events[1], *back, *skipped])
    row = table_of(tmp_path).loc[0]
    keys = ("num_restarts", "num_updates_skipped", "num_divergences", "num_batches_skipped")
    assert [row[key] for key in keys] == ["1", "2", "2", "7"]


def test_counts_stay_whole_numbers_beside_empty_cells(tmp_path):
    make_run(tmp_path, "a", [train(1), val(2, 3.0)])
    make_run(tmp_path, "b", [])
    table = table_of(tmp_path)
    assert table["tokens_seen"].tolist() == ["2000", ""]
    assert table["first_step_below_gpt2_val_loss"].tolist() == ["2", ""]
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert [row["tokens_seen"] for row in rows] == [2000, None]
    assert [row["run"] for row in rows] == ["a", "b"]


def test_each_evaluated_step_has_a_row_as_the_run_was_then(tmp_path):
    make_run(
        tmp_path, "a", [train(0, loss=6.0), val(1, 5.0), train(1, loss=4.0), val(2, 3.0), DONE]
    )
    write(tmp_path / "evaluate/a@1/val_loss.json", {"val_loss_nats": 5.01, "bits_per_byte": 1.5})
    write(tmp_path / "evaluate/a/val_loss.json", {"val_loss_nats": 3.01})
    early, late = (row for _, row in table_of(tmp_path).iterrows())
    assert (early["run"], early["model"], early["step"]) == ("a", "a@1", "1")
    assert (early["tokens_seen"], early["train_loss_nats"]) == ("1000", "6.0")
    assert (early["val_loss_nats"], early["bits_per_byte"]) == ("5.01", "1.5")
    assert (early["val_loss_step"], late["val_loss_step"]) == ("1", "2")
    assert (early["status"], late["status"]) == ("finished", "finished")
    assert (late["model"], late["step"], late["val_loss_nats"]) == ("a", "2", "3.01")


def items_of(path, answers, num_characters=1):
    """A log of items in which these are answered right; the first candidate is the true one."""
    lines = []
    for right in answers:
        nats = [1.0, 2.0, 3.0, 4.0] if right else [2.0, 1.0, 3.0, 4.0]
        entry = {"label": 0, "nats": nats, "num_tokens": [1] * 4}
        entry["num_characters"] = [num_characters] * 4
        lines.append(json.dumps({"llmc": entry}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def measure_gpt2(results, name, init_from="openai-community/gpt2"):
    records = [val(0, 3.3), {"kind": "done", "step": 0}]
    make_run(results, name, records, max_steps=0, init_from=init_from)


def test_a_run_is_compared_with_our_own_measurement_of_gpt_2_item_by_item(tmp_path):
    make_run(tmp_path, "ours", [train(0), val(2, 3.0), DONE])
    measure_gpt2(tmp_path, "gpt2")
    write(tmp_path / "evaluate/gpt2/val_loss.json", {"val_loss_nats": 3.29})
    for name in ("ours", "gpt2"):
        write(tmp_path / f"evaluate/{name}/hellaswag.json", {"num_items": 20})
    # ten items that only ours has right, two that only the other has, and some that both have
    items_of(tmp_path / "evaluate/ours/hellaswag_items.jsonl", [1] * 10 + [0] * 2 + [1] * 8)
    items_of(tmp_path / "evaluate/gpt2/hellaswag_items.jsonl", [0] * 10 + [1] * 2 + [1] * 8)
    gpt2, ours = (row for _, row in table_of(tmp_path).iterrows())
    assert (ours["baseline_run"], gpt2["baseline_run"]) == ("gpt2", "")
    assert ours["val_loss_minus_baseline_nats"] == "-0.29"
    # two-sided: 2 * (1 + 12 + 66) / 2^12
    assert float(ours["paired_p_value_against_baseline"]) == pytest.approx(158 / 4096)
    rows = pd.read_csv(tmp_path / "baselines.tsv", sep="\t", keep_default_na=False)
    line = rows[(rows["published"] == 3.2924)].iloc[0]
    assert (float(line["measured_here"]), line["run"]) == (3.29, "gpt2")
    assert (rows["source"] != "").all() and len(rows) > 25
    assert rows[rows["model"] == "GPT-3 125M"].iloc[0]["run"] == ""


@pytest.mark.parametrize(("num_items", "shown"), [(14042, "0.2722"), (100, "")])
def test_the_measured_mmlu_stands_beside_the_published_one(tmp_path, num_items, shown):
    measure_gpt2(tmp_path, "gpt2")
    scores = {"num_items": num_items, "acc": 0.2558, "acc_token_mean": 0.2722}
    write(tmp_path / "evaluate/gpt2/mmlu.json", scores)
    table_of(tmp_path)
    rows = pd.read_csv(tmp_path / "baselines.tsv", sep="\t", dtype=str, keep_default_na=False)
    assert rows[rows["published"] == "0.2721"].iloc[0]["measured_here"] == shown


def test_answers_to_other_questions_are_not_compared(tmp_path):
    ours, theirs, others = (tmp_path / name for name in "abc")
    items_of(ours, [1, 0, 1])
    items_of(theirs, [1, 1, 0])
    items_of(others, [1, 1, 0], num_characters=7)
    assert paired_p_value(ours, theirs) == 1.0
    assert paired_p_value(ours, others) is None


@pytest.mark.parametrize(
    ("init_from", "is_gpt2"),
    [
        ("openai-community/gpt2@main", True),
        ("/data/gpt2/", True),
        ("./weights/openai-community--gpt2/config.json", True),
        ("/hub/models--openai-community--gpt2/snapshots/607a30d7", True),
        ("/llm.c/gpt2_124M_bf16.bin", True),
        ("someone/gpt2", False),
        ("openai-community/gpt2-tuned", False),
        ("./gpt2-tuned", False),
        ("ours@2", False),
        ("gpt2", False),
    ],
)
def test_gpt_2_is_what_openai_published(tmp_path, init_from, is_gpt2):
    make_run(tmp_path, "ours", [train(0), val(2, 3.0), DONE])
    measure_gpt2(tmp_path, "theirs", init_from)
    assert table_of(tmp_path).loc[0, "baseline_run"] == ("theirs" if is_gpt2 else "")
    rows = pd.read_csv(tmp_path / "baselines.tsv", sep="\t", keep_default_na=False)
    assert rows[rows["published"] == 3.2924].iloc[0]["run"] == ("theirs" if is_gpt2 else "")


@pytest.mark.parametrize(
    ("init_from", "max_steps", "num_steps", "is_shown"),
    [
        ("openai-community/gpt2-xl", 1000, 1000, True),
        ("openai-community/gpt2-xl", 1000, 500, False),
        ("openai-community/gpt2-xl", 5000, 5000, False),
        ("mine/gpt2-xl", 1000, 1000, False),
    ],
)
def test_the_fine_tuned_gpt_2_is_openai_s_after_a_thousand_steps(
    tmp_path, init_from, max_steps, num_steps, is_shown
):
    shape = {"num_layers": 48, "num_heads": 25, "channels": 1600}
    records = [train(num_steps - 1), val(num_steps, 2.6)]
    make_run(tmp_path, "t", records, max_steps=max_steps, init_from=init_from, **shape)
    table_of(tmp_path)
    rows = pd.read_csv(tmp_path / "baselines.tsv", sep="\t", keep_default_na=False)
    (line,) = rows[rows["metric"] == "finetuned_val_loss_nats"].to_dict("records")
    assert (line["run"], line["measured_here"]) == (("t", "2.6") if is_shown else ("", ""))


def test_scores_of_weights_that_are_gone_are_not_shown(tmp_path):
    make_run(tmp_path, "a", [train(0), train(1), val(2, 3.5), DONE])
    folder = tmp_path / "evaluate/a"
    write(tmp_path / "export/a/export.json", {"weights_sha256": "new", "step": 2})
    write(folder / "val_loss.json", {"weights_sha256": "old", "val_loss_nats": 3.0})
    write(folder / "hellaswag.json", {"weights_sha256": "old", "llmc": {"acc_token_mean": 0.3}})
    write(folder / "wikitext.json", {"weights_sha256": "old", "word_perplexity": 40.0})
    write(folder / "mmlu.json", {"weights_sha256": "new", "acc": 0.26})
    scores = {"piqa": {"shots": 0, "acc": 0.6}}
    write(folder / "harness.json", {"weights_sha256": "old", "tasks": scores})
    write(folder / "leaderboard.json", {"weights_sha256": "old", "leaderboard_mean": 0.3})
    table = table_of(tmp_path)
    row = table.loc[0]
    assert (row["weights_sha256"], row["mmlu_acc"]) == ("new", "0.26")
    assert (row["val_loss_nats"], row["val_loss_from"]) == ("3.5", "training")
    gone = ["hellaswag_llmc_acc_token_mean", "wikitext_word_perplexity", "leaderboard_mean"]
    assert [row[key] for key in gone] == ["", "", ""]
    assert "lm_eval_piqa_0_shots_acc" not in table
    (tmp_path / "export/a/export.json").unlink()  # then the validation loss tells the weights
    row = table_of(tmp_path).loc[0]
    assert (row["weights_sha256"], row["val_loss_nats"], row["mmlu_acc"]) == ("old", "3.0", "")


def test_scores_of_a_run_that_was_begun_anew_are_not_shown(tmp_path):
    make_run(tmp_path, "a", [train(0), train(1)], max_steps=9)
    old = {"weights_sha256": "old", "step": 9}
    write(tmp_path / "export/a/export.json", old)
    for model in ("a", "a@8"):
        write(tmp_path / f"evaluate/{model}/val_loss.json", {**old, "val_loss_nats": 3.0})
    table = table_of(tmp_path)
    assert table["model"].tolist() == ["a"]
    assert (table.loc[0, "weights_sha256"], table.loc[0, "val_loss_nats"]) == ("", "")


@pytest.mark.parametrize("key", ["fingerprint", "data_fingerprint"])
def test_an_export_of_another_run_of_that_name_is_not_shown(tmp_path, key):
    make_run(tmp_path, "a", [train(0), train(1), val(2, 3.5), DONE])
    settings = tmp_path / "settings/a.json"
    write(settings, json.loads(settings.read_text()) | {key: "new"})
    old = {"weights_sha256": "old", "step": 2}
    for found, loss, source in (("old", "3.5", "training"), ("new", "3.0", "export")):
        write(tmp_path / "export/a/export.json", old | {key: found})
        write(tmp_path / "evaluate/a/val_loss.json", old | {"val_loss_nats": 3.0})
        row = table_of(tmp_path).loc[0]
        assert (row["val_loss_nats"], row["val_loss_from"]) == (loss, source)


def test_answers_of_weights_that_are_gone_are_not_compared(tmp_path):
    make_run(tmp_path, "ours", [train(0), DONE])
    measure_gpt2(tmp_path, "gpt2")
    for name in ("ours", "gpt2"):
        write(tmp_path / f"export/{name}/export.json", {"weights_sha256": f"{name} now"})
        answered = {"weights_sha256": f"{name} now", "num_items": 20}
        write(tmp_path / f"evaluate/{name}/hellaswag.json", answered)
        items_of(tmp_path / f"evaluate/{name}/hellaswag_items.jsonl", [1] * 20)
    assert table_of(tmp_path).loc[1, "paired_p_value_against_baseline"] == "1.0"
    write(tmp_path / "export/gpt2/export.json", {"weights_sha256": "other"})
    assert table_of(tmp_path).loc[1, "paired_p_value_against_baseline"] == ""


def test_a_published_share_is_compared_by_its_count(tmp_path):
    make_run(tmp_path, "a", [train(0), score(2, 3100)])
    make_run(tmp_path, "b", [train(0), score(2, 2960)])
    make_run(tmp_path, "c", [train(0), score(2, 60, num_items=200)])
    clear, same, other = table_of(tmp_path)["p_value_against_published_gpt2"]
    # shares 0.30870 and 0.29446 of 10,042: z = 2.197
    assert float(clear) == pytest.approx(0.028, abs=5e-4)
    assert float(same) > 0.9 and other == ""


def test_the_cross_over_is_stated_with_what_it_does_not_say(tmp_path):
    records = [train(0), val(1000, 3.5), val(2000, 3.2), score(1000, 2000), score(2000, 3000)]
    make_run(tmp_path, "a", records, max_steps=3000)
    make_run(tmp_path, "b", [train(0), val(2000, 3.2)], dataset="mine")
    table_of(tmp_path)
    text = (tmp_path / "x.md").read_text()
    loss = "first below GPT-2 124M (3.2924 nats on FineWeb-Edu) at step 2,000, 2,000,000 tokens."
    assert f"- validation loss: {loss}" in text
    assert "- HellaSwag: first above GPT-2 124M (29.4 % on HellaSwag) at step 2,000" in text
    assert "- HellaSwag: not above GPT-3 125M (33.7 % on HellaSwag) in 2,000 steps." in text
    assert "since this run was measured on mine" in text
    assert "WebText, which was never published" in text and "other languages, code" in text


def test_tasks_measured_on_the_export_have_columns_with_their_names(tmp_path):
    make_run(tmp_path, "a", [train(0)])
    write(tmp_path / "evaluate/a/mmlu.json", {"num_items": 14042, "acc_token_mean": 0.27})
    write(tmp_path / "evaluate/a/wikitext.json", {"data": "w.txt", "word_perplexity": 40.0})
    scores = {"shots": 10, "num_items": 5, "acc_norm": 0.5, "data": "hub"}
    board = {"leaderboard_mean": 0.3, "tasks": {"hellaswag": scores}}
    write(tmp_path / "evaluate/a/leaderboard.json", board)
    row = table_of(tmp_path).loc[0]
    assert (row["mmlu_acc_token_mean"], row["mmlu_num_items"]) == ("0.27", "14042")
    assert (row["wikitext_data"], row["wikitext_word_perplexity"]) == ("w.txt", "40.0")
    assert (row["leaderboard_mean"], row["lm_eval_hellaswag_10_shots_acc_norm"]) == ("0.3", "0.5")


def test_half_written_files_and_losses_that_are_not_finite_are_empty_cells(tmp_path):
    make_run(tmp_path, "a", [train(0, loss=float("nan")), val(1, float("inf"))])
    with (tmp_path / "train/a/metrics.jsonl").open("a") as log:
        log.write('{"kind": "val", "st')
    (tmp_path / "evaluate/a").mkdir(parents=True)
    (tmp_path / "evaluate/a/val_loss.json").write_text('{"val_loss_na')
    row = table_of(tmp_path).loc[0]
    assert (row["train_loss_nats"], row["val_loss_nats"], row["perplexity"]) == ("", "", "")


def test_the_settings_that_the_run_was_started_with_count(tmp_path):
    make_run(tmp_path, "a", [train(0), DONE], max_steps=7)
    assert table_of(tmp_path).loc[0, "status"] == "running"
    write(tmp_path / "train/a/settings.json", {"recipe": {"max_steps": 2}})
    assert table_of(tmp_path).loc[0, ["status", "max_steps"]].tolist() == ["finished", "2"]


def test_a_run_is_stopped_until_it_goes_on(tmp_path):
    stop = {"kind": "stop", "step": 2, "signal": "SIGTERM"}
    make_run(tmp_path, "a", [train(0), train(1), stop], max_steps=7)
    assert table_of(tmp_path).loc[0, "status"] == "stopped"
    make_run(tmp_path, "b", [train(0), train(1), stop, train(2)], max_steps=7)
    assert table_of(tmp_path).loc[1, "status"] == "running"


def test_no_runs_give_the_header_alone(tmp_path):
    table = table_of(tmp_path)
    assert len(table) == 0 and table.columns[0] == "run"


def test_the_script_writes_the_tables(tmp_path):
    make_run(tmp_path, "a", [train(0)])
    line = [sys.executable, SCRIPTS / "write_summary.py", "--results", tmp_path]
    for name in ("table", "json", "baselines", "crossovers"):
        line += [f"--{name}", tmp_path / name]
    subprocess.run([*line, "--smoothing", "0.9"], check=True)
    table = pd.read_csv(tmp_path / "table", sep="\t")
    assert table.loc[0, "train_loss_nats"] == pytest.approx(4.0)
    assert json.loads((tmp_path / "json").read_text())[0]["run"] == "a"


def test_pages_show_markdown_and_tables_as_html(tmp_path):
    (tmp_path / "a.md").write_text("# Texts\n\n> **Once**\n\n```text\n<b>*raw*\n```\n")
    (tmp_path / "b.tsv").write_text("model\tvalue\nGPT-2\t3.2\n")
    line = [sys.executable, SCRIPTS / "render_page.py", "--title", "t", "--output", tmp_path / "p"]
    subprocess.run([*line, "--files", tmp_path / "a.md", tmp_path / "b.tsv"], check=True)
    page = (tmp_path / "p").read_text()
    assert "<h1>Texts</h1>" in page and "<strong>Once</strong>" in page
    assert "&lt;b&gt;*raw*" in page and "<b>" not in page
    assert "<tr><td>GPT-2</td><td>3.2</td></tr>" in page


def test_a_page_of_damaged_files_names_them(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    line = [sys.executable, SCRIPTS / "render_page.py", "--title", "t", "--output", tmp_path / "p"]
    result = subprocess.run([*line, "--files", tmp_path / "a.json"], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"error: {tmp_path / 'a.json'}: not valid JSON" in result.stderr
    (tmp_path / "b.md").write_bytes(b"\xff text")
    (tmp_path / "c.tsv").write_text("")
    subprocess.run([*line, "--files", tmp_path / "b.md", tmp_path / "c.tsv"], check=True)
    assert "text" in (tmp_path / "p").read_text()
