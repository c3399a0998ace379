"""Runs against GPT-2 and GPT-3: significance, the step of the cross-over, and our own baselines."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from miniseries.evaluation.choices import right_answers
from miniseries.reporting.runlog import (
    CHANCE,
    Baseline,
    Run,
    first_step_past,
    loss_baseline,
    published,
    score_baseline,
)

PROMPT, WAY = "llmc", "acc_token_mean"  # what GPT-2's published accuracies were counted by

MMLU_ITEMS = 14042  # of its test part, which the published accuracies are about
FINETUNED_STEPS = 1000  # of llm.c's fine-tuned GPT-2
# OpenAI's weights as `init_from:` names them: of the hub, a folder of that name, llm.c's file
OPENAI_WEIGHTS = re.compile(
    r"openai-community/gpt2(-medium|-large|-xl)?(@[\w.-]+)?"
    r"|[./](.*/)?(\S*openai-community--)?gpt2(-medium|-large|-xl)?(/snapshots/\w+)?"
    r"(/|/config\.json)?"
    r"|[./](.*/)?gpt2_(124M|355M|774M|1558M)(_bf16)?\.bin"
)


def mcnemar_p_value(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Chance of so large a difference between two models on the same items, were they equal.

    Exact and two-sided: of the items that only one of them has right, each is a fair coin.

    Args:
        ours: (N,) bool, right answers of one model.
        theirs: (N,) bool, those of the other.
    """
    wins, losses = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    count = wins + losses
    log_terms = (
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(min(wins, losses) + 1)
    )
    tail = math.fsum(math.exp(term - count * math.log(2)) for term in log_terms)
    return min(1.0, 2 * tail)


def two_samples_p_value(share: float, count: int, other: float, other_count: int) -> float:
    """The same for two shares of right answers of which the single answers are not known.

    Normal approximation with the pooled share; answers to the same items vary together, so the
    true value is smaller.
    """
    pooled = (share * count + other * other_count) / (count + other_count)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / other_count))
    return 1.0 if spread == 0 else math.erfc(abs(share - other) / spread / math.sqrt(2))


def read_items(path: Path) -> list[dict[str, Any]] | None:
    """What `hellaswag_items.jsonl` holds for the prompt that is compared; None if unreadable."""
    try:
        return [json.loads(line)[PROMPT] for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def paired_p_value(ours: Path, theirs: Path) -> float | None:
    """McNemar's for two logs of items; None if one is missing or they are about other items."""
    logs = [read_items(path) for path in (ours, theirs)]
    if not all(logs):
        return None
    # the labels of two sets of questions may agree
    asked, other = ([(item["label"], item["num_characters"]) for item in log] for log in logs)
    if asked != other:
        return None
    return mcnemar_p_value(*(right_answers(log, WAY) for log in logs))


def is_measured_only(run: Run) -> bool:
    """Whether nothing is trained: a baseline of our own measurement."""
    return bool(run.recipe.get("init_from")) and run.recipe.get("max_steps") == 0


def starts_from_openai(run: Run) -> bool:
    """Whether a run begins with weights that OpenAI published, by the name that it gives them."""
    return bool(OPENAI_WEIGHTS.fullmatch(str(run.recipe.get("init_from"))))


def has_shape_of(run: Run, other: Run) -> bool:
    """Whether two runs have models of the same shape."""
    keys = ("num_layers", "num_heads", "channels")
    return bool(run.recipe) and all(run.recipe.get(k) == other.recipe.get(k) for k in keys)


def baseline_of(run: Run, runs: list[Run]) -> Run | None:
    """Our measurement of the GPT-2 of a run's shape, if possible on its data."""
    gpt2 = [r for r in runs if is_measured_only(r) and starts_from_openai(r)]
    found = [r for r in gpt2 if has_shape_of(r, run) and r != run]
    return min(found, key=lambda r: (r.data_set != run.data_set, r.name), default=None)


def _measured_on(run: Run, row: dict[str, Any]) -> set[str | None]:
    """The data sets, as `baselines.json` names them, of a run's loss and answers."""
    mmlu = {"MMLU"} if row.get("mmlu_num_items") == MMLU_ITEMS else set()
    return {run.data_set, row.get("questions")} | mmlu


def baseline_rows(runs: list[Run], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every published figure with its source, and beside it what we measured of that model.

    Args:
        rows: the summary's; their columns carry the names of the published metrics.
    """
    gpt2 = [run for run in runs if starts_from_openai(run)]
    own = [run for run in gpt2 if is_measured_only(run)]
    tuned = [r for r in gpt2 if r.recipe.get("max_steps") == r.num_steps == FINETUNED_STEPS]
    by_run = {row["model"]: row for row in rows}
    table = []
    for entry in published()["baselines"]:
        metric = entry["metric"].removeprefix("finetuned_")
        candidates = tuned if metric != entry["metric"] else own
        shape = published()["sizes"][entry["size"]]
        match = [
            run
            for run in candidates
            if entry["model"].startswith("GPT-2")
            and all(run.recipe.get(k) == shape[k] for k in ("num_layers", "num_heads", "channels"))
            and entry["data_set"] in _measured_on(run, by_run[run.name])
        ]
        row = by_run[match[0].name] if match else {}
        table.append(
            {
                "model": entry["model"],
                "metric": entry["metric"],
                "data_set": entry["data_set"],
                "published": entry["value"],
                "measured_here": row.get(metric),
                "run": row.get("model"),
                "source": entry["source"],
            }
        )
    return table


def _sentence(run: Run, line: Baseline | None, kind: str) -> str:
    """Whether and when a run passed one line."""
    what, word = ("validation loss", "below") if kind == "val" else ("HellaSwag", "above")
    if line is None:
        return f"{what}: there is no published figure."
    number = f"{line.value:.4f} nats" if kind == "val" else f"{100 * line.value:.1f} %"
    name = f"{line.model} ({number} on {line.data_set})"
    if not line.same_data:
        asked = run.data_set if kind == "val" else run.questions
        return f"{what}: no comparison with {name}, since this run was measured on {asked}."
    if not run.metrics.get(kind):
        return f"{what}, against {name}: not measured yet."
    step = first_step_past(run, line, kind)
    if step is None:
        return f"{what}: not {word} {name} in {run.num_steps:,} steps."
    tokens = f", {step * run.tokens_per_step:,} tokens" if run.tokens_per_step else ""
    return f"{what}: first {word} {name} at step {step:,}{tokens}."


def crossovers_markdown(runs: list[Run]) -> str:
    """The first step past each published line, for every run, with what the lines leave out."""
    parts = ["## Where the runs pass GPT-2 and GPT-3\n"]
    for run in sorted(runs, key=lambda run: run.num_parameters or 0):
        if is_measured_only(run) or run.is_empty:
            continue
        lines = [
            _sentence(run, loss_baseline(run), "val"),
            _sentence(run, score_baseline(run), "hellaswag"),
            _sentence(run, score_baseline(run, "gpt3_hellaswag_acc"), "hellaswag"),
        ]
        parts.append(f"**{run.label}**\n\n" + "".join(f"- {line}\n" for line in lines))
    parts.append(
        "Steps are those of the evaluations, so a line can have been passed a little earlier. A "
        "lower loss than GPT-2's is not yet a better model: GPT-2 learnt from WebText, which was "
        "never published, and pays for the change of text; a run that starts from GPT-2 and trains "
        "on this text for 1,000 steps shows how much of the lead is due to that. HellaSwag asks "
        f"for common sense in simple English, guessing gets {100 * CHANCE:.0f} %, and it says "
        "nothing about other languages, code, or mathematics, which WebText may have held more of. "
        "GPT-3's line is that of a model trained on 300 billion tokens, scored in its authors' own "
        "way.\n"
    )
    return "\n".join(parts)
