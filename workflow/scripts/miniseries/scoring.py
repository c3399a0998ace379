"""Validation loss and HellaSwag, the same code during training and after it.

Everything is scored as rows: token sequences of which the last few targets count. Each forward
call has one fixed shape, every rank makes the same number of calls (a rank without rows left runs
an ignored batch, so that collectives inside a sharded model never wait), and each row's loss goes
into its own place of one float64 vector that is summed over ranks: the result depends neither on
the micro-batch nor on the number of processes.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.distributed as dist

from miniseries.distributed import reshard
from miniseries.model import GPT
from miniseries.shards import DOCUMENT_MARK, VOCAB_SIZE, Manifest, open_shard

TOKEN_MEAN = "token_mean"  # llm.c: raw context, loss per ending token
HARNESS = "harness"  # lm-eval: activity label, cleaned text, log-likelihood per character
IGNORED = -100  # a target without a loss: cross_entropy's own `ignore_index`
ROW_MULTIPLE = 64  # HellaSwag rows are padded to a multiple of this: whole tiles on a GPU
ENCODER_THREADS = 2  # ranks of one node share its cores

# n + 1 token ids (n inputs and, one to the left, their targets); how many last targets count
Row = tuple[Sequence[int] | np.ndarray, int]
Progress = Callable[[int, int], None]


class Candidate(NamedTuple):
    """One possible ending after its context; `tokens` ends with the `num_ending` of the ending."""

    tokens: list[int]
    num_ending: int
    num_characters: int


class Question(NamedTuple):
    """One HellaSwag item: its four candidates by rule, and the number of the true one."""

    label: int
    candidates: dict[str, list[Candidate]]


def _no_progress(_done: int, _total: int) -> None:
    """Nobody wants to know."""


def _calls(num_rows: int, rows: int, rank: int, world_size: int) -> Iterator[range]:
    """Rows of each forward call of one rank, in turns over ranks; equally many calls on each.

    The last ranges can be short or empty.
    """
    for start in range(0, num_rows, rows * world_size):
        first = start + rank * rows
        yield range(min(first, num_rows), min(first + rows, num_rows))


def _pack(batch: list[Row], rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (rows, length), right-padded; targets that do not count are -100."""
    tokens = np.full((rows, length), DOCUMENT_MARK, dtype=np.int64)
    targets = np.full((rows, length), IGNORED, dtype=np.int64)
    for row, (ids, num_scored) in enumerate(batch):
        end = len(ids) - 1
        tokens[row, :end] = ids[:-1]
        targets[row, end - num_scored : end] = ids[len(ids) - num_scored :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


@torch.no_grad()
def _row_losses(
    model: GPT,
    read_row: Callable[[int], Row],
    num_rows: int,
    *,
    rows_per_call: int,
    length: int,
    device: torch.device,
    rank: int,
    world_size: int,
    progress: Progress,
) -> np.ndarray:
    """Summed loss of the counted targets of every row, on every rank.

    Returns:
        (num_rows,) float64 nats.
    """
    sums = torch.zeros(num_rows, dtype=torch.float64, device=device)
    for part in _calls(num_rows, rows_per_call, rank, world_size):
        progress(part.start, num_rows)
        packed = _pack([read_row(i) for i in part], rows_per_call, length)
        if device.type == "cuda":
            packed = tuple(t.pin_memory() for t in packed)
        tokens, targets = (t.to(device, non_blocking=True) for t in packed)
        losses = model(tokens, targets, reduction="none")  # (rows, length), 0 where ignored
        sums[part.start : part.stop] = losses.double().sum(dim=1)[: len(part)]
    reshard(model)
    if world_size > 1:
        dist.all_reduce(sums)
    return sums.cpu().numpy()


def validation_windows(
    num_tokens: Sequence[int], sequence_length: int, val_tokens: int
) -> list[tuple[int, int]]:
    """Shard number and first token of every validation window, in reading order.

    A window is T inputs and their targets, T + 1 tokens of one shard; consecutive windows share
    one token, so every target counts once. What is left of a shard, or of `val_tokens`, after the
    last full window is dropped: fewer than T tokens each.

    Raises:
        ValueError: there is no full window.
    """
    windows = [
        (shard, index * sequence_length)
        for shard, count in enumerate(num_tokens)
        for index in range((count - 1) // sequence_length)
    ]
    windows = windows[: val_tokens // sequence_length]
    if not windows:
        raise ValueError(
            f"validation needs {sequence_length + 1} tokens in one shard and val_tokens >= "
            f"{sequence_length}, but the shards hold {list(num_tokens)} "
            f"and val_tokens is {val_tokens}; use more text, a larger val_tokens, "
            "or a shorter sequence_length"
        )
    return windows


def _check_ids(ids: np.ndarray, path: Path, first: int) -> None:
    """Refuse what would be a wild read on a GPU; `ids` begin at token `first` of the shard."""
    if ids.max() >= VOCAB_SIZE:
        raise ValueError(
            f"{path}: token {first + int(ids.argmax())} has id {ids.max()}, but GPT-2 has "
            f"{VOCAB_SIZE}; the shard is damaged or made with another tokenizer"
        )


def validation_loss(
    model: GPT,
    manifest: Manifest,
    *,
    micro_batch: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress = _no_progress,
) -> dict[str, Any]:
    """Mean loss over the first `val_tokens` tokens of the validation shards.

    Windows of the model's T tokens in a fixed order, see `validation_windows`. All ranks call
    this and all get the same answer.

    Args:
        micro_batch: windows of one rank in one forward call.
        progress: called by all ranks before each call of the model, with windows done and in all.

    Returns:
        val_loss_nats; val_loss_stderr, the standard error over windows in nats (None with a
        single window); num_tokens, how many targets were counted.

    Raises:
        ValueError: no full window, or a token id that GPT-2 does not have.
    """
    length = model.config.sequence_length
    shards = [open_shard(path) for path in manifest.val_shards]
    windows = validation_windows([len(s) for s in shards], length, manifest.val_tokens)

    def read_window(index: int) -> Row:
        shard, first = windows[index]
        ids = shards[shard][first : first + length + 1]
        _check_ids(ids, manifest.val_shards[shard], first)
        return ids, length

    split = {"device": device, "rank": rank, "world_size": world_size, "progress": progress}
    shape = {"rows_per_call": micro_batch, "length": length}
    means = _row_losses(model, read_window, len(windows), **shape, **split) / length
    stderr = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else None
    return {
        "val_loss_nats": float(means.mean()),
        "val_loss_stderr": stderr,
        "num_tokens": len(windows) * length,
    }


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Questions in HellaSwag's own keys, one JSON object a line.

    Raises:
        ValueError: names the file and the line that is not a question with four endings.
    """
    remedy = "delete the file and give the same command again"
    questions = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            content = json.loads(line)
            texts = [content[key] for key in ("ctx", "ctx_a", "ctx_b", "activity_label")]
            endings, label = content["endings"], int(content["label"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is no question ({error!r}); {remedy}"
            ) from None
        if len(endings) != 4 or label not in range(4):
            raise ValueError(f"{path}: line {number} needs 4 endings and a label 0 to 3; {remedy}")
        if not all(isinstance(text, str) for text in [*texts, *endings]):
            raise ValueError(f"{path}: line {number} holds something other than text; {remedy}")
        questions.append({**content, "label": label})
    if not questions:
        raise ValueError(f"{path}: holds no question; {remedy}")
    return questions


def clean_text(text: str) -> str:
    """lm-eval's clean-up of HellaSwag: WikiHow's marks in brackets go (its `preprocess`)."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _token_mean_candidates(
    questions: list[dict[str, Any]], encoding: tiktoken.Encoding
) -> list[Candidate]:
    """llm.c's rule: context as given; one space and the ending, each encoded by itself."""
    contexts = encoding.encode_ordinary_batch(
        [q["ctx"] for q in questions], num_threads=ENCODER_THREADS
    )
    endings = encoding.encode_ordinary_batch(
        [" " + e for q in questions for e in q["endings"]], num_threads=ENCODER_THREADS
    )
    characters = [len(e) for q in questions for e in q["endings"]]
    return [
        # nothing can be predicted without a first token: an empty context is a document's start
        Candidate((contexts[i // 4] or [DOCUMENT_MARK]) + ending, len(ending), characters[i])
        for i, ending in enumerate(endings)
    ]


def _harness_candidates(
    questions: list[dict[str, Any]], encoding: tiktoken.Encoding
) -> list[Candidate]:
    """lm-eval's rule: the whole is encoded, and what follows the context's tokens counts.

    Blanks at the context's end belong to the continuation (lm-eval's `_encode_pair`).
    """
    queries, choices = [], []
    for q in questions:
        context = q["ctx_a"] + " " + q["ctx_b"].capitalize()
        queries.append(clean_text(q["activity_label"] + ": " + context))
        choices += [clean_text(ending) for ending in q["endings"]]
    contexts = encoding.encode_ordinary_batch(
        [query.rstrip() for query in queries], num_threads=ENCODER_THREADS
    )
    wholes = encoding.encode_ordinary_batch(
        [f"{queries[i // 4]} {choice}" for i, choice in enumerate(choices)],
        num_threads=ENCODER_THREADS,
    )
    return [
        Candidate(whole, len(whole) - len(contexts[i // 4]), len(choices[i]))
        for i, whole in enumerate(wholes)
    ]


_CANDIDATES = {TOKEN_MEAN: _token_mean_candidates, HARNESS: _harness_candidates}


def encode_questions(
    path: Path, encoding: tiktoken.Encoding, rules: Sequence[str] = (TOKEN_MEAN,)
) -> list[Question]:
    """Read a question file and encode it once, for as many scorings as wanted.

    Args:
        path: HellaSwag's keys, one JSON object a line.
        rules: "token_mean" (llm.c), "harness" (lm-eval), or both.

    Raises:
        ValueError: the file is damaged; names the line.
    """
    questions = read_questions(path)
    encoded = {rule: _CANDIDATES[rule](questions, encoding) for rule in rules}
    return [
        Question(q["label"], {rule: encoded[rule][4 * i : 4 * i + 4] for rule in rules})
        for i, q in enumerate(questions)
    ]


def _accuracy(name: str, is_right: np.ndarray) -> dict[str, float | None]:
    """Share of right answers and its standard error as lm-eval's; None for a single item."""
    share, count = float(is_right.mean()), len(is_right)
    stderr = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return {name: share, f"{name}_stderr": stderr}


def hellaswag_scores(
    model: GPT,
    questions: Sequence[Question],
    rule: str = TOKEN_MEAN,
    *,
    micro_batch: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress = _no_progress,
    with_predictions: bool = False,
) -> dict[str, Any]:
    """Share of questions whose true ending the model finds likeliest.

    All ranks call this and all get the same answer. Among equal candidates the first one wins.
    A row longer than the model's T loses tokens at its start. Rows are padded to the longest one,
    not to T: one more shape, `micro_batch` x T tokens at most, at a fraction of the work.

    Args:
        questions: from `encode_questions`, with this rule.
        micro_batch: rows of T tokens that fit one rank's forward call.
        progress: called by all ranks before each call of the model, with rows done and in all.

    Returns:
        rule, num_items, num_truncated (questions that lost tokens); acc (smallest summed loss)
        and acc_norm (smallest loss per ending token, or for the harness's rule per character),
        each with its standard error; num_correct, counted by acc_norm; with `with_predictions`
        also predictions, the choice of acc_norm for every question.
    """
    candidates = [c for question in questions for c in question.candidates[rule]]
    positions = model.config.sequence_length
    longest = max(len(c.tokens) - 1 for c in candidates)
    length = min(positions, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
    rows = [(c.tokens[-(length + 1) :], min(c.num_ending, length)) for c in candidates]
    split = {"device": device, "rank": rank, "world_size": world_size, "progress": progress}
    shape = {"rows_per_call": micro_batch * (positions // length), "length": length}
    sums = _row_losses(model, rows.__getitem__, len(rows), **shape, **split)
    if rule == TOKEN_MEAN:
        divisors = [num_scored for _, num_scored in rows]
    else:
        divisors = [max(1, c.num_characters) for c in candidates]
    choices = (sums / divisors).reshape(-1, 4).argmin(axis=1)
    labels = np.array([question.label for question in questions])
    truncated = np.array([len(c.tokens) > length + 1 for c in candidates]).reshape(-1, 4)
    scores = {
        "rule": rule,
        "num_items": len(questions),
        "num_truncated": int(truncated.any(axis=1).sum()),
        "num_correct": int((choices == labels).sum()),
        **_accuracy("acc", sums.reshape(-1, 4).argmin(axis=1) == labels),
        **_accuracy("acc_norm", choices == labels),
    }
    return scores | ({"predictions": choices.tolist()} if with_predictions else {})
