"""Our speed beside other programs', and the README's table of it."""

from collections.abc import Sequence
from pathlib import Path

from miniseries.markdown import markdown_table, number
from miniseries.metrics import read_json, write_text
from miniseries.speed.tables import Row, gib, percent, setting, start

SPEEDS = Path(__file__).with_name("speeds.json")
# The README's table stands between these two lines
BEGIN, END = "<!-- speed: made by write_comparison.py -->", "<!-- speed: end -->"
# Keys of a row in `benchmarks/<device>.json` that tell rows apart
IDENTITY = (
    "work", "measure", "precision", "micro_batch", "recompute", "tokens_per_step", "processes",
)  # fmt: skip


def read_devices(files: Sequence[Path]) -> list[Row]:
    """All measured rows of device files, each with its device.

    A row that two files have, of the same device, counts once, as the first file has it.
    """
    rows: dict[tuple, Row] = {}
    for file in files:
        content = read_json(file, ["device", "rows"])
        for row in content["rows"]:
            whole = {"device": content["device"]} | row
            rows.setdefault((content["device"], *(row.get(key) for key in IDENTITY)), whole)
    return list(rows.values())


def is_ours(row: Row) -> bool:
    """Whether a row has a speed of the trainer's or the yardstick's step."""
    return row["measure"] in ("step", "huggingface") and bool(row.get("tokens_per_second"))


def compare_lines(rows: Sequence[Row], published: Sequence[Row]) -> list[dict[str, str]]:
    """Ours and published speeds by work, device and number of GPUs, the fastest first."""
    found = []
    for row in filter(is_ours, rows):
        ours = row["measure"] == "step"
        found.append(
            {
                "key": (row["work"], row["device"], row["processes"]),
                "program": f"ours, {setting(row)}" if ours else "PyTorch: Hugging Face's, compiled",
                "per_second": row["tokens_per_second"]["median"],
                "batch": (row["micro_batch"], row["tokens_per_step"]),
                "peak": row.get("peak_gib"),
                "source": f"commit {row['commit']}, torch {row['versions']['torch']}",
            }
        )
    for row in published:
        detail = f", {row['detail']}" if row["detail"] else ""
        found.append(
            {
                "key": (row["work"], row["device"], row["gpus"]),
                "program": f"{row['program']}{detail}",
                "per_second": row["tokens_per_second"],
                "batch": (row["micro_batch"], row["tokens_per_step"]),
                "peak": row["peak_gib"],
                "source": row["source"],
            }
        )
    found.sort(key=lambda line: (line["key"], -(line["per_second"] or 0)))
    return [
        {
            "work": line["key"][0],
            "on": f"{line['key'][2]} x {line['key'][1].removeprefix('NVIDIA ')}",
            "program": line["program"],
            "micro-batch": number(line["batch"][0]),
            "tokens a step": number(line["batch"][1]),
            "tokens/s": number(line["per_second"]),
            "ms a step": number(_milliseconds(line), ",.0f"),
            "peak": gib(line["peak"]),
            "source": line["source"],
        }
        for line in found
    ]


def _milliseconds(line: Row) -> float | None:
    size, speed_of_line = line["batch"][1], line["per_second"]
    return 1e3 * size / speed_of_line if size and speed_of_line else None


def best_of(published: Sequence[Row], row: Row, program: str) -> Row | None:
    """The fastest published speed of a program for the same work, device, and number of GPUs."""
    same = [
        other
        for other in published
        if other["program"] == program
        and other["tokens_per_second"]
        and (other["work"], other["device"], other["gpus"])
        == (row["work"], row["device"], row["processes"])
    ]
    near = [other for other in same if other["tokens_per_step"] == row["tokens_per_step"]]
    return max(near or same, key=lambda other: other["tokens_per_second"], default=None)


def readme_table(rows: Sequence[Row], published: Sequence[Row]) -> str:
    """The README's one table of speed: ours beside llm.c and PyTorch, Markdown."""
    yardsticks = {
        (row["work"], row["device"], row["processes"]): row["tokens_per_second"]["median"]
        for row in rows
        if row["measure"] == "huggingface" and row.get("tokens_per_second")
    }
    lines = []
    for row in rows:
        if row["measure"] != "step" or not row.get("tokens_per_second"):
            continue
        llmc, torch = (best_of(published, row, name) for name in ("llm.c", "PyTorch"))
        key = (row["work"], row["device"], row["processes"])
        other = torch["tokens_per_second"] if torch else yardsticks.get(key)
        lines.append(
            {
                "": f"`{row['work']}`",
                "on": f"{row['processes']} x {row['device'].removeprefix('NVIDIA ')}",
                "precision": setting(row),
                "micro-batch": f"{row['micro_batch']}",
                "tokens a step": number(row["tokens_per_step"]),
                "tokens/s": number(row["tokens_per_second"]["median"]),
                "MFU": percent(row.get("mfu_percent")),
                "peak memory": gib(row.get("peak_gib")),
                "first step, cold / warm": start(row),
                "llm.c": number(llmc["tokens_per_second"] if llmc else None),
                "PyTorch": number(other),
                "commit": row["commit"],
            }
        )
    return markdown_table(lines)


def put_into(text: str, table: str) -> str:
    """The README with the table between its two marks.

    Raises:
        ValueError: the marks are missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the README needs one line {BEGIN!r} and one {END!r}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def write_comparison(measured: list[Path], output: Path | None, readme: Path | None) -> None:
    """Write ours beside other programs' speeds, and print it; or put the table into the README.

    Args:
        measured: device files; of a row that stands in two of them the first counts.
    """
    rows, published = read_devices(measured), read_json(SPEEDS)["speeds"]
    if readme:
        text = readme.read_text(encoding="utf-8")
        write_text(readme, put_into(text, readme_table(rows, published)))
    if output:
        text = "# Ours and others\n\nT = 1024, bf16 unless said otherwise, optimizer step included."
        text += f"\n\n{markdown_table(compare_lines(rows, published))}"
        write_text(output, text)
        print(text)
