"""Questions with four endings, HellaSwag's and MMLU's: read, and turned into tokens.

Two prompts for HellaSwag, never to be mixed: llm.c's and lm-evaluation-harness's.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from miniseries.data.questions import read_rows
from miniseries.data.shards import DOCUMENT_MARK

LLMC = "llmc"  # llm.c: the context as it is
HARNESS = "harness"  # lm-eval: activity label, cleaned text
MMLU = "mmlu"  # llm.c's prompt for MMLU
ENCODER_THREADS = 2  # ranks of one node share its cores
HELLASWAG_ITEMS = 10042  # questions of HellaSwag's validation split
# Divisor of each candidate's nats for each way to count, as `scoring.choice_scores` has them
WAYS = {"acc": None, "acc_token_mean": "num_tokens", "acc_characters": "num_characters"}


class Candidate(NamedTuple):
    """One possible ending after its context; `tokens` ends with the `num_ending` of the ending."""

    tokens: list[int]
    num_ending: int
    num_characters: int


class Question(NamedTuple):
    """One item: its four candidates by prompt, and the number of the true one."""

    label: int
    candidates: dict[str, list[Candidate]]


def question_set(num_items: int | None) -> str | None:
    """Whose questions these are: HellaSwag's own only if their number is; None without any."""
    if not num_items:
        return None
    return "HellaSwag" if num_items == HELLASWAG_ITEMS else "made-up questions"


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Questions in HellaSwag's own keys, one JSON object a line; none of an empty file.

    A held-out text may be such that no question can be made of it.

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
    return questions


def clean_text(text: str) -> str:
    """lm-eval's clean-up of HellaSwag: WikiHow's marks in brackets go (its `preprocess`)."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _llmc_candidates(
    questions: list[dict[str, Any]], encoding: tiktoken.Encoding
) -> list[Candidate]:
    """llm.c's prompt: context as given; one space and the ending, each encoded by itself."""
    return _apart([q["ctx"] for q in questions], [q["endings"] for q in questions], encoding)


def _apart(
    contexts: list[str], endings: list[list[str]], encoding: tiktoken.Encoding
) -> list[Candidate]:
    """Context, and one space with the ending, each encoded by itself."""
    flat = [ending for four in endings for ending in four]
    starts = encoding.encode_ordinary_batch(contexts, num_threads=ENCODER_THREADS)
    ends = encoding.encode_ordinary_batch([f" {e}" for e in flat], num_threads=ENCODER_THREADS)
    return [
        # nothing can be predicted without a first token: an empty context is a document's start
        Candidate((starts[i // 4] or [DOCUMENT_MARK]) + end, len(end), len(flat[i]))
        for i, end in enumerate(ends)
    ]


def _harness_candidates(
    questions: list[dict[str, Any]], encoding: tiktoken.Encoding
) -> list[Candidate]:
    """lm-eval's prompt: the whole is encoded, and what follows the context's tokens counts.

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


_CANDIDATES = {LLMC: _llmc_candidates, HARNESS: _harness_candidates}


def encode_questions(
    path: Path, encoding: tiktoken.Encoding, prompts: Sequence[str] = (LLMC,)
) -> list[Question]:
    """Read a question file and encode it once, for as many scorings as wanted.

    Args:
        path: HellaSwag's keys, one JSON object a line.
        prompts: "llmc", "harness" (lm-eval), or both.

    Raises:
        ValueError: the file is damaged; names the line.
    """
    questions = read_questions(path)
    encoded = {prompt: _CANDIDATES[prompt](questions, encoding) for prompt in prompts}
    return [
        Question(q["label"], {prompt: encoded[prompt][4 * i : 4 * i + 4] for prompt in prompts})
        for i, q in enumerate(questions)
    ]


def encode_mmlu(path: Path, encoding: tiktoken.Encoding) -> list[Question]:
    """MMLU's questions with llm.c's prompt: the question, and each choice written out.

    Args:
        path: `question`, `choices` (four), and `answer` (0 to 3) in each line of a .jsonl file or
            row of a .parquet file, as in the data set cais/mmlu.

    Raises:
        ValueError: the file is damaged; names the line.
    """
    rows, contexts, choices, labels = read_rows(path), [], [], []
    for number, row in enumerate(rows, start=1):
        try:
            four, label = [str(choice) for choice in row["choices"]], int(row["answer"])
            contexts.append(f"Question: {row['question']}\n\nAnswer:")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number} is no question of MMLU ({error!r})") from None
        if len(four) != 4 or label not in range(4):
            raise ValueError(f"{path}: line {number} needs 4 choices and an answer from 0 to 3")
        choices.append(four)
        labels.append(label)
    candidates = _apart(contexts, choices, encoding)
    return [
        Question(label, {MMLU: candidates[4 * i : 4 * i + 4]}) for i, label in enumerate(labels)
    ]


def right_answers(items: Sequence[dict[str, Any]], way: str) -> np.ndarray:
    """(N,) bool: whether each of the items of `scoring.choice_scores` is answered right."""
    nats = np.array([item["nats"] for item in items])
    divisors = np.array([item[WAYS[way]] for item in items]) if WAYS[way] else 1
    return (nats / divisors).argmin(axis=1) == np.array([item["label"] for item in items])
