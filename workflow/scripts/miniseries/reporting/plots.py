"""Figures of runs, drawn from whatever their logs hold."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from miniseries.reporting.canvas import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    PALE,
    PURPLE,
    RED,
    Style,
    counts,
    draw_curve,
    draw_line,
    draw_values,
    log_axis,
    mark_steps,
    new_figure,
    nothing,
    placeholder,
    put_legend,
    step_axis,
    token_axis_above,
    write_figure,
)
from miniseries.reporting.layers import NUM_ROWS, draw_layers
from miniseries.reporting.runlog import (
    CHANCE,
    LONG_STEPS,
    Baseline,
    Run,
    accuracy_stderr,
    divergence_label,
    headline,
    last,
    line_label,
    lines_label,
    load_run,
    loss_baseline,
    loss_limits,
    score_baseline,
    score_limits,
    score_title,
    sweep_labels,
    train_label,
)

CLIP_NORM = 1.0  # gradients are scaled down to this norm


def draw_loss(axes: Axes, run: Run, style: Style) -> None:
    """Training and validation loss of one run with GPT-2's."""
    steps, losses = run.column("train", "train_loss_nats")
    _, smoothed = run.smoothed_loss(style.smoothing)
    validated = run.column("val", "val_loss_nats")
    axes.set(title="loss", ylabel="nats per token")
    if not len(steps) and not len(validated[0]):
        return nothing(axes, "no finite loss logged yet")
    if len(steps):
        draw_values(axes, steps, losses, color=BLUE, alpha=0.3, linewidth=0.7)
        draw_values(axes, steps, smoothed, color=BLUE, linewidth=2.2, label=train_label(run))
    if len(validated[0]):
        label = f"validation, {validated[1][-1]:.3f} at step {validated[0][-1]:,.0f}"
        draw_curve(axes, *validated, label, i=COLOURS.index(BLACK))
    lines = [loss_baseline(run), loss_baseline(run, "finetuned_val_loss_nats")]
    lines = lines if lines[1] and lines[1].same_data else lines[:1]
    low, high = loss_limits([(steps, smoothed), validated], lines, run.num_steps)
    axes.set_ylim(losses.min(initial=low), high)
    for line, colour, dashes in zip(lines, (RED, PURPLE), ("--", ":"), strict=False):
        draw_line(axes, line.value, line_label(run, line, "val"), colour, dashes)
    if diverged := [record["step"] for record in run.metrics.get("divergence", [])]:
        mark_steps(axes, diverged, divergence_label(run))


def draw_score(axes: Axes, run: Run) -> None:
    """HellaSwag accuracy of one run with GPT-2's and GPT-3's."""
    axes.set(title=score_title([run]), ylabel="accuracy by mean loss per token, %")
    steps, accuracy = run.column("hellaswag", "acc_norm_token_mean")
    if not len(steps):
        return nothing(axes, "not measured in this run yet")
    num_items = run.metrics["hellaswag"][-1].get("num_items")
    error = np.array([accuracy_stderr(a, num_items) or 0.0 for a in accuracy])
    low, high = accuracy - error, accuracy + error
    axes.fill_between(steps, 100 * low, 100 * high, color=BLUE, alpha=0.15, linewidth=0)
    newest = f"{100 * accuracy[-1]:.1f} % at step {steps[-1]:,.0f}"
    band = f"(band: standard error, {100 * error[-1]:.1f})"
    draw_curve(axes, steps, 100 * accuracy, f"this run, {newest} {band}", i=0)
    gpt2, gpt3 = score_baseline(run), score_baseline(run, "gpt3_hellaswag_acc")
    axes.set_ylim(*score_limits(np.concatenate([low, high]), [gpt2, gpt3]))
    axes.axhline(100 * CHANCE, color=PALE, linestyle=":", label="random choice: 25 %")
    for line, colour, dashes in ((gpt2, RED, "--"), (gpt3, GREEN, "-.")):
        draw_line(axes, 100 * line.value, line_label(run, line, "hellaswag"), colour, dashes)


def draw_run(run: Run, style: Style) -> Figure:
    """Loss beside HellaSwag against the steps, as in llm.c's post on GPT-2 1558M."""
    figure, (left, right) = new_figure(style, headline(run), rows=1)
    draw_loss(left, run, style)
    draw_score(right, run)
    for axes in (left, right):
        step_axis(axes, run)
        token_axis_above(axes, run)
        put_legend(axes, style)
    return figure


def draw_median(axes: Axes, run: Run, key: str, form: str) -> None:
    """One key of the training records from zero up, with its median."""
    steps, values = run.column("train", key)
    if not len(steps):
        unknown = "n/a: peak of this device unknown"
        return nothing(axes, unknown if key == "mfu_percent" else "not logged yet")
    draw_values(axes, steps, values, color=BLUE, linewidth=0.8)
    median = float(np.median(values))
    # one odd timing must not flatten the rest
    axes.set_ylim(0, 1.3 * max(np.percentile(values, 99), 1e-9))
    counts(axes.yaxis)
    axes.axhline(median, color=BLACK, linestyle="--", label="median " + form.format(median))


def draw_norm(axes: Axes, run: Run) -> None:
    """Gradient norm before clipping, and a cross below for each update skipped as a spike."""
    steps, norms = run.column("train", "grad_norm")
    if not (norms > 0).any():
        return nothing(axes, "not logged yet")
    draw_values(axes, steps, norms, color=BLUE, linewidth=0.8)
    axes.axhline(CLIP_NORM, color=BLACK, linestyle="--", label=f"clipped above {CLIP_NORM:g}")
    log_axis(axes)
    skipped = [r["step"] for r in run.metrics["train"] if r.get("skipped")]
    if skipped:
        mark_steps(axes, skipped, f"updates skipped: {len(skipped):,}")


def draw_speed(run: Run, style: Style) -> Figure:
    """Over the steps: tokens per second, MFU, gradient norm, learning rate.

    Below them, where the log has any, the ranges of each layer's weights and residual stream.
    """
    with_layers = bool(run.metrics.get("ranges"))
    figure, panels = new_figure(style, headline(run), rows=2 + NUM_ROWS * with_layers)
    draw_median(panels[0], run, "tokens_per_second", "{:,.0f} tokens/s")
    draw_median(panels[1], run, "mfu_percent", "{:.1f} %")
    draw_norm(panels[2], run)
    steps, rates = run.column("train", "learning_rate")
    draw_values(panels[3], steps, rates, color=BLUE)
    panels[3].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    titles = ("tokens per second", "model FLOPs utilisation, %", "gradient norm", "learning rate")
    if with_layers:
        draw_layers(figure, panels[4:], run)
    for axes, title in zip(panels[:4], titles, strict=True):
        axes.set_title(title)
    for axes in panels:
        step_axis(axes, run)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="best")
    return figure


def token_axis(axes: Axes, runs: list[Run]) -> None:
    """Tokens seen; for long runs logarithmic, from 1 % of the shortest run on."""
    ends = [last(run.column("train", "tokens_seen")[1]) or 1.0 for run in runs]
    start, end = -0.02 * max(ends), 1.02 * max(ends)
    if max(run.num_steps for run in runs) >= LONG_STEPS:
        axes.set_xscale("log", nonpositive="mask")
        start, end = max(0.01 * min(ends), 0.001 * max(ends)), 1.15 * max(ends)
    axes.set(xlabel="training tokens", xlim=(start, end))
    counts(axes.xaxis)


def series_lines(axes: Axes, lines: list[Baseline | None], kind: str, dashes: str) -> None:
    """Published lines, faint: in a run's colour where no other run has the same line.

    Args:
        lines: of each run; None where it has no curve to compare.
    """
    low, high = axes.get_ylim()
    known = [line for line in lines if line]
    for line in dict.fromkeys(known):
        alone = lines.count(line) == 1 < len(lines)
        colour = COLOURS[lines.index(line) % len(COLOURS)] if alone else GREY
        value = line.value if kind == "val" else 100 * line.value
        if low <= value <= high:
            axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.0, alpha=0.7)
    text = lines_label(known, kind, low, high)
    axes.plot([], [], color=GREY, linestyle=dashes, linewidth=1.0, label=text)


def series_losses(axes: Axes, runs: list[Run], labels: list[str], style: Style) -> None:
    """The loss curves of a series with the lines of GPT-2."""
    curves = []
    for i, (run, label) in enumerate(zip(runs, labels, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        trained = run.smoothed_loss(style.smoothing, x="tokens_seen")
        validated = run.column("val", "val_loss_nats", x="tokens_seen")
        if len(validated[0]):
            draw_values(axes, *trained, color=colour, alpha=0.35, linewidth=2.0)
            draw_curve(axes, *validated, f"{label}: {validated[1][-1]:.3f}", i)
        elif len(trained[0]):
            text = f"{label}: {trained[1][-1]:.3f} in training"
            draw_values(axes, *trained, color=colour, label=text)
        curves += [trained, validated]
    lines = [loss_baseline(run) for run in runs]
    axes.set_ylim(*loss_limits(curves, lines, max(run.num_steps for run in runs)))
    series_lines(axes, lines, "val", "--")
    kind = "validation loss" + (" on different data" if len({r.data_set for r in runs}) > 1 else "")
    axes.set(title=f"{kind} (pale: training)", ylabel="nats per token")


def series_scores(axes: Axes, runs: list[Run], labels: list[str]) -> None:
    """The HellaSwag curves of a series with the lines of GPT-2 and GPT-3."""
    scores = [run.column("hellaswag", "acc_norm_token_mean", x="tokens_seen") for run in runs]
    axes.set(title=score_title(runs), ylabel="accuracy by mean loss per token, %")
    if not any(len(tokens) for tokens, _ in scores):
        return nothing(axes, "not measured in these runs yet")
    for i, ((tokens, accuracy), label) in enumerate(zip(scores, labels, strict=True)):
        if len(tokens):
            draw_curve(axes, tokens, 100 * accuracy, f"{label}: {100 * accuracy[-1]:.1f} %", i)
    measured = [run if len(tokens) else None for run, (tokens, _) in zip(runs, scores, strict=True)]
    gpt2 = [run and score_baseline(run) for run in measured]
    gpt3 = [run and score_baseline(run, "gpt3_hellaswag_acc") for run in measured]
    accuracies = np.concatenate([accuracy for _, accuracy in scores])
    axes.set_ylim(*score_limits(accuracies, [line for line in gpt2 + gpt3 if line]))
    axes.axhline(100 * CHANCE, color=PALE, linestyle=":", label="random choice: 25 %")
    series_lines(axes, gpt2, "hellaswag", "--")
    series_lines(axes, gpt3, "hellaswag", "-.")


def draw_series(runs: list[Run], title: str, labels: list[str], style: Style) -> Figure:
    """Loss and HellaSwag of several runs against the tokens they have seen."""
    figure, (left, right) = new_figure(style, title, rows=1)
    series_losses(left, runs, labels, style)
    series_scores(right, runs, labels)
    for axes in (left, right):
        token_axis(axes, runs)
        put_legend(axes, style)
    return figure


def plot_run(
    run: str, metrics: Path, settings: Path, output: list[Path], speed: list[Path], **style: Any
) -> None:
    """Draw the two figures of one run; with nothing logged yet they say so.

    Args:
        metrics: the run's `metrics.jsonl`; may be missing or incomplete.
        settings: the run's settings JSON, for title and baselines.
        output: files (.png, .svg) for loss and HellaSwag.
        speed: files (.png, .svg) for speed, gradient norm and learning rate.
        style: fields of `Style`.
    """
    look, loaded = Style(**style), load_run(run, metrics, settings)
    if loaded.is_empty:
        figure = placeholder(f"{run}: this run has not logged anything yet", look)
        return write_figure(figure, [*output, *speed], look.dpi)
    write_figure(draw_run(loaded, look), output, look.dpi)
    write_figure(draw_speed(loaded, look), speed, look.dpi)


def plot_series(
    title: str,
    runs: list[str],
    metrics: list[Path],
    settings: list[Path],
    sweep: bool,
    output: list[Path],
    **style: Any,
) -> None:
    """Draw several runs in one figure; runs that have logged nothing yet are left out.

    Args:
        metrics, settings: one path per run, in the runs' order; files may be missing.
        sweep: label the runs with the settings they differ in, not with their size.
        output: files (.png, .svg).
        style: fields of `Style`.

    Raises:
        ValueError: the lists differ in length.
    """
    if not len(runs) == len(metrics) == len(settings):
        given = f"{len(runs)} runs, {len(metrics)} metrics and {len(settings)} settings"
        raise ValueError(f"{given}: give one metrics and one settings path per run")
    look = Style(**style)
    loaded = [load_run(*paths) for paths in zip(runs, metrics, settings, strict=True)]
    drawn = [run for run in loaded if not run.is_empty]
    if not drawn:
        figure = placeholder(f"{title}: no run has logged anything yet", look)
        return write_figure(figure, output, look.dpi)
    for run in filter(lambda run: run.is_empty, loaded):
        print(f"{title}: {run.name} has not logged anything yet")
    labels = sweep_labels(drawn) if sweep else [run.label for run in drawn]
    write_figure(draw_series(drawn, title, labels, look), output, look.dpi)
