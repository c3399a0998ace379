"""Tables of measurements: the README's is the one of `benchmarks/`, and each says what it lacks."""

import copy
import json

import pytest
from stand_ins import PROJECT

from miniseries.metrics import read_json
from miniseries.reporting.canvas import Style
from miniseries.speed.comparison import (
    BEGIN,
    END,
    SPEEDS,
    best_of,
    compare_lines,
    put_into,
    read_devices,
    readme_table,
    write_comparison,
)
from miniseries.speed.rows import LADDER
from miniseries.speed.tables import collect, draw_ladder, write_ladder, write_profile

BENCHMARKS = sorted((PROJECT / "benchmarks").glob("*.json"))
PUBLISHED = read_json(SPEEDS)["speeds"]
README = PROJECT / "README.md"
PART = {"ms": 500.0, "share": 0.5, "count": 96.0}
MEASURED = {
    "work": "124m",
    "measure": "step",
    "rung": None,
    "precision": "bf16",
    "micro_batch": 64,
    "recompute": 0,
    "tokens_per_step": 524288,
    "sequence_length": 1024,
    "processes": 1,
    "device": "NVIDIA H200",
    "commit": "abc1234",
    "versions": {"torch": "2.13.0"},
    "not_measured": None,
    "tokens_per_second": {"median": 600000.4, "p10": 590000.0, "p90": 610000.0},
    "step_ms": 873.8,
    "mfu_percent": 48.75,
    "peak_gib": 20.04,
    "reserved_gib": 22.0,
    "seconds_to_first_step": {"cold": 31.6, "warm": 12.2},
    "p99_by_median": 1.0123,
    "data_wait_share": 0.00042,
    "recompiles_after_step_3": 0,
    "repetitions": 10,
    "loss_nats": 6.5,
    "breakdown": {
        "step_ms": 1000.0,
        "idle_ms": 500.0,
        "hidden_ms": 0.0,
        "kinds": {"matrix products": PART},
        "phases": {"backward": PART},
        "counted_bytes": {"backward": {"products": 1e12, "others": 5e11}},
        "top_kernels": [PART | {"kernel": "nvjet|x", "kind": "matrix products"}],
    },
}
SKIPPED = {key: MEASURED[key] for key in list(MEASURED)[:13]} | {"processes": 2}
SKIPPED |= {"not_measured": "needs 2 GPUs, this machine has 1"}


@pytest.fixture
def files(tmp_path):
    """Results of rows as the bench leaves them."""
    hellaswag = SKIPPED | {"measure": "hellaswag", "not_measured": None, "num_items": 10042}
    hellaswag |= {"hellaswag_seconds": 7.25, "first_call_seconds": 3.0, "processes": 1}
    paths = []
    for number, row in enumerate((MEASURED, SKIPPED, hellaswag)):
        paths.append(tmp_path / f"row{number}.json")
        paths[-1].write_text(json.dumps(row))
    return paths


def test_the_readmes_table_is_the_one_of_the_benchmarks():
    table = readme_table(read_devices(BENCHMARKS), PUBLISHED)
    text = README.read_text()
    remedy = (
        "python workflow/scripts/write_comparison.py --measured benchmarks/*.json "
        "--readme README.md"
    )
    assert put_into(text, table) == text, f"out of date: {remedy}"


def test_every_kept_row_names_what_it_was_measured_with():
    rows = read_devices(BENCHMARKS)
    assert rows
    for row in rows:
        assert row["commit"] and row["versions"]["torch"] and row["device"]
        assert row["not_measured"] or row["repetitions"]


def test_published_speeds_have_a_source_and_belong_to_a_run():
    for line in PUBLISHED:
        assert line["source"] and line["work"] in ("124m", "1558m")
        assert line["tokens_per_second"] or line["peak_gib"]


@pytest.mark.parametrize("text", ["[]", "{}", ""])
def test_a_damaged_row_is_named(tmp_path, text):
    row = tmp_path / "row.json"
    row.write_text(text)
    for read in (
        lambda: collect([row], tmp_path, tmp_path / "out.md"),
        lambda: write_profile([row], tmp_path / "out.md"),
        lambda: write_ladder([row], tmp_path / "out.md", []),
        lambda: read_devices([row]),
    ):
        with pytest.raises(ValueError, match=r"row\.json: .*; delete it to have it made again"):
            read()


def test_rows_become_a_file_of_their_device_and_a_table(files, tmp_path, capsys):
    collect(files, tmp_path / "bench", tmp_path / "bench.md")
    content = read_json(tmp_path / "bench" / "NVIDIA-H200.json")
    assert content["device"] == "NVIDIA H200"
    first, second, _ = content["rows"]
    assert first["tokens_per_second"] == MEASURED["tokens_per_second"]
    assert first["breakdown"]["kinds"] == {"matrix products": PART}
    assert "top_kernels" not in first["breakdown"] and "device" not in first
    assert second["not_measured"] == SKIPPED["not_measured"]
    text = (tmp_path / "bench.md").read_text()
    assert text in capsys.readouterr().out
    for cell in ("600,000 (590,000 to 610,000)", "48.8 %", "20.0 GiB", "32 / 12 s", "1.012"):
        assert f" {cell} " in text
    assert "needs 2 GPUs, this machine has 1" in text
    assert "10,042" in text and " 7.2 " in text


def test_the_newer_of_two_files_counts(files, tmp_path):
    collect(files, tmp_path / "new", tmp_path / "bench.md")
    rows = read_devices([tmp_path / "new" / "NVIDIA-H200.json", *BENCHMARKS])
    speeds = [
        row["tokens_per_second"]["median"]
        for row in rows
        if (row["work"], row["measure"], row["processes"], row["micro_batch"])
        == ("124m", "step", 1, 64)
        and row["precision"] == "bf16"
    ]
    assert speeds == [600000.4]


def test_a_profile_adds_up_and_shows_counted_traffic(files, tmp_path):
    write_profile(files[:2], tmp_path / "profile.md")
    text = (tmp_path / "profile.md").read_text()
    assert text.count("| idle ") == 2
    # 1.5e12 bytes in half a second
    assert "1,500.0" in text and "| 3.00 " in text
    assert "nvjet/x" in text  # a bar would break the table
    assert "needs 2 GPUs" in text


@pytest.fixture
def rungs(tmp_path):
    paths = []
    for number, name in enumerate(LADDER):
        row = copy.deepcopy(MEASURED) | {
            "measure": "rung",
            "rung": name,
            "step_ms": 1000 / (number + 1),
        }
        if name == "tf32":
            row |= {"not_measured": "unsupported: needs compute capability 8.0"}
        else:
            row["precision"] = "fp32" if name == "padded" else LADDER[name].precision
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(row))
    return paths


def test_the_ladder_is_a_table_and_a_chart(rungs, tmp_path):
    figures = [tmp_path / "ladder.png", tmp_path / "ladder.svg"]
    write_ladder(rungs, tmp_path / "ladder.md", figures, dpi=50, width_inches=8.0, smoothing=0.0)
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (tmp_path / "ladder.md").read_text().splitlines()
        if line.startswith("|")
    ][2:]
    titles = [rung.title for rung in LADDER.values()]
    titles[list(LADDER).index("padded")] += ", in fp32"
    assert [line[0] for line in lines] == titles
    assert lines[0][1:] == ["1,000.0", "600,000", "1.00", "20.0 GiB", "31.6 s", "6.5000"]
    assert lines[1][1:] == ["unsupported: needs compute capability 8.0", *"-----"]
    assert lines[2][3] == "3.00"
    assert figures[1].stat().st_size > 5000
    assert figures[0].read_bytes().startswith(b"\x89PNG")


def test_the_ladder_s_chart_says_of_what_it_is_and_what_the_device_lacks(rungs):
    (axes,) = draw_ladder([read_json(path) for path in rungs], Style()).axes
    shape = "524,288 tokens a step in micro-batches of 64 x 1,024"
    assert axes.get_title() == f"124m on NVIDIA H200, {shape}"
    first, second, *_ = [text.get_text() for text in axes.texts]
    assert first == "600,000 tokens/s, 1,000 ms"
    assert second == "unsupported: needs compute capability 8.0"


def test_ours_stand_beside_others_fastest_first():
    lines = compare_lines([MEASURED], PUBLISHED)
    here = [line for line in lines if (line["work"], line["on"]) == ("124m", "1 x H200")]
    assert [line["tokens/s"] for line in here] == ["600,000", "579,300", "567,000"]
    assert here[0]["source"] == "commit abc1234, torch 2.13.0"
    assert all(line["source"] for line in lines)


def test_the_readme_sets_like_beside_like():
    small = MEASURED | {"tokens_per_step": 32768, "micro_batch": 32}
    assert best_of(PUBLISHED, MEASURED, "llm.c")["tokens_per_second"] == 579300
    assert best_of(PUBLISHED, small, "llm.c")["tokens_per_second"] == 567000
    assert best_of(PUBLISHED, MEASURED | {"processes": 2}, "llm.c") is None
    yardstick = MEASURED | {"measure": "huggingface"}
    yardstick["tokens_per_second"] = {"median": 300000.0}
    table = readme_table([MEASURED, yardstick], PUBLISHED)
    assert table.count("\n") == 3  # head, rule, one row: the yardstick is a column
    assert "| 579,300 " in table and "| 300,000 " in table


def test_the_readme_gets_its_table_between_the_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nobsolete\n{END}\nafter\n")
    write_comparison(BENCHMARKS, None, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n|") and text.endswith(f"|\n{END}\nafter\n")
    assert "obsolete" not in text
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="needs one line"):
        write_comparison(BENCHMARKS, None, readme)
