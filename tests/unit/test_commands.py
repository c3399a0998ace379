"""Commands in their time: what ends them, what they leave behind, and when TERM is sent."""

import os
import signal
import subprocess
import sys
import time

from miniseries.metrics import append_record
from miniseries.speed import commands
from miniseries.speed.commands import MARK, TermAfter, marked_processes, run_command

FOREVER = "import time; time.sleep(600)"


def run(code, tmp_path, seconds=60.0, **more):
    deadline = time.monotonic() + seconds
    command = [sys.executable, "-c", code]
    return run_command(command, tmp_path, tmp_path / "log.txt", deadline, **more)


def test_a_command_s_words_exit_code_and_seconds_are_kept(tmp_path):
    finished = run("print('hello'); raise SystemExit(3)", tmp_path)
    assert (finished.code, finished.is_late) == (3, False)
    assert (finished.leftovers, finished.watchdog) == ([], [])
    assert (tmp_path / "log.txt").read_text() == "hello\n"
    assert 0 < finished.seconds < 60


def test_words_of_nccl_s_watchdog_are_found(tmp_path):
    line = "[rank3]:[E1129] [PG 0] Watchdog caught collective operation timeout"
    assert run(f"print('fine'); print('{line}')", tmp_path).watchdog == [line]


def test_a_command_is_ended_at_its_deadline_as_by_ctrl_c(tmp_path):
    finished = run(FOREVER, tmp_path, seconds=0.5)
    assert (finished.is_late, finished.code) == (True, -signal.SIGINT)


def test_a_command_deaf_to_ctrl_c_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "GRACE_SECONDS", 0.2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a command inherits
    try:
        finished = run(FOREVER, tmp_path, seconds=0.2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (finished.is_late, finished.code) == (True, -signal.SIGKILL)


def test_a_process_that_outlives_its_command_is_named_and_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "LEFTOVER_SECONDS", 0.2)
    child = f"[sys.executable, '-c', {FOREVER!r}, 'orphan of {tmp_path.name}']"
    code = f"import subprocess, sys; subprocess.Popen({child}, start_new_session=True)"
    finished = run(code, tmp_path)
    (left,) = finished.leftovers
    assert left.endswith(f"orphan of {tmp_path.name}")
    deadline = time.monotonic() + 20
    while left in commands_at_work():
        assert time.monotonic() < deadline


def commands_at_work():
    listing = ["ps", "-eo", "args"]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()


def test_processes_are_found_by_their_mark_alone():
    with subprocess.Popen(
        [sys.executable, "-c", FOREVER], env={**os.environ, MARK: "ours"}
    ) as process:
        try:
            while not (found := marked_processes("ours")):
                time.sleep(0.02)
            assert list(found) == [process.pid]
            assert marked_processes("our") == {}
        finally:
            process.kill()


def test_term_is_sent_once_after_the_step_to_the_process_in_the_lock(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(commands.os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(commands.random, "uniform", lambda low, high: high)
    (tmp_path / "lock").write_text("123")
    term = TermAfter(tmp_path, 4)
    for step in (2, 3):
        append_record(tmp_path / "metrics.jsonl", "train", step=step, step_time_ms=50.0)
    term.look()
    assert term.due is None
    append_record(tmp_path / "metrics.jsonl", "train", step=4, step_time_ms=50.0)
    term.look()
    assert not killed, "first a part of the step's time goes by"
    deadline = time.monotonic() + 10
    while term.sent_at is None and time.monotonic() < deadline:
        term.look()
    term.look()
    assert killed == [(123, signal.SIGTERM)]
