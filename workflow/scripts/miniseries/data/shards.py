"""Token shards in llm.c's `.bin` format, and the manifest that lists those of one dataset.

A shard is 256 little-endian int32 (magic, version, number of tokens, then zeros) and the token
ids as uint16. Shard 0 is validation, training starts at 1. Every document is preceded by 50256,
and documents run across shard borders.
"""

import errno
import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from miniseries.metrics import read_json

# llm.c dev/data/data_common.py and llmc/dataloader.h
MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
DOCUMENT_MARK = 50256  # <|endoftext|>
VOCAB_SIZE = 50257  # GPT-2's byte-pair encoding: 256 bytes, 50,000 merges, <|endoftext|>
PADDED_VOCAB_SIZE = 50304  # next multiple of 128: the matrix units want whole tiles
SHARD_TOKENS = 100_000_000
VAL_TOKENS = 10_485_760  # what llm.c's runs validate on
MAX_ID = 65_535  # the widest id that uint16 holds
# llm.c seeks with a 32-bit int, so a whole shard must stay under 2 GiB
MAX_SHARD_TOKENS = (2**31 - 1 - HEADER_BYTES) // 2
LLAMA3_MAGIC = 20240801
REMEDY = (
    "put a good copy in its place, or delete it and the manifest.json of its dataset and run the "
    "same command again"
)
NO_MANIFEST = "not a dataset's manifest"
MAX_NAMED = 100  # bad shards named in one message
IDS_AT_ONCE = 10_000_000


@dataclass(frozen=True)
class Manifest:
    """The shards of one dataset; `val_tokens` is the most that validation reads."""

    path: Path
    dataset: str
    train_shards: list[Path]
    val_shards: list[Path]
    val_tokens: int
    num_train_tokens: int
    num_val_tokens: int
    fingerprint: str


def shard_name(dataset: str, split: str, number: int) -> str:
    """File name of a shard, as llm.c's data scripts write it."""
    return f"{dataset}_{split}_{number:06d}.bin"


def _check_width(path: Path, tokens: np.ndarray) -> None:
    """Refuse ids that uint16 cannot hold: astype would wrap and train on other tokens."""
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest > MAX_ID:
        worst = largest if largest > MAX_ID else smallest
        raise ValueError(
            f"{path}: token id {worst} does not fit the shard's 16 bits (0 to {MAX_ID}); "
            "use the gpt2 tokenizer"
        )


def write_shard(
    path: Path, chunks: np.ndarray | Iterable[np.ndarray], num_tokens: int | None = None
) -> str:
    """Write one shard, whole or not at all.

    Args:
        path: its parent folder is made.
        chunks: (N,) integers, or several such arrays one after another.
        num_tokens: of all chunks, 0 < num_tokens < 2**30; None where there is one array.

    Returns:
        sha256 of the file.

    Raises:
        ValueError: not flat arrays of integers, too few or too many tokens, or an id that 16 bits
            cannot hold.
    """
    path = Path(path)
    if num_tokens is None:
        chunks = np.asarray(chunks)
        num_tokens, chunks = len(chunks), [chunks]
    if not 0 < num_tokens <= MAX_SHARD_TOKENS:
        raise ValueError(
            f"{path}: a shard holds 1 to {MAX_SHARD_TOKENS:,} tokens, not {num_tokens:,}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            header = struct.pack("<3i", MAGIC, VERSION, num_tokens).ljust(HEADER_BYTES, b"\0")
            for content in chain([header], (_shard_bytes(path, chunk) for chunk in chunks)):
                file.write(content)
                digest.update(content)
            file.flush()
            os.fsync(file.fileno())
        if temporary.stat().st_size != HEADER_BYTES + 2 * num_tokens:
            raise ValueError(f"{path}: other than the {num_tokens:,} tokens that were announced")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


def _shard_bytes(path: Path, tokens: np.ndarray) -> memoryview:
    """Ids as they stand in a shard."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"{path}: expected a flat array of token ids, got {tokens.dtype} {tokens.shape}"
        )
    if len(tokens):
        _check_width(path, tokens)
    return np.ascontiguousarray(tokens, dtype="<u2").data.cast("B")


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it.

    Raises:
        ValueError: it is missing, unreadable, a folder, or a device; names it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path}: a folder or device, not a file; {REMEDY}")
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {_remedy(error)}") from None


def _remedy(error: OSError) -> str:
    """A file that is there and cannot be read is not known to be bad."""
    is_gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    return REMEDY if is_gone else "mend what keeps it from being read; nothing was changed"


def read_header(path: Path) -> int:
    """Check magic, version, and size of a shard.

    Returns:
        The number of tokens.

    Raises:
        ValueError: what is wrong, with the file and the remedy.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            head = file.read(12)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; {_remedy(error)}") from None
        num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes < HEADER_BYTES:
        raise ValueError(f"{path}: {num_bytes} bytes, shorter than a shard's header; {REMEDY}")
    magic, version, num_tokens = struct.unpack("<3i", head)
    if magic == LLAMA3_MAGIC:
        raise ValueError(f"{path}: a Llama-3 shard (32-bit ids); GPT-2 needs gpt2 shards")
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(
            f"{path}: starts with {magic}, {version} instead of {MAGIC}, {VERSION}, "
            f"so it is no GPT-2 token shard; {REMEDY}"
        )
    if num_tokens <= 0 or num_bytes != HEADER_BYTES + 2 * num_tokens:
        raise ValueError(
            f"{path}: its header says {num_tokens} tokens = {HEADER_BYTES + 2 * num_tokens} bytes, "
            f"but it has {num_bytes} bytes; {REMEDY}"
        )
    if num_tokens > MAX_SHARD_TOKENS:
        raise ValueError(f"{path}: {num_bytes} bytes, a shard has to stay under 2 GiB; {REMEDY}")
    return num_tokens


def open_shard(path: Path) -> np.memmap:
    """Map a checked shard into memory: (num_tokens,) uint16, read only.

    Raises:
        ValueError: as `read_header`.
    """
    num_tokens = read_header(path)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(num_tokens,))


def check_ids(path: Path, tokens: np.ndarray, offset: int = HEADER_BYTES) -> None:
    """Look at every id of a file.

    Args:
        tokens: (N,) uint16, of the file.
        offset: bytes before the first id.

    Raises:
        ValueError: the first id outside GPT-2's vocabulary, with its position and byte offset.
    """
    for start in range(0, len(tokens), IDS_AT_ONCE):
        outside = np.flatnonzero(tokens[start : start + IDS_AT_ONCE] >= VOCAB_SIZE)
        if len(outside):
            position = start + int(outside[0])
            raise ValueError(
                f"{path}: token {position} (byte {offset + 2 * position}) is "
                f"{int(tokens[position])}, outside the vocabulary of {VOCAB_SIZE}; {REMEDY}"
            )


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_shard(path: Path, split: str, sha256: str | None = None) -> dict[str, Any]:
    """Manifest entry of a shard; its `path` is absolute until `build_manifest` makes it relative.

    Args:
        sha256: known hash of the file; None reads the file.

    Raises:
        ValueError: as `read_header`.
    """
    num_tokens = read_header(path)
    return shard_entry(path, split, num_tokens, sha256 or file_sha256(path))


def shard_entry(path: Path, split: str, num_tokens: int, sha256: str) -> dict[str, Any]:
    """Manifest entry of a shard of which all is known."""
    return {
        "path": str(Path(path).absolute()),
        "split": split,
        "num_tokens": num_tokens,
        "num_bytes": HEADER_BYTES + 2 * num_tokens,
        "sha256": sha256,
    }


def build_manifest(
    folder: Path,
    dataset: str,
    shards: Sequence[dict[str, Any]],
    *,
    source: dict[str, Any],
    val_tokens: int = VAL_TOKENS,
    num_documents: int | None = None,
) -> dict[str, Any]:
    """Content of `manifest.json`.

    Args:
        folder: where the manifest will lie; the shards' paths become relative to it.
        shards: from `describe_shard`, in reading order.
        num_documents: None where it is not known (ready-made shards).

    Raises:
        ValueError: a split has no shard.
    """
    start = Path(folder).absolute()
    entries = [{**shard, "path": _within(start, Path(shard["path"]))} for shard in shards]
    num_tokens = {"train": 0, "val": 0}
    for entry in entries:
        num_tokens[entry["split"]] += entry["num_tokens"]
    for split in num_tokens:
        if not num_tokens[split]:
            raise ValueError(f"dataset {dataset}: no {split} shard")
    names = [Path(entry["path"]).name for entry in entries]  # the same wherever they lie
    known = [[e["num_tokens"], e["sha256"]] for e in entries]
    identity = [[[n, *about] for n, about in zip(names, known, strict=True)], val_tokens]
    return {
        "dataset": dataset,
        "tokenizer": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "num_train_tokens": num_tokens["train"],
        "num_val_tokens": num_tokens["val"],
        "num_documents": num_documents,
        "val_tokens": val_tokens,
        "source": source,
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "shards": entries,
    }


def _within(folder: Path, path: Path) -> str:
    """A path relative to the folder if it is below it, so that both can be moved, else absolute.

    Not `..`: it leads elsewhere where the folder is a link to another disk.
    """
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest and check the header and size of every shard, not their content.

    Raises:
        ValueError: the manifest is damaged, or names each bad shard and what is wrong with it.
    """
    path = Path(path)
    content = read_json(path)
    shards: dict[str, list[Path]] = {"train": [], "val": []}
    problems = []
    try:
        for entry in content["shards"]:
            shard = path.parent / entry["path"]
            shards[entry["split"]].append(shard)
            problems += problems_of(shard, entry["num_tokens"])
        manifest = Manifest(
            path=path,
            dataset=content["dataset"],
            train_shards=shards["train"],
            val_shards=shards["val"],
            val_tokens=content["val_tokens"],
            num_train_tokens=content["num_train_tokens"],
            num_val_tokens=content["num_val_tokens"],
            fingerprint=content["fingerprint"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {NO_MANIFEST} ({error!r}); {REMEDY}") from None
    raise_problems(f"dataset {manifest.dataset}", problems)
    return manifest


def problems_of(shard: Path, num_tokens: int) -> list[str]:
    """What is wrong with a shard; empty if it is as the manifest says."""
    try:
        found = read_header(shard)
    except ValueError as error:
        return [str(error)]
    if found != num_tokens:
        return [f"{shard}: {found} tokens, its manifest says {num_tokens}; {REMEDY}"]
    return []


def raise_problems(what: str, problems: Sequence[str]) -> None:
    """Raise one ValueError that lists the problems, one a line; none is no error."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        named = list(problems[:MAX_NAMED])
        if len(problems) > MAX_NAMED:
            named.append(f"and {len(problems) - MAX_NAMED} more")
        raise ValueError(f"{what}: {len(problems)} bad files\n  " + "\n  ".join(named))


def verify_shards(manifest_path: Path, num_threads: int = 1) -> int:
    """Read every byte: headers, sizes, ids, and sha256 against the manifest.

    Args:
        num_threads: shards read at the same time.

    Returns:
        The number of shards, all of them good.

    Raises:
        ValueError: names each bad shard and what is wrong with it.
    """
    manifest_path = Path(manifest_path)
    content = read_json(manifest_path, ["dataset", "shards"])
    try:
        with ThreadPoolExecutor(num_threads) as pool:  # hashing and reading leave the GIL alone
            found = pool.map(partial(_verify, manifest_path.parent), content["shards"])
            problems = list(chain.from_iterable(found))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{manifest_path}: {NO_MANIFEST} ({error!r}); {REMEDY}") from None
    raise_problems(f"dataset {content['dataset']}", problems)
    return len(content["shards"])


def _verify(folder: Path, entry: dict[str, Any]) -> list[str]:
    """What is wrong with one shard of a manifest; reads all of it."""
    shard = folder / entry["path"]
    try:
        problems = problems_of(shard, entry["num_tokens"])
        if not problems:
            check_ids(shard, open_shard(shard))
        if not problems and file_sha256(shard) != entry["sha256"]:
            problems = [f"{shard}: its sha256 is not the manifest's; {REMEDY}"]
        return problems
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{shard}: cannot be read ({error}); it was not verified"]


def is_shard_of(dataset: str, path: Path) -> bool:
    """Whether a file has the name of one of the shards that are made for a dataset."""
    return bool(re.fullmatch(re.escape(dataset) + r"_(train|val)_\d{6}\.bin", path.name))


def remove_other_shards(folder: Path, dataset: str, keep: Sequence[Path]) -> None:
    """Delete this dataset's shards of an earlier, longer version and what a kill left behind."""
    kept = {path.name for path in keep}
    for path in Path(folder).iterdir():
        if path.suffix == ".tmp" or (is_shard_of(dataset, path) and path.name not in kept):
            path.unlink(missing_ok=True)
