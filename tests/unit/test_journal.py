import time
from dataclasses import replace

import pytest
import torch

from miniseries.metrics import read_metrics
from miniseries.model.gpt import GPT, GPTConfig
from miniseries.training import memory
from miniseries.training.journal import Journal, StepReport
from miniseries.training.optimizer import make_optimizer

MIB = 1 << 20


def make_journal(folder, **changes):
    values = {"is_main": True, "first_step": 0, "max_steps": 1000, "tokens_per_step": 100}
    values |= {"tokens_per_epoch": 1000, "flops_per_token": 6.0, "peak_flops": None}
    return Journal(folder, **(values | changes))


def test_the_time_left_counts_the_evaluations_and_saves_to_come(tmp_path):
    journal = make_journal(tmp_path)
    assert journal.seconds_left(100, 2.0) == 1800
    journal.pauses = {"evaluation": (250, 60.0), "sample": (0, 7.0), "save": (300, 10.0)}
    # evaluations at 250, 500, 750, 1000; a sample at the end; saves at 300, 600, 900, 1000
    assert journal.seconds_left(100, 2.0) == 1800 + 4 * 60 + 7 + 4 * 10
    assert journal.seconds_left(250, 2.0) == 1500 + 3 * 60 + 7 + 4 * 10
    assert journal.seconds_left(999, 2.0) == 2 + 60 + 7 + 10


def test_the_time_left_is_right_within_5_percent_after_100_steps(tmp_path):
    """A run of 1,000 steps of 1 ms with an evaluation of 20 ms every 100, on a clock of its own."""
    journal = make_journal(tmp_path)
    clock, ends = 0.0, []
    for step in range(1000):
        if step % 100 == 0:
            clock += 0.020
            journal.pauses["evaluation"] = (100, 0.020)
        clock += 0.001
        ends.append(clock + journal.seconds_left(step + 1, 0.001))
    clock += 0.020
    assert all(end == pytest.approx(clock, rel=0.05) for end in ends[100:])


def test_mfu_is_llm_c_s_and_never_a_guess(tmp_path):
    # llm.c's 1558M run: 2,750 ms for 1,048,576 tokens on 8 H100 of 988.8 TFLOP/s are 47.3 %
    flops = 6 * 1_557_686_400 + 6 * 48 * 1600 * 1024
    known = make_journal(tmp_path, flops_per_token=flops, peak_flops=8 * 988.8e12)
    assert known.mfu_percent(1_048_576 / 2.75) == pytest.approx(47.3, abs=0.05)
    assert make_journal(tmp_path).mfu_percent(1e6) is None


def test_the_first_step_of_a_start_which_compiles_is_not_in_the_smoothed_speed(tmp_path, capsys):
    journal = make_journal(tmp_path, first_step=7)
    for step, seconds in ((7, 10.0), (8, 0.1)):
        journal.step(StepReport(step, step, 3.0, 1.0, 0.0, 0.0, 1e-3, seconds, False, None, "00"))
    speeds = [line.rpartition("| ")[2] for line in capsys.readouterr().out.splitlines()]
    assert speeds == ["10 tok/s", "1000 tok/s"]


def test_a_pause_is_measured(tmp_path):
    journal = make_journal(tmp_path)
    with journal.pausing("save", 50):
        time.sleep(0.05)
    every, seconds = journal.pauses["save"]
    assert every == 50 and 0.05 <= seconds < 5


def test_batches_that_were_left_out_count_as_epochs_and_not_as_tokens_seen(tmp_path, capsys):
    journal = make_journal(tmp_path, first_step=7)  # ten batches are an epoch
    report = StepReport(7, 7, 3.0, 1.0, 0.0, 0.0, 1e-3, 0.1, False, None, "00")
    journal.step(report)
    assert "have been read" not in capsys.readouterr().out
    journal.step(replace(report, step=8, batch=25))  # after going back from step 10 or so
    assert "the training tokens have been read 2.60 times" in capsys.readouterr().out
    journal.step(replace(report, step=9, batch=26))
    assert "have been read" not in capsys.readouterr().out
    records = read_metrics(tmp_path / "metrics.jsonl")["train"]
    assert [(r["epoch"], r["tokens_seen"]) for r in records] == [
        (0.8, 800),
        (2.6, 900),
        (2.7, 1000),
    ]
    journal.start(val_tokens=1, batches_skipped=17)
    assert "the run reads 101.70 epochs" in capsys.readouterr().out


def test_what_no_buffer_explains_of_a_gpu_s_memory_is_the_activations(monkeypatch):
    monkeypatch.setattr(memory, "peak", lambda _device: {"peak": 100.0, "reserved": 120.0})
    kept = {"parameters": 20.0, "master_copy": 40.0, "weights_without_master_copy": None}
    found = memory.report(kept, torch.device("cuda"))
    assert found == kept | {"activations": 40.0, "peak": 100.0, "reserved": 120.0}


def test_buffers_are_those_of_the_model_and_the_optimizer(tmp_path, capsys):
    model = GPT(GPTConfig(2, 2, 64, 32))
    num_elements = sum(p.numel() for p in model.parameters())
    found = memory.buffers(model, make_optimizer(model, 0.1), "bf16")
    assert found["parameters"] * MIB == 2 * num_elements
    for name in ("gradients", "adamw_m", "adamw_v", "master_copy"):
        assert found[name] * MIB == 4 * num_elements, name
    rounded = model.bfloat16()
    less = memory.buffers(rounded, make_optimizer(rounded, 0.1), "bf16")
    assert less["master_copy"] is None
    saved = sum(v or 0 for v in found.values()) - sum(v or 0 for v in less.values())
    assert saved * MIB == 4 * num_elements  # 2 of the weights, 2 of the gradients
    plain = GPT(GPTConfig(2, 2, 64, 32))
    fp32 = memory.buffers(plain, make_optimizer(plain, 0.1), "fp32")
    assert fp32["master_copy"] is None, "they are what is computed with, cut in parts"
    assert fp32["weights_without_master_copy"] == fp32["parameters"] == 2 * found["parameters"]
    journal = make_journal(tmp_path)
    split = {"processes": 1, "micro_batch": 4, "sequence_length": 32, "grad_accum_steps": 2}
    journal.sizes(num_elements=num_elements, buffers=found, **split)
    journal.memory(0, memory.report(found, torch.device("cpu")))
    said = capsys.readouterr().out
    assert f"num_parameters: {num_elements} => bytes: {2 * num_elements}" in said
    assert "allocating 13 MiB for AdamW optimizer state m" in said
    assert "allocating 13 MiB for master copy of params" in said
    (record,) = read_metrics(tmp_path / "metrics.jsonl")["memory"]
    assert record["peak_mib"] > 13 and record["activations_mib"] is None
    assert record["adamw_v_mib"] == pytest.approx(4 * num_elements / MIB)
