"""Parts of a corpus to token streams, and streams to shards: the same bytes for any workers.

A stream is a headerless file of uint16 ids. Each part of the corpus gives one for each split and a
note beside them; shards are stretches of the streams one after another, cut at fixed counts. Notes
say how many tokens each stream has, so a shard that is missing can be made again from the parts it
needs, and a stream whose tokens are all in shards can go.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from miniseries.data.corpus import (
    VAL_FRACTION,
    Document,
    Findings,
    Part,
    is_validation,
    read_part,
)
from miniseries.data.encode import encode_texts, gpt2_encoding
from miniseries.data.shards import (
    DOCUMENT_MARK,
    SHARD_TOKENS,
    read_header,
    shard_entry,
    shard_name,
    write_shard,
)
from miniseries.metrics import read_json, write_json

DOCUMENTS_AT_ONCE = 1_024
CHARACTERS_AT_ONCE = 4_000_000  # about 1 M tokens
TOKENS_AT_ONCE = 4_000_000  # copied from streams to shards
SPLITS = ("val", "train")
# What of a dataset's entry decides a stream; the rest decides where streams are cut.
STREAM_KEYS = ("source", "text_key", "split", "min_doc_tokens")


class Segment(NamedTuple):
    """Tokens start to stop of one stream of a part."""

    part: int
    split: str
    start: int
    stop: int


@dataclass(frozen=True)
class ShardPlan:
    """A shard and the segments that it consists of."""

    split: str
    name: str
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the shard."""
        return sum(segment.stop - segment.start for segment in self.segments)

    def identity(self, identities: Sequence[str]) -> str:
        """Hash of the text that the shard is made of; `identities` are those of all parts."""
        content = [[identities[part], *where] for part, *where in self.segments]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def stream_path(folder: Path, number: int, split: str) -> Path:
    """A part's stream of one split."""
    return folder / f"{number:06d}.{split}.tokens"


def note_path(folder: Path, number: int) -> Path:
    """What is known of a part's streams."""
    return folder / f"{number:06d}.json"


def read_note(folder: Path, number: int, identity: str) -> dict[str, Any] | None:
    """Note of a part that was tokenized from the same text in the same way, else None."""
    try:
        note = read_json(note_path(folder, number))
        return note if note["identity"] == identity else None
    except (ValueError, KeyError, TypeError):
        return None


def has_streams(folder: Path, number: int, note: dict[str, Any]) -> bool:
    """Whether the streams that the note tells of are there, whole."""
    return all(has_stream(folder, number, split, note) for split in note["num_tokens"])


def has_stream(folder: Path, number: int, split: str, note: dict[str, Any]) -> bool:
    """Whether one of them is."""
    num_tokens, path = note["num_tokens"][split], stream_path(folder, number, split)
    return not num_tokens or (path.exists() and path.stat().st_size == 2 * num_tokens)


def held_out_fraction(dataset: dict[str, Any]) -> float:
    """Share of the documents whose text decides that they are held out."""
    by_place = dataset["source"] == "hub-text" or dataset.get("val_first_tokens")
    return 0.0 if by_place else dataset.get("val_fraction", VAL_FRACTION)


def identify(part: Part, dataset: dict[str, Any], about: Any = None) -> str:
    """Hash of what a part's streams depend on.

    Args:
        about: of a part of a downloaded file, what the repository says of it; else the sizes and
            times of the files are taken.
    """
    if about is None:
        stats = [Path(piece.path).stat() for piece in part.pieces]
        about = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        about.append(part.pieces)
    options = [dataset.get(key) for key in STREAM_KEYS]
    content = json.dumps([part.split, about, options, held_out_fraction(dataset)])
    return hashlib.sha256(content.encode()).hexdigest()


def tokenize_part(
    part: Part, number: int, dataset: dict[str, Any], folder: Path, identity: str
) -> dict[str, Any]:
    """Write the streams of one part, and at the very end its note; nothing if all is there.

    Args:
        number: of the part in the dataset.
        dataset: its entry in the configuration.
        folder: of the streams.
        identity: from `identify`.

    Returns:
        The note: identity, tokens by split, what was found.

    Raises:
        ValueError, OSError: unreadable text, a full disk; names the file.
    """
    note = read_note(folder, number, identity)
    if note and has_streams(folder, number, note):
        return note
    gpt2_encoding()  # a vocabulary that cannot be read is no fault of the documents
    folder.mkdir(parents=True, exist_ok=True)
    note_path(folder, number).unlink(missing_ok=True)
    findings = Findings()
    text_hash = hashlib.sha256()
    temporary = {split: stream_path(folder, number, f"{split}.tmp") for split in SPLITS}
    try:
        with temporary["val"].open("wb") as val, temporary["train"].open("wb") as train:
            files = {"val": val, "train": train}
            for batch in _batches(read_part(part, dataset, findings)):
                _write_batch(batch, part.split, dataset, findings, files)
                for document in batch:
                    text_hash.update(document.digest)
            for file in files.values():  # the note that follows is trusted, after a crash, too
                file.flush()
                os.fsync(file.fileno())
        num_tokens = {split: path.stat().st_size // 2 for split, path in temporary.items()}
        for split, path in temporary.items():
            if num_tokens[split]:
                path.replace(stream_path(folder, number, split))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    note = {"identity": identity, "num_tokens": num_tokens, "findings": asdict(findings)}
    note["text_sha256"] = text_hash.hexdigest()
    write_json(note_path(folder, number), note)
    return note


def _write_batch(
    batch: list[Document],
    split: str | None,
    dataset: dict[str, Any],
    findings: Findings,
    files: dict[str, IO[bytes]],
) -> None:
    """Encode documents, and append each with its mark to the stream of its split."""
    batch, ids, counts = encode_documents(batch, findings)
    is_long = counts >= dataset.get("min_doc_tokens", 0)
    findings.num_short += int(len(counts) - is_long.sum())
    findings.num_documents += int(is_long.sum())
    if split is not None:
        is_val = np.full(len(batch), split == "val")
    else:
        val_fraction = held_out_fraction(dataset)
        held_out = (val_fraction > 0 and is_validation(doc.digest, val_fraction) for doc in batch)
        is_val = np.fromiter(held_out, bool, len(batch))
    tokens = _with_marks(ids, counts)
    for name, chosen in (("val", is_val & is_long), ("train", ~is_val & is_long)):
        files[name].write(tokens[np.repeat(chosen, counts + 1)].astype("<u2", copy=False).data)


def _with_marks(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same ids, (N,), with the mark before each document, (N + documents,) uint16."""
    tokens = np.full(len(ids) + len(counts), DOCUMENT_MARK, dtype=np.uint16)
    is_mark = np.zeros(len(tokens), dtype=bool)
    is_mark[np.cumsum(counts + 1) - counts - 1] = True
    tokens[~is_mark] = ids
    return tokens


def encode_documents(
    batch: list[Document], findings: Findings
) -> tuple[list[Document], np.ndarray, np.ndarray]:
    """Encode a batch; documents that cannot be encoded are counted, named, and left out.

    Returns:
        The documents that are left, their ids one after another, (N,) uint16, and the number of
        ids of each, (documents,) int64, without marks.
    """
    try:
        return batch, *encode_texts([document.text for document in batch])
    except BaseException as error:  # a panic of a Rust library is no Exception
        _raise_unless_of_text(error)
    good: list[Document] = []
    encoded = []
    for document in batch:
        try:
            encoded.append(encode_texts([document.text])[0])
            good.append(document)
        except BaseException as error:
            _raise_unless_of_text(error)
            findings.add_bad(document.name, f"cannot be tokenized ({error})")
    counts = np.array([len(ids) for ids in encoded], dtype=np.int64)
    return good, np.concatenate([np.empty(0, np.uint16), *encoded]), counts


def _raise_unless_of_text(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | OSError):
        raise error


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) == DOCUMENTS_AT_ONCE or num_characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def plan_shards(
    name: str, num_tokens: Sequence[dict[str, int]], dataset: dict[str, Any]
) -> list[ShardPlan]:
    """Which tokens each shard holds, validation first; only the last one of a split is not full.

    Args:
        name: of the dataset; begins the shards' names.
        num_tokens: of each part, tokens by split.
        dataset: `val_first_tokens` (held out from the start of the text, unless files are),
            `num_shards` (training shards to keep, None is all), `shard_tokens`.
    """
    segments = {
        split: [Segment(i, split, 0, n[split]) for i, n in enumerate(num_tokens) if n[split]]
        for split in SPLITS
    }
    first = dataset.get("val_first_tokens", 0)
    if first and not segments["val"]:
        held_out, segments["train"] = _cut(segments["train"], first)
        segments["val"] = held_out
    plans = []
    size = dataset.get("shard_tokens", SHARD_TOKENS)
    for split, rest in segments.items():
        number = 0 if split == "val" else 1
        last = dataset.get("num_shards") if split == "train" else None
        while rest and not (last and number > last):
            shard, rest = _cut(rest, size)
            plans.append(ShardPlan(split, shard_name(name, split, number), tuple(shard)))
            number += 1
    return plans


def _cut(segments: list[Segment], num_tokens: int) -> tuple[list[Segment], list[Segment]]:
    """The first tokens of a row of segments, and what is left of it."""
    taken: list[Segment] = []
    for place, segment in enumerate(segments):
        stop = min(segment.stop, segment.start + num_tokens)
        taken.append(segment._replace(stop=stop))
        num_tokens -= stop - segment.start
        if num_tokens == 0:
            left = [segment._replace(start=stop)] if stop < segment.stop else []
            return taken, left + segments[place + 1 :]
    return taken, []


def are_of_text(plans: Sequence[ShardPlan], streams: Path, identities: Sequence[str]) -> bool:
    """Whether these shards, there by now or not, were made of the same text before."""
    done = _read_record(streams)
    return all(done.get(p.name, {}).get("text") == p.identity(identities) for p in plans)


def shards_to_write(
    plans: Sequence[ShardPlan], folder: Path, streams: Path, identities: Sequence[str]
) -> list[ShardPlan]:
    """Those of the shards that are not there yet, or are made of other text by now."""
    done = _read_record(streams)
    return [plan for plan in plans if not _is_done(plan, folder, done.get(plan.name), identities)]


def pack_shards(
    plans: Sequence[ShardPlan],
    folder: Path,
    streams: Path,
    identities: Sequence[str],
    provide: Callable[[int], Any],
) -> list[dict[str, Any]]:
    """Write the shards that are not there yet, and drop each stream once it is used up.

    Args:
        plans: of all shards.
        folder: of the shards.
        streams: folder of the streams; `packed.json` in it says which shards are done.
        identities: of all parts.
        provide: makes the streams of a part whose number it is given, if they are not there.

    Returns:
        Entries for the manifest.
    """
    done = _read_record(streams)
    entries = []
    for place, plan in enumerate(plans):
        path, known = folder / plan.name, done.get(plan.name)
        if not _is_done(plan, folder, known, identities):
            for segment in plan.segments:
                path_of_stream = stream_path(streams, segment.part, segment.split)
                if not path_of_stream.exists():  # whole streams only ever get this name
                    provide(segment.part)
            sha256 = write_shard(path, _read(plan, streams), plan.num_tokens)
            text = plan.identity(identities)
            if known and known["text"] == text and known["sha256"] != sha256:
                path.unlink()  # or the next call would take it for the earlier one
                raise ValueError(
                    f"{path}: made again of the same text, it has other tokens than before; delete "
                    f"{folder} and run the same command again"
                )
            done[plan.name] = {"text": text, "num_tokens": plan.num_tokens, "sha256": sha256}
            write_json(streams / "packed.json", done)
        entries.append(shard_entry(path, plan.split, plan.num_tokens, done[plan.name]["sha256"]))
        needed = {segment[:2] for later in plans[place + 1 :] for segment in later.segments}
        for segment in plan.segments:
            if segment[:2] not in needed:
                stream_path(streams, segment.part, segment.split).unlink(missing_ok=True)
    return entries


def _read_record(streams: Path) -> dict[str, Any]:
    """What is known of the shards that were written: text (a hash), num_tokens, sha256."""
    record = streams / "packed.json"
    return read_json(record) if record.exists() else {}


def _is_done(
    plan: ShardPlan, folder: Path, known: dict[str, Any] | None, identities: Sequence[str]
) -> bool:
    try:
        return (
            known is not None
            and known["text"] == plan.identity(identities)
            and read_header(folder / plan.name) == known["num_tokens"]
        )
    except ValueError:
        return False


def _read(plan: ShardPlan, streams: Path) -> Iterator[np.ndarray]:
    for segment in plan.segments:
        path = stream_path(streams, segment.part, segment.split)
        for start in range(segment.start, segment.stop, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, segment.stop - start)
            yield np.fromfile(path, "<u2", count, offset=2 * start)


def drop_streams(streams: Path) -> None:
    """Delete what no shard needs any more; notes and `packed.json` stay."""
    for path in chain(streams.glob("*.tokens"), streams.glob("*.tmp")):
        path.unlink(missing_ok=True)
