"""Turn results (JSON, TSV, Markdown) into one page that the report can show; rules `render_*`.

Example: render_page.py --title tiny --files results/evaluate/tiny/val_loss.json --output tiny.html
"""

import argparse
import csv
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from miniseries.metrics import read_json, run_main, write_text

MOST_COLUMNS = 12
HEAD = """<!DOCTYPE html><meta charset="utf-8"><title>{0}</title><style>
body {{ font-family: sans-serif; margin: 1em }} td {{ padding: 0.2em 1em; vertical-align: top }}
tr:nth-child(odd) {{ background: #f0f0f0 }} pre {{ white-space: pre-wrap; font-family: serif }}
blockquote {{ border-left: 3px solid #999; margin-left: 0; padding-left: 1em }}
</style><h1>{0}</h1>
"""


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON object: ("token_mean.acc", 0.25)."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from flatten(entry, f"{key}.{name}" if key else name)
    else:
        yield key, value


def render(file: Path) -> str:
    """One file as HTML; a table with very many columns is turned, so that it fits a screen."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".md":
        return MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    if file.suffix == ".tsv":
        rows = list(csv.reader(text.splitlines(), delimiter="\t"))
        if rows and len(rows[0]) > MOST_COLUMNS:
            rows = list(zip(*rows, strict=True))
    else:
        rows = list(flatten(read_json(file)))
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<h2>{escape(file.name)}</h2><table>{table}</table>"


def render_page(title: str, files: list[Path], output: Path) -> None:
    """Write the page; it needs no network."""
    write_text(output, HEAD.format(escape(title)) + "".join(map(render, files)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--title", required=True, help="heading of the page")
    parser.add_argument("--files", type=Path, nargs="+", required=True, help=".json, .tsv, .md")
    parser.add_argument("--output", type=Path, required=True, help="written: .html")
    run_main(render_page, **vars(parser.parse_args()))
