"""Scores of exported models: the same as in training, and those that take more time."""

import math
from pathlib import Path

import torch

from miniseries.distributed import choose_device
from miniseries.encode import gpt2_encoding
from miniseries.huggingface import load_export
from miniseries.metrics import write_json
from miniseries.scoring import (
    HARNESS,
    TOKEN_MEAN,
    encode_questions,
    hellaswag_scores,
    validation_loss,
)
from miniseries.shards import load_manifest


def score_export(
    export: Path,
    manifest: Path,
    questions: Path,
    micro_batch: int,
    val_loss_json: Path,
    hellaswag_json: Path,
    device: str = "auto",
) -> None:
    """Score an exported model as training does, and HellaSwag by lm-eval's rule as well.

    Args:
        export: a Hugging Face GPT-2 folder.
        manifest: its validation shards are read.
        questions: HellaSwag's keys, one JSON object a line.
        micro_batch: rows of T tokens in one forward call.
        val_loss_json: written.
        hellaswag_json: written.
        device: a torch device, or "auto".

    Raises:
        ValueError: an input is damaged, or the loss is not finite.
    """
    if micro_batch < 1:
        raise ValueError(f"--micro-batch is {micro_batch}; it must be at least 1")
    place = choose_device(device)
    model, info = load_export(export, place)
    if info["precision"] == "tf32":
        torch.set_float32_matmul_precision("high")  # as in training
    data = load_manifest(manifest)
    items = encode_questions(questions, gpt2_encoding(), (TOKEN_MEAN, HARNESS))
    scores = validation_loss(model, data, micro_batch=micro_batch, device=place)
    loss = scores["val_loss_nats"]
    if not math.isfinite(loss):
        raise ValueError(f"{export}: its validation loss is {loss}; the weights are spoilt")
    scores["perplexity"] = math.exp(min(loss, 700.0))  # e^710 is no float
    by_rule = {}
    for rule in (TOKEN_MEAN, HARNESS):
        found = hellaswag_scores(model, items, rule, micro_batch=micro_batch, device=place)
        by_rule[rule] = {k: v for k, v in found.items() if k not in ("rule", "num_items")}
    identity = {key: info[key] for key in ("run", "step", "weights_sha256", "dtype")}
    identity = {"model": export.resolve().name, **identity}
    write_json(val_loss_json, {**identity, "dataset": data.dataset, **scores})
    write_json(hellaswag_json, {**identity, "num_items": len(items), **by_rule})
