"""Text of a dataset as a stream of documents, split into training and validation.

Which split a document belongs to depends on its text alone, so neither the order of the files
nor the number of workers moves it, and equal documents are never on both sides.
"""

import ast
import glob
import hashlib
import importlib
import json
import os
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

VAL_FRACTION = 0.1
NUM_QUESTIONS = 200
SOURCES = ("builtin", "builtin-large", "files")
PARQUET_ROWS = 1_000  # rows held at once
PARALLEL_MODULES = 2_000  # below, starting processes takes longer than parsing
MAX_WORKERS = 16
MAX_NAMED = 5  # bad lines named in the manifest
# Folders without prose of their own, and the three that Linux distributions package apart
# from Python: with them the text would differ from one installation to the next.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FOLDERS |= {"idlelib", "tkinter", "turtledemo"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SURROGATE = re.compile("[\ud800-\udfff]")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
PROSE = re.compile(r"[A-Z][^|<>{}\[\]\\]*[.!?]")  # no tables, code, or markup


class Document(NamedTuple):
    """One text; the name (module, file, or file and line) appears in messages and questions."""

    name: str
    text: str


class Passage(NamedTuple):
    """A few sentences of a held-out document and the one that follows them."""

    name: str
    context: str
    ending: str


@dataclass
class Findings:
    """What reading a corpus found; `read_documents` fills it on the way."""

    num_documents: int = 0
    num_duplicates: int = 0
    num_repaired: int = 0
    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)
    text_hash: Any = field(default_factory=hashlib.sha256)

    def add_bad_line(self, place: str, reason: str) -> None:
        self.num_bad_lines += 1
        if len(self.bad_lines) < MAX_NAMED:
            self.bad_lines.append(f"{place}: {reason}")


def read_documents(dataset: dict[str, Any], findings: Findings) -> Iterator[Document]:
    """Documents of a dataset, in a fixed order, each text once, empty ones left out.

    Lone surrogates, which no UTF-8 text can hold, become U+FFFD; everything else, NUL and
    special strings such as <|endoftext|> too, stays as it is.

    Args:
        dataset: entry of the configuration: `source`, and for files `paths`, `text_key`, `split`.
        findings: filled while the documents are read.

    Raises:
        ValueError: unknown source, no such file, unreadable text.
    """
    source = dataset["source"]
    if source == "files":
        raw = file_documents(
            dataset["paths"], dataset.get("text_key", "text"), dataset.get("split"), findings
        )
    elif source in SOURCES:
        raw = builtin_documents(with_packages=source == "builtin-large")
    else:
        raise ValueError(f"source {source!r} has no text; known: {', '.join(SOURCES)}")
    seen: set[int] = set()
    for name, text in raw:
        if not text.strip():
            continue
        repaired = SURROGATE.sub("\ufffd", text)
        findings.num_repaired += repaired != text
        digest = hashlib.sha256(repaired.encode()).digest()
        key = int.from_bytes(digest[:8], "big")  # 8 bytes: memory of ~80 bytes per document
        if key in seen:
            findings.num_duplicates += 1
            continue
        seen.add(key)
        findings.num_documents += 1
        findings.text_hash.update(digest)
        yield Document(name, repaired)


def num_cores() -> int:
    """Cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_validation(text: str, val_fraction: float) -> bool:
    """Whether a document is held out: decided by its sha256 alone, uniform over documents."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 < val_fraction


def builtin_documents(with_packages: bool = False) -> Iterator[Document]:
    """Language reference and docstrings of the running Python, by name; identical ones once.

    Args:
        with_packages: also the docstrings of every installed package.

    Raises:
        ValueError: this Python ships without its sources.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ValueError(
            "this Python has no pydoc_data.topics, so `source: builtin` has no text; use a full "
            "installation of Python or `source: files`"
        ) from None
    for topic in sorted(topics):
        yield Document(f"topic {topic}", topics[topic])
    places = sysconfig.get_paths()
    folders = [places["stdlib"]]
    if with_packages:
        folders += sorted({places["purelib"], places["platlib"]})
    seen: set[str] = set()
    for folder in folders:
        yield from _docstrings_of_folder(Path(folder), seen)


def _docstrings_of_folder(root: Path, seen: set[str]) -> Iterator[Document]:
    """One document per module below `root`: the docstrings that no module before it had."""
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts[:-1]):
            modules[".".join(part for part in parts if part != "__init__")] = path
    names = sorted(modules)
    for name, texts in zip(names, _parse_modules([modules[name] for name in names]), strict=True):
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            yield Document(name, "\n\n".join(new))


def _parse_modules(paths: Sequence[Path]) -> Iterator[list[str]]:
    """`module_docstrings` of each path, in order; thousands of them on several cores."""
    if len(paths) < PARALLEL_MODULES:
        yield from map(module_docstrings, paths)
        return
    num_workers = min(num_cores(), MAX_WORKERS)
    # spawned, not forked: the tokenizer's threads may be running already
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(module_docstrings, paths, chunksize=50)


def module_docstrings(path: Path) -> list[str]:
    """Docstrings of a source file in their order; a file that does not parse has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # walk goes level by level
    return [text for text in map(ast.get_docstring, nodes) if text]


def file_documents(
    paths: Sequence[str], text_key: str, split: str | None, findings: Findings
) -> Iterator[Document]:
    """Documents of the user's own files, sorted by path.

    Args:
        paths: globs of .txt, .jsonl, and .parquet files; `**` goes through folders.
        text_key: column or key that holds the text of .parquet and .jsonl files.
        split: "blank_lines" makes each block of a .txt file a document; None, each file.

    Raises:
        ValueError: a glob without a match, an unknown suffix, a missing column, bad text.
    """
    files: set[str] = set()
    for pattern in paths:
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path's takes no absolute one)
        matches = [path for path in found if Path(path).is_file()]
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; check `paths` of the dataset")
        files.update(matches)
    unknown = sorted(path for path in files if Path(path).suffix not in READERS)
    if unknown:
        raise ValueError(
            f"{unknown[0]}: unknown kind of file; known suffixes: {', '.join(READERS)}"
        )
    for path in sorted(files):
        yield from READERS[Path(path).suffix](Path(path), text_key, split, findings)


def _text_documents(
    path: Path, text_key: str, split: str | None, findings: Findings
) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if split != "blank_lines":
                yield Document(str(path), file.read())
                return
            block: list[str] = []
            first = 1
            for number, line in enumerate(file, 1):
                block.append(line)
                if not line.strip():  # the blank line stays at the end of its block, as in llm.c
                    yield Document(f"{path}:{first}", "".join(block))
                    block, first = [], number + 1
            yield Document(f"{path}:{first}", "".join(block))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); convert it, e.g. by iconv") from None


def _jsonl_documents(
    path: Path, text_key: str, split: str | None, findings: Findings
) -> Iterator[Document]:
    num_good = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = json.loads(line)[text_key]
            except (ValueError, RecursionError):
                findings.add_bad_line(place, "not JSON")
                continue
            except (KeyError, TypeError, IndexError):
                text = None
            if isinstance(text, str):
                num_good += 1
                yield Document(place, text)
            else:
                findings.add_bad_line(place, f"no text under {text_key!r}")
    if num_good == 0:
        raise ValueError(f"{path}: no line has a text under {text_key!r}; check `text_key`")


def _parquet_documents(
    path: Path, text_key: str, split: str | None, findings: Findings
) -> Iterator[Document]:
    from pyarrow import ArrowException, parquet  # half a second, needed for this kind only

    try:
        file = parquet.ParquetFile(path)
        if text_key not in file.schema_arrow.names:
            columns = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path}: no column {text_key!r} (`text_key`); it has {columns}")
        row = 0
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                if isinstance(text, str):
                    yield Document(f"{path}:{row}", text)
                else:
                    findings.add_bad_line(f"{path}:{row}", f"no text under {text_key!r}")
    except ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet ({error})") from None


READERS = {".txt": _text_documents, ".jsonl": _jsonl_documents, ".parquet": _parquet_documents}


def find_passages(document: Document) -> Iterator[Passage]:
    """Passages of 2 to 4 whole sentences of prose that do not overlap."""
    for paragraph in re.split(r"\n\s*\n", document.text):
        run: list[str] = []
        for sentence in [*SENTENCE_END.split(" ".join(paragraph.split())), ""]:
            is_prose = PROSE.fullmatch(sentence) and 5 <= len(sentence.split()) <= 40
            if is_prose:
                run.append(sentence)
            if len(run) == 4 or (not is_prose and len(run) > 1):
                yield Passage(document.name, " ".join(run[:-1]), run[-1])
            if len(run) == 4 or not is_prose:
                run = []


def slice_passages(document: Document) -> Iterator[Passage]:
    """Passages of plain slices, for text without prose: code, verse, other scripts."""
    text = " ".join(document.text.split())
    for start in range(0, len(text) - 150, 150):
        context, ending = text[start : start + 100].strip(), text[start + 100 : start + 150].strip()
        # lm-eval takes what is in brackets out of a question, so that little could be left
        if len(context) > 20 and len(ending) > 20 and "[" not in context + ending:
            yield Passage(document.name, context, ending)


def make_questions(
    passages: Iterable[Passage], num_questions: int = NUM_QUESTIONS, seed: int = 42
) -> list[dict[str, Any]]:
    """HellaSwag-shaped questions: the true continuation against three from other places.

    Args:
        passages: of held-out documents, in a fixed order.
        num_questions: at most; fewer where the text has fewer passages.

    Returns:
        Records with HellaSwag's own keys; endings do not start with a space.
    """
    unique = {passage.ending: passage for passage in passages}
    ordered = sorted(unique.values(), key=lambda p: (len(p.ending), p.ending))
    generator = random.Random(seed)
    chosen = generator.sample(range(len(ordered)), min(num_questions, len(ordered)))
    questions: list[dict[str, Any]] = []
    for place in chosen:
        true = ordered[place]
        # neighbours in the order of length, so that length does not give the answer away
        near = [p for p in ordered[max(0, place - 20) : place + 21] if p is not true]
        other = [p for p in near if p.name != true.name]  # their ending might follow as well
        near = other if len(other) >= 3 else near
        if len(near) < 3:
            continue
        endings = [p.ending for p in generator.sample(near, 3)]
        label = generator.randrange(4)
        endings.insert(label, true.ending)
        questions.append(
            {
                "ind": len(questions),
                "activity_label": true.name,
                "ctx_a": true.context,
                "ctx_b": "",
                "ctx": true.context,
                "label": label,
                "endings": endings,
            }
        )
    return questions
