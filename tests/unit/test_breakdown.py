"""Traces: what counts as a kernel, which phase it belongs to, and that all times add up."""

import csv
import gzip
import json

import pytest
import torch

from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.speed.breakdown import (
    COLLECTIVES,
    Kernel,
    break_down,
    exposed_share,
    kind_of,
    named_layers,
    visible_time,
    write_top_kernels,
)

MAIN, AUTOGRAD = 100, 200  # threads


def span(cat, name, start, end, tid=MAIN, **arguments):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": end - start,
        "tid": tid,
        "args": arguments,
    }


def launch(number, moment, tid=MAIN):
    return span("cuda_runtime", "cudaLaunchKernel", moment, moment + 1, tid, correlation=number)


def gpu(name, number, start, end, cat="kernel"):
    return span(cat, name, start, end, 7, correlation=number)


def write_trace(path, events):
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, file)
    return path


@pytest.fixture
def trace(tmp_path):
    """One step of 1,000 microseconds on a GPU that runs behind the processor that launches."""
    ranges = [
        span("user_annotation", name, start, end)
        for name, start, end in [
            ("step 5", 0, 1000),
            ("data", 0, 10),
            ("forward", 10, 100),
            ("layer 0", 30, 40),
            ("layer 1", 40, 50),
            ("backward", 100, 200),
            ("clip", 200, 220),
            ("optimizer", 220, 240),
        ]
    ]
    launches = [
        launch(1, 15),
        launch(2, 35),
        launch(3, 45),
        launch(4, 80),
        launch(5, 150, tid=AUTOGRAD),
        launch(6, 230),
        launch(7, 5),
        launch(8, 160, tid=AUTOGRAD),
    ]
    kernels = [
        gpu("Memcpy HtoD (Pinned -> Device)", 7, 8, 18, cat="gpu_memcpy"),
        gpu("vectorized_gather_kernel_embedding", 1, 20, 40),
        gpu("nvjet_tst_128x256", 2, 40, 140),
        gpu("cudnn_generated_fort_native_sdpa_sm90", 3, 140, 190),
        gpu("_classifier_kernel", 4, 200, 300),
        gpu("nvjet_tst_256x128", 5, 300, 500),
        gpu("ncclDevKernel_ReduceScatter", 8, 450, 550),
        gpu("multi_tensor_apply_kernel<FusedAdam>", 6, 600, 700),
    ]
    # what the profiler draws over the kernels is none
    markers = [
        span("gpu_user_annotation", "Optimizer.step#AdamW.step", 590, 710, 7),
        span("gpu_user_annotation", "FSDP::post_backward_accumulate", 300, 560, 7),
        span("gpu_user_annotation", "## Call CompiledFxGraph abc ##", 40, 190, 7),
    ]
    before = [launch(9, -60), gpu("nvjet_warm_up", 9, -50, -10)]  # of no profiled step
    events = [*before, *ranges, *launches, *kernels, *markers]
    return write_trace(tmp_path / "trace.json.gz", events)


def milliseconds(table):
    return {name: pytest.approx(1e3 * row["ms"]) for name, row in table.items()}


def test_only_real_kernels_of_the_step_count_each_with_its_kind(trace):
    assert milliseconds(break_down(trace)["kinds"]) == {
        "matrix products": 300,
        "loss": 100,
        "optimizer": 100,
        "attention": 50,
        COLLECTIVES: 50,
        "embedding": 20,
        "copies": 10,
    }


def test_kernels_belong_to_the_phase_in_which_they_were_launched(trace):
    # the backward's launches come from another thread, and all kernels run later than launched
    assert milliseconds(break_down(trace)["phases"]) == {
        "encoder": 20,
        "forward": 150,
        "classifier": 100,
        "backward": 250,
        "optimizer": 100,
        "other": 10,
    }


def test_kinds_and_phases_with_the_idle_time_are_the_step(trace):
    found = break_down(trace)
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["idle_ms"] == pytest.approx(0.37)
    assert found["hidden_ms"] == pytest.approx(0.05)  # the collective behind the product
    for table in (found["kinds"], found["phases"]):
        total = sum(row["ms"] for row in table.values()) + found["idle_ms"]
        assert total == pytest.approx(found["step_ms"])
        assert sum(row["share"] for row in table.values()) == pytest.approx(0.63)


def test_communication_is_exposed_where_nothing_else_is_at_work(trace, tmp_path):
    # half of the reduction's 100 microseconds lie behind a product, half behind nothing
    assert exposed_share(break_down(trace)) == pytest.approx(0.05)
    alone = [span("user_annotation", "step 1", 0, 1000), launch(1, 5), gpu("nvjet", 1, 10, 900)]
    assert exposed_share(break_down(write_trace(tmp_path / "alone.json.gz", alone))) == 0.0


def test_the_top_kernels_are_written_as_csv(trace, tmp_path):
    write_top_kernels(tmp_path / "kernels.csv", break_down(trace)["top_kernels"])
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["kernel"] == "nvjet_tst_256x128"
    assert (rows[0]["kind"], float(rows[0]["ms"])) == ("matrix products", pytest.approx(0.2))
    assert len(rows) == 8


def test_several_steps_are_averaged(tmp_path):
    events = []
    for number, start in enumerate((0, 5000)):
        events += [
            span("user_annotation", f"step {number}", start, start + 1000),
            span("user_annotation", "backward", start, start + 900),
            launch(number, start + 1),
            gpu("nvjet", number, start + 100, start + 500),
        ]
    found = break_down(write_trace(tmp_path / "t.json.gz", events))
    assert found["kinds"]["matrix products"] == {"ms": 0.4, "count": 1.0, "share": 0.4}
    assert found["idle_ms"] == pytest.approx(0.6)


def test_a_trace_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no trace of the trainer"):
        break_down(write_trace(tmp_path / "t.json.gz", [gpu("nvjet", 1, 0, 1)]))


def test_overlapping_kernels_are_not_counted_twice():
    kernels = [
        Kernel("a", 0, 100, ""),
        Kernel("b", 50, 120, ""),
        Kernel("nccl", 90, 200, ""),
        Kernel("c", 150, 160, ""),
        Kernel("nccl", 190, 210, ""),
    ]
    assert visible_time(kernels) == [100, 20, 70, 10, 10]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_mma_128x256x64_2_64x3_2x1_v_bz_bias_TNN", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimizer"),
        ("_add_norm_backward_kernel", "norms"),
        ("_gelu_backward_kernel", "GELU"),
        ("triton_poi_fused_add_1", "compiled"),
        ("Memset (Device)", "copies"),
        ("ncclDevKernel_AllGather_RING_LL", COLLECTIVES),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("aten::_log_softmax", "loss"),
        ("_quantize_rows_kernel", "quantization"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copies"),
        ("triton_per_fused_native_layer_norm_add_0", "norms"),
        ("something new", "other"),
    ],
)
def test_kinds_by_name(kernel, kind):
    assert kind_of(kernel) == kind


def test_ranges_of_layers_change_nothing_and_are_taken_away_again():
    model = GPT(GPTConfig(num_layers=2, num_heads=2, channels=16, sequence_length=8))
    init_weights(model, draw_weights(model.config, seed=1))
    tokens = torch.arange(8)[None]
    expected = model(tokens, tokens)
    calls = [block._compiled_call_impl for block in model.h]
    with named_layers(model), torch.profiler.profile() as profiler:
        torch.testing.assert_close(model(tokens, tokens), expected, rtol=0, atol=0)
    assert [block._compiled_call_impl for block in model.h] == calls
    assert {"layer 0", "layer 1"} <= {event.name for event in profiler.events()}
