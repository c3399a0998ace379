"""Panels on the ranges of a run: how large each layer's weights and residual stream become."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from miniseries.reporting.canvas import BLACK, GREY, draw_values, log_axis
from miniseries.reporting.runlog import Run, is_finite

NUM_ROWS = 2  # of panels: weights, residual stream; absolute maximum to the left, RMS to the right
# Elements of a layer's matrices for each C x C, by which their mean squares are averaged; biases
# and norms' gains are too few to count
MATRICES = {
    "attn.c_attn.weight": 3,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 4,
    "mlp.c_proj.weight": 4,
}
# GPT-2's biases can grow large, too; the gains of norms begin at 1 and would hide all else
BIASES = tuple(name.replace("weight", "bias") for name in MATRICES)
TABLES = {"wte.weight": ("token table", "--", BLACK), "wpe.weight": ("position table", ":", GREY)}


def layer_values(record: dict[str, Any], what: str, measure: str) -> np.ndarray:
    """One value for each layer of a `ranges` record, (L,), empty where it has none.

    Args:
        what: `weights`, all matrices of a layer together, or `activations`, the residual stream.
        measure: `absmax` or `rms`.
    """
    found = (record.get(what) or {}).get(measure) or {}
    if what == "activations":
        return np.array(found.get("residual", []), dtype=float)
    names = [*MATRICES, *BIASES] if measure == "absmax" else [*MATRICES]
    names = [name for name in names if found.get(name)]
    if not names:
        return np.empty(0)
    values = np.array([found[name] for name in names], dtype=float)  # (kinds, L)
    if measure == "absmax":
        return values.max(axis=0)
    return np.sqrt(np.average(values**2, axis=0, weights=[MATRICES[name] for name in names]))


def table_values(run: Run, measure: str) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, Any]]]:
    """Steps and values of the embedding tables, and how they are drawn."""
    for name, (label, dashes, colour) in TABLES.items():
        pairs = []
        for record in run.metrics["ranges"]:
            found = ((record.get("weights") or {}).get(measure) or {}).get(name)
            if found and is_finite(found[0]):
                pairs.append((record["step"], found[0]))
        steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
        if len(steps):
            yield steps, values, {"label": label, "linestyle": dashes, "color": colour}


def draw_layer_panel(axes: Axes, run: Run, what: str, measure: str, num_layers: int) -> None:
    """A line for each layer, from dark to bright with its depth."""
    records = [(r["step"], layer_values(r, what, measure)) for r in run.metrics["ranges"]]
    kept = [(step, values) for step, values in records if len(values) == num_layers]
    steps = np.array([step for step, _ in kept], dtype=float)
    for layer in range(num_layers if kept else 0):
        values = np.array([values[layer] for _, values in kept])
        colour = colormaps["viridis"](layer / max(num_layers - 1, 1))
        draw_values(axes, steps, values, color=colour, linewidth=0.9)
    if what == "weights":
        for place, values, look in table_values(run, measure):
            draw_values(axes, place, values, linewidth=1.3, **look)
    log_axis(axes)


def draw_layers(figure: Figure, panels: np.ndarray, run: Run) -> None:
    """Fill 2 x 2 panels with the `ranges` records of a run, and say what the colours are."""
    newest = run.metrics["ranges"][-1]
    measures = {"absmax": "largest absolute value", "rms": "root mean square"}
    subjects = {"weights": "weights of each layer", "activations": "residual stream"}
    num_layers = max(len(layer_values(newest, what, "absmax")) for what in subjects)
    places = iter(panels)
    for what, subject in subjects.items():
        for measure, word in measures.items():
            axes = next(places)
            draw_layer_panel(axes, run, what, measure, num_layers)
            axes.set_title(f"{subject}: {word}")
    depth = ScalarMappable(Normalize(1, max(num_layers, 2)), "viridis")
    bar = figure.colorbar(depth, ax=list(panels), label="layer", aspect=40, pad=0.01)
    bar.locator.set_params(integer=True)
    bar.update_ticks()
