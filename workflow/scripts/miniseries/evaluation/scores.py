"""Scores of exported models: the same as in training, and those that take more time."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miniseries.data.encode import gpt2_encoding
from miniseries.data.questions import read_rows
from miniseries.data.shards import DOCUMENT_MARK, VOCAB_SIZE, Manifest, load_manifest
from miniseries.evaluation.choices import (
    HARNESS,
    LLMC,
    MMLU,
    encode_mmlu,
    encode_questions,
    question_set,
)
from miniseries.evaluation.huggingface import load_export
from miniseries.evaluation.scoring import (
    Row,
    choice_scores,
    open_validation,
    row_losses,
    validation_loss,
)
from miniseries.metrics import write_json, write_text
from miniseries.model.gpt import GPT
from miniseries.training.distributed import choose_device

LARGEST_EXPONENT = 700.0  # e^710 is no float


def _open_export(
    export: Path, micro_batch: int, device: str
) -> tuple[GPT, torch.device, dict[str, Any]]:
    """The model on its device, and what identifies it in every file of scores."""
    if micro_batch < 1:
        raise ValueError(f"--micro-batch is {micro_batch}; it must be at least 1")
    place = choose_device(device)
    model, info = load_export(export, place)
    if info["precision"] == "tf32":
        torch.set_float32_matmul_precision("high")  # as in training
    identity = {key: info[key] for key in ("run", "step", "weights_sha256", "dtype")}
    return model, place, {"model": export.resolve().name, **identity}


def perplexity(nats: float) -> float:
    """e to the mean loss."""
    return math.exp(min(nats, LARGEST_EXPONENT))


def token_bytes() -> np.ndarray:
    """(V,) int64 length of every token's text in UTF-8 bytes; 0 for the mark of a document."""
    encoding = gpt2_encoding()
    lengths = [len(encoding.decode_single_token_bytes(token)) for token in range(VOCAB_SIZE)]
    lengths[DOCUMENT_MARK] = 0
    return np.array(lengths)


def validation_bytes(manifest: Manifest, sequence_length: int) -> int:
    """UTF-8 bytes of the text that the validation loss is about."""
    lengths = token_bytes()
    shards, windows = open_validation(manifest, sequence_length)
    return sum(
        int(lengths[shards[shard][first + 1 : first + 1 + sequence_length]].sum())
        for shard, first in windows
    )


def score_export(
    export: Path,
    manifest: Path,
    questions: Path,
    micro_batch: int,
    val_loss_json: Path,
    hellaswag_json: Path,
    items_jsonl: Path,
    device: str = "auto",
) -> None:
    """Score an exported model as training does, and HellaSwag with lm-eval's prompt as well.

    Args:
        export: a Hugging Face GPT-2 folder.
        manifest: its validation shards are read.
        questions: HellaSwag's keys, one JSON object a line; empty if there are none.
        micro_batch: rows of T tokens in one forward call.
        val_loss_json: written.
        hellaswag_json: written.
        items_jsonl: written; one line a question with the loss of every candidate.
        device: a torch device, or "auto".

    Raises:
        ValueError: an input is damaged, or the loss is not finite.
    """
    model, place, identity = _open_export(export, micro_batch, device)
    data = load_manifest(manifest)
    asked = encode_questions(questions, gpt2_encoding(), (LLMC, HARNESS))
    scores = validation_loss(model, data, micro_batch=micro_batch, device=place)
    loss = scores["val_loss_nats"]
    if not math.isfinite(loss):
        raise ValueError(f"{export}: its validation loss is {loss}; the weights are spoilt")
    scores["perplexity"] = perplexity(loss)
    num_bytes = validation_bytes(data, model.config.sequence_length)
    if num_bytes:
        scores["bits_per_byte"] = loss * scores["num_tokens"] / (math.log(2) * num_bytes)
    by_prompt, items = {}, {}
    for prompt in (LLMC, HARNESS) if asked else ():
        options = {"micro_batch": micro_batch, "device": place, "with_items": True}
        by_prompt[prompt] = choice_scores(model, asked, prompt, **options)
        items[prompt] = by_prompt[prompt].pop("items")
    lines = [
        json.dumps({"item": i, **dict(zip(items, both, strict=True))})
        for i, both in enumerate(zip(*items.values(), strict=True))
    ]
    write_json(val_loss_json, {**identity, "dataset": data.dataset, **scores})
    write_text(items_jsonl, "".join(f"{line}\n" for line in lines))
    name = question_set(len(asked))
    asked_of = {"questions": name, "questions_of": name if name == "HellaSwag" else data.dataset}
    write_json(hellaswag_json, {**identity, **asked_of, "num_items": len(asked), **by_prompt})
    said = f"{identity['model']}: val loss {loss:.4f} ({scores['num_tokens']:,} tokens)"
    if asked:
        right = by_prompt[LLMC]["num_correct"]
        said += f", {name} {right}/{len(asked)} = {right / len(asked):.4f}"
    print(said)


# ---- further tasks --------------------------------------------------------------------------


def _mmlu(model: GPT, data: Path, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """MMLU without examples, the choices written out, as llm.c's `dev/data/mmlu.py` asks it."""
    questions = encode_mmlu(data, gpt2_encoding())
    return choice_scores(model, questions, MMLU, micro_batch=micro_batch, device=device)


def _read_text(path: Path) -> str:
    """A text, or the column `text` of a .parquet file, joined as it stands."""
    if path.suffix == ".parquet":
        return "".join(row["text"] for row in read_rows(path))
    return path.read_text(encoding="utf-8")


def strided_rows(tokens: np.ndarray, sequence_length: int) -> list[Row]:
    """Rows in which each token but the first counts once, after at least T/2 tokens of context.

    The first row alone scores all its targets.
    """
    stride = max(1, sequence_length // 2)
    rows, scored = [], 1  # tokens that have been scored, the first of which never is
    while scored < len(tokens):
        end = min(len(tokens), sequence_length + 1 if scored == 1 else scored + stride)
        rows.append((tokens[max(0, end - sequence_length - 1) : end], end - scored))
        scored = end
    return rows


def _wikitext(model: GPT, data: Path, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Perplexity on a text as it stands (WikiText's raw test part), by token, word, and byte.

    Words are what blanks separate, as the published figures count them. GPT-2's own figures are
    lower than a plain reading gives, as its authors undid WikiText's spacing of punctuation.
    """
    text = _read_text(data)
    tokens = np.array(gpt2_encoding().encode_ordinary(text))
    if len(tokens) < 2:
        raise ValueError(f"{data}: holds no text")
    rows = strided_rows(tokens, model.config.sequence_length)
    total = float(row_losses(model, rows, micro_batch=micro_batch, device=device).sum())
    counts = {"token": len(tokens) - 1, "word": len(text.split())}
    return {
        **{f"num_{unit}s": count for unit, count in counts.items()},
        **{f"{unit}_perplexity": perplexity(total / count) for unit, count in counts.items()},
        "bits_per_byte": total / (math.log(2) * len(text.encode())),
    }


# What scores a task, and of its scores the one that is printed, with what it is a mean over
TASKS = {
    "mmlu": (_mmlu, "acc_token_mean", "num_items"),
    "wikitext": (_wikitext, "word_perplexity", "num_words"),
}


def score_task(
    export: Path, task: str, data: Path, micro_batch: int, output: Path, device: str = "auto"
) -> None:
    """Score an exported model on MMLU or WikiText.

    Args:
        task: "mmlu" or "wikitext".
        data: the task's file.
        output: written, JSON.

    Raises:
        ValueError: a damaged input.
    """
    model, place, identity = _open_export(export, micro_batch, device)
    measure, figure, count = TASKS[task]
    scores = measure(model, data, micro_batch, place)
    write_json(output, {**identity, "task": task, "data": data.name, **scores})
    print(
        f"{identity['model']}: {task} {figure} {scores[figure]:.4f} "
        f"({scores[count]:,} {count.removeprefix('num_')})"
    )
