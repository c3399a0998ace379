"""Text of a dataset as documents, in a fixed order, cut into parts that workers read side by side.

Which split a document belongs to depends on its text, its file, or its place, never on a worker.
Part after part and document after document give the same text however many workers there are.
"""

import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from miniseries.data.prose import builtin_documents

VAL_FRACTION = 0.1
PART_BYTES = 64_000_000  # of files; keeps a worker busy for some seconds
MAX_TEXT_BYTES = 256_000_000  # of a .txt file that is one document, since it is held in memory
PARQUET_ROWS = 1_000  # rows held at once
MAX_NAMED = 5  # bad documents named in the manifest
SURROGATE = re.compile("[\ud800-\udfff]")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


class Document(NamedTuple):
    """One text; the name (module, file, file and line or row) appears in messages."""

    name: str
    text: str
    digest: bytes  # sha256 of the text in UTF-8


class Piece(NamedTuple):
    """A file or a stretch: bytes of a .jsonl, row groups of a .parquet; None is to its end."""

    path: str
    start: int = 0
    stop: int | None = None


class Part(NamedTuple):
    """What one worker reads at a time; no pieces stand for the prose of Python.

    `split` is "val" or "train" where whole files are held out, else None.
    """

    pieces: tuple[Piece, ...]
    split: str | None


@dataclass
class Findings:
    """What reading found; filled on the way, added up over parts."""

    num_documents: int = 0
    num_empty: int = 0
    num_short: int = 0
    num_repaired: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)

    def add_bad(self, place: str, reason: str) -> None:
        """Count a document that is left out, and name the first few."""
        self.num_bad += 1
        if len(self.bad) < MAX_NAMED:
            self.bad.append(f"{place}: {reason}")

    def add(self, other: dict[str, Any]) -> None:
        """Add the findings (as a dictionary) of another part."""
        for key, value in other.items():
            setattr(self, key, getattr(self, key) + value)
        del self.bad[MAX_NAMED:]


def plan_parts(dataset: dict[str, Any]) -> list[Part]:
    """The parts of a `builtin`, `builtin-large`, or `files` dataset; held-out files come first.

    Raises:
        ValueError: a glob without a match, an unknown suffix, an unreadable .parquet.
    """
    if dataset["source"] != "files":
        return [Part((), None)]
    held_out = find_files(dataset["val_paths"]) if dataset.get("val_paths") else []
    places = {os.path.realpath(path) for path in held_out}
    files = [path for path in find_files(dataset["paths"]) if os.path.realpath(path) not in places]
    if not held_out:
        return _parts_of(files, None)
    return _parts_of(held_out, "val") + _parts_of(files, "train")


def _parts_of(files: Sequence[str], split: str | None) -> list[Part]:
    """Large files cut into several parts, small ones put together in one."""
    parts: list[Part] = []
    begun: list[Piece] = []
    room = PART_BYTES
    for path in files:
        for piece, num_bytes in _pieces_of(path):
            if begun and num_bytes > room:
                parts.append(Part(tuple(begun), split))
                begun, room = [], PART_BYTES
            begun.append(piece)
            room -= num_bytes
    return [*parts, Part(tuple(begun), split)] if begun else parts


def _pieces_of(path: str) -> Iterator[tuple[Piece, int]]:
    """Pieces of a file with their sizes in bytes."""
    num_bytes = Path(path).stat().st_size
    if path.endswith(".jsonl"):
        for start in range(0, max(num_bytes, 1), PART_BYTES):
            stop = min(start + PART_BYTES, num_bytes)
            yield Piece(path, start, stop), stop - start
    elif path.endswith(".parquet"):
        sizes = _row_group_bytes(path)
        start, size = 0, 0
        for group, group_bytes in enumerate(sizes):
            size += group_bytes
            if size >= PART_BYTES or group == len(sizes) - 1:
                yield Piece(path, start, group + 1), size
                start, size = group + 1, 0
    else:
        yield Piece(path), num_bytes


def _row_group_bytes(path: str) -> list[int]:
    """Bytes of each row group of a .parquet file, uncompressed."""
    from pyarrow import ArrowException, parquet  # half a second, needed for this kind only

    try:
        about = parquet.read_metadata(path)
    except ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet ({error})") from None
    return [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]


def read_part(part: Part, dataset: dict[str, Any], findings: Findings) -> Iterator[Document]:
    """Documents of a part in their order, empty ones left out.

    Lone surrogates, which no UTF-8 text can hold, become U+FFFD; everything else, NUL and
    special strings such as <|endoftext|> too, stays as it is.

    Args:
        dataset: entry of the configuration: `source`, and for files `text_key`, `split`.
        findings: filled while the documents are read.

    Raises:
        ValueError: unreadable text.
    """
    if part.pieces:
        raw = _piece_documents(part, dataset, findings)
    else:
        raw = builtin_documents(with_packages=dataset["source"] == "builtin-large")
    for name, text in raw:
        if not text or text.isspace():
            findings.num_empty += 1
            continue
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            text = SURROGATE.sub("\ufffd", text)
            encoded = text.encode()
            findings.num_repaired += 1
        yield Document(name, text, hashlib.sha256(encoded).digest())


def _piece_documents(
    part: Part, dataset: dict[str, Any], findings: Findings
) -> Iterator[tuple[str, str]]:
    for piece in part.pieces:
        try:
            yield from READERS[_kind(piece.path)](piece, dataset, findings)
        except OSError as error:  # a cut .gz does not say which one it is
            raise ValueError(f"{piece.path}: cannot be read ({error})") from None


def is_validation(digest: bytes, val_fraction: float) -> bool:
    """Whether a document is held out: decided by its sha256 alone, uniform over documents."""
    return int.from_bytes(digest[:4], "big") / 2**32 < val_fraction


def _kind(path: str) -> str:
    """Suffix of a file, without the compression's."""
    suffix = Path(path).suffix
    return Path(Path(path).stem).suffix if suffix in COMPRESSED else suffix


def find_files(patterns: Sequence[str]) -> list[str]:
    """Files that match the globs, by name, each once, by whatever way it is reached."""
    files: set[str] = set()
    for pattern in patterns:
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path's takes no absolute one)
        matches = [path for path in found if Path(path).is_file()]
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; check `paths` of the dataset")
        files.update(matches)
    check_kinds(sorted(files))
    places = {os.path.realpath(path): path for path in sorted(files, reverse=True)}
    return sorted(places.values())


def check_kinds(paths: Sequence[str]) -> None:
    """Raise ValueError for a file that nothing here can read, by its name."""
    for path in paths:
        is_packed_parquet = _kind(path) == ".parquet" and not path.endswith(".parquet")
        if _kind(path) not in READERS or is_packed_parquet:
            known = ", ".join(READERS)
            raise ValueError(
                f"{path}: unknown kind of file; known are {known}; .txt and .jsonl may "
                "be packed, .gz or .zst"
            )


def _open(path: str) -> IO[bytes]:
    """A file to read bytes from, unpacked on the way."""
    compression = COMPRESSED.get(Path(path).suffix)
    if compression is None:
        return Path(path).open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression=compression), 1 << 20)


def _text_documents(
    piece: Piece, dataset: dict[str, Any], findings: Findings
) -> Iterator[tuple[str, str]]:
    path = piece.path
    by_blocks = dataset.get("split") == "blank_lines"
    try:
        with _open(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
            if by_blocks:
                yield from _blocks(path, file)
                return
            text = file.read(MAX_TEXT_BYTES + 1)
            if len(text) > MAX_TEXT_BYTES:
                raise ValueError(
                    f"{path}: more than {MAX_TEXT_BYTES:,} characters in one document; say "
                    "`split: blank_lines`, or cut it into several files"
                )
            yield path, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); convert it, e.g. by iconv") from None


def _blocks(path: str, file: IO[str]) -> Iterator[tuple[str, str]]:
    """Blocks between blank lines; the blank line stays at the end of its block, as in llm.c."""
    block: list[str] = []
    first, size = 1, 0
    for number, line in enumerate(iter(lambda: file.readline(MAX_TEXT_BYTES + 1), ""), 1):
        block.append(line)
        size += len(line)
        if size > MAX_TEXT_BYTES:
            raise ValueError(
                f"{path}:{first}: more than {MAX_TEXT_BYTES:,} characters without a blank line; "
                "cut it into several documents"
            )
        if not line.strip():
            yield f"{path}:{first}", "".join(block)
            block, first, size = [], number + 1, 0
    yield f"{path}:{first}", "".join(block)


def _jsonl_documents(
    piece: Piece, dataset: dict[str, Any], findings: Findings
) -> Iterator[tuple[str, str]]:
    key = dataset.get("text_key", "text")
    num_good, num_bad = 0, findings.num_bad
    for place, line in _lines(piece):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, RecursionError):
            findings.add_bad(place, "not JSON")
            continue
        except (KeyError, TypeError, IndexError):
            text = None
        if isinstance(text, str):
            num_good += 1
            yield place, text
        else:
            findings.add_bad(place, f"no text under {key!r}")
    if piece.start == 0 and num_good == 0 and findings.num_bad > num_bad:
        raise ValueError(f"{piece.path}: no line has a text under {key!r}; check `text_key`")


def _lines(piece: Piece) -> Iterator[tuple[str, bytes]]:
    """Place and content of the lines that begin within a piece."""
    with _open(piece.path) as file:
        position = piece.start
        if position:  # the line that the piece before this one began is that one's
            file.seek(position - 1)
            position += len(_line(piece.path, file)) - 1
        for number, line in enumerate(iter(lambda: _line(piece.path, file), b""), 1):
            if piece.stop is not None and position >= piece.stop:
                return
            place = f"byte {position}" if piece.start else number
            yield f"{piece.path}:{place}", line
            position += len(line)


def _line(path: str, file: IO[bytes]) -> bytes:
    """The next line; a file without line ends is not to fill the memory."""
    line = file.readline(MAX_TEXT_BYTES + 1)
    if len(line) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{path}: a line of more than {MAX_TEXT_BYTES:,} bytes; .jsonl has a document a line"
        )
    return line


def _parquet_documents(
    piece: Piece, dataset: dict[str, Any], findings: Findings
) -> Iterator[tuple[str, str]]:
    import pyarrow
    from pyarrow import parquet

    path, key = piece.path, dataset.get("text_key", "text")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, key, file.schema_arrow)
            stop = file.num_row_groups if piece.stop is None else piece.stop
            row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
            groups = list(range(piece.start, stop))
            for batch in file.iter_batches(PARQUET_ROWS, row_groups=groups, columns=[key]):
                for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    try:
                        text = value.decode()
                    except AttributeError:  # None
                        findings.add_bad(f"{path}:{row}", f"no text under {key!r}")
                    except UnicodeDecodeError:
                        findings.add_bad(f"{path}:{row}", "not UTF-8")
                    else:
                        yield f"{path}:{row}", text
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet ({error})") from None


def _check_column(path: str, key: str, schema: Any) -> None:
    if key not in schema.names:
        columns = ", ".join(schema.names)
        raise ValueError(f"{path}: no column {key!r} (`text_key`); it has {columns}")
    kind = str(schema.field(key).type)
    if not kind.removeprefix("large_").startswith(("string", "binary")):
        raise ValueError(f"{path}: column {key!r} holds {kind}, not text; check `text_key`")


Reader = Callable[[Piece, dict[str, Any], Findings], Iterator[tuple[str, str]]]
READERS: dict[str, Reader] = {
    ".txt": _text_documents,
    ".jsonl": _jsonl_documents,
    ".parquet": _parquet_documents,
}
