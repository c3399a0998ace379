import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import TRAIN_SCRIPT

from miniseries.metrics import (
    append_record,
    read_json,
    read_metrics,
    run_main,
    write_json,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_the_last_record_of_a_step_wins_and_steps_come_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, loss in [(0, 3.0), (1, 2.0), (2, 1.0), (1, 2.5)]:
        append_record(path, "train", step=step, train_loss_nats=loss)
    records = read_metrics(path)["train"]
    assert [(r["step"], r["train_loss_nats"]) for r in records] == [(0, 3.0), (1, 2.5), (2, 1.0)]


def test_a_line_that_a_kill_cut_short_costs_that_line_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(path, "train", step=0)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    append_record(path, "train", step=2)
    assert [r["step"] for r in read_metrics(path)["train"]] == [0, 2]


def test_lines_that_are_no_records_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(path, "train", step=0)
    others = ['{"kind": "train", "step": 1e999}', '{"kind": "val", "step": "1"}', "[]", "7", "\0\0"]
    others += ['{"kind": [], "step": 1}', '{"kind": "train"}', '{"step": 1}']
    with path.open("a") as file:
        file.write("\n".join(others) + "\n")
    assert read_metrics(path) == {"train": [{"kind": "train", "step": 0}]}


def test_no_metrics_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == {}


def test_what_happened_at_the_same_step_again_counts_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for skipped in (5, 3):
        append_record(path, "rollback", step=4, batches_skipped=skipped)
        append_record(path, "val", step=4, val_loss_nats=skipped)
    found = read_metrics(path)
    assert [r["batches_skipped"] for r in found["rollback"]] == [5, 3]
    assert [r["val_loss_nats"] for r in found["val"]] == [3]


def test_a_rollback_takes_back_what_was_done_after_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for kind, step in [("start", 0), ("restart", 5), ("start", 5), ("ranges", 6), ("stop", 7)]:
        append_record(path, kind, step=step)
    for step in range(7):
        append_record(path, "train", step=step, train_loss_nats=9.0)
        append_record(path, "val", step=step + 1, val_loss_nats=9.0)
    append_record(path, "divergence", step=7)
    append_record(path, "rollback", step=4, back_to=4)
    append_record(path, "train", step=4, train_loss_nats=2.0)
    found = read_metrics(path)
    losses = [(r["step"], r["train_loss_nats"]) for r in found["train"]]
    assert losses == [(0, 9.0), (1, 9.0), (2, 9.0), (3, 9.0), (4, 2.0)]
    assert [r["step"] for r in found["val"]] == [1, 2, 3, 4]
    assert "ranges" not in found and "stop" not in found
    assert [r["step"] for r in found["start"]] == [0, 5]  # of the process that went back, too
    assert [found[kind][0]["step"] for kind in ("restart", "divergence", "rollback")] == [5, 7, 4]


def test_damaged_json_names_the_file_and_the_remedy(tmp_path):
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(ValueError, match=r"damaged\.json: not valid JSON .* delete it"):
        read_json(path)
    for text in ('{"a": 1}', "[]"):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=r"damaged\.json: damaged, it lacks .*b; bring it back"
        ):
            read_json(path, ["a", "b"], remedy="bring it back")


def test_what_a_user_can_mend_is_one_line_and_exit_code_1(capsys):
    def fail():
        raise ValueError("this is wrong, do that")

    with pytest.raises(SystemExit) as leaving:
        run_main(fail)
    assert leaving.value.code == 1
    assert capsys.readouterr().err == "error: this is wrong, do that\n"


def test_a_character_that_the_terminal_lacks_ends_nothing():
    program = "from miniseries.metrics import run_main; run_main(lambda: print('\\u2019 \\xe9'))"
    environment = {**os.environ, "PYTHONPATH": str(TRAIN_SCRIPT.parent)}
    environment["PYTHONIOENCODING"] = "latin-1"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.stdout == b"\\u2019 \xe9\n", result.stderr


def test_a_full_disk_is_named_with_its_remedy(capsys):
    def fail():
        Path("/dev/full").write_text("x")

    with pytest.raises(SystemExit):
        run_main(fail)
    expected = (
        "error: [Errno 28] No space left on device; make room on the disk of results/ and give"
    )
    assert capsys.readouterr().err.startswith(expected)
