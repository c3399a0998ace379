"""Datasets of the hub that are token shards already: fetched one by one, then described."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from miniseries.data.fetch import describe_progress, fetch_file
from miniseries.data.shards import (
    VAL_TOKENS,
    build_manifest,
    check_ids,
    describe_shard,
    file_sha256,
    open_shard,
    raise_problems,
    read_header,
    shard_name,
)
from miniseries.metrics import read_json, write_json


def shard_files(dataset: dict[str, Any]) -> list[tuple[str, str]]:
    """(file name, split) of every shard a `hub-shards` dataset asks for, validation first.

    The names are those of llm.c's scripts with the dataset's `prefix`. The validation shard is the
    same for any `num_shards`.
    """
    prefix = dataset.get("prefix", "edu_fineweb")
    numbers = range(1, dataset["num_shards"] + 1)
    train = [(shard_name(prefix, "train", number), "train") for number in numbers]
    return [(shard_name(prefix, "val", 0), "val"), *train]


def fetch_shard(
    dataset: dict[str, Any], filename: str, folder: Path, num_files: int = 1, **options: Any
) -> None:
    """Fetch one token shard of a `hub-shards` dataset, with a note of its hash beside it.

    A shard that is there and right is kept; under HF_HUB_OFFLINE it is so if its ids are.

    Args:
        dataset: its entry in the configuration: `repository`, `revision`.
        filename: of the shard in the repository.
        folder: for `<shard>` and `<shard>.json`.
        num_files: of the dataset, to see beforehand whether the disk can hold those to come.
        options: `attempts`, `wait_seconds` of `fetch_file`.

    Raises:
        ValueError, OSError: as `fetch_file`; also a file that is not a token shard.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    path = Path(folder) / Path(filename).name
    with suppress(ValueError, KeyError, TypeError):  # not here or not right
        note = read_json(_sidecar(path))
        if read_header(path) == note["num_tokens"] and file_sha256(path) == note["sha256"]:
            return
    commit = None
    if HF_HUB_OFFLINE and path.exists():
        check_ids(path, open_shard(path))
    else:
        left = max(1, num_files - len(list(Path(folder).glob("*.bin"))))
        where = (dataset["repository"], filename, dataset.get("revision", "main"), Path(folder))
        path, commit = fetch_file(*where, check=read_header, num_files_left=left, **options)
    about = {"num_tokens": read_header(path), "num_bytes": path.stat().st_size}
    write_json(_sidecar(path), about | {"sha256": file_sha256(path), "commit": commit})


def assemble_manifest(
    name: str, dataset: dict[str, Any], folder: Path, manifest: Path, **options: Any
) -> None:
    """Write the manifest of fetched shards; checks headers and sizes, and fetches missing ones.

    Args:
        options: `attempts`, `wait_seconds` of `fetch_file`.

    Raises:
        ValueError: names each shard that is missing or bad.
    """
    entries, problems, commits = [], [], set()
    files = shard_files(dataset)
    for filename, split in files:
        path = Path(folder) / filename
        try:
            if not (path.exists() and _sidecar(path).exists()):
                fetch_shard(dataset, filename, folder, len(files), **options)
            note = read_json(_sidecar(path))
            if note["num_tokens"] != read_header(path):
                raise ValueError(
                    f"{path}: {read_header(path)} tokens, but {note['num_tokens']} when it was "
                    "fetched; delete it and run the same command again"
                )
            entries.append(describe_shard(path, split, note["sha256"]))
            commits.add(note["commit"])
        except ValueError as error:
            problems.append(str(error))
    raise_problems(f"dataset {name}", problems)
    source = {
        "kind": "hub-shards",
        "repository": dataset["repository"],
        "revision": dataset.get("revision", "main"),
        "commits": sorted(commit for commit in commits if commit),
    }
    val_tokens = dataset.get("val_tokens", VAL_TOKENS)
    content = build_manifest(
        Path(manifest).parent, name, entries, source=source, val_tokens=val_tokens
    )
    write_json(Path(manifest), content)
    shutil.rmtree(Path(folder) / ".fetch", ignore_errors=True)  # the downloads' locks


def shard_progress(name: str, folder: Path, num_files: int) -> str:
    """How far the download of a `hub-shards` dataset is, in a line."""
    done = []
    for note in Path(folder).glob("*.bin.json"):
        with suppress(ValueError, OSError, KeyError):
            done.append((note.stat().st_mtime, read_json(note)["num_bytes"]))
    mean = sum(num_bytes for _, num_bytes in done) / max(len(done), 1)
    return describe_progress(name, done, num_files, int(mean * num_files))


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")
