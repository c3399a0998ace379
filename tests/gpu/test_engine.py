"""The engine on a real GPU, with real text: each test prints its figures (`pytest -m gpu -s`)."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from stand_ins import PROJECT, losses, make_settings, train_command

from miniseries.metrics import read_json, read_metrics
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights, saved_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
REAL = {"sequence_length": 1024, "precision": "bf16", "compile": True, "warmup_steps": 10}
REAL |= {"learning_rate": 6e-4, "checkpoint_every_steps": 0, "gpus": 1}
D12 = REAL | {"num_layers": 12, "num_heads": 12, "channels": 768, "total_batch_tokens": 65536}
D12 |= {"micro_batch": 64}
D48 = REAL | {"num_layers": 48, "num_heads": 25, "channels": 1600, "total_batch_tokens": 131072}
WATCHED = Path(__file__).parents[1] / "watched_train_run.py"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """`builtin-large`, made once; or what BUILTIN_LARGE names, a folder that holds it."""
    if "BUILTIN_LARGE" in os.environ:
        return Path(os.environ["BUILTIN_LARGE"])
    folder = tmp_path_factory.mktemp("builtin-large")
    entry = {"source": "builtin-large", "val_fraction": 0.05, "val_tokens": 262144}
    command = [sys.executable, str(PROJECT / "workflow/scripts/prepare_dataset.py")]
    command += ["--name", "builtin-large", "--dataset", json.dumps(entry | {"num_questions": 200})]
    command += ["--folder", str(folder), "--manifest", str(folder / "manifest.json")]
    subprocess.run(command, check=True)
    return folder


def start(data, folder, watched=False, fault="", **changes):
    """The real command, with HellaSwag's questions; its output goes to `said.txt`."""
    folder.mkdir(exist_ok=True)
    command = train_command(
        make_settings(folder / "in.json", **changes), data / "manifest.json", folder
    )
    command += ["--questions", str(data / "hellaswag.jsonl")]
    if watched or fault:
        command[1] = str(WATCHED if watched else WATCHED.with_name("faulty_train_run.py"))
    with (folder / "said.txt").open("w") as said:
        environment = {**os.environ, "FAULT": fault}
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment)


def train(data, folder, **changes):
    process = start(data, folder, **changes)
    assert process.wait(timeout=550) == 0, said(folder)
    return read_metrics(folder / "metrics.jsonl")


def said(folder):
    return (folder / "said.txt").read_text()


def stop_after(process, folder, steps):
    """TERM once so many steps are done; returns the step that was saved."""
    while len(read_metrics(folder / "metrics.jsonl").get("train", [])) < steps:
        assert process.poll() is None, said(folder)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130, said(folder)
    return saved_steps(folder)[-1]


def median_ms(records, first=10):
    return statistics.median(r["step_time_ms"] for r in records["train"][first:])


def weights(folder, step):
    return load_model_weights(checkpoint_folder(folder, step))


def assert_memory_and_graphs_stay(folder):
    """What `watched_train_run.py` wrote after each step: nothing new after step 3."""
    watched = [json.loads(line) for line in (folder / "watched.jsonl").open()]
    third, last = watched[2], watched[-1]
    print(f"\nstep 3: {third}\nend:    {last}")
    assert third["reserved_bytes"] == last["reserved_bytes"]
    assert third["graphs"] == last["graphs"]


def test_124m_has_all_its_memory_and_code_after_step_3(data, tmp_path):
    changes = D12 | {"max_steps": 300, "hellaswag": True, "val_every_steps": 100}
    changes |= {"sample_every_steps": 150, "ranges_every_steps": 50, "checkpoint_every_steps": 100}
    records = train(data, tmp_path / "run", watched=True, **changes)
    assert len(records["hellaswag"]) == 3 and len(records["val"]) == 4
    assert_memory_and_graphs_stay(tmp_path / "run")
    step = median_ms(records)
    spent = statistics.median(r["seconds"] for r in records["ranges"][1:]) * 1e3
    print(f"step {step:.1f} ms; ranges {spent:.1f} ms, every 100 steps {spent / step:.2f} %")
    assert spent / (100 * step) < 0.01


def test_1558m_finds_its_micro_batch_saves_beside_training_and_keeps_its_memory(data, tmp_path):
    folder, began = tmp_path / "run", time.monotonic()
    changes = D48 | {"max_steps": 60, "hellaswag": True, "val_every_steps": 30}
    changes |= {"micro_batch": "auto", "ranges_every_steps": 20}
    changes |= {"checkpoint_every_steps": 20, "keep_checkpoints": 1}
    records = train(data, folder, watched=True, **changes)
    tried = re.findall(r"^micro_batch (\d+): (fits|out of memory)$", said(folder), re.MULTILINE)
    print(f"\ntried {tried}, whole run {time.monotonic() - began:.0f} s")
    found = read_json(folder / "micro_batch.json")["micro_batch"]
    assert [int(size) for size, _ in tried][-1] == found and found >= 8
    assert "restart" not in records, "what the trial found fits"
    saves, step = records["checkpoint"], median_ms(records)
    slowest = max(r["step_time_ms"] for r in records["train"][20:30])
    waited = [round(save["training_waited_seconds"], 2) for save in saves]
    took = [round(save["seconds"], 1) for save in saves]
    print(f"saves took {took} s, training waited {waited} s")
    print(f"step {step:.0f} ms, slowest beside a save {slowest:.0f} ms")
    assert max(waited) < 5
    assert_memory_and_graphs_stay(folder)


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=needs_two)])
def test_deterministic_runs_are_equal_bit_by_bit_also_when_stopped(data, tmp_path, gpus):
    changes = D12 | {"max_steps": 60, "val_every_steps": 0, "ranges_every_steps": 0}
    changes |= {"gpus": gpus, "micro_batch": 64 // gpus}
    fast = train(data, tmp_path / "fast", **changes)
    first = train(data, tmp_path / "first", **changes, deterministic=True)
    train(data, tmp_path / "second", **changes, deterministic=True)
    process = start(data, tmp_path / "stopped", **changes, deterministic=True)
    stopped_at = stop_after(process, tmp_path / "stopped", 25)
    train(data, tmp_path / "stopped", **changes, deterministic=True)
    slower = median_ms(first) / median_ms(fast) - 1
    print(
        f"\nstep {median_ms(fast):.1f} ms, deterministic {median_ms(first):.1f} ms: "
        f"{slower:+.1%}; stopped at {stopped_at}"
    )
    expected = weights(tmp_path / "first", 60)
    for other in ("second", "stopped"):
        assert losses(tmp_path / other) == losses(tmp_path / "first"), other
        found = weights(tmp_path / other, 60)
        assert all(torch.equal(found[name], expected[name]) for name in expected), other


def test_out_of_memory_starts_again_with_less_at_a_time(data, tmp_path):
    changes = D12 | {"max_steps": 12, "val_every_steps": 0, "hellaswag": False}
    records = train(data, tmp_path / "run", fault="greedy", **changes)
    (restart,) = records["restart"]
    print(f"\n{restart['reason']}")
    assert restart["reason"] == "out of memory with micro_batch 64, now 32"
    assert len(records["train"]) == 12


@needs_two
def test_two_gpus_survive_a_stop_and_a_killed_process(data, tmp_path):
    import psutil

    changes = D12 | {"gpus": 2, "max_steps": 50, "checkpoint_every_steps": 10, "micro_batch": 32}
    changes |= {"warmup_steps": 700}  # 124m's own
    one = train(data, tmp_path / "one", **changes | {"gpus": 1})
    folder = tmp_path / "two"
    process = start(data, folder, **changes)
    while 10 not in saved_steps(folder):  # it is written while some more steps are taken
        assert process.poll() is None, said(folder)
        time.sleep(0.05)
    psutil.Process(process.pid).children()[1].kill()
    assert process.wait(timeout=200) == 0, said(folder)
    assert re.search(r"was killed by SIGKILL; starting again from step [1-4]0\n", said(folder))
    assert "Watchdog" not in said(folder)
    two = read_metrics(folder / "metrics.jsonl")
    for ours, theirs in zip(two["train"], one["train"], strict=True):
        assert ours["train_loss_nats"] == pytest.approx(theirs["train_loss_nats"], abs=2e-3)
    print(f"\nlast losses {ours['train_loss_nats']:.6f} and {theirs['train_loss_nats']:.6f}")


@needs_two
def test_a_run_goes_on_with_one_gpu_and_with_two_again(data, tmp_path):
    changes = D12 | {"max_steps": 40, "micro_batch": 32, "warmup_steps": 700}  # 124m's own
    whole = train(data, tmp_path / "whole", **changes | {"gpus": 2})["train"]
    folder, stops = tmp_path / "run", []
    for gpus, steps in ((2, 8), (1, 20)):
        process = start(data, folder, **changes | {"gpus": gpus})
        stops.append(stop_after(process, folder, steps))
    found = train(data, folder, **changes | {"gpus": 2})["train"]
    assert [r["batch_hash"] for r in found] == [r["batch_hash"] for r in whole]
    apart = [
        abs(a["train_loss_nats"] - b["train_loss_nats"]) for a, b in zip(found, whole, strict=True)
    ]
    print(f"\nstopped at {stops} on 2 and 1 GPUs: the same batches, losses {max(apart):.1e} apart")
    assert max(apart) < 2e-3
