"""Token files that other tools made: llm.c's are used in place, others are made into shards."""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miniseries.data.shards import (
    IDS_AT_ONCE,
    MAGIC,
    SHARD_TOKENS,
    VAL_TOKENS,
    build_manifest,
    check_ids,
    describe_shard,
    is_shard_of,
    open_regular,
    open_shard,
    raise_problems,
    remove_other_shards,
    shard_entry,
    shard_name,
    write_shard,
)
from miniseries.metrics import write_json

LLMC, NPY = "llmc", "npy"


def prepare_shards(name: str, dataset: dict[str, Any], folder: Path, manifest: Path) -> None:
    """Write the manifest of token files of one's own, after every id in them was read.

    llm.c's and modded-nanogpt's shards stay where they are. nanoGPT's files (uint16, no header)
    and build-nanogpt's .npy are copied into shards of 100 million tokens beside the manifest.

    Args:
        name: of the dataset.
        dataset: its entry in the configuration: `train_paths`, `val_paths`, `format`, `val_tokens`.
        folder: for shards that are made.
        manifest: path of the manifest.

    Raises:
        ValueError: names each bad file and what is wrong with it; nothing is written then.
    """
    files = {split: find_token_files(dataset[f"{split}_paths"]) for split in ("val", "train")}
    twice = sorted(set(files["val"]) & set(files["train"]))
    if twice:
        raise ValueError(f"{twice[0]}: in `train_paths` and in `val_paths`; it would be trained on")
    layout = dataset.get("format", LLMC)
    paths = [path for found in files.values() for path in found]
    problems = [problem for path in paths for problem in _problems(path, layout)]
    if layout != LLMC:
        problems += [
            f"{path}: lies where this dataset's shards are made, under such a name; move it away"
            for path in paths
            if path.parent == folder.resolve() and is_shard_of(name, path)
        ]
    raise_problems(f"dataset {name}", problems)
    if layout != LLMC:
        manifest.unlink(missing_ok=True)  # never describes shards of another version
    entries = []
    for split, found in files.items():
        if layout == LLMC:  # where they are; nothing is ever deleted beside them
            entries += [describe_shard(path, split) for path in found]
        else:
            entries += _convert(name, split, [_tokens(path, layout) for path in found], folder)
    if layout != LLMC:
        remove_other_shards(folder, name, [Path(entry["path"]) for entry in entries])
    content = build_manifest(
        manifest.parent,
        name,
        entries,
        source={
            "kind": "shards",
            "format": layout,
            "files": [str(path) for path in paths],
        },
        val_tokens=dataset.get("val_tokens", VAL_TOKENS),
    )
    write_json(manifest, content)


def find_token_files(patterns: Sequence[str]) -> list[Path]:
    """Files that match the globs, by name, each once; a folder is taken along, to be refused."""
    found: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path's takes no absolute one)
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; check the paths of the dataset")
        found.update(matches)
    return list(dict.fromkeys(Path(path).resolve() for path in sorted(found)))


def _problems(path: Path, layout: str) -> list[str]:
    """What is wrong with a file; reads all its ids."""
    try:
        if layout == LLMC:
            check_ids(path, open_shard(path))
        else:
            tokens = _tokens(path, layout)
            check_ids(path, tokens, tokens.offset)
    except ValueError as error:
        return [str(error)]
    return []


def _tokens(path: Path, layout: str) -> np.memmap:
    """Ids of a file, (N,) uint16, mapped into memory."""
    with open_regular(path) as file:
        head = file.read(8)
    num_bytes = path.stat().st_size
    if layout == NPY:
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: not a whole .npy file ({error})") from None
        if not isinstance(tokens, np.ndarray):
            raise ValueError(f"{path}: an .npz, of several arrays; build-nanogpt's are .npy")
        if tokens.ndim != 1 or tokens.dtype != np.dtype("<u2") or not len(tokens):
            raise ValueError(
                f"{path}: holds {tokens.dtype} {tokens.shape}; build-nanogpt's are flat uint16"
            )
        return tokens
    if int.from_bytes(head[:4], "little") == MAGIC:
        raise ValueError(f"{path}: has llm.c's header; use `format: {LLMC}`")
    if num_bytes == 0 or num_bytes % 2:
        raise ValueError(f"{path}: {num_bytes} bytes are no row of 16-bit ids; it may be cut short")
    return np.memmap(path, dtype="<u2", mode="r")


def _convert(
    name: str, split: str, files: Sequence[np.ndarray], folder: Path
) -> list[dict[str, Any]]:
    """Copy ids into shards, one file after another; only the last shard is not full."""
    total = sum(map(len, files))
    entries = []
    for number, start in enumerate(range(0, total, SHARD_TOKENS), 0 if split == "val" else 1):
        path = folder / shard_name(name, split, number)
        num_tokens = min(SHARD_TOKENS, total - start)
        sha256 = write_shard(path, _stretch(files, start, num_tokens), num_tokens)
        entries.append(shard_entry(path, split, num_tokens, sha256))
    return entries


def _stretch(files: Sequence[np.ndarray], start: int, num_tokens: int) -> Iterator[np.ndarray]:
    """A stretch of the files' ids one after another, in pieces."""
    for tokens in files:
        while num_tokens and start < len(tokens):
            piece = tokens[start : start + min(num_tokens, IDS_AT_ONCE)]
            yield piece
            start += len(piece)
            num_tokens -= len(piece)
        start -= len(tokens)
