"""A dataset from its text or its files to shards and manifest, whatever its source."""

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from miniseries.data import corpus, fetch, foreign, hub_shards, origin, streams
from miniseries.data.corpus import Findings, Part, Piece
from miniseries.data.encode import gpt2_encoding
from miniseries.data.questions import NUM_QUESTIONS, questions_from_shards
from miniseries.data.shards import VAL_TOKENS, build_manifest, problems_of, remove_other_shards
from miniseries.metrics import (
    die_with_parent,
    locked,
    num_cores,
    read_json,
    write_json,
    write_text,
)

ROUNDS = 3  # of a measurement
STREAMS = ".streams"  # folder of notes and token streams, in the dataset's
# Bytes of tokens for each byte of text: 2 for about 4.5 characters, more in scripts other than
# Latin. Of compressed text, about as many as of the file: FineWeb-Edu's sample of 10 billion tokens
# (20 GB) is 28.5 GB of .parquet.
TOKEN_BYTES = {False: 0.5, True: 0.8}


def prepare_dataset(
    name: str, dataset: dict[str, Any], folder: Path, manifest: Path, num_workers: int | None = None
) -> None:
    """Make the shards, the questions, and at the very end the manifest of one dataset.

    The same text gives the same bytes for any number of workers. An interrupted call goes on with
    what is missing: parts of the text that have no tokens yet, shards that are not there. Tokens on
    which runs stand are never replaced: of these only manifest and questions are written again.

    Args:
        name: of the dataset; first part of the names of its shards.
        dataset: its entry in the configuration.
        folder: for the shards and hellaswag.jsonl.
        manifest: path of the manifest.
        num_workers: processes that tokenize; None takes one a core.

    Raises:
        ValueError, OSError: what is wrong with the configuration, the text, the disk, the network;
            shards of runs are gone, and there is other text by now.
    """
    folder, manifest = Path(folder), Path(manifest)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):  # a second terminal waits instead of mixing its shards in
        if dataset["source"] == "hub-shards":
            hub_shards.assemble_manifest(name, dataset, folder, manifest)
            return
        users = _check_users(name, dataset, folder)
        if users and _bring_back(dataset, folder, manifest):
            return
        files = origin.describe_files(dataset)
        text = None if dataset["source"] == "shards" else Text(name, dataset, folder)
        if users:
            before = origin.read_note(folder).get("files")
            _refuse_unless(text.is_as_before() if text else files == before, name, folder, users)
        if text:
            text.prepare(manifest, num_workers or num_cores())
        else:
            foreign.prepare_shards(name, dataset, folder, manifest)
        origin.write_note(folder, dataset, files)


def _check_users(name: str, dataset: dict[str, Any], folder: Path) -> list[str]:
    """Runs on the tokens in the folder; raises if the entry is not the one these were made of."""
    if dataset["source"] == "shards" and dataset.get("format", foreign.LLMC) == foreign.LLMC:
        return []  # used where they are: nothing is written over
    runs = folder.parent.parent / "train"  # results/data/{name} -> results/train
    origin.check_origin(name, dataset, folder, runs)
    return origin.find_users(name, folder, runs)


def _refuse_unless(is_same_text: bool, name: str, folder: Path, users: list[str]) -> None:
    if not is_same_text:
        raise ValueError(
            f"dataset {name}: shards that run {', '.join(users)} was trained on are missing in "
            f"{folder}, and the text is no longer what they were made of. No shard was touched. "
            "Bring them back, or the text as it was, with its times (`cp -p`); give the new text a "
            "dataset of another name"
        )


def _bring_back(dataset: dict[str, Any], folder: Path, manifest: Path) -> bool:
    """Write questions and manifest as they were, if all shards are there; returns whether so."""
    known = origin.read_note(folder).get("manifest")
    if not known or any(problems_of(folder / s["path"], s["num_tokens"]) for s in known["shards"]):
        return False
    if dataset["source"] not in ("shards", "hub-text"):
        _write_questions(dataset, folder, known["shards"])
    write_json(manifest, known)
    return True


def _write_questions(dataset: dict[str, Any], folder: Path, shards: list[dict[str, Any]]) -> int:
    """Make hellaswag.jsonl of the validation shards; returns the number of questions."""
    val = [folder / shard["path"] for shard in shards if shard["split"] == "val"]
    questions = questions_from_shards(val, dataset.get("num_questions", NUM_QUESTIONS))
    lines = [json.dumps(question) + "\n" for question in questions]
    write_text(folder / "hellaswag.jsonl", "".join(lines))
    return len(questions)


class Text:
    """A dataset that is tokenized here: its parts, and the way from them to the manifest."""

    def __init__(self, name: str, dataset: dict[str, Any], folder: Path) -> None:
        self.name, self.dataset, self.folder = name, dataset, folder
        self.streams = folder / STREAMS
        self.is_remote = dataset["source"] == "hub-text"
        if self.is_remote:
            listed = read_json(folder / "files.json")
            self.commit, self.files = listed["commit"], listed["files"]
            corpus.check_kinds([file["path"] for file in self.files])
            self.parts = [_remote_part(folder, n, file) for n, file in enumerate(self.files)]
            about = [[file["path"], file["sha256"]] for file in self.files]
        else:
            self.parts = corpus.plan_parts(dataset)
            about = [None] * len(self.parts)
        pairs = zip(self.parts, about, strict=True)
        self.identities = [streams.identify(part, dataset, entry) for part, entry in pairs]

    def tokenize(self, number: int, is_note_enough: bool = False) -> dict[str, Any]:
        """Streams and note of one part, made if they are not there; a remote file is fetched.

        Args:
            is_note_enough: streams that are in shards already are not made again.

        Returns:
            The note.
        """
        part, identity = self.parts[number], self.identities[number]
        rest = (number, self.dataset, self.streams, identity)
        if not self.is_remote:
            return streams.tokenize_part(part, *rest)
        self.streams.mkdir(parents=True, exist_ok=True)
        with locked(self.streams / f"{number:06d}.lock"):  # another command may be at it
            note = self.note(number)
            if note and (is_note_enough or streams.has_streams(self.streams, number, note)):
                return note
            folder = Path(part.pieces[0].path).parent
            self._fetch(number, folder)
            note = streams.tokenize_part(part, *rest)
            shutil.rmtree(folder, ignore_errors=True)
            return note

    def _fetch(self, number: int, folder: Path) -> None:
        file = self.files[number]
        left = [f["num_bytes"] for n, f in enumerate(self.files) if not self.note(n)]
        needed = file["num_bytes"] + int(TOKEN_BYTES[True] * sum(left))
        fetch.check_space(self.folder, needed, f"dataset {self.name}")
        where = (self.dataset["repository"], file["path"], self.commit)
        fetch.fetch_file(*where, folder)

    def note(self, number: int) -> dict[str, Any] | None:
        """What is known of a part that was tokenized before, else None."""
        return streams.read_note(self.streams, number, self.identities[number])

    def is_as_before(self) -> bool:
        """Whether the shards that were made before would be made of the same text again."""
        notes = [self.note(number) for number in range(len(self.parts))]
        if not all(notes):
            return False
        plans = streams.plan_shards(self.name, [n["num_tokens"] for n in notes], self.dataset)
        return streams.are_of_text(plans, self.streams, self.identities)

    def prepare(self, manifest: Path, num_workers: int) -> None:
        """Tokenize what has no note yet, write the shards that are missing, then the manifest."""
        if not self.is_remote:
            self._check_space()
        self._tokenize_all([n for n in range(len(self.parts)) if not self.note(n)], num_workers)
        notes = [self.note(number) for number in range(len(self.parts))]
        counts = [note["num_tokens"] for note in notes]
        plans = streams.plan_shards(self.name, counts, self.dataset)
        findings = Findings()
        for note in notes:
            findings.add(note["findings"])
        self._check_splits({plan.split for plan in plans}, findings)
        manifest.unlink(missing_ok=True)  # never describes shards of another version
        missing = streams.shards_to_write(plans, self.folder, self.streams, self.identities)
        needed = {segment[:2] for plan in missing for segment in plan.segments}
        gone = {
            n for n, split in needed if not streams.has_stream(self.streams, n, split, notes[n])
        }
        self._tokenize_all(sorted(gone), num_workers)
        entries = streams.pack_shards(
            plans, self.folder, self.streams, self.identities, self.tokenize
        )
        streams.drop_streams(self.streams)
        shutil.rmtree(self.folder / ".fetch", ignore_errors=True)  # what a killed download left
        remove_other_shards(self.folder, self.name, [Path(entry["path"]) for entry in entries])
        self._check_unchanged()
        self._write_manifest(manifest, entries, notes, findings)

    def _check_unchanged(self) -> None:
        """Raise if a file of one's own has changed since its parts were planned."""
        for part, identity in zip(self.parts, self.identities, strict=True):
            if not self.is_remote and streams.identify(part, self.dataset) != identity:
                names = ", ".join(sorted({piece.path for piece in part.pieces}))
                raise ValueError(
                    f"dataset {self.name}: changed while it was tokenized: {names}; run the same "
                    "command again once nothing writes there any more"
                )
        # what grew between planning and `identify` has the identity of text that nobody read
        if self.dataset["source"] == "files" and corpus.plan_parts(self.dataset) != self.parts:
            raise ValueError(
                f"dataset {self.name}: its files changed while they were tokenized; run the same "
                "command again once nothing writes there any more"
            )

    def _tokenize_all(self, numbers: Sequence[int], num_workers: int) -> None:
        num_workers = min(num_workers, len(numbers))
        if num_workers < 2:
            for done, number in enumerate(numbers, 1):
                self.tokenize(number)
                self._tell(done, len(numbers))
            return
        # spawned, not forked: libraries may have started threads already
        with ProcessPoolExecutor(
            num_workers, get_context("spawn"), die_with_parent, (os.getpid(),)
        ) as pool:
            try:
                tasks = [pool.submit(*self._task(number)) for number in numbers]
                for done, task in enumerate(tasks, 1):
                    task.result()
                    self._tell(done, len(numbers))
            except BrokenProcessPool:
                raise ValueError(
                    f"dataset {self.name}: a process that tokenizes was killed, most likely since "
                    "memory was short; give the same command again, with fewer cores if it repeats"
                ) from None
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _tell(self, done: int, total: int) -> None:
        now = time.strftime("%H:%M:%S")
        print(f"{now} {self.name}: {done} of {total} parts tokenized", file=sys.stderr, flush=True)

    def _task(self, number: int) -> tuple:
        """Function and arguments; no more than a worker needs, since they are sent to it."""
        if self.is_remote:
            return self.tokenize, number
        part, identity = self.parts[number], self.identities[number]
        return streams.tokenize_part, part, number, self.dataset, self.streams, identity

    def _check_space(self) -> None:
        """Refuse to begin what the disk cannot hold, as far as file sizes tell."""
        new = [part for number, part in enumerate(self.parts) if not self.note(number)]
        needed = 0.0
        for path in {Path(piece.path) for part in new for piece in part.pieces}:
            is_packed = path.suffix in (*corpus.COMPRESSED, ".parquet")
            needed += path.stat().st_size * TOKEN_BYTES[is_packed]
        fetch.check_space(self.folder, int(needed), f"dataset {self.name}")

    def _check_splits(self, splits: set[str], findings: Findings) -> None:
        for split in streams.SPLITS:
            if split not in splits:
                raise ValueError(
                    f"dataset {self.name}: none of its {findings.num_documents} documents fell "
                    f"into the {split} split ({findings.num_empty} empty, {findings.num_short} "
                    f"short, and {findings.num_bad} bad ones left out); give it more documents, "
                    "another val_fraction, or `split: blank_lines` for one large text"
                )

    def _write_manifest(
        self, manifest: Path, entries: list[dict], notes: list[dict], findings: Findings
    ) -> None:
        source = {"kind": self.dataset["source"], "python": platform.python_version()}
        source |= {key: value for key, value in vars(findings).items() if key != "num_documents"}
        hashes = "".join(note["text_sha256"] for note in notes)
        source["text_sha256"] = hashlib.sha256(hashes.encode()).hexdigest()
        if self.is_remote:
            source |= {"repository": self.dataset["repository"], "commit": self.commit}
            source["files"] = self.files
        else:
            source["num_questions"] = _write_questions(self.dataset, self.folder, entries)
        content = build_manifest(
            manifest.parent,
            self.name,
            entries,
            source=source,
            val_tokens=self.dataset.get("val_tokens", VAL_TOKENS),
            num_documents=findings.num_documents,
        )
        write_json(manifest, content)


def tokenize_file(
    name: str, dataset: dict[str, Any], number: int, folder: Path, done: Path
) -> None:
    """Fetch and tokenize one file of a `hub-text` dataset, and say how far the dataset is.

    Args:
        name: of the dataset.
        dataset: its entry in the configuration.
        number: of the file in files.json, from 0.
        folder: of the dataset, with files.json.
        done: written last; what was found.

    Raises:
        ValueError, OSError: as `fetch.fetch_file`; unreadable text, a full disk.
    """
    text = Text(name, dataset, Path(folder))
    note = text.tokenize(number, is_note_enough=True)
    write_json(Path(done), note | text.files[number])
    complete = []
    for n, file in enumerate(text.files):
        if text.note(n):
            complete.append((streams.note_path(text.streams, n).stat().st_mtime, file["num_bytes"]))
    total = sum(file["num_bytes"] for file in text.files)
    print(fetch.describe_progress(name, complete, len(text.files), total), flush=True)


def _remote_part(folder: Path, number: int, file: dict[str, Any]) -> Part:
    """Where a file of the hub lies while it is tokenized; in a folder of its own."""
    place = folder / ".fetch" / f"{number:06d}" / Path(file["path"]).name
    return Part((Piece(str(place)),), file["split"])


def measure_speed(paths: Sequence[str], text_key: str, num_workers: int, output: Path) -> None:
    """Compare the way from files to shards with tiktoken alone, on the same documents and cores.

    Both take turns, and the best of each counts: other work on the machine only ever slows down.

    Args:
        paths: globs of .jsonl, .parquet, or .txt files; their text is held in memory meanwhile.
        text_key: key or column that holds the text.
        num_workers: processes here, threads of `encode_ordinary_batch` there.
        output: JSON with the seconds of both, of the clock and of the cores.
    """
    dataset = {"source": "files", "paths": list(paths), "text_key": text_key, "num_questions": 0}
    texts = [
        document.text
        for part in corpus.plan_parts(dataset)
        for document in corpus.read_part(part, dataset, Findings())
    ]
    alone, whole = [], []
    for _ in range(ROUNDS):
        start = _seconds()
        encoded = gpt2_encoding().encode_ordinary_batch(texts, num_threads=num_workers)
        alone.append(_seconds() - start)
        num_tokens = sum(map(len, encoded))
        del encoded
        with tempfile.TemporaryDirectory(dir=Path(output).parent) as name:
            start = _seconds()
            manifest = Path(name) / "manifest.json"
            prepare_dataset("measured", dataset, Path(name), manifest, num_workers)
            whole.append(_seconds() - start)
            found = read_json(manifest)
        # the same tokens, and a mark before each document
        assert found["num_train_tokens"] + found["num_val_tokens"] == num_tokens + len(texts)
    alone, whole = np.min(alone, axis=0), np.min(whole, axis=0)
    write_json(
        Path(output),
        {
            "num_documents": len(texts),
            "num_tokens": num_tokens,
            "num_workers": num_workers,
            "tiktoken_seconds": alone[0],
            "tiktoken_cpu_seconds": alone[1],
            "files_to_shards_seconds": whole[0],
            "files_to_shards_cpu_seconds": whole[1],
            "tokens_per_cpu_second": num_tokens / whole[1],
            "share_by_time": alone[0] / whole[0],
            "share_by_cpu_time": alone[1] / whole[1],  # the one that counts on a shared machine
        },
    )


def _seconds() -> np.ndarray:
    """Time, and what this process and those it waited for had of the cores."""
    used = os.times()
    cores = used.user + used.system + used.children_user + used.children_system
    return np.array([time.perf_counter(), cores])
