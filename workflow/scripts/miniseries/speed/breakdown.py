"""Where the time of a step goes: by kind of kernel, by phase of the step, and idle.

PyTorch's profiler writes a trace that also opens in Perfetto; all figures are worked out from that
file. Only what runs on the device counts as a kernel: markers such as `Optimizer.step` or
`FSDP::...`, which the profiler draws on the device's lines too, do not. On a CPU operators take
the place of kernels, each without the operators that it calls.
"""

import contextlib
import csv
import gzip
import io
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from miniseries.metrics import write_text
from miniseries.training.trainer import Trainer

COLLECTIVES = "collectives"
# Kinds by parts of kernels' names, first match wins: cuBLAS calls its Hopper kernels nvjet,
# cuDNN's attention holds "sdpa", Inductor's own begin with triton_, ours are those of kernels.py
KINDS = {
    "loss": ("classifier", "nll_loss", "log_softmax", "cross_entropy", "aten::exp_"),
    "attention": ("sdpa", "fmha", "flash", "attention", "softmax"),
    COLLECTIVES: ("nccl", "gloo", "c10d::"),
    "matrix products": (
        "nvjet", "gemm", "cutlass", "cublas", "xmma", "splitK", "s16816", "scaled_mm",
        "aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear",
    ),
    "GELU": ("gelu",),
    "norms": ("norm_kernel", "norm_backward", "layer_norm"),
    "optimizer": ("multi_tensor_apply", "adam", "_foreach", "vector_norm"),
    "embedding": ("embedding", "indexSelect", "index_select"),
    "sums": ("reduce_kernel", "aten::sum"),
    "quantization": ("quantize",),
    "copies": (
        "copy", "Copy", "emcpy", "emset", "CatArray", "aten::cat", "fused_cat", "fill", "zero_",
    ),
    "compiled": ("triton_",),
    "elementwise": ("elementwise", "Functor", "aten::add", "aten::mul", "aten::div"),
}  # fmt: skip
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
# Phases in the order of a step. The forward of the head makes its gradients, too: they belong to
# the classifier, as in llm.c's profile. `other` is what no range of the trainer covers.
PHASES = ("encoder", "forward", "classifier", "backward", "optimizer", "other")
RANGES = {"data": "other", "backward": "backward", "clip": "optimizer", "optimizer": "optimizer"}
NUM_TOP = 20
Event = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel; start and end in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    phase: str

    @property
    def kind(self) -> str:
        """The kind, by name."""
        return kind_of(self.name)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name; "other" when no part of it is known."""
    for kind, parts in KINDS.items():
        if any(part in kernel for part in parts):
            return kind
    return "other"


# ---- recording ------------------------------------------------------------------------------


@contextlib.contextmanager
def named_layers(model: nn.Module) -> Iterator[None]:
    """Give each layer's forward call a range of its own; compiled code stays as it is.

    The yardstick's layers, which have another name, get none.
    """

    def in_range(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*arguments: Any) -> Any:
            with record_function(name):
                return call(*arguments)

        return named

    blocks = list(getattr(model, "h", ()))
    before = [block._compiled_call_impl for block in blocks]
    for number, block in enumerate(blocks):
        # what nn.Module calls in place of `_call_impl`: outside of the compiled code
        call = block._compiled_call_impl or block._call_impl
        block._compiled_call_impl = in_range(f"layer {number}", call)
    try:
        yield
    finally:
        for block, call in zip(blocks, before, strict=True):
            block._compiled_call_impl = call


def record_trace(run: Trainer, first: int, steps: int, trace: Path) -> None:
    """Profile `steps` steps from step `first` on, after one that warms the profiler up.

    Args:
        trace: .json or .json.gz; https://ui.perfetto.dev opens both.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    trace.parent.mkdir(parents=True, exist_ok=True)
    with (
        named_layers(run.model),
        profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler,
    ):
        for step in range(first, first + steps + 1):
            with record_function(f"step {step}"):
                run.train_step(step, goes_on=True)
            profiler.step()


# ---- reading --------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Event]:
    """Events of a trace that have a duration."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return [event for event in json.loads(content)["traceEvents"] if event.get("ph") == "X"]


class Timeline:
    """The trainer's ranges on the processor's clock: which phase of the step a moment belongs to.

    Backward runs on a thread of its own while the main one waits inside its range `backward`, so
    time alone tells the phase of what any thread launches.
    """

    def __init__(self, events: list[Event]) -> None:
        ranges = [e for e in events if e.get("cat") == "user_annotation"]
        self.steps = _spans(e for e in ranges if e["name"].startswith("step "))
        self.layers = _spans(e for e in ranges if e["name"].startswith("layer "))
        named = [e for e in ranges if e["name"] in RANGES or e["name"] == "forward"]
        self.named = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in named)
        self._starts = [start for start, _, _ in self.named]

    def phase(self, moment: float) -> str:
        """Phase that the processor was in."""
        place = bisect_right(self._starts, moment) - 1
        if place < 0 or moment > self.named[place][1]:
            return "other"
        start, end, name = self.named[place]
        if name != "forward":
            return RANGES[name]
        layers = [span for span in self.layers if start <= span[0] <= end]
        if not layers:
            return "forward"
        if moment < layers[0][0]:
            return "encoder"
        return "classifier" if moment > layers[-1][1] else "forward"

    def is_inside(self, start: float) -> bool:
        """Whether the moment lies in one of the profiled steps."""
        return any(first <= start <= last for first, last in self.steps)


def _spans(events: Iterator[Event]) -> list[tuple[float, float]]:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events)


def device_kernels(events: list[Event], timeline: Timeline) -> list[Kernel]:
    """What ran on the GPU in the profiled steps, each with the phase in which it was launched."""
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    kernels = []
    phases: dict[float, str] = {}
    for event in events:
        if event.get("cat") not in ON_GPU or not timeline.is_inside(event["ts"]):
            continue
        moment = launched.get(event["args"].get("correlation"))
        if moment not in phases:
            phases[moment] = "other" if moment is None else timeline.phase(moment)
        end = event["ts"] + event["dur"]
        kernels.append(Kernel(event["name"], event["ts"], end, phases[moment]))
    return kernels


def processor_kernels(events: list[Event], timeline: Timeline) -> list[Kernel]:
    """Operators on the CPU, each cut into the pieces in which it calls no other operator."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and timeline.is_inside(event["ts"]):
            threads[event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    pieces = []
    for operators in threads.values():
        open_ones: list[list] = []  # [end, name, where its next piece starts]
        for start, minus_duration, name in [*sorted(operators), (float("inf"), 0.0, "")]:
            while open_ones and open_ones[-1][0] <= start:
                end, closed, since = open_ones.pop()
                pieces.append((closed, since, end))
                if open_ones:
                    open_ones[-1][2] = end
            if open_ones:
                pieces.append((open_ones[-1][1], open_ones[-1][2], start))
            open_ones.append([start - minus_duration, name, start])
    return [
        Kernel(name, start, end, timeline.phase(start))
        for name, start, end in pieces
        if end > start
    ]


# ---- figures --------------------------------------------------------------------------------


def visible_time(kernels: list[Kernel]) -> list[float]:
    """Microseconds of each kernel in which it, and none before it in line, occupies the device.

    The sum is the time in which the device is busy. Collectives stand last in line: what they
    do while something computes is hidden and costs nothing.
    """
    visible = [0.0] * len(kernels)
    order = sorted(range(len(kernels)), key=lambda i: kernels[i].start)
    spans: list[list[float]] = []  # busy with computing
    for i in order:
        kernel = kernels[i]
        if kernel.kind == COLLECTIVES:
            continue
        if spans and kernel.start <= spans[-1][1]:
            visible[i] = max(0.0, kernel.end - spans[-1][1])
            spans[-1][1] = max(spans[-1][1], kernel.end)
        else:
            visible[i] = kernel.end - kernel.start
            spans.append([kernel.start, kernel.end])
    done = float("-inf")
    starts = [start for start, _ in spans]
    for i in order:
        kernel = kernels[i]
        if kernel.kind != COLLECTIVES:
            continue
        start = max(kernel.start, done)
        visible[i] = max(0.0, kernel.end - start)
        for place in range(max(0, bisect_right(starts, start) - 1), len(spans)):
            if spans[place][0] >= kernel.end:
                break
            visible[i] -= max(0.0, min(spans[place][1], kernel.end) - max(spans[place][0], start))
        visible[i] = max(0.0, visible[i])
        done = max(done, kernel.end)
    return visible


def break_down(trace: Path) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel and by phase, each with the idle time adding up.

    Returns:
        step_ms; idle_ms, in which the device does nothing; hidden_ms, collectives behind other
        kernels; kinds and phases: name -> ms, share of the step, number of kernels a step;
        top_kernels: the NUM_TOP that take longest, with name, kind, and the same figures.

    Raises:
        ValueError: the trace holds no step of the trainer.
    """
    events = read_trace(trace)
    timeline = Timeline(events)
    num_steps = len(timeline.steps)
    if not num_steps:
        raise ValueError(f"{trace}: holds no range named `step`; it is no trace of the trainer")
    step_ms = sum(end - start for start, end in timeline.steps) / 1e3 / num_steps
    kernels = device_kernels(events, timeline) or processor_kernels(events, timeline)
    visible = visible_time(kernels)

    def table(key: Callable[[Kernel], str]) -> dict[str, dict[str, float]]:
        rows: dict[str, dict[str, float]] = {}
        for kernel, time in zip(kernels, visible, strict=True):
            row = rows.setdefault(key(kernel), {"ms": 0.0, "share": 0.0, "count": 0.0})
            row["ms"] += time / 1e3 / num_steps
            row["count"] += 1 / num_steps
        for row in rows.values():
            row["share"] = row["ms"] / step_ms
        return dict(sorted(rows.items(), key=lambda item: -item[1]["ms"]))

    by_phase, by_name = table(lambda k: k.phase), table(lambda k: k.name)
    whole = sum(k.end - k.start for k in kernels if k.kind == COLLECTIVES)
    seen = sum(t for k, t in zip(kernels, visible, strict=True) if k.kind == COLLECTIVES)
    top = [{"kernel": n, "kind": kind_of(n), **row} for n, row in by_name.items()][:NUM_TOP]
    return {
        "step_ms": step_ms,
        "idle_ms": step_ms - sum(visible) / 1e3 / num_steps,
        "hidden_ms": (whole - seen) / 1e3 / num_steps,
        "kinds": table(lambda k: k.kind),
        "phases": {name: by_phase[name] for name in PHASES if name in by_phase},
        "top_kernels": top,
    }


def exposed_share(found: dict[str, Any]) -> float:
    """Share of a step in which collectives alone are at work: the communication that costs time.

    Args:
        found: by `break_down`.
    """
    return found["kinds"].get(COLLECTIVES, {"share": 0.0})["share"]


def write_top_kernels(path: Path, kernels: list[dict[str, Any]]) -> None:
    """The kernels that take longest, as CSV: ms, share and count are those of one step."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["kernel", "kind", "ms", "share", "count"])
    writer.writeheader()
    writer.writerows(kernels)
    write_text(path, text.getvalue())
