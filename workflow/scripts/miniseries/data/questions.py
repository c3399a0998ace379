"""HellaSwag's questions, questions of the same form made from held-out text, and llm.c's file."""

import json
import random
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from miniseries.data.encode import gpt2_encoding
from miniseries.data.fetch import answer_again, fetch_file
from miniseries.data.shards import DOCUMENT_MARK, open_shard
from miniseries.metrics import write_bytes, write_text

# The validation part of HellaSwag, 10,042 questions. The authors' copy on GitHub is gone.
HELLASWAG_REPOSITORY = "Rowan/hellaswag"
HELLASWAG_REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"
HELLASWAG_FILE = "data/validation-00000-of-00001.parquet"
HELLASWAG_KEYS = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "label", "endings")


NUM_QUESTIONS = 200
ENOUGH_PROSE = 20  # passages; with fewer the questions are made from plain slices
PASSAGES_PER_QUESTION = 20  # enough to choose from; bounds the memory of a large text
TOKENS_AT_ONCE = 1_000_000
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
PROSE = re.compile(r"[A-Z][^|<>{}\[\]\\]*[.!?]")  # no tables, code, or markup
# llm.c dev/data/data_common.py and llmc/dataloader.h
EVAL_MAGIC = 20240522
EVAL_VERSION = 1
EVAL_START = 65_535  # before each example
MAX_EXAMPLES = 65_535
MAX_EXAMPLE_BYTES = 65_535


class Passage(NamedTuple):
    """A few sentences of a held-out document and the one that follows them."""

    name: str
    context: str
    ending: str


def questions_from_shards(
    shards: Sequence[Path], num_questions: int = NUM_QUESTIONS
) -> list[dict[str, Any]]:
    """HellaSwag-shaped questions from the documents of validation shards.

    Prose is asked for whole sentences; text with hardly any (code, other scripts) for slices.
    """
    max_passages = PASSAGES_PER_QUESTION * num_questions
    prose: list[Passage] = []
    slices: list[Passage] = []
    for number, text in enumerate(_documents(shards)):
        if len(prose) < max_passages:
            prose += find_passages(f"document {number}", text)
        if len(slices) < max_passages:
            slices += slice_passages(f"document {number}", text)
        if min(len(prose), len(slices)) >= max_passages:
            break
    passages = prose if len(prose) >= min(ENOUGH_PROSE, len(slices)) else slices
    return make_questions(passages, num_questions)


def _documents(shards: Sequence[Path]) -> Iterator[str]:
    """Texts of the documents in shards; what stands before the first mark is none."""
    encoding = gpt2_encoding()
    begun: list[np.ndarray] = []
    for shard in shards:
        tokens = open_shard(shard)
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            part = np.asarray(tokens[start : start + TOKENS_AT_ONCE])
            pieces = np.split(part, np.flatnonzero(part == DOCUMENT_MARK))
            for place, piece in enumerate(pieces):
                if place and begun:
                    yield encoding.decode(np.concatenate(begun)[1:].tolist())
                if place:
                    begun = []
                if begun or (len(piece) and piece[0] == DOCUMENT_MARK):
                    begun.append(piece)
    if begun:
        yield encoding.decode(np.concatenate(begun)[1:].tolist())


def find_passages(name: str, text: str) -> Iterator[Passage]:
    """Passages of 2 to 4 whole sentences of prose that do not overlap."""
    for paragraph in re.split(r"\n\s*\n", text):
        run: list[str] = []
        for sentence in [*SENTENCE_END.split(" ".join(paragraph.split())), ""]:
            is_prose = PROSE.fullmatch(sentence) and 5 <= len(sentence.split()) <= 40
            if is_prose:
                run.append(sentence)
            if len(run) == 4 or (not is_prose and len(run) > 1):
                yield Passage(name, " ".join(run[:-1]), run[-1])
            if len(run) == 4 or not is_prose:
                run = []


def slice_passages(name: str, text: str) -> Iterator[Passage]:
    """Passages of plain slices, for text without prose: code, verse, other scripts."""
    text = " ".join(text.split())
    for start in range(0, len(text) - 150, 150):
        context, ending = text[start : start + 100].strip(), text[start + 100 : start + 150].strip()
        # lm-eval takes what is in brackets out of a question, so that little could be left
        if len(context) > 20 and len(ending) > 20 and "[" not in context + ending:
            yield Passage(name, context, ending)


def make_questions(
    passages: Iterable[Passage], num_questions: int = NUM_QUESTIONS, seed: int = 42
) -> list[dict[str, Any]]:
    """HellaSwag-shaped questions: the true continuation against three from other places.

    Args:
        passages: of held-out documents, in a fixed order.
        num_questions: at most; fewer where the text has fewer passages.

    Returns:
        Records with HellaSwag's own keys; endings do not start with a space.
    """
    unique = {passage.ending: passage for passage in passages}
    ordered = sorted(unique.values(), key=lambda p: (len(p.ending), p.ending))
    generator = random.Random(seed)
    chosen = generator.sample(range(len(ordered)), min(num_questions, len(ordered)))
    questions: list[dict[str, Any]] = []
    for place in chosen:
        true = ordered[place]
        # neighbours in the order of length, so that length does not give the answer away
        near = [p for p in ordered[max(0, place - 20) : place + 21] if p is not true]
        other = [p for p in near if p.name != true.name]  # their ending might follow as well
        near = other if len(other) >= 3 else near
        if len(near) < 3:
            continue
        endings = [p.ending for p in generator.sample(near, 3)]
        label = generator.randrange(4)
        endings.insert(label, true.ending)
        questions.append(
            {
                "ind": len(questions),
                "activity_label": true.name,
                "ctx_a": true.context,
                "ctx_b": "",
                "ctx": true.context,
                "label": label,
                "endings": endings,
            }
        )
    return questions


def fetch_questions(
    source: str, output: Path, revision: str = HELLASWAG_REVISION, **options: Any
) -> None:
    """Write HellaSwag's validation questions as hellaswag.jsonl, in HellaSwag's own keys.

    Args:
        source: a local .jsonl or .parquet file, or a repository laid out like Rowan/hellaswag.
        output: one question per line.
        revision: of the repository.
        options: `attempts`, `wait_seconds` of `fetch_file`.

    Raises:
        ValueError, OSError: as `fetch_file`; also a bad question, by its number.
    """
    output = Path(output)
    if Path(source).suffix in (".jsonl", ".parquet"):
        _write_questions(source, read_rows(Path(source)), output)
        return

    def fetch() -> None:
        path, _ = fetch_file(source, HELLASWAG_FILE, revision, output.parent, **options)
        _write_questions(source, read_rows(path), output)
        path.unlink()

    answer_again(fetch, output, source, revision)


def _write_questions(source: str, rows: list[dict[str, Any]], output: Path) -> None:
    lines = [json.dumps(_question(row, f"{source}, question {i}")) for i, row in enumerate(rows)]
    write_text(output, "\n".join(lines) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .parquet or .jsonl file.

    Raises:
        ValueError: missing, damaged, or empty.
    """
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet  # half a second, needed here only

            rows = parquet.read_table(path).to_pylist()
        else:
            lines = path.read_bytes().splitlines()  # a str would be cut at a raw U+2028 as well
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not rows:
        raise ValueError(f"{path}: holds no row")
    return rows


def _question(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The keys the scorers read, with the label as a number (the hub has it as text)."""
    try:
        question = {key: row[key] for key in HELLASWAG_KEYS}
        question["label"] = int(question["label"])
        texts = [question["ctx"], *question["endings"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place}: not a HellaSwag question ({error!r})") from None
    is_text = all(isinstance(text, str) for text in texts)
    if not is_text or len(texts) != 5 or question["label"] not in range(4):
        raise ValueError(f"{place}: needs a context, four endings, and a label from 0 to 3")
    return question


def write_eval_file(questions: Path, output: Path) -> None:
    """Write questions as llm.c's `hellaswag_val.bin`, in tokens.

    Per example, all uint16: 65535, its size in bytes, its number, label, 4, then the context and
    the four endings, each as a count and its ids. An ending begins with a space.

    Args:
        questions: JSON lines with HellaSwag's keys.
        output: the file; written whole or not at all.

    Raises:
        ValueError: not readable as questions, more of them or longer ones than the format holds.
    """
    rows = [
        _question(row, f"{questions}, question {i}") for i, row in enumerate(read_rows(questions))
    ]
    if len(rows) > MAX_EXAMPLES:
        raise ValueError(f"{questions}: the format holds {MAX_EXAMPLES} examples, not {len(rows)}")
    examples = [_example(row, i, f"{questions}, question {i}") for i, row in enumerate(rows)]
    longest = max(map(len, examples))
    header = struct.pack("<4i", EVAL_MAGIC, EVAL_VERSION, len(rows), longest).ljust(1024, b"\0")
    write_bytes(output, header + b"".join(examples))


def _example(question: dict[str, Any], number: int, place: str) -> bytes:
    encode = gpt2_encoding().encode_ordinary
    parts = [encode(question["ctx"]), *(encode(" " + text) for text in question["endings"])]
    words = [number, question["label"], len(question["endings"])]
    for part in parts:
        words += [len(part), *part]
    num_bytes = 2 * (2 + len(words))
    if num_bytes > MAX_EXAMPLE_BYTES:
        raise ValueError(f"{place}: {num_bytes} bytes, the format holds {MAX_EXAMPLE_BYTES}")
    return np.array([EVAL_START, num_bytes, *words], dtype="<u2").tobytes()
