"""The model card of an export: what it is, how it was made, what it scores, what it cost."""

from typing import Any

from miniseries.evaluation.choices import question_set
from miniseries.reporting.runlog import Run, last

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
language: en
tags: [gpt2]
---
"""
LOADING = """It continues text; it follows no instructions, and its training text may show through.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("this/folder")
    model = AutoModelForCausalLM.from_pretrained("this/folder")
"""


def _table(names: tuple[str, str], rows: dict[str, Any]) -> str:
    """A Markdown table of two columns; what is not known has no row."""
    lines = "".join(f"| {key} | {value} |\n" for key, value in rows.items() if value is not None)
    return f"| {names[0]} | {names[1]} |\n|---|---|\n{lines}" if lines else ""


def _share(value: float, stderr: float | None) -> str:
    return f"{100 * value:.2f}" + (f" ± {100 * stderr:.2f} %" if stderr is not None else " %")


def training_scores(run: Run, step: int) -> dict[str, str]:
    """The newest scores from training; those of an earlier step than `step` say so."""
    steps, losses = run.column("val", "val_loss_nats")
    loss, scores = last(losses), {}
    if loss is not None:
        scores["validation loss"] = f"{loss:.4f} nats per token{_at(steps[-1], step)}"
    newest = (run.metrics.get("hellaswag") or [{}])[-1]
    if newest.get("num_items"):
        counted = f"{newest['num_correct']} of {newest['num_items']} by mean loss per token"
        scores[run.questions] = counted + _at(newest["step"], step)
    return scores


def _at(measured: float, exported: int) -> str:
    return "" if measured == exported else f", at step {measured:.0f}"


def measured_scores(
    val_loss: dict[str, Any], choices: dict[str, Any], tasks: dict[str, Any]
) -> dict[str, str]:
    """Scores of the exported weights, each with its standard error.

    Args:
        val_loss: content of val_loss.json.
        choices: content of hellaswag.json.
        tasks: `tasks` of lm-eval's results, or {}.
    """
    loss, error = val_loss["val_loss_nats"], val_loss.get("val_loss_stderr")
    spread = f" ± {error:.4f}" if error is not None else ""
    scores = {
        f"validation loss on {val_loss['dataset']}": f"{loss:.4f}{spread} nats per token",
        "perplexity": f"{val_loss['perplexity']:.3f}",
    }
    if "bits_per_byte" in val_loss:
        scores["bits per byte"] = f"{val_loss['bits_per_byte']:.4f}"
    ways = {"acc": "sum", "acc_token_mean": "mean per token", "acc_characters": "per character"}
    for prompt, name in (("llmc", "llm.c's prompt"), ("harness", "lm-eval's prompt")):
        found = choices.get(prompt)  # None if no question could be made of the text
        for way, counted in ways.items() if found else ():
            label = f"{choices['questions']}, {name}, {counted}"
            scores[label] = _share(found[way], found.get(f"{way}_stderr"))
    for task, found in tasks.items():
        for metric, value in found.items():
            if metric.startswith(("acc", "exact_match")) and "stderr" not in metric:
                label = f"{_task_name(task, found)}, {found['shots']} examples, {metric}"
                scores[label] = _share(value, _stderr(found, metric))
    return scores


def _task_name(task: str, found: dict[str, Any]) -> str:
    """lm-eval's name; its HellaSwag may have been asked the run's own questions instead."""
    local = task == "hellaswag" and found.get("data") == "local"
    asked = question_set(found["num_items"]) if local else "HellaSwag"
    return f"lm-eval {task}" if asked == "HellaSwag" else f"{asked}, lm-eval {task}"


def _stderr(found: dict[str, Any], metric: str) -> float | None:
    """Of exact_match_strict-match it is exact_match_stderr_strict-match: the filter comes last."""
    errors = (key for key in found if "_stderr" in key and key.replace("_stderr", "") == metric)
    return found.get(next(errors, ""))


def cost(run: Run) -> dict[str, Any]:
    """What the training took, and with which code and machine."""
    start = run.start
    versions = start.get("versions") or {}
    device = start.get("gpu_name") or start.get("device")
    hours = run.device_hours
    return {
        "device": f"{start.get('world_size', 1)} x {device}" if device else None,
        "device-hours of training steps": f"{hours:.2f}" if hours else None,
        "code": versions.get("commit"),
        "torch": versions.get("torch"),
    }


def model_card(
    info: dict[str, Any], recipe: dict[str, Any], run: Run, scores: dict[str, str]
) -> str:
    """README.md of an export.

    Args:
        info: content of export.json.
        recipe: of the run.
        run: its log, up to the exported step.
        scores: name and value of each score.
    """
    start = f"`{recipe['init_from']}`" if recipe.get("init_from") else "scratch"
    described = _table(
        ("setting", "value"),
        {key: value for key, value in recipe.items() if not isinstance(value, dict)},
    )
    data = {"data set": info["dataset"], **recipe["data"]}
    data |= {"fingerprint of the tokens": info.get("data_fingerprint")}
    return f"""{HEAD}# {info["run"]} after {info["step"]} steps

A GPT-2 with {info["num_parameters"]:,} parameters, trained from {start} on
{info["tokens_seen"]:,} tokens of `{info["dataset"]}`. {LOADING}
Weights are {info["dtype"]}, sha256 of `model.safetensors`: `{info["weights_sha256"]}`.

## Scores

{_table(("score", "value"), scores) or "None was measured yet."}

## Recipe

{described}

## Data

{_table(("what", "value"), data)}

## Cost

{_table(("what", "value"), cost(run)) or "Not known."}
"""
