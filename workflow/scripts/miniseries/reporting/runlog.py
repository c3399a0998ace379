"""What a run's log says and how it compares with GPT-2; read for the figures and the summary.

A run may be in progress, resumed, diverged, without evaluations or without any log: nothing of
that is an error here, what is missing is left out.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from miniseries.evaluation.choices import HELLASWAG_ITEMS
from miniseries.metrics import read_metrics
from miniseries.shapes import num_parameters

CHANCE = 0.25  # four endings per question
LONG_STEPS = 1000  # from here on a run is long: its beginning may leave the figure
GUESSING_NATS = 12.0  # ln(50257) = 10.8 knows nothing; higher losses are cut off a figure
DATA_SETS = {  # as named in baselines.json; looked for in a data set's name and config entry
    "FineWeb-Edu": r"fine_?web[-_]?edu|edu[-_]?fine_?web",
    "FineWeb": r"fine_?web",
    "OpenWebText": r"openwebtext",
}
# other texts of similar names; `fineweb-2b` and `fineweb20b` are 2 and 20 billion of its tokens
OTHER_TEXTS = r"fine_?web(s|[-_]?2(?![\d.]*b|\d)|[-_]?edu[-_]?(score|chinese))"
# tokens of context of the published losses: with more before it a token is easier to predict
PUBLISHED_CONTEXT = 1024


@dataclass(frozen=True)
class Baseline:
    """A published figure to compare with.

    Args:
        same_data: whether it was measured on the run's own data, with as much text before a token.
    """

    model: str
    value: float
    data_set: str
    same_data: bool


@dataclass(frozen=True)
class Run:
    """One run: its name, its settings JSON ({} when missing) and its records by kind."""

    name: str
    settings: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that change the result."""
        recipe = self.settings.get("recipe")
        return recipe if isinstance(recipe, dict) else {}

    @property
    def is_empty(self) -> bool:
        """True when the log holds nothing to draw yet."""
        return not any(self.metrics.get(kind) for kind in ("train", "val", "hellaswag"))

    @property
    def num_parameters(self) -> int | None:
        """Without the padding rows of the embedding; from the settings, else from the log."""
        try:
            return num_parameters(self.recipe)
        except (KeyError, TypeError):
            return self.start.get("num_parameters")

    @property
    def start(self) -> dict[str, Any]:
        """The record of the newest start or resume."""
        return (self.metrics.get("start") or [{}])[-1]

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in one update; None when neither settings nor log tell."""
        return self.recipe.get("total_batch_tokens") or self.start.get("tokens_per_step")

    @property
    def device_hours(self) -> float:
        """Time of all training steps, times the processes that were at work on each."""
        starts = [(s["step"], s.get("world_size") or 1) for s in self.metrics.get("start", [])]
        total = 0.0
        for record in self.metrics.get("train", []):
            milliseconds = record.get("step_time_ms")
            if is_finite(milliseconds):
                before = [size for step, size in starts if step <= record["step"]]
                total += milliseconds * (before[-1] if before else 1)
        return total / 3.6e6

    @property
    def batches_skipped(self) -> int:
        """Global batches that are never read again, because they led to a divergence."""
        return sum(r.get("batches_skipped", 0) for r in self.metrics.get("rollback", []))

    @property
    def num_steps(self) -> int:
        """Updates done so far, as far as the log tells."""
        train = [record["step"] + 1 for record in self.metrics.get("train", [])]
        kinds = ("val", "hellaswag", "done")
        other = [record["step"] for kind in kinds for record in self.metrics.get(kind, [])]
        return max(train + other, default=0)

    @property
    def status(self) -> str:
        """`not started`, `running` (or killed on the way), `stopped` by a signal, or `finished`."""
        if self.is_empty:
            return "not started"
        done = max((record["step"] for record in self.metrics.get("done", [])), default=-1)
        if done >= (self.recipe.get("max_steps") or 0):
            return "finished"
        stopped = max((record["step"] for record in self.metrics.get("stop", [])), default=-1)
        return "stopped" if stopped >= self.num_steps else "running"

    @property
    def size(self) -> str:
        """The GPT-2 size of the run's shape, or else the nearest one in parameters."""
        sizes, count = published()["sizes"], self.num_parameters or 1
        return min(sizes, key=lambda s: abs(math.log(sizes[s]["num_parameters"] / count)))

    @property
    def label(self) -> str:
        """The run's name and its size, the size only where the name does not tell it."""
        shape = published()["sizes"][self.size]
        same = all(self.recipe.get(k) == shape[k] for k in ("num_layers", "num_heads", "channels"))
        size = self.size if same else short(self.num_parameters)
        return self.name if size.lower() in self.name.lower() else f"{self.name} ({size})"

    @property
    def data_set(self) -> str:
        """What the run trains on, by the name that `baselines.json` uses if it is in there."""
        name = str(self.recipe.get("dataset", "unknown data"))
        text = f"{name} {json.dumps(self.recipe.get('data'))}".lower()
        if re.search(OTHER_TEXTS, text):
            return name
        return next((known for known, seen in DATA_SETS.items() if re.search(seen, text)), name)

    @property
    def questions(self) -> str:
        """HellaSwag, unless the number of questions says that they are others."""
        num_items = [r.get("num_items") for r in self.metrics.get("hellaswag", [])]
        if set(num_items) <= {HELLASWAG_ITEMS}:
            return "HellaSwag"
        return f"{num_items[-1] or 'unknown'} questions, not HellaSwag's"

    def until(self, step: int) -> "Run":
        """The run as it was after `step` updates."""
        counted = {  # a training record is named by the update that it describes, from 0
            kind: [r for r in records if r["step"] + (kind == "train") <= step]
            for kind, records in self.metrics.items()
        }
        return Run(self.name, self.settings, counted)

    def column(self, kind: str, key: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """All finite values of one key: (N,) of `x` and (N,) of the values, in order of `x`."""
        pairs = [(r.get(x), r.get(key)) for r in self.metrics.get(kind, [])]
        kept = [pair for pair in pairs if all(is_finite(value) for value in pair)]
        table = np.array(kept, dtype=float).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def smoothed_loss(self, smoothing: float, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """The training loss as in `column`, smoothed over at most 1/40 of the run.

        A short run falls fast: a mean over 20 of its 200 steps would trail far behind.
        """
        place, losses = self.column("train", "train_loss_nats", x)
        return place, smooth(losses, max(0.0, min(smoothing, 1 - 40 / max(len(losses), 1))))


@cache
def published() -> dict[str, Any]:
    """The published figures of `baselines.json`."""
    path = Path(__file__).with_name("baselines.json")
    return json.loads(path.read_text(encoding="utf-8"))


def is_finite(value: Any) -> bool:
    """True for a number that can be drawn; logs may hold null, NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def load_json(path: Path | None) -> dict[str, Any]:
    """A JSON object, {} when the file is missing, half-written or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_run(name: str, metrics: Path, settings: Path | None) -> Run:
    """Read one run as far as it has come."""
    return Run(name, load_json(settings), read_metrics(metrics))


def short(count: float | None) -> str:
    """A count in three digits: 124439808 -> 124M; None -> `size unknown`."""
    if count is None:
        return "size unknown"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def smooth(values: np.ndarray, smoothing: float) -> np.ndarray:
    """Exponential mean of (N,) values, corrected for its start as Adam corrects its moments."""
    mean, result = 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        mean = smoothing * mean + (1 - smoothing) * value
        result[i] = mean / (1 - smoothing ** (i + 1))
    return result


def thin_out(x: np.ndarray, y: np.ndarray, bins: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 points per bin, the lowest and the highest, so that no spike is lost."""
    if len(x) <= 2 * bins:
        return x, y
    parts = np.array_split(np.arange(len(x)), bins)
    kept = np.unique([part[f(y[part])] for part in parts for f in (np.argmin, np.argmax)])
    return x[kept], y[kept]


def loss_limits(
    curves: list[tuple[np.ndarray, np.ndarray]], lines: list[Baseline], num_steps: int
) -> tuple[float, float]:
    """Bottom and top of a loss axis that holds the curves, and the lines that are near to them.

    A line far away must not flatten the curves; nor must, in a long run, the fall from 11 nats
    in the first 5 % of its steps.

    Args:
        curves: (N,) places and (N,) nats of each curve.
        num_steps: length of the run.
    """
    skip = 0.05 if num_steps >= LONG_STEPS else 0.0
    published_losses = [line.value for line in lines]
    settled = [y[x >= skip * x[-1]] for x, y in curves if len(x)] or [np.array(published_losses)]
    values = np.minimum(np.concatenate(settled), GUESSING_NATS)
    low, high = values.min(), values.max()
    reach = max(0.35 * (high - low), 0.1)
    near = [loss for loss in published_losses if low - reach <= loss <= high + reach]
    low, high = min([low, *near]), max([high, *near])
    margin = max(0.06 * (high - low), 0.05)
    return low - margin, high + margin


def score_limits(accuracy: np.ndarray, lines: list[Baseline]) -> tuple[float, float]:
    """Bottom and top, per cent, of an axis with the curves, random choice and the lines."""
    values = 100 * np.concatenate([accuracy, [line.value for line in lines], [CHANCE]])
    margin = 0.06 * (values.max() - values.min())
    return values.min() - margin, values.max() + margin


def find_baseline(size: str, metric: str, data_set: str) -> Baseline | None:
    """The published figure for a size, if possible the one measured on `data_set`."""
    found = [b for b in published()["baselines"] if (b["size"], b["metric"]) == (size, metric)]
    if not found:
        return None
    best = min(found, key=lambda b: b["data_set"] != data_set)
    same = best["data_set"] == data_set
    return Baseline(best["model"], best["value"], best["data_set"], same)


def loss_baseline(run: Run, metric: str = "val_loss_nats") -> Baseline | None:
    """The published loss that a run's validation loss is compared with."""
    line = find_baseline(run.size, metric, run.data_set)
    context = run.recipe.get("sequence_length", PUBLISHED_CONTEXT)
    if line is None or not line.same_data or context == PUBLISHED_CONTEXT:
        return line
    return replace(line, data_set=f"{line.data_set}, T = {PUBLISHED_CONTEXT}", same_data=False)


def score_baseline(run: Run, metric: str = "hellaswag_llmc_acc_token_mean") -> Baseline | None:
    """The published accuracy that a run's own questions are compared with."""
    return find_baseline(run.size, metric, run.questions)


def first_step_past(run: Run, line: Baseline | None, kind: str) -> int | None:
    """The first step with a `val` loss below, or a `hellaswag` accuracy above, the line.

    None when there is none, and when the comparison would mean nothing: a loss on other text than
    the line's, or an accuracy on other questions than HellaSwag's.
    """
    if line is None or not line.same_data:
        return None
    if kind == "val":
        steps, values = run.column("val", "val_loss_nats")
        past = values < line.value
    else:
        steps, values = run.column("hellaswag", "acc_norm_token_mean")
        past = values > line.value
    return int(steps[past][0]) if past.any() else None


def accuracy_stderr(accuracy: float | None, num_items: int | None) -> float | None:
    """Standard error of a share of right answers, with n - 1 as lm-eval-harness counts it."""
    known = is_finite(accuracy) and is_finite(num_items)
    if not known or not 0 <= accuracy <= 1 or num_items < 2:
        return None
    return math.sqrt(accuracy * (1 - accuracy) / (num_items - 1))


def _other(line: Baseline, kind: str) -> list[str]:
    """A warning if a published line was not measured on what the run was."""
    return [] if line.same_data else ["other data" if kind == "val" else "other questions"]


def line_label(run: Run, line: Baseline, kind: str) -> str:
    """What a published line is, on which data, and the first step past it."""
    number = f"{line.value:.2f}" if kind == "val" else f"{100 * line.value:.1f} %"
    other = "".join(f", {word}" for word in _other(line, kind))
    step = first_step_past(run, line, kind)
    word = "below" if kind == "val" else "above"
    past = "" if step is None else f"; first {word} it at step {step:,}"
    return f"{line.model} on {line.data_set}: {number}{other}{past}"


def lines_label(lines: list[Baseline], kind: str, low: float, high: float) -> str:
    """The published lines of a series in one legend entry, and those not from low to high."""
    entries = []
    for line in dict.fromkeys(lines):
        value = line.value if kind == "val" else 100 * line.value
        number = f"{value:.2f}" if kind == "val" else f"{value:.1f} %"
        notes = _other(line, kind) + ["out of range"] * (not low <= value <= high)
        note = f" ({', '.join(notes)})" if notes else ""
        entries.append(f"{line.model.split()[1]} {number}{note}")
    return f"{lines[0].model.split()[0]}: {', '.join(entries)}"


def train_label(run: Run) -> str:
    """What the training curve is, and how many losses it leaves out."""
    records = run.metrics.get("train", [])
    num_bad = sum(not is_finite(record.get("train_loss_nats")) for record in records)
    bad = f"; {num_bad:,} steps without a finite loss left out" if num_bad else ""
    return f"training (pale: each step){bad}"


def divergence_label(run: Run) -> str:
    """How often a run diverged, and what was done about it the last time."""
    count = len(run.metrics["divergence"])
    text = "diverged" if count == 1 else f"diverged {count} times, the last time"
    text += f" at step {run.metrics['divergence'][-1]['step']:,}"
    newest = (run.metrics.get("rollback") or [{}])[-1]
    if "back_to" not in newest:
        return text
    return f"{text}; back to step {newest['back_to']:,}, {run.batches_skipped:,} batches left out"


def headline(run: Run) -> str:
    """Name, size, data and progress of a run."""
    planned = run.recipe.get("max_steps")
    progress = f"step {run.num_steps:,}" + (f" of {planned:,}" if planned else "")
    state = "" if run.status == "finished" else ", unfinished"
    size = f"{short(run.num_parameters)} parameters" if run.num_parameters else "size unknown"
    return f"{run.name}: {size}, {run.data_set}, {progress}{state}"


def score_title(runs: list[Run]) -> str:
    """Names the questions, which are HellaSwag's own only if their number is."""
    asked = sorted({run.questions for run in runs if run.metrics.get("hellaswag")})
    if not asked:
        return "choice of ending"
    if asked == ["HellaSwag"]:
        return "HellaSwag"
    return f"choice of ending: {asked[0] if len(asked) == 1 else 'different questions'}"


def sweep_labels(runs: list[Run]) -> list[str]:
    """What differs between the recipes of a sweep's runs; their names where that is unclear."""
    keys = sorted({key for run in runs for key in run.recipe} - {"data"})
    differing = [key for key in keys if len({str(run.recipe.get(key)) for run in runs}) > 1]
    if not 0 < len(differing) <= 3 or not all(run.recipe for run in runs):
        return [run.label for run in runs]
    rows = [[(key, run.recipe.get(key)) for key in differing] for run in runs]
    form = [
        [f"{key} {v:g}" if isinstance(v, float) else f"{key} {v}" for key, v in r] for r in rows
    ]
    return [", ".join(parts) for parts in form]


def last(values: np.ndarray) -> float | None:
    """The newest of (N,) values; None when there is none."""
    return float(values[-1]) if len(values) else None
