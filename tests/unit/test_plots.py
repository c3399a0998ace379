import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import docutils.core
import jinja2
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from miniseries.reporting.canvas import RED, Style
from miniseries.reporting.layers import layer_values
from miniseries.reporting.plots import (
    draw_run,
    draw_series,
    draw_speed,
    plot_run,
    plot_series,
)
from miniseries.reporting.runlog import (
    Baseline,
    Run,
    find_baseline,
    first_step_past,
    headline,
    load_run,
    loss_baseline,
    loss_limits,
    published,
    short,
    smooth,
    sweep_labels,
    thin_out,
)

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
REPORT = Path(__file__).parents[2] / "workflow/report"
TINY = {"num_layers": 4, "num_heads": 4, "channels": 128, "sequence_length": 128}
SIZES = {name: {**shape, "sequence_length": 1024} for name, shape in published()["sizes"].items()}
STYLE = Style(dpi=40)


def settings(dataset="builtin", shape=TINY, **changes):
    recipe = {"dataset": dataset, "total_batch_tokens": 1024, "max_steps": 10, **shape, **changes}
    return {"recipe": recipe}


def train_record(step, loss=5.0, **changes):
    record = {"kind": "train", "step": step, "tokens_seen": 1024 * (step + 1)}
    record |= {"train_loss_nats": loss, "grad_norm": 0.5, "learning_rate": 1e-3, "skipped": False}
    record |= {"step_time_ms": 1000.0, "tokens_per_second": 1024.0, "mfu_percent": None}
    return record | changes


def val_record(step, loss):
    return {"kind": "val", "step": step, "tokens_seen": 1024 * step, "val_loss_nats": loss}


def score_record(step, accuracy, num_items=10042):
    record = {"kind": "hellaswag", "step": step, "tokens_seen": 1024 * step}
    return record | {"num_items": num_items, "acc_norm_token_mean": accuracy}


def run_of(*records, name="r", **changes):
    kinds = {record["kind"] for record in records}
    metrics = {kind: [r for r in records if r["kind"] == kind] for kind in kinds}
    return Run(name, settings(**changes), metrics)


def write_log(folder, *records, torn=""):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)
    (folder / "settings.json").write_text(json.dumps(settings()))
    return folder / "metrics.jsonl", folder / "settings.json"


def legend_of(axes):
    return " ".join(" ".join(text.get_text().split()) for text in axes.get_legend().get_texts())


def test_smoothing_corrects_for_its_start():
    # 0.5-weighted sums 1, 2.5 over weights 0.5, 0.75
    np.testing.assert_allclose(smooth(np.array([2.0, 4.0]), 0.5), [2.0, 2.5 / 0.75])
    np.testing.assert_allclose(smooth(np.array([3.0, 3.0, 3.0]), 0.9), 3.0)
    assert len(smooth(np.array([]), 0.9)) == 0


def test_short_runs_are_smoothed_over_a_fortieth_of_their_steps():
    losses = [float(step % 2) for step in range(80)]  # a fortieth: 2 steps, half weight each
    run = run_of(*(train_record(step, loss) for step, loss in enumerate(losses)))
    _, smoothed = run.smoothed_loss(0.95)
    np.testing.assert_allclose(smoothed, smooth(np.array(losses), 0.5))


def test_thinning_out_keeps_every_spike_and_the_order():
    y = np.zeros(10_000)
    y[[1234, 7777]] = 5.0, -5.0
    x, kept = thin_out(np.arange(10_000), y, bins=100)
    assert len(x) <= 200 and (np.diff(x) > 0).all()
    assert kept[list(x).index(1234)] == 5.0 and kept[list(x).index(7777)] == -5.0


def test_counts_are_written_in_three_digits():
    counts = [0, 999, 1024, 124_439_808, 999_999_999, 33_554_432_000, None]
    written = ["0", "999", "1.02k", "124M", "1B", "33.6B", "size unknown"]
    assert [short(count) for count in counts] == written


def test_a_far_baseline_does_not_flatten_the_curve_and_a_near_one_is_included():
    curve = [(np.array([0.0, 100.0]), np.array([8.0, 6.0]))]
    low, high = loss_limits(curve, [Baseline("GPT-2", 3.4, "x", False)], num_steps=100)
    assert (low, high) == pytest.approx((6.0 - 0.12, 8.0 + 0.12))
    low, _ = loss_limits(curve, [Baseline("GPT-2", 5.5, "x", False)], num_steps=100)
    assert low == pytest.approx(5.5 - 0.06 * 2.5)


def test_the_first_fall_of_a_long_run_and_absurd_losses_leave_the_axis():
    x = np.arange(1001.0)
    y = np.where(x < 50, 11.0, 3.0)
    assert loss_limits([(x, y)], [], num_steps=1001)[1] < 4
    assert loss_limits([(x, y)], [], num_steps=999)[1] > 11
    assert loss_limits([(x, np.full(1001, 1e30))], [], num_steps=999)[1] < 13


def test_the_published_shapes_have_the_published_sizes():
    for name, shape in SIZES.items():
        run = run_of(shape=shape)
        assert (run.size, run.num_parameters) == (name, shape["num_parameters"])
    for line in published()["baselines"]:
        assert line["size"] in SIZES and line["data_set"] and line["source"]
        if "num_items" in line:
            assert line["value"] == pytest.approx(line["num_correct"] / line["num_items"], abs=1e-6)


def test_a_baseline_on_the_same_data_is_preferred_and_another_is_said_to_be_other():
    on_edu = find_baseline("124M", "val_loss_nats", "FineWeb-Edu")
    assert on_edu == Baseline("GPT-2 124M", 3.2924, "FineWeb-Edu", True)
    on_own = find_baseline("124M", "val_loss_nats", "builtin")
    assert on_own == Baseline("GPT-2 124M", 3.424958, "FineWeb", False)
    assert find_baseline("350M", "val_loss_nats", "FineWeb-Edu").same_data is False


@pytest.mark.parametrize(
    ("dataset", "data", "known"),
    [
        ("fineweb-edu-100b", {}, "FineWeb-Edu"),
        ("mine", {"repository": "x/finewebedu10B-gpt2"}, "FineWeb-Edu"),
        ("mine", {"paths": ["edu_fineweb_train_*.bin"]}, "FineWeb-Edu"),
        ("fineweb-10b", {"lr_schedule": "x"}, "FineWeb"),
        ("builtin", {}, "builtin"),
        ("fineweb10B-gpt2", {}, "FineWeb"),
        ("fineweb-20b", {}, "FineWeb"),
        ("fineweb-2.5b", {}, "FineWeb"),
        ("fineweb-2", {}, "fineweb-2"),
        ("mine", {"repository": "HuggingFaceFW/fineweb-2"}, "mine"),
        ("fineweb2-fra", {}, "fineweb2-fra"),
        ("finewebs", {}, "finewebs"),
        ("mine", {"repository": "HuggingFaceFW/fineweb-edu-score-2"}, "mine"),
    ],
)
def test_the_data_set_is_recognised_by_its_name_or_its_source(dataset, data, known):
    assert run_of(dataset=dataset, data=data).data_set == known


def test_the_first_step_past_gpt2_is_the_first_evaluation_below_its_loss():
    records = [val_record(0, 11.0), val_record(250, 2.84), val_record(500, 2.80)]
    records += [val_record(750, 2.9), score_record(250, 0.48), score_record(500, 0.49)]
    run = run_of(*records, dataset="fineweb-edu", shape=SIZES["1558M"])
    loss = find_baseline("1558M", "val_loss_nats", "FineWeb-Edu")
    score = find_baseline("1558M", "hellaswag_llmc_acc_token_mean", "HellaSwag")
    assert (first_step_past(run, loss, "val"), first_step_past(run, score, "hellaswag")) == (
        500,
    ) * 2


def test_no_crossing_is_claimed_on_other_text_or_other_questions():
    run = run_of(val_record(50, 2.0), score_record(50, 0.9, num_items=200))
    loss = find_baseline(run.size, "val_loss_nats", run.data_set)
    score = find_baseline(run.size, "hellaswag_llmc_acc_token_mean", run.questions)
    assert first_step_past(run, loss, "val") is None
    assert first_step_past(run, score, "hellaswag") is None
    medium = run_of(val_record(50, 2.9), dataset="fineweb-edu", shape=SIZES["350M"])
    loss = find_baseline("350M", "val_loss_nats", medium.data_set)
    assert (loss.data_set, first_step_past(medium, loss, "val")) == ("FineWeb", None)


def test_a_resumed_log_shows_every_step_once(tmp_path):
    """Stopped at 6 and at 8 with checkpoints at 4 and 6: those steps stand in the log twice."""
    steps = [*range(7), *range(4, 9), *range(6, 10)]
    log = write_log(tmp_path, *(train_record(step, 9.0 - step) for step in steps))
    x, y = load_run("r", *log).column("train", "train_loss_nats")
    assert x.tolist() == list(range(10)) and y.tolist() == [9.0 - step for step in range(10)]


def test_the_legend_names_the_baseline_its_data_and_that_it_is_out_of_range():
    left, right = draw_run(run_of(train_record(0), score_record(1, 0.25, 200)), STYLE).axes
    assert "GPT-2 124M on FineWeb: 3.42, other data (below this range)" in legend_of(left)
    assert "GPT-2 124M on HellaSwag: 29.4 %, other questions" in legend_of(right)
    assert "200 questions, not HellaSwag's" in right.get_title()


def test_no_loss_of_a_single_step_lies_below_the_figure():
    losses = [5.0] * 30 + [3.0] + [5.0] * 30
    run = run_of(*(train_record(step, loss) for step, loss in enumerate(losses)))
    assert draw_run(run, STYLE).axes[0].get_ylim()[0] <= 3.0


def test_a_run_that_was_not_asked_yet_has_no_title_of_hellaswag():
    assert draw_run(run_of(train_record(0)), STYLE).axes[1].get_title() == "choice of ending"


def test_the_figure_of_the_largest_model_has_gpt2_in_range_and_the_crossing():
    records = [val_record(0, 11.0), val_record(5, 2.9), val_record(10, 2.5), score_record(10, 0.5)]
    left, right = draw_run(
        run_of(*records, dataset="fineweb-edu", shape=SIZES["1558M"]), STYLE
    ).axes
    assert "GPT-2 1558M on FineWeb-Edu: 2.83; first below it at step 10" in legend_of(left)
    assert "GPT-2 1558M on HellaSwag: 48.9 %; first above it at step 10" in legend_of(right)
    assert "GPT-3 1.3B on HellaSwag: 54.7 %" in legend_of(right)
    red = [line.get_ydata()[0] for line in left.lines if to_hex(line.get_color()) == RED.lower()]
    assert red == [2.831273]


def test_an_unknown_peak_is_said_in_the_mfu_panel():
    panels = draw_speed(run_of(train_record(0), train_record(1)), STYLE).axes
    assert panels[1].texts[0].get_text() == "n/a: peak of this device unknown"
    known = draw_speed(run_of(train_record(0, mfu_percent=47.3)), STYLE).axes[1]
    assert "median 47.3 %" in legend_of(known)


def test_skipped_updates_are_marked():
    run = run_of(train_record(0), train_record(1, skipped=True), train_record(2))
    assert "updates skipped: 1" in legend_of(draw_speed(run, STYLE).axes[2])


@pytest.mark.parametrize(
    ("norms", "wanted"), [((0.56, 1.1), "0.6"), ((0.2, 30.0), "0.5"), ((0.01, 5e4), "100")]
)
def test_the_norm_s_ticks_are_plain_numbers(norms, wanted):
    records = [train_record(step, grad_norm=norm) for step, norm in enumerate(norms)]
    figure = draw_speed(run_of(*records), STYLE)
    FigureCanvasAgg(figure).draw()
    low, high = figure.axes[2].get_ylim()
    axis = figure.axes[2].yaxis
    seen = [t.get_text() for t in axis.get_ticklabels() if low <= t.get_position()[1] <= high]
    seen += [t.get_text() for t in axis.get_minorticklabels() if t.get_text()]
    assert wanted in seen and 2 <= len(seen) <= 10
    assert all(re.fullmatch(r"[\d.]+", text) for text in seen)


def ranges_record(step, layers=2, scale=1.0):
    """Matrices of 3, 1, 4, and 4 times C x C, with mean squares of 3, 9, 1, and 1."""
    kinds = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    rms = dict(zip(kinds, [3**0.5, 3.0, 1.0, 1.0], strict=True))
    weights = {
        "rms": {kind: [scale * value] * layers for kind, value in rms.items()},
        "absmax": {kind: [scale * 5.0] * layers for kind in kinds},
    }
    weights["absmax"] |= {"attn.c_attn.bias": [0.0] * (layers - 1) + [60.0], "ln_f.weight": [99.0]}
    weights["rms"]["wte.weight"] = [0.5]
    residual = {key: {"residual": [scale] * layers, "mlp": [7.0] * layers} for key in weights}
    return {"kind": "ranges", "step": step, "weights": weights, "activations": residual}


def test_the_ranges_of_a_layer_are_those_of_its_matrices_together():
    record = ranges_record(0)
    mean_square = (3 * 3 + 1 * 9 + 4 * 1 + 4 * 1) / 12
    assert layer_values(record, "weights", "rms") == pytest.approx([mean_square**0.5] * 2)
    assert layer_values(record, "weights", "absmax").tolist() == [5.0, 60.0], "the bias counts"
    assert layer_values(record, "activations", "rms").tolist() == [1.0, 1.0]
    assert len(layer_values({"step": 0}, "weights", "absmax")) == 0


def test_ranges_have_a_line_for_each_layer_and_without_them_there_are_no_panels():
    steps = [train_record(step) for step in range(9)]
    assert len(draw_speed(run_of(*steps), STYLE).axes) == 4
    ranges = [ranges_record(step, layers=5, scale=1.0 + step) for step in (0, 3, 6)]
    panels = draw_speed(run_of(*steps, *ranges), STYLE).axes
    assert len(panels) == 9, "four more, and the bar that says which colour is which layer"
    assert [len(axes.lines) for axes in panels[4:8]] == [5, 6, 5, 5]
    last_layer = panels[6].lines[-1]
    assert last_layer.get_xdata().tolist() == [0, 3, 6]
    assert last_layer.get_ydata().tolist() == [1, 4, 7]
    assert "token table" in legend_of(panels[5])


def test_a_divergence_is_marked_and_what_was_done_about_it_is_said():
    events = [{"kind": "divergence", "step": step} for step in (7, 7)]
    back = [{"kind": "rollback", "step": 4, "back_to": 4, "batches_skipped": n} for n in (5, 6)]
    left, _ = draw_run(run_of(train_record(0), *events, *back), STYLE).axes
    expected = "diverged 2 times, the last time at step 7; back to step 4, 11 batches left out"
    assert expected in legend_of(left)
    left, _ = draw_run(run_of(train_record(0), events[0]), STYLE).axes
    assert "diverged at step 7" in legend_of(left) and "back to" not in legend_of(left)


def test_no_crossing_is_claimed_of_a_loss_with_more_context():
    run = run_of(val_record(50, 2.9), dataset="fineweb-edu", shape=SIZES["124M"])
    longer = run_of(
        val_record(50, 2.9), dataset="fineweb-edu", shape=SIZES["124M"] | {"sequence_length": 2048}
    )
    assert first_step_past(run, loss_baseline(run), "val") == 50
    assert first_step_past(longer, loss_baseline(longer), "val") is None
    assert loss_baseline(longer).data_set == "FineWeb-Edu, T = 1024"


def test_a_run_in_progress_says_so_in_its_title():
    done = {"kind": "done", "step": 10}
    assert (
        headline(run_of(train_record(4)))
        == "r: 7.24M parameters, builtin, step 5 of 10, unfinished"
    )
    assert headline(run_of(train_record(9), done)).endswith("step 10 of 10")


def test_a_sweep_is_labelled_by_what_differs_and_a_series_by_size():
    runs = [run_of(name=f"s{rate}", learning_rate=rate) for rate in (3e-4, 6e-4)]
    assert sweep_labels(runs) == ["learning_rate 0.0003", "learning_rate 0.0006"]
    assert run_of(name="124m", shape=SIZES["124M"]).label == "124m"
    assert run_of(name="mine", shape=SIZES["350M"]).label == "mine (350M)"
    assert run_of(name="tiny").label == "tiny (7.24M)"


def test_a_series_shows_each_run_with_its_newest_values():
    runs = [
        run_of(val_record(5, loss), score_record(5, 0.3), name=name, shape=SIZES[name])
        for name, loss in (("124M", 3.5), ("350M", 3.25))
    ]
    left, right = draw_series(runs, "both", ["124M", "350M"], STYLE).axes
    assert "124M: 3.500" in legend_of(left) and "350M: 3.250" in legend_of(left)
    assert "GPT-2: 124M 29.4 %, 350M 37.5 %" in legend_of(right)


def test_a_series_on_different_data_says_so_in_its_title():
    runs = [run_of(val_record(5, 5.0), dataset=name, name=name) for name in ("builtin", "mine")]
    left = draw_series(runs, "both", ["a", "b"], STYLE).axes[0]
    assert left.get_title() == "validation loss on different data (pale: training)"
    left = draw_series(runs[:1], "one", ["a"], STYLE).axes[0]
    assert left.get_title() == "validation loss (pale: training)"


def test_a_run_without_scores_has_no_line_of_its_own_in_a_series():
    measured = run_of(val_record(5, 5.0), score_record(5, 0.3, num_items=200), name="a")
    runs = [run_of(val_record(0, 10.7), name="b"), measured]
    right = draw_series(runs, "both", ["b", "a"], STYLE).axes[1]
    assert "GPT-2: 124M 29.4 % (other questions)" in legend_of(right)


NAN, INF = math.nan, math.inf
ODD_LOGS = {
    "no evaluation": [train_record(step) for step in range(5)],
    "one record": [train_record(0)],
    "one score": [score_record(3, 0.25)],
    "one validation": [val_record(0, 10.9)],
    "losses not finite": [train_record(0), train_record(1, NAN), train_record(2, INF)],
    "nothing finite": [
        train_record(0, NAN, grad_norm=INF),
        val_record(0, NAN),
        score_record(1, NAN),
    ],
    "null values": [dict.fromkeys(train_record(0)) | {"kind": "train", "step": 0}],
    "keys missing": [{"kind": kind, "step": 1} for kind in ("train", "val", "hellaswag", "done")],
    "impossible accuracy": [score_record(1, 1.5), score_record(2, -1.0, num_items=0)],
    "ranges of nothing": [
        {"kind": "ranges", "step": 0},
        {"kind": "ranges", "step": 1, "weights": {"rms": None}, "activations": None},
    ],
    "ranges not finite": [train_record(0), ranges_record(0, scale=INF), ranges_record(1, 2, NAN)],
    "a divergence alone": [train_record(0), {"kind": "divergence", "step": 1}],
    "start alone": [{"kind": "start", "step": 0, "num_parameters": 7, "tokens_per_step": 8}],
}


@pytest.mark.parametrize("name", ODD_LOGS)
def test_no_log_is_too_odd_to_draw_even_without_settings(tmp_path, name):
    metrics, found = write_log(tmp_path / "log", *ODD_LOGS[name], torn='{"kind": "train", "st')
    missing = tmp_path / "none.json"
    one, two, many = (tmp_path / f"{figure}.png" for figure in ("one", "two", "many"))
    plot_run("r", metrics, missing, [one], [two], dpi=20)
    plot_series("all", ["r"] * 2, [metrics] * 2, [found] * 2, True, [many], dpi=20)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (one, two, many))


def test_without_any_log_the_figure_and_one_line_say_so(tmp_path, capsys):
    missing, figure = tmp_path / "none.jsonl", tmp_path / "figure.svg"
    plot_series("rates", ["a"], [missing], [missing], False, [figure])
    assert capsys.readouterr().out == "rates: no run has logged anything yet\n"
    assert "no run has logged anything yet" in figure.read_text()
    plot_series("rates", [], [], [], False, [figure])


def test_a_run_without_a_log_is_left_out_of_a_series(tmp_path, capsys):
    metrics, found = write_log(tmp_path, train_record(0))
    missing, figure = tmp_path / "none.jsonl", tmp_path / "figure.svg"
    plot_series("s", ["a", "b"], [metrics, missing], [found, missing], False, [figure])
    assert capsys.readouterr().out == "s: b has not logged anything yet\n"
    assert "a (7.24M): 5.000 in training" in figure.read_text()


def test_drawing_again_gives_the_same_bytes(tmp_path):
    records = [train_record(step, 9.0 - step, skipped=step == 2) for step in range(5)]
    log = write_log(tmp_path, *records, val_record(5, 4.0), score_record(5, 0.26))
    drawn = []
    for name in ("first", "second"):
        paths = [tmp_path / name / f"{figure}" for figure in ("a.png", "a.svg", "b.png", "b.svg")]
        plot_run("r", *log, paths[:2], paths[2:], dpi=40)
        drawn.append([path.read_bytes() for path in paths])
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [p.name for p in paths]
    assert drawn[0] == drawn[1]


def test_the_scripts_draw_from_the_command_line(tmp_path):
    metrics, found = write_log(tmp_path, train_record(0), torn="{")
    one, two, many = (str(tmp_path / f"{name}.png") for name in ("one", "two", "many"))
    run = ["--run", "r", "--metrics", metrics, "--settings", found, "--output", one]
    look = ["--dpi", "40", "--width-inches", "10", "--smoothing", "0.9"]
    series = ["--title", "t", "--runs", "r", "--metrics", metrics, "--settings", found]
    for line in (
        ["plot_run.py", *run, "--speed", two, *look],
        ["plot_series.py", *series, "--output", many, "--sweep", *look],
        ["plot_series.py", "--title", "t", "--runs", "--metrics", "--settings", "--output", many],
    ):
        subprocess.run([sys.executable, SCRIPTS / line[0], *line[1:]], check=True)
    uneven = [sys.executable, SCRIPTS / "plot_series.py", "--title", "t", "--output", many]
    failed = subprocess.run([*uneven, "--runs", "a"], capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("error: 1 runs, 0 metrics")


@pytest.mark.parametrize("path", sorted(REPORT.glob("*.rst")), ids=lambda path: path.stem)
def test_captions_of_the_report_are_valid_markup(path):
    names = {"run": "tiny", "model": "tiny@100", "series": "rates"}
    snakemake = SimpleNamespace(wildcards=SimpleNamespace(**names), config={"runs": {"tiny": {}}})
    text = jinja2.Environment().from_string(path.read_text()).render(snakemake=snakemake)
    strict = {"halt_level": 2, "report_level": 2}  # 2: warnings
    assert docutils.core.publish_string(text, writer="html", settings_overrides=strict)
