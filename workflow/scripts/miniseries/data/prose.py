"""The prose that comes with Python: the language reference and docstrings, by name and text."""

import ast
import importlib
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from miniseries.metrics import num_cores

PARALLEL_MODULES = 2_000  # below, starting processes takes longer than parsing
MAX_WORKERS = 16
# Folders without prose of their own, and the three that Linux distributions package apart
# from Python: with them the text would differ from one installation to the next.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FOLDERS |= {"idlelib", "tkinter", "turtledemo"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def builtin_documents(with_packages: bool = False) -> Iterator[tuple[str, str]]:
    """Names and texts: language reference and docstrings of the running Python, each once.

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
    texts: set[str] = set()
    for topic in sorted(topics):
        if topics[topic] not in texts:
            texts.add(topics[topic])
            yield f"topic {topic}", topics[topic]
    places = sysconfig.get_paths()
    folders = [places["stdlib"]]
    if with_packages:
        folders += sorted({places["purelib"], places["platlib"]})
    seen: set[str] = set()
    for folder in folders:
        yield from _docstrings_of_folder(Path(folder), seen)


def _docstrings_of_folder(root: Path, seen: set[str]) -> Iterator[tuple[str, str]]:
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
            yield name, "\n\n".join(new)


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
