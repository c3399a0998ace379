"""The summary table: one row per run, with the unit in the name of each column."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from miniseries.metrics import write_text
from miniseries.runlog import (
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


def progress_columns(run: Run, smoothing: float) -> dict[str, Any]:
    """How far a run has come, how fast, and its training loss."""
    speeds, mfu, times = (
        run.column("train", key)[1] for key in ("tokens_per_second", "mfu_percent", "step_time_ms")
    )
    tokens_seen = last(run.column("train", "tokens_seen")[1])
    return {
        "run": run.name,
        "status": run.status,
        "parameters": run.num_parameters,
        "data_set": run.data_set,
        "step": run.num_steps,
        "max_steps": run.recipe.get("max_steps"),
        "tokens_seen": None if tokens_seen is None else int(tokens_seen),
        "tokens_per_step": run.tokens_per_step,
        "train_loss_nats": last(run.smoothed_loss(smoothing)[1]),
        "tokens_per_second": float(np.median(speeds)) if len(speeds) else None,
        "mfu_percent": float(np.median(mfu)) if len(mfu) else None,
        "train_hours": times.sum() / 3.6e6 if len(times) else None,
    }


def loss_columns(run: Run, scored: dict[str, Any]) -> dict[str, Any]:
    """Validation loss of the exported weights, or else the newest one measured in training."""
    loss = scored.get("val_loss_nats", last(run.column("val", "val_loss_nats")[1]))
    line = loss_baseline(run)
    known = is_finite(loss)
    return {
        "val_loss_nats": loss,
        "val_loss_stderr": scored.get("val_loss_stderr"),
        "perplexity": math.exp(loss) if known and loss < 100 else None,
        "val_loss_from": ("export" if "val_loss_nats" in scored else "training") if known else None,
        "gpt2_val_loss_nats": line.value if line else None,
        "gpt2_val_loss_data_set": line.data_set if line else None,
        "first_step_below_gpt2_val_loss": first_step_past(run, line, "val"),
    }


def score_columns(run: Run, scored: dict[str, Any]) -> dict[str, Any]:
    """HellaSwag of the exported weights by both rules, or else the newest score in training."""
    newest = (run.metrics.get("hellaswag") or [{}])[-1]
    in_loop = {"acc_norm": newest.get("acc_norm_token_mean")}
    in_loop["acc_norm_stderr"] = accuracy_stderr(in_loop["acc_norm"], newest.get("num_items"))
    token_mean, harness = scored.get("token_mean") or in_loop, scored.get("harness") or {}
    line = score_baseline(run)
    return {
        "hellaswag_num_items": scored.get("num_items", newest.get("num_items")),
        "hellaswag_acc_norm_token_mean": token_mean.get("acc_norm"),
        "hellaswag_acc_norm_token_mean_stderr": token_mean.get("acc_norm_stderr"),
        "hellaswag_acc_harness": harness.get("acc"),
        "hellaswag_acc_norm_harness": harness.get("acc_norm"),
        "gpt2_hellaswag_acc_norm_token_mean": line.value if line else None,
        "first_step_above_gpt2_hellaswag": first_step_past(run, line, "hellaswag"),
    }


def summarise(run: Run, results: Path, smoothing: float = 0.95) -> dict[str, Any]:
    """One row of the summary: unit in the name of each column, None for what is not known."""
    scored = load_json(results / "evaluate" / run.name / "val_loss.json")
    answered = load_json(results / "evaluate" / run.name / "hellaswag.json")
    exported = load_json(results / "export" / run.name / "export.json")
    row = progress_columns(run, smoothing) | loss_columns(run, scored)
    row |= score_columns(run, answered)
    sources = (exported, scored, answered)
    row["weights_sha256"] = next(
        (s["weights_sha256"] for s in sources if "weights_sha256" in s), None
    )
    for key, value in row.items():
        if isinstance(value, float):
            row[key] = round(value, 6) if math.isfinite(value) else None
    return row


def write_summary(results: Path, runs: list[str], output: Path, smoothing: float = 0.95) -> None:
    """Write one tab-separated row per run from what lies under `results`; missing = empty."""
    rows = []
    for name in runs:
        folder = results / "train" / name
        frozen, wanted = folder / "settings.json", results / "settings" / f"{name}.json"
        run = load_run(name, folder / "metrics.jsonl", frozen if frozen.exists() else wanted)
        rows.append(summarise(run, results, smoothing))
    empty = summarise(Run("", {}, {}), results / "none", smoothing)
    # object columns keep counts whole beside empty cells
    table = pd.DataFrame(rows, columns=list(empty), dtype=object)
    write_text(output, table.to_csv(sep="\t", index=False))
