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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from miniseries.data.shards import file_sha256
from miniseries.metrics import locked, sync_file, write_bytes, write_json

ATTEMPTS = 6
WAIT_SECONDS = 2.0  # before the second attempt; doubled each time
MAX_WAIT_SECONDS = 60.0
LONGEST_WISHED_WAIT = 900.0  # of a server that asks for more the next call may ask again
SPARE_BYTES = 100_000_000  # left free on the disk
PACE_SECONDS = 600
FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}

Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """What the repository says of a file: its commit, size, and hash (None: not told)."""

    commit: str
    num_bytes: int | None
    etag: str | None


def answer_again(make: Callable[[], Any], output: Path, *request: Any) -> None:
    """Make a small file from afar; where that fails, take what the same request gave before.

    Snakemake deletes an output before the job that makes it anew. So a wrong setting, once it is
    put right, needs no network.

    Args:
        make: writes `output`; what it raises is raised where there was no answer before.
        request: all that the answer depends on.
    """
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    kept = output.parent / ".kept" / f"{key}-{output.name}"
    try:
        make()
    except (ValueError, OSError) as error:
        if not kept.exists():
            raise
        print(f"{error}\nThe same was answered before: {kept}", file=sys.stderr, flush=True)
        write_bytes(output, kept.read_bytes())
    else:
        write_bytes(kept, output.read_bytes())


def list_files(dataset: dict[str, Any], output: Path, **options: Any) -> None:
    """Write which files of its repository a `hub-text` dataset takes, held-out ones first.

    Args:
        dataset: its entry in the configuration: `repository`, `revision`, `files`, and
            `val_files` (globs), `num_files` (of those that are not held out; None is all).
        output: JSON with the commit, and path, split, bytes, and hash of each file.
        options: `attempts`, `wait_seconds` as of `fetch_file`.

    Raises:
        ValueError, OSError: as `fetch_file`; also globs that match nothing.
    """
    make = partial(_list_files, dataset, Path(output), **options)
    answer_again(make, Path(output), dataset, os.environ.get("HF_ENDPOINT"))


def _list_files(dataset: dict[str, Any], output: Path, **options: Any) -> None:
    from huggingface_hub import HfApi

    api, where = HfApi(endpoint=os.environ.get("HF_ENDPOINT")), dataset["repository"]
    settings = {"attempts": ATTEMPTS, "wait_seconds": WAIT_SECONDS} | options
    about = {"repo_type": "dataset", "revision": dataset["revision"]}
    ask = partial(api.repo_info, where, **about)
    about["revision"] = _retry(ask, where, **settings).sha
    files = []
    for split, patterns in (("val", dataset.get("val_files", [])), ("train", dataset["files"])):
        found = {}
        for pattern in patterns:
            folder = re.match(r"([^*?[]*/)?", pattern)[0].rstrip("/")
            tree = partial(api.list_repo_tree, where, folder or None, recursive=True, **about)
            for entry in _retry(lambda tree=tree: list(tree()), f"{where}/{folder}", **settings):
                if hasattr(entry, "size") and fnmatchcase(entry.path, pattern):
                    found[entry.path] = entry
        taken = {file["path"] for file in files}
        ordered = [found[path] for path in sorted(found) if path not in taken]
        if not ordered and patterns:
            raise ValueError(f"{where}: no file of it matches {', '.join(patterns)}; check `files`")
        files += [_describe(entry, split) for entry in ordered]
    num_val = sum(file["split"] == "val" for file in files)
    if dataset.get("num_files"):
        del files[num_val + dataset["num_files"] :]
    if num_val == 0:
        files = [file | {"split": None} for file in files]
    write_json(output, {"commit": about["revision"], "files": files})


def _describe(entry: Any, split: str) -> dict[str, Any]:
    sha = entry.lfs.sha256 if entry.lfs else entry.blob_id
    return {"path": entry.path, "split": split, "num_bytes": entry.size, "sha256": sha}


def fetch_file(
    repository: str,
    filename: str,
    revision: str,
    folder: Path,
    check: Callable[[Path], Any] = lambda path: None,
    attempts: int = ATTEMPTS,
    wait_seconds: float = WAIT_SECONDS,
    num_files_left: int = 1,
    repo_type: str = "dataset",
) -> tuple[Path, str]:
    """Fetch one file of a repository into `folder`, or keep it if it is already right.

    It appears under its name only when size, hash, and `check` are right.

    Args:
        filename: path in the repository; its last part names the file in `folder`.
        check: called with the path before the file gets its name; raises ValueError.
        attempts: tries per request when the server or the network fails.
        wait_seconds: before the second try, then doubled; the server's own wish comes first.
        num_files_left: about as large as this one, itself among them; all must fit on the disk.
        repo_type: "dataset" or "model".

    Returns its path and its commit.

    Raises:
        ValueError, OSError: no such file, no access, offline, damaged; the network, the disk.
    """
    what, target = f"{repository}/{filename}", Path(folder) / Path(filename).name
    private = Path(folder) / ".fetch" / target.name  # ours alone, so leftovers are easy to clear
    private.parent.mkdir(parents=True, exist_ok=True)
    retried = partial(_retry, what=what, attempts=attempts, wait_seconds=wait_seconds)
    with locked(private.with_name(f"{private.name}.lock")):
        shutil.rmtree(private, ignore_errors=True)
        try:
            remote = retried(partial(_ask, repository, filename, revision, repo_type))
            if not target.exists() or _mismatch(target, remote):
                check_space(Path(folder), num_files_left * (remote.num_bytes or 0), what)
                path = _download(repository, filename, remote, private, retried, repo_type)
                check(path)
                sync_file(path)  # what is noted of it must not outlive it
                path.replace(target)
            return target, remote.commit
        finally:
            shutil.rmtree(private, ignore_errors=True)


def _ask(repository: str, filename: str, revision: str, repo_type: str) -> RemoteFile:
    """One HEAD request for commit, size, and hash."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(
        repository,
        filename,
        repo_type=repo_type,
        revision=revision,
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    found = get_hf_file_metadata(url)
    if found.commit_hash is None:
        raise OSError("the server does not answer like a Hugging Face hub; check HF_ENDPOINT")
    return RemoteFile(found.commit_hash, found.size, found.etag)


def _download(
    repository: str,
    filename: str,
    remote: RemoteFile,
    folder: Path,
    retried: Callable[..., str],
    repo_type: str,
) -> Path:
    """Let huggingface_hub fetch one file at a fixed commit; a wrong one once more, uncached."""
    from huggingface_hub import hf_hub_download

    options = {"repo_type": repo_type, "revision": remote.commit, "local_dir": folder}
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


def check_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raise an OSError with both figures if that many bytes, and some to spare, are not free."""
    free = shutil.disk_usage(folder).free
    needed = num_bytes + SPARE_BYTES
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
            wished = min(_wished_wait(cause), LONGEST_WISHED_WAIT)
            wait = max(wished, wait) * random.uniform(1.0, 1.25)
            again = f"trying again in {wait:.0f} s ({attempt + 1} of {attempts})"
            text = f"cannot fetch {what}, {again}: {_one_line(cause)}"
            print(text, file=sys.stderr, flush=True)
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


def describe_progress(
    name: str, done: Sequence[tuple[float, int]], num_files: int, num_bytes: int
) -> str:
    """Files and bytes so far, and the time that is left at the pace of the last ten minutes.

    Args:
        done: (time of completion in seconds, bytes) of each file that is complete.
        num_files: of all files.
        num_bytes: of all files.
    """
    have = sum(size for _, size in done)
    text = f"{name}: {len(done)} of {num_files} files, {have / 1e9:.1f} of {num_bytes / 1e9:.1f} GB"
    recent = sorted(entry for entry in done if entry[0] > time.time() - PACE_SECONDS)
    span = recent[-1][0] - recent[0][0] if recent else 0.0
    if span <= 0 or len(done) == num_files:
        return text
    pace = sum(size for _, size in recent[1:]) / span
    if pace == 0:
        return text
    minutes = (num_bytes - have) / pace / 60
    return f"{text}, {pace / 1e6:.0f} MB/s, {minutes:.0f} min left"
