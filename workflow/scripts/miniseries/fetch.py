"""Files of Hugging Face dataset repositories: fetched, checked against the repository's sha256.

huggingface_hub resumes a connection that is cut; what it leaves to us (tried with 2.4.0) are
503 answers, wrong bytes, and the leftovers of a killed download. HF_ENDPOINT, HF_HUB_OFFLINE and
HF_TOKEN work as everywhere. Only fetch jobs use the network, training never does.
"""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from miniseries.metrics import read_json, write_json, write_text
from miniseries.shards import (
    VAL_TOKENS,
    build_manifest,
    describe_shard,
    file_sha256,
    raise_problems,
    read_header,
)

ATTEMPTS = 6
WAIT_SECONDS = 2.0  # before the second attempt; doubled each time
MAX_WAIT_SECONDS = 60.0
SPARE_BYTES = 100_000_000  # left free on the disk
FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
# The validation part of HellaSwag, 10,042 questions. The authors' copy on GitHub is gone.
HELLASWAG_REPOSITORY = "Rowan/hellaswag"
HELLASWAG_REVISION = "218ec52e09a7e7462a5400043bb9a69a41d06b76"
HELLASWAG_FILE = "data/validation-00000-of-00001.parquet"
HELLASWAG_KEYS = ("ind", "activity_label", "ctx_a", "ctx_b", "ctx", "label", "endings")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """What the repository says of a file: its commit, size, and hash (None: not told)."""

    commit: str
    num_bytes: int | None
    etag: str | None


def shard_files(dataset: dict[str, Any]) -> list[tuple[str, str]]:
    """(file name, split) of every shard a `hub-shards` dataset asks for, validation first.

    The names are those of llm.c's scripts with the dataset's `prefix`, unless its `val_shards`
    (list) and `train_shard_pattern` (`{:06d}` for the number) say otherwise.
    """
    prefix = dataset.get("prefix", "edu_fineweb")
    val = dataset.get("val_shards", [f"{prefix}_val_000000.bin"])
    pattern = dataset.get("train_shard_pattern", prefix + "_train_{:06d}.bin")
    train = [pattern.format(number) for number in range(1, dataset["num_shards"] + 1)]
    return [(name, "val") for name in val] + [(name, "train") for name in train]


def fetch_file(
    repository: str,
    filename: str,
    revision: str,
    folder: Path,
    check: Callable[[Path], Any] = lambda path: None,
    attempts: int = ATTEMPTS,
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Path, str]:
    """Fetch one file of a dataset repository into `folder`, or keep it if it is already right.

    It appears under its name only when size, hash, and `check` are right.

    Args:
        filename: path in the repository; its last part names the file in `folder`.
        check: called with the path before the file gets its name; raises ValueError.
        attempts: tries per request when the server or the network fails.
        wait_seconds: before the second try, then doubled; the server's own wish comes first.

    Returns its path and its commit.

    Raises:
        ValueError, OSError: no such file, no access, offline, damaged; the network, the disk.
    """
    what, target = f"{repository}/{filename}", Path(folder) / Path(filename).name
    private = Path(folder) / ".fetch" / target.name  # ours alone, so leftovers are easy to clear
    private.parent.mkdir(parents=True, exist_ok=True)
    retried = partial(_retry, what=what, attempts=attempts, wait_seconds=wait_seconds)
    with FileLock(f"{private}.lock"):
        shutil.rmtree(private, ignore_errors=True)
        try:
            remote = retried(partial(_ask, repository, filename, revision))
            if not target.exists() or _mismatch(target, remote):
                _check_space(Path(folder), remote.num_bytes, what)
                path = _download(repository, filename, remote, private, retried)
                check(path)
                path.replace(target)
            return target, remote.commit
        finally:
            shutil.rmtree(private, ignore_errors=True)


def _ask(repository: str, filename: str, revision: str) -> RemoteFile:
    """One HEAD request for commit, size, and hash."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(
        repository,
        filename,
        repo_type="dataset",
        revision=revision,
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    found = get_hf_file_metadata(url)
    if found.commit_hash is None:
        raise OSError("the server does not answer like a Hugging Face hub; check HF_ENDPOINT")
    return RemoteFile(found.commit_hash, found.size, found.etag)


def _download(
    repository: str, filename: str, remote: RemoteFile, folder: Path, retried: Callable[..., str]
) -> Path:
    """Let huggingface_hub fetch one file at a fixed commit; a wrong one once more, uncached."""
    from huggingface_hub import hf_hub_download

    options = {"repo_type": "dataset", "revision": remote.commit, "local_dir": folder}
    options["endpoint"] = os.environ.get("HF_ENDPOINT")
    for force in (False, True):
        call = partial(hf_hub_download, repository, filename, force_download=force, **options)
        path = Path(retried(call))
        problem = _mismatch(path, remote)
        if not problem:
            return path
        print(f"{repository}/{filename}: {problem}", file=sys.stderr, flush=True)
    raise ValueError(f"{repository}/{filename}: {problem}, twice; check the network or HF_ENDPOINT")


def _mismatch(path: Path, remote: RemoteFile) -> str:
    """How a file differs from the repository's; empty if it does not.

    The hub's etag is the sha256 of a large (LFS) file and git's blob hash of a small one.
    """
    num_bytes = path.stat().st_size
    if remote.num_bytes is not None and num_bytes != remote.num_bytes:
        return f"{num_bytes} bytes instead of {remote.num_bytes}"
    etag = remote.etag or ""
    if re.fullmatch("[0-9a-f]{64}", etag):
        found = file_sha256(path)
    elif re.fullmatch("[0-9a-f]{40}", etag):
        found = hashlib.sha1(f"blob {num_bytes}\0".encode() + path.read_bytes()).hexdigest()
    else:
        return ""
    return "" if found == etag else f"its hash is {found} instead of {etag}"


def _check_space(folder: Path, num_bytes: int | None, what: str) -> None:
    free = shutil.disk_usage(folder).free
    needed = (num_bytes or 0) + SPARE_BYTES
    if free < needed:
        raise OSError(f"{what} needs {needed:,} bytes in {folder}, which has {free:,} free")


def _retry(function: Callable[[], Result], what: str, attempts: int, wait_seconds: float) -> Result:
    """Call until it works; waits as long as the server asks, else ever longer.

    Raises:
        ValueError: an answer that another try would not change.
        OSError: the last failure.
    """
    for attempt in range(1, attempts + 1):
        try:
            return function()
        except Exception as error:
            cause = _root_cause(error)
            remedy = _final_remedy(cause)
            if remedy:
                raise ValueError(f"{what}: {remedy} ({_one_line(cause)})") from error
            if attempt == attempts:
                raise OSError(
                    f"{what}: failed {attempts} times, last by: {_one_line(cause)}; check the "
                    "network and run the same command again, finished files are kept"
                ) from error
            wait = min(wait_seconds * 2 ** (attempt - 1), MAX_WAIT_SECONDS)
            # spread, so that jobs turned away together do not come back together
            wait = max(_wished_wait(cause), wait) * random.uniform(1.0, 1.25)
            print(
                f"{what}: {_one_line(cause)}; try {attempt + 1} of {attempts} in {wait:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(wait)
    raise AssertionError("attempts >= 1")


def _root_cause(error: BaseException) -> BaseException:
    """huggingface_hub wraps its reasons, e.g. as a missing entry of its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    wrapped = isinstance(error, LocalEntryNotFoundError) or type(error) is ValueError
    return _root_cause(error.__cause__) if wrapped and error.__cause__ else error


def _final_remedy(error: BaseException) -> str:
    """What to do about an error that another try would not change; empty for the others."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "not here, and HF_HUB_OFFLINE is set; unset it or copy the file here"
    if isinstance(error, errors.RevisionNotFoundError):
        return "no such revision; check `revision`"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the repository has no such file; check the file names and `num_shards`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository, or no access to it; check `repository` and HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return "not a repository; check `repository`"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if 400 <= status < 500 and status not in (408, 429):
        return "refused by the server"
    if isinstance(error, OSError) and error.errno in FINAL_ERRNOS:
        return "cannot be written; free the disk or check the folder's permissions"
    return ""


def _wished_wait(error: BaseException) -> float:
    """Seconds the server asks to wait (Retry-After, or t= of the rate limit); else 0."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    found = re.fullmatch(r"\s*(\d+)\s*", headers.get("retry-after", ""))
    found = found or re.search(r"r=0;\s*t=(\d+)", headers.get("ratelimit", ""))
    return float(found[1]) if found else 0.0


def _one_line(error: BaseException) -> str:
    """The message without line breaks and without query strings, which can hold signatures."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split()))
    return (text or type(error).__name__)[:300]


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def fetch_shard(dataset: dict[str, Any], filename: str, folder: Path, **options: Any) -> None:
    """Fetch one token shard of a `hub-shards` dataset, with a note of its hash beside it.

    Args:
        dataset: its entry in the configuration: `repository`, `revision`.
        filename: of the shard in the repository.
        folder: for `<shard>` and `<shard>.json`; a shard that is there and right is kept.
        options: `attempts`, `wait_seconds` of `fetch_file`.

    Raises:
        ValueError, OSError: as `fetch_file`; also a file that is not a token shard.
    """
    path = Path(folder) / Path(filename).name
    try:
        note = read_json(_sidecar(path))
        if read_header(path) == note["num_tokens"] and file_sha256(path) == note["sha256"]:
            return
    except (ValueError, KeyError, TypeError):
        pass  # not here or not right
    revision = dataset.get("revision", "main")
    path, commit = fetch_file(
        dataset["repository"], filename, revision, folder, check=read_header, **options
    )
    _write_note(path, commit)


def _write_note(path: Path, commit: str | None) -> dict[str, Any]:
    note = {
        "num_tokens": read_header(path),
        "num_bytes": path.stat().st_size,
        "sha256": file_sha256(path),
        "commit": commit,
    }
    write_json(_sidecar(path), note)
    return note


def assemble_manifest(name: str, dataset: dict[str, Any], folder: Path, manifest: Path) -> None:
    """Write the manifest of fetched shards; checks headers and sizes, hashes only the unnoted.

    Raises:
        ValueError: names each shard that is missing or bad.
    """
    entries, problems, commits = [], [], set()
    for filename, split in shard_files(dataset):
        path = Path(folder) / Path(filename).name
        try:
            num_tokens = read_header(path)
            is_noted = _sidecar(path).exists()  # not so for the user's own copy
            note = read_json(_sidecar(path)) if is_noted else _write_note(path, None)
            if note["num_tokens"] != num_tokens:
                raise ValueError(
                    f"{path}: {num_tokens} tokens, but {note['num_tokens']} when it was fetched; "
                    "delete it and run the same command again"
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
        rows = _read_rows(Path(source))
    else:
        path, _ = fetch_file(source, HELLASWAG_FILE, revision, output.parent, **options)
        rows = _read_rows(path)
        path.unlink()
    if not rows:
        raise ValueError(f"{source}: no questions")
    lines = [json.dumps(_question(row, f"{source}, question {i}")) for i, row in enumerate(rows)]
    write_text(output, "\n".join(lines) + "\n")


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet  # half a second, needed here only

        try:
            return parquet.read_table(path).to_pylist()
        except ArrowException as error:
            raise ValueError(f"{path}: cannot be read as parquet ({error})") from None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path}: not a file of JSON lines ({error})") from None


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
