"""Validation loss and choices of endings, the same code during training and after it.

Everything is scored as rows: token sequences of which the last few targets count. Forward calls
have a few fixed shapes, every rank makes the same number of calls (a rank without rows left runs
an ignored batch, so that collectives inside a sharded model never wait), and each row's loss goes
into its own place of one float64 vector that is summed over ranks: the result depends neither on
the micro-batch nor on the number of processes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miniseries.data.shards import DOCUMENT_MARK, VOCAB_SIZE, Manifest, open_shard
from miniseries.evaluation.choices import LLMC, WAYS, Question, right_answers
from miniseries.model.gpt import GPT
from miniseries.training.distributed import reshard

IGNORED = -100  # a target without a loss: cross_entropy's own `ignore_index`
SHORTEST_ROW = 64  # rows are padded to 64, 128, 256 ... tokens: few shapes, whole tiles on a GPU

# n + 1 token ids (n inputs and, one to the left, their targets); how many last targets count
Row = tuple[Sequence[int] | np.ndarray, int]
Progress = Callable[[int, int], None]


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


def open_validation(
    manifest: Manifest, sequence_length: int
) -> tuple[list[np.memmap], list[tuple[int, int]]]:
    """The validation shards, and their `validation_windows`.

    Raises:
        ValueError: there is no full window.
    """
    shards = [open_shard(path) for path in manifest.val_shards]
    sizes = [len(shard) for shard in shards]
    return shards, validation_windows(sizes, sequence_length, manifest.val_tokens)


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
    shards, windows = open_validation(manifest, length)

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


def _padded_lengths(lengths: Sequence[int], positions: int) -> np.ndarray:
    """(N,) length that each row is padded to: 64 times a power of 2, at most what is needed."""
    longest = min(positions, -(-max(lengths) // SHORTEST_ROW) * SHORTEST_ROW)
    steps = np.ceil(np.log2(np.maximum(np.array(lengths), 1) / SHORTEST_ROW)).clip(min=0)
    return np.minimum(SHORTEST_ROW * 2**steps, longest).astype(int)


def row_losses(
    model: GPT,
    rows: Sequence[Row],
    *,
    micro_batch: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress = _no_progress,
) -> np.ndarray:
    """Summed loss of the counted targets of rows of any length up to T.

    Rows of about one length go together, so that little is padding. All ranks call this and all
    get the same answer.

    Args:
        micro_batch: rows of T tokens that fit one rank's forward call.
        progress: called by all ranks before each call of the model, with rows done and in all.

    Returns:
        (N,) float64 nats.
    """
    positions = model.config.sequence_length
    padded = _padded_lengths([len(ids) - 1 for ids, _ in rows], positions)
    sums, num_done = np.zeros(len(rows)), 0
    for length in np.unique(padded):
        group = np.flatnonzero(padded == length)
        sums[group] = _row_losses(
            model,
            lambda place, group=group: rows[group[place]],
            len(group),
            rows_per_call=micro_batch * (positions // int(length)),
            length=int(length),
            device=device,
            rank=rank,
            world_size=world_size,
            progress=lambda done, _, before=num_done: progress(before + done, len(rows)),
        )
        num_done += len(group)
    return sums


def warm_up(model: GPT, questions: Sequence[Question] | None, **shared: Any) -> None:
    """Compute once with each shape that validation and questions have.

    From then on they compile nothing and take no more memory. All ranks call this.

    Args:
        questions: as `choice_scores` takes them with llm.c's prompt; None when there are none.
        shared: micro_batch, device, rank, world_size of the scorings to come.
    """
    positions = model.config.sequence_length
    lengths = [
        min(len(c.tokens) - 1, positions) for q in questions or () for c in q.candidates[LLMC]
    ]
    padded = np.unique(_padded_lengths(lengths, positions)) if lengths else []
    for shapes in ([positions], padded):
        rows = [(np.zeros(length + 1, dtype=np.int64), 1) for length in shapes]
        if rows:
            row_losses(model, rows, **shared)


def accuracy(name: str, is_right: np.ndarray) -> dict[str, float | None]:
    """Share of right answers and its standard error as lm-eval's; None for a single item."""
    share, count = float(is_right.mean()), len(is_right)
    stderr = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return {name: share, f"{name}_stderr": stderr}


def choice_scores(
    model: GPT,
    questions: Sequence[Question],
    prompt: str = LLMC,
    *,
    micro_batch: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress = _no_progress,
    with_items: bool = False,
) -> dict[str, Any]:
    """Share of questions whose true ending the model finds likeliest, counted in three ways.

    All ranks call this and all get the same answer. Among equal candidates the first one wins.
    A row longer than the model's T loses tokens at its start.

    Args:
        questions: from `choices`, encoded with this prompt.
        micro_batch: rows of T tokens that fit one rank's forward call.
        progress: called by all ranks before each call of the model, with rows done and in all.

    Returns:
        num_items, num_truncated (questions that lost tokens); acc (smallest summed loss, lm-eval's
        `acc`), acc_token_mean (smallest loss per token of the ending, llm.c's `acc_norm`), and
        acc_characters (per character of the ending, lm-eval's `acc_norm`), each with its standard
        error; num_correct, counted by acc_token_mean; with `with_items` also items, for each
        question its label and of each candidate nats, num_tokens, and num_characters.
    """
    candidates = [c for question in questions for c in question.candidates[prompt]]
    positions = model.config.sequence_length
    rows = [
        (np.array(c.tokens[-(positions + 1) :]), min(c.num_ending, positions)) for c in candidates
    ]
    split = {"device": device, "rank": rank, "world_size": world_size, "progress": progress}
    columns = {
        "nats": row_losses(model, rows, micro_batch=micro_batch, **split),
        "num_tokens": np.array([num_scored for _, num_scored in rows]),
        "num_characters": np.array([max(1, c.num_characters) for c in candidates]),
    }
    fours = {name: values.reshape(-1, 4).tolist() for name, values in columns.items()}
    items = [
        {"label": question.label, **{name: four[i] for name, four in fours.items()}}
        for i, question in enumerate(questions)
    ]
    is_cut = np.array([len(c.tokens) > positions + 1 for c in candidates]).reshape(-1, 4)
    scores: dict[str, Any] = {
        "num_items": len(questions),
        "num_truncated": int(is_cut.any(axis=1).sum()),
        "num_correct": int(right_answers(items, "acc_token_mean").sum()),
    }
    for way in WAYS:
        scores |= accuracy(way, right_answers(items, way))
    return scores | ({"items": items} if with_items else {})
