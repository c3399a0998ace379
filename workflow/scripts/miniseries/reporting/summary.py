"""The summary: one row for a run and each of its kept steps, units in the names of the columns."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from miniseries.data.shards import PADDED_VOCAB_SIZE, VOCAB_SIZE
from miniseries.evaluation.choices import HARNESS, HELLASWAG_ITEMS, LLMC, WAYS, question_set
from miniseries.metrics import write_text
from miniseries.reporting.crossover import (
    PROMPT,
    WAY,
    baseline_of,
    baseline_rows,
    crossovers_markdown,
    paired_p_value,
    two_samples_p_value,
)
from miniseries.reporting.runlog import (
    Run,
    accuracy_stderr,
    first_step_past,
    is_finite,
    last,
    load_json,
    load_run,
    loss_baseline,
    score_baseline,
)

DIGITS = 6  # after the point
# files in results/evaluate/{model}/
SCORES = ("val_loss", "hellaswag", "mmlu", "wikitext", "leaderboard", "harness")


def progress_columns(run: Run, model: str, smoothing: float) -> dict[str, Any]:
    """What a run is, how far it has come, how fast, and its training loss."""
    speeds, mfu, times = (
        run.column("train", key)[1] for key in ("tokens_per_second", "mfu_percent", "step_time_ms")
    )
    tokens_seen = last(run.column("train", "tokens_seen")[1])
    unique_tokens = run.start.get("unique_tokens")
    epochs = last(run.column("train", "epoch")[1])  # batches that were left out included
    if epochs is None and tokens_seen and unique_tokens:
        epochs = tokens_seen / unique_tokens
    num_parameters, channels = run.num_parameters, run.recipe.get("channels")
    padding = (PADDED_VOCAB_SIZE - VOCAB_SIZE) * channels if channels else None
    known = num_parameters is not None and padding is not None
    return {
        "run": run.name,
        "model": model,
        "status": run.status,
        "num_parameters": num_parameters,
        "num_parameters_padded": num_parameters + padding if known else None,
        "data_set": run.data_set,
        "init_from": run.recipe.get("init_from"),
        "step": run.num_steps,
        "max_steps": run.recipe.get("max_steps"),
        "tokens_seen": None if tokens_seen is None else int(tokens_seen),
        "unique_tokens": unique_tokens,  # of the training data
        "epochs": epochs,
        "tokens_per_step": run.tokens_per_step,
        "train_loss_nats": last(run.smoothed_loss(smoothing)[1]),
        "tokens_per_second": float(np.median(speeds)) if len(speeds) else None,
        "mfu_percent": float(np.median(mfu)) if len(mfu) else None,
        "train_hours": times.sum() / 3.6e6 if len(times) else None,
        "device": run.start.get("gpu_name") or run.start.get("device"),
        "device_hours": run.device_hours or None,
        "num_restarts": len(run.metrics.get("restart", [])),
        "num_updates_skipped": sum(bool(r.get("skipped")) for r in run.metrics.get("train", [])),
        "num_divergences": len(run.metrics.get("divergence", [])),
        "num_batches_skipped": run.batches_skipped,  # by going back after them
        "commit": (run.start.get("versions") or {}).get("commit"),
    }


def loss_columns(run: Run, scored: dict[str, Any]) -> dict[str, Any]:
    """Validation loss of the exported weights, or else the newest one measured in training."""
    steps, losses = run.column("val", "val_loss_nats")
    loss, step = last(losses), last(steps)
    if "val_loss_nats" in scored:
        loss, step = scored["val_loss_nats"], scored.get("step", run.num_steps)
    line = loss_baseline(run)
    known = is_finite(loss)
    return {
        "val_loss_nats": loss,
        "val_loss_step": int(step) if known and step is not None else None,
        "val_loss_stderr_nats": scored.get("val_loss_stderr"),
        "perplexity": math.exp(loss) if known and loss < 100 else None,
        "bits_per_byte": scored.get("bits_per_byte"),
        "val_loss_from": ("export" if "val_loss_nats" in scored else "training") if known else None,
        "gpt2_val_loss_nats": line.value if line else None,
        "gpt2_val_loss_data_set": line.data_set if line else None,
        "first_step_below_gpt2_val_loss": first_step_past(run, line, "val"),
    }


def choice_columns(run: Run, scored: dict[str, Any]) -> dict[str, Any]:
    """Choices of endings by both prompts and three counts, or else the newest from training."""
    newest = (run.metrics.get("hellaswag") or [{}])[-1]
    num_items = scored.get("num_items", newest.get("num_items"))
    share = newest.get("acc_norm_token_mean")
    in_loop = {WAY: share, f"{WAY}_stderr": accuracy_stderr(share, num_items)}
    row = {
        "questions": scored.get("questions") or question_set(num_items),
        "hellaswag_num_items": num_items,
    }
    for prompt in (LLMC, HARNESS):
        found = scored.get(prompt) or (in_loop if prompt == PROMPT else {})
        for way in WAYS:
            for name in (way, f"{way}_stderr"):
                row[f"hellaswag_{prompt}_{name}"] = found.get(name)
    gpt2, gpt3 = score_baseline(run), score_baseline(run, "gpt3_hellaswag_acc")
    row |= {
        f"gpt2_hellaswag_{PROMPT}_{WAY}": gpt2.value if gpt2 else None,
        "first_step_above_gpt2_hellaswag": first_step_past(run, gpt2, "hellaswag"),
        "gpt3_hellaswag_acc": gpt3.value if gpt3 else None,
        "first_step_above_gpt3_hellaswag": first_step_past(run, gpt3, "hellaswag"),
    }
    ours = row[f"hellaswag_{PROMPT}_{WAY}"]
    comparable = gpt2 and gpt2.same_data and num_items == HELLASWAG_ITEMS and is_finite(ours)
    row["p_value_against_published_gpt2"] = (
        two_samples_p_value(ours, num_items, gpt2.value, HELLASWAG_ITEMS) if comparable else None
    )
    return row


def current_scores(
    run: Run, model: str, results: Path
) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """What was measured on the weights that a model has now.

    Files of scores stay when a model is exported again or its run is begun anew; those of weights
    that are gone count as missing.

    Returns:
        sha256 of the weights, None if no file tells; the content of each of `SCORES`, by name.
    """

    def load(path: Path) -> dict[str, Any]:
        content = load_json(path)
        step = content.get("step")
        return {} if is_finite(step) and step > run.num_steps else content

    folder = results / "evaluate" / model
    scores = {name: load(folder / f"{name}.json") for name in SCORES}
    exported = load(results / "export" / model / "export.json")
    for key in ("fingerprint", "data_fingerprint"):
        prints = {exported.get(key), run.settings.get(key)} - {None}
        if len(prints) == 2:  # the export is one of a run of this name that is gone
            gone, exported = exported.get("weights_sha256"), {}
            scores = {n: {} if s.get("weights_sha256") == gone else s for n, s in scores.items()}
    sources = (exported, *scores.values())
    sha256 = next((s["weights_sha256"] for s in sources if "weights_sha256" in s), None)
    return sha256, {
        name: found if found.get("weights_sha256", sha256) == sha256 else {}
        for name, found in scores.items()
    }


def baseline_columns(
    run: Run,
    model: str,
    scores: dict[str, dict[str, Any]],
    loss: float | None,
    runs: list[Run],
    results: Path,
) -> dict[str, Any]:
    """The run against our own measurement of a model of its shape, item by item.

    Args:
        scores: the model's current ones.
        loss: its validation loss, nats.
    """
    baseline = baseline_of(run, runs)
    difference = p_value = None
    if baseline:
        _, theirs = current_scores(baseline, baseline.name, results)
        other = last(baseline.column("val", "val_loss_nats")[1])
        other = theirs["val_loss"].get("val_loss_nats", other)
        same_data = baseline.data_set == run.data_set
        # with more text before it a token is easier to predict
        same_length = baseline.recipe.get("sequence_length") == run.recipe.get("sequence_length")
        if same_data and same_length and is_finite(loss) and is_finite(other):
            difference = loss - other
        # the items are written with hellaswag.json, which alone tells of which weights they are
        if scores["hellaswag"].get("num_items") and theirs["hellaswag"].get("num_items"):
            folders = (results / "evaluate" / name for name in (model, baseline.name))
            p_value = paired_p_value(*(folder / "hellaswag_items.jsonl" for folder in folders))
    return {
        "baseline_run": baseline.name if baseline else None,
        "val_loss_minus_baseline_nats": difference,
        "paired_p_value_against_baseline": p_value,
    }


def task_columns(scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """MMLU, WikiText, and the tasks of lm-eval, as far as they were measured."""
    mmlu, wikitext, leaderboard = (scores[name] for name in ("mmlu", "wikitext", "leaderboard"))
    row = {f"mmlu_{key}": mmlu.get(key) for key in ("num_items", "acc", "acc_stderr")}
    row |= {f"mmlu_{key}": mmlu.get(key) for key in (WAY, f"{WAY}_stderr")}
    row["wikitext_data"] = wikitext.get("data")
    for key in ("token_perplexity", "word_perplexity", "bits_per_byte"):
        row[f"wikitext_{key}"] = wikitext.get(key)
    row["leaderboard_mean"] = leaderboard.get("leaderboard_mean")
    for found in (leaderboard, scores["harness"]):
        for task, measured in found.get("tasks", {}).items():
            shots = measured.get("shots")
            named = {key: value for key, value in measured.items() if key != "shots"}
            row |= {f"lm_eval_{task}_{shots}_shots_{key}": value for key, value in named.items()}
    return row


def summarise(
    run: Run, step: int | None, runs: list[Run], results: Path, smoothing: float
) -> dict[str, Any]:
    """One row: unit in the name of each column, None for what is not known.

    Args:
        run: its whole log.
        step: the kept one that the row is about; None for the run's newest state.
        runs: all runs, among which the baseline is looked for.
    """
    model = run.name if step is None else f"{run.name}@{step}"
    then = run if step is None else run.until(step)
    weights_sha256, scores = current_scores(run, model, results)
    row = progress_columns(then, model, smoothing) | {"status": run.status}
    row |= loss_columns(then, scores["val_loss"]) | choice_columns(then, scores["hellaswag"])
    row |= baseline_columns(run, model, scores, row["val_loss_nats"], runs, results)
    row |= task_columns(scores) | {"weights_sha256": weights_sha256}
    return {key: _cell(key, value) for key, value in row.items()}


def _cell(key: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if "p_value" in key else round(value, DIGITS)


def load_runs(results: Path) -> list[Run]:
    """Every run that has a log, by name, also those that the configuration no longer has."""
    logs = sorted((results / "train").glob("*/metrics.jsonl"))
    runs = []
    for log in logs:
        name = log.parent.name
        frozen, wanted = log.parent / "settings.json", results / "settings" / f"{name}.json"
        runs.append(load_run(name, log, frozen if frozen.exists() else wanted))
    return runs


def kept_steps(run: Run, results: Path) -> list[int]:
    """Steps of a run that were evaluated by themselves, ascending."""
    folders = (results / "evaluate").glob(f"{run.name}@*")
    steps = (folder.name.rpartition("@")[2] for folder in folders if any(folder.glob("*.json")))
    found = sorted(int(step) for step in steps if step.isdecimal())
    return [step for step in found if step <= run.num_steps]  # others are of a run that is gone


def summary_rows(runs: list[Run], results: Path, smoothing: float) -> list[dict[str, Any]]:
    """The rows of all runs, kept steps before the newest state."""
    rows = []
    for run in runs:
        for step in kept_steps(run, results):
            rows.append(summarise(run, step, runs, results, smoothing))
        rows.append(summarise(run, None, runs, results, smoothing))
    return rows


def _tsv(rows: list[dict[str, Any]], columns: list[str]) -> str:
    # object columns keep counts whole beside empty cells
    return pd.DataFrame(rows, columns=columns, dtype=object).to_csv(sep="\t", index=False)


def write_summary(
    results: Path,
    table: Path,
    json_table: Path,
    baselines: Path,
    crossovers: Path,
    smoothing: float = 0.95,
) -> None:
    """Write what lies under `results` as tables and sentences; what is missing is left empty.

    Args:
        table: written, one tab-separated row a run and a kept step.
        json_table: written, the same as a list of objects.
        baselines: written, tab-separated: published figures and our own of the same models.
        crossovers: written, Markdown: where each run passes GPT-2 and GPT-3.
    """
    runs = load_runs(results)
    rows = summary_rows(runs, results, smoothing)
    empty = summarise(Run("", {}, {}), None, [], results / "none", smoothing)
    columns = list(dict.fromkeys([*empty, *(key for row in rows for key in row)]))
    write_text(table, _tsv(rows, columns))
    write_text(json_table, json.dumps(rows, indent=1) + "\n")
    compared = baseline_rows(runs, rows)
    write_text(baselines, _tsv(compared, list(compared[0])))
    write_text(crossovers, crossovers_markdown(runs))
