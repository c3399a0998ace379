"""Tables and the figure of what was measured: the bench, profiles, and the ladder."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from miniseries.markdown import markdown_table, number
from miniseries.metrics import read_json, write_json, write_text
from miniseries.reporting.canvas import BLUE, GREEN, GREY, Style, write_figure
from miniseries.speed.rows import LADDER

Row = dict[str, Any]
ROW = ("work", "device")  # what each file of a row has


# ---- cells ----------------------------------------------------------------------------------


def setting(row: Row) -> str:
    """What was measured, in a few words."""
    words = [row["precision"]]
    words += [f"recompute {row['recompute']}"] if row.get("recompute") else []
    return ", ".join(words)


def speed(row: Row) -> str:
    """Median tokens/s with the tenth and ninetieth percentile."""
    found = row.get("tokens_per_second")
    if not found:
        return row.get("not_measured") or "n/a"
    if found.get("p10") is None:
        return number(found["median"])
    return f"{found['median']:,.0f} ({found['p10']:,.0f} to {found['p90']:,.0f})"


def start(row: Row) -> str:
    """Seconds to the end of the first step: cold / warm."""
    seconds = row.get("seconds_to_first_step") or {}
    found = [seconds.get("cold"), seconds.get("warm")]
    return f"{number(found[0])} / {number(found[1])} s" if any(found) else "n/a"


def gib(value: float | None) -> str:
    """Memory with its unit."""
    return "n/a" if value is None else f"{value:.1f} GiB"


def percent(value: float | None, digits: int = 1) -> str:
    """A figure that is in percent already."""
    return "n/a" if value is None else f"{value:.{digits}f} %"


def share(value: float | None, digits: int = 1) -> str:
    """A share as percent."""
    return percent(None if value is None else 100 * value, digits)


# ---- bench ----------------------------------------------------------------------------------


def bench_table(rows: Sequence[Row]) -> str:
    """Speed, memory, start and steadiness of the trainer's step, Markdown."""
    lines = [
        {
            "work": ", ".join([row["work"]] + [row["measure"]] * (row["measure"] != "step")),
            "GPUs": f"{row['processes']}",
            "precision": setting(row),
            "micro-batch": f"{row['micro_batch']}",
            "tokens a step": number(row["tokens_per_step"]),
            "tokens/s, median (p10 to p90)": speed(row),
            "MFU": percent(row.get("mfu_percent")),
            "peak": gib(row.get("peak_gib")),
            "reserved": gib(row.get("reserved_gib")),
            "first step, cold / warm": start(row),
            "p99 / median": number(row.get("p99_by_median"), ".3f"),
            "data wait": share(row.get("data_wait_share"), 2),
            "recompiles": number(row.get("recompiles_after_step_3")),
        }
        for row in rows
        if row["measure"] != "hellaswag"
    ]
    return markdown_table(lines) if lines else ""


def hellaswag_table(rows: Sequence[Row]) -> str:
    """Seconds for all questions, Markdown; empty without such a row."""
    lines = [
        {
            "HellaSwag": row["work"],
            "GPUs": f"{row['processes']}",
            "sequences at once": f"{row['micro_batch']}",
            "questions": number(row.get("num_items")),
            "seconds": row.get("not_measured") or number(row.get("hellaswag_seconds"), ".1f"),
            "first call, which compiles": number(row.get("first_call_seconds"), ".1f") + " s",
        }
        for row in rows
        if row["measure"] == "hellaswag"
    ]
    return markdown_table(lines) if lines else ""


def device_file(folder: Path, device: str) -> Path:
    """Where a device's results belong: its name with hyphens for all but letters and digits."""
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def entry(row: Row) -> Row:
    """A row as it is kept: without the lists that its profile folder holds."""
    kept = {key: value for key, value in row.items() if key not in ("was_cold", "rung")}
    if kept.get("breakdown"):
        left_out = ("top_kernels",)
        kept["breakdown"] = {k: v for k, v in kept["breakdown"].items() if k not in left_out}
    return kept


def collect(rows: list[Path], folder: Path, output: Path) -> None:
    """Write `<device>.json` for each device among the rows, and all of them as a table.

    Args:
        rows: results of `bench_run.py`.
        folder: for the device files.
        output: the table, Markdown.
    """
    results = [read_json(path, ROW) for path in rows]
    text = "# Bench\n"
    for device in dict.fromkeys(row["device"] for row in results):
        found = [entry(row) for row in results if row["device"] == device]
        plain = [{key: v for key, v in row.items() if key != "device"} for row in found]
        write_json(device_file(folder, device), {"device": device, "rows": plain})
        text += f"\n## {device}\n\n{bench_table(found)}\n{hellaswag_table(found)}"
    write_text(output, text)
    print(text)


# ---- profile --------------------------------------------------------------------------------


def profile_text(row: Row) -> str:
    """The breakdown of one row: kinds, phases, and the kernels that take longest, Markdown."""
    title = f"## {row['work']}, {setting(row)}, micro-batch {row['micro_batch']}, {row['device']}\n"
    found = row.get("breakdown")
    if not found:
        return f"{title}\n{row.get('not_measured') or 'no profile'}\n"
    step, idle = found["step_ms"], found["idle_ms"]
    ends = [("idle", idle, idle / step, None), ("step", step, 1.0, None)]

    def lines(name: str, parts: dict[str, Row]) -> list[dict[str, str]]:
        cells = [(key, part["ms"], part["share"], part["count"]) for key, part in parts.items()]
        return [
            {name: key, "ms": f"{ms:.2f}", "share": share(of), "kernels": number(count)}
            for key, ms, of, count in [*cells, *ends]
        ]

    phases = lines("phase", found["phases"])
    for line in phases:
        counted = found.get("counted_bytes", {}).get(line["phase"])
        whole = sum(counted.values()) if counted else None
        line["GB counted"] = number(None if whole is None else whole / 1e9, ",.1f")
        seconds = float(line["ms"]) / 1e3
        line["TB/s"] = number(whole / seconds / 1e12 if whole and seconds else None, ".2f")
    top = [
        {
            "kernel": kernel["kernel"][:70].replace("|", "/"),
            "kind": kernel["kind"],
            "ms": f"{kernel['ms']:.2f}",
            "share": share(kernel["share"]),
            "count": number(kernel["count"]),
        }
        for kernel in found.get("top_kernels", [])
    ]
    usual = number(row.get("step_ms"), ".1f")
    return (
        f"{title}\nOne step under the profiler, {step:.1f} ms; without it {usual} ms. Collectives "
        f"hidden behind other kernels: {found['hidden_ms']:.2f} ms. Bytes\nare counted from "
        "shapes, the least that has to move: DRAM counters need Nsight Compute and root.\n\n"
        f"{markdown_table(lines('kind', found['kinds']))}\n{markdown_table(phases)}\n"
        + (markdown_table(top) if top else "")
    )


def write_profile(rows: list[Path], output: Path) -> None:
    """Write the breakdowns of the profiled rows, and print them."""
    text = "# Profile\n\n" + "\n".join(profile_text(read_json(path, ROW)) for path in rows)
    write_text(output, text)
    print(text)


# ---- ladder ---------------------------------------------------------------------------------


def ladder_table(rows: Sequence[Row]) -> str:
    """One line a rung, in their order, Markdown."""
    first = next((row["step_ms"] for row in rows if not row["not_measured"]), None)
    lines = []
    for row in rows:
        cold = (row.get("seconds_to_first_step") or {}).get("cold")
        done = not row["not_measured"]
        lines.append(
            {
                "rung": rung_title(row),
                "ms a step": number(row.get("step_ms"), ",.1f") if done else row["not_measured"],
                "tokens/s": number(row["tokens_per_second"]["median"]) if done else "-",
                "times the first": number(first / row["step_ms"], ".2f") if done else "-",
                "peak": gib(row.get("peak_gib")) if done else "-",
                "first step after": number(cold, ",.1f") + " s" if done else "-",
                "loss": number(row.get("loss_nats"), ".4f") if done else "-",
            }
        )
    return markdown_table(lines)


def draw_ladder(rows: Sequence[Row], style: Style) -> Figure:
    """Tokens/s of each rung as a bar; what the device cannot do says so in its place."""
    figure = Figure(figsize=(style.width_inches, 0.42 * style.width_inches), layout="constrained")
    axes = figure.subplots()
    speeds = [0 if r["not_measured"] else r["tokens_per_second"]["median"] for r in rows]
    colours = [GREEN if LADDER[row["rung"]].own_kernels else BLUE for row in rows]
    axes.barh(range(len(rows)), speeds, color=colours, height=0.65)
    axes.set_yticks(range(len(rows)), [rung_title(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(*speeds, 1e-9))
    for place, (row, value) in enumerate(zip(rows, speeds, strict=True)):
        text = row["not_measured"] or f"{value:,.0f} tokens/s, {row['step_ms']:,.0f} ms"
        colour = GREY if row["not_measured"] else "black"
        axes.text(value + 0.01 * max(speeds), place, text, va="center", fontsize=9, color=colour)
    axes.set_title(ladder_title(rows))
    axes.set_xlabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def rung_title(row: Row) -> str:
    """The rung, and its precision where the device lacks the usual one."""
    rung = LADDER[row["rung"]]
    in_other = row["precision"] != rung.precision and not row["not_measured"]
    return f"{rung.title}, in {row['precision']}" if in_other else rung.title


def ladder_title(rows: Sequence[Row]) -> str:
    """Shape and device."""
    row = rows[0]
    return (
        f"{row['work']} on {row['device']}, {row['tokens_per_step']:,} tokens a step in "
        f"micro-batches of {row['micro_batch']} x {row['sequence_length']:,}"
    )


def write_ladder(rows: list[Path], output: Path, figures: list[Path], **style: Any) -> None:
    """Write the ladder as a table and as figures (.png, .svg), and print the table."""
    results = [read_json(path, ROW) for path in rows]
    text = f"# Ladder\n\n{ladder_title(results)}, each rung in a process of its own.\n\n"
    text += ladder_table(results)
    write_text(output, text)
    look = Style(**style)
    write_figure(draw_ladder(results, look), figures, look.dpi)
    print(text)
