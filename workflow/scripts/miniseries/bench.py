"""How fast the real trainer's step is on this device, and what its time is made of."""

import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from miniseries.distributed import start_world
from miniseries.metrics import read_json, write_json
from miniseries.shards import load_manifest
from miniseries.trainer import Trainer, attention_kernels

GIBIBYTE = 1 << 30
# Kinds of kernels by parts of their names, first match wins: cuBLAS calls its Hopper kernels
# nvjet, cuDNN's attention holds "sdpa", Inductor's own begin with triton
KINDS = {
    "attention": ("sdpa", "fmha", "flash", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas", "xmma", "splitK", "s16816"),
    "collectives": ("nccl",),
    "optimizer": ("multi_tensor_apply", "adam"),
    "compiled": ("triton",),
    "copies": ("copy", "memcpy", "Memcpy", "cat", "fill", "Memset", "direct_copy", "split"),
}


def kind_of(kernel: str) -> str:
    """The kind of a GPU kernel by its name; "other" when no part of it is known."""
    for kind, parts in KINDS.items():
        if any(part in kernel for part in parts):
            return kind
    return "other"


def measure(
    settings: dict[str, Any], manifest: Path, steps: int, started: float, profiled_steps: int = 0
) -> dict[str, Any]:
    """Train a few steps and time each; the first two are left out of the figures.

    Args:
        settings: of a run, as the trainer takes them.
        started: when the process began, by `time.time()`; the start is measured from there.
        profiled_steps: steps to run again under the profiler, for the breakdown.

    Returns:
        Speed (tokens/s: median, p10, p90), MFU, memory, seconds to the first step, final loss;
        with a profile the milliseconds a step of each kind of kernel and of the top kernels.
    """
    world = start_world()
    on_gpu = world.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder, attention_kernels(world.device):
        run = Trainer(settings, load_manifest(manifest), None, Path(folder), world)
        reports = [run.train_step(0)]
        to_first_step = time.time() - started
        reports += [run.train_step(step) for step in range(1, steps)]
        speeds = [run.tokens_per_step / report.seconds for report in reports[2:]]
        deciles = statistics.quantiles(speeds, n=10)
        median = statistics.median(speeds)
        result = {
            "run": settings["run"],
            "precision": settings["recipe"]["precision"],
            "tokens_per_step": run.tokens_per_step,
            "micro_batch": run.micro_batch,
            "processes": world.size,
            "tokens_per_second": {"median": median, "p10": deciles[0], "p90": deciles[-1]},
            "mfu_percent": run.journal.mfu_percent(median),
            "peak_gib": torch.cuda.max_memory_allocated() / GIBIBYTE if on_gpu else None,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIBIBYTE if on_gpu else None,
            "seconds_to_first_step": to_first_step,
            "repetitions": len(speeds),
            "final_loss_nats": reports[-1].loss,
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        if profiled_steps and on_gpu:
            result |= breakdown(run, steps, profiled_steps)
        run.journal.close()
    dist.destroy_process_group()
    return result


def breakdown(run: Trainer, first: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step that the device spends in each kind of kernel, and in the top ones."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for step in range(first, first + steps):
            run.train_step(step)
    kinds: dict[str, float] = defaultdict(float)
    kernels = []
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA or not event.self_device_time_total:
            continue
        milliseconds = event.self_device_time_total / 1e3 / steps
        kinds[kind_of(event.key)] += milliseconds
        kernels.append((milliseconds, event.count / steps, event.key))
    top = [
        {"milliseconds": ms, "count": count, "kind": kind_of(name), "kernel": name[:160]}
        for ms, count, name in sorted(kernels, reverse=True)[:40]
    ]
    by_kind = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return {"milliseconds_by_kind": by_kind, "top_kernels": top}


def bench(
    settings: Path, manifest: Path, output: Path, steps: int, profiled_steps: int, started: float
) -> None:
    """Measure one run's step and write the result."""
    result = measure(read_json(settings), manifest, steps, started, profiled_steps)
    if os.environ.get("RANK", "0") != "0":
        return
    write_json(output, result)
    speed = result["tokens_per_second"]
    print(
        f"{result['run']}: {speed['median']:.0f} tok/s (p10 {speed['p10']:.0f}, p90 "
        f"{speed['p90']:.0f}), peak {result['peak_gib'] or 0:.1f} GiB, first step after "
        f"{result['seconds_to_first_step']:.1f} s"
    )
