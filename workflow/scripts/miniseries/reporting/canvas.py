"""How every figure looks: size, palette, axes, legends; and how it is written to a file.

Figures are built as objects on the Agg canvas (no display, no global state); the same log gives
the same bytes whenever it is drawn.
"""

import argparse
import io
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from miniseries.metrics import write_bytes
from miniseries.reporting.runlog import Run, short, thin_out

# Okabe and Ito's palette, told apart by colour-blind readers too; yellow left out (pale on white)
BLUE, RED, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
BLACK, GREY, PALE = "#000000", "#7F7F7F", "#AAAAAA"
COLOURS = [BLUE, "#E69F00", GREEN, PURPLE, "#56B4E9", RED, BLACK]


@dataclass(frozen=True)
class Style:
    """How figures look: `plots:` of the config."""

    dpi: int = 150
    width_inches: float = 12.0
    smoothing: float = 0.95  # weight of the past in the mean of the training loss, 0 to below 1


def add_style_arguments(parser: argparse.ArgumentParser) -> None:
    """The command-line arguments that the scripts of all figures share."""
    parser.add_argument("--dpi", type=int, default=Style.dpi, help="dots per inch of a PNG")
    parser.add_argument("--width-inches", type=float, default=Style.width_inches, help="inches")
    parser.add_argument("--smoothing", type=float, default=Style.smoothing, help="0 to below 1")


def write_figure(figure: Figure, paths: list[Path], dpi: int) -> None:
    """Write a figure as PNG or SVG, by the ends of the paths' names; whole files or nothing."""
    FigureCanvasAgg(figure)  # needs no display
    for path in paths:
        buffer = io.BytesIO()
        # a fixed salt and no date: drawing again gives the same bytes
        with matplotlib.rc_context({"svg.hashsalt": "miniseries"}):
            if path.suffix == ".svg":
                figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            else:
                figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        write_bytes(path, buffer.getvalue())


def new_figure(style: Style, title: str, rows: int) -> tuple[Figure, np.ndarray]:
    """An empty figure of `rows` by 2 panels, with one or two rows half as high as it is wide."""
    width = style.width_inches
    height = max(0.52 * width, 5.0) * max(rows / 2, 1)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(wspace=0.04, hspace=0.06)
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes in panels:
        axes.grid(color="#E5E5E5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def placeholder(text: str, style: Style) -> Figure:
    """A small figure that only says why there is nothing to see; said on the console too."""
    print(text)
    figure = Figure(figsize=(style.width_inches, 1.5))
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=12, color=GREY)
    return figure


def nothing(axes: Axes, text: str) -> None:
    """Say in an empty panel why it is empty."""
    axes.text(0.5, 0.5, text, color=GREY, ha="center", va="center", transform=axes.transAxes)
    axes.set_yticks([])


def put_legend(axes: Axes, style: Style) -> None:
    """The legend under the panel, where it can never hide a curve; long lines are wrapped."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if len(labels) <= 7 else 2
    wrapped = [textwrap.fill(label, int(6.5 * style.width_inches / columns)) for label in labels]
    below = ScaledTranslation(0, -0.55, axes.figure.dpi_scale_trans)  # inches, past the labels
    look = {"loc": "upper left", "fontsize": 8, "frameon": False, "ncols": columns}
    legend = axes.legend(handles, wrapped, **look)
    legend.set_bbox_to_anchor((0, 0), transform=axes.transAxes + below)


def counts(axis: Axis) -> None:
    """Label an axis with short counts: 25k, 1.2B."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def log_axis(axes: Axes) -> None:
    """A logarithmic vertical axis for what is drawn so far, with plain numbers at its ticks."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    if high < 5 * low:  # 1, 2, and 5 may all lie outside
        axes.yaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def step_axis(axes: Axes, run: Run) -> None:
    """Whole steps up to the newest."""
    end = max(run.num_steps, 1)
    axes.set(xlabel="step", xlim=(-0.02 * end, 1.02 * end))
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    counts(axes.xaxis)


def token_axis_above(axes: Axes, run: Run) -> None:
    """Tokens at the steps below, where the log or the settings tell how many a step has."""
    if size := run.tokens_per_step:
        top = axes.secondary_xaxis("top", functions=(lambda s: s * size, lambda t: t / size))
        counts(top.xaxis)
        top.set_xlabel("training tokens", fontsize=9)
        top.tick_params(labelsize=8)


def draw_line(axes: Axes, value: float, label: str, colour: str, dashes: str) -> None:
    """A horizontal line; out of the axis' range only a mark at its edge and words say so."""
    low, high = axes.get_ylim()
    if low <= value <= high:
        axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.3, label=label)
        return
    mark, height, word = ("v", 0.0, "below") if value < low else ("^", 1.0, "above")
    look = {"marker": mark, "color": colour, "label": f"{label} ({word} this range)"}
    axes.scatter([0.96], [height], transform=axes.transAxes, clip_on=False, **look)


def draw_values(axes: Axes, x: np.ndarray, y: np.ndarray, **look: Any) -> None:
    """A value per step as a line, thinned out; a single one as a dot."""
    axes.plot(*thin_out(x, y), marker="." if len(x) == 1 else "", **look)


def mark_steps(axes: Axes, steps: list[int], label: str) -> None:
    """A red cross on the lower edge at each of these steps."""
    place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.scatter(steps, [0.0] * len(steps), marker="x", color=RED, label=label, **place)


def draw_curve(axes: Axes, x: np.ndarray, y: np.ndarray, label: str, i: int) -> None:
    """Measured points, colour and mark number i; the more points, the smaller the marks."""
    look = {"color": COLOURS[i % len(COLOURS)], "marker": "os^Dv"[i // len(COLOURS) % 5]}
    size = min(4.0, 24 / math.sqrt(len(x)))
    axes.plot(x, y, linewidth=1.1, markersize=size, label=label, **look)
