"""Tables as Markdown that is also easy to read as it stands."""

from collections.abc import Sequence


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table with columns of even width; the keys of the first row are its head."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [" | ".join(name.ljust(widths[name]) for name in names)]
    lines += [" | ".join("-" * widths[name] for name in names)]
    lines += [" | ".join(row[name].ljust(widths[name]) for name in names) for row in rows]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def number(value: float | None, form: str = ",.0f") -> str:
    """A number as text; n/a where there is none."""
    return "n/a" if value is None else format(value, form)
