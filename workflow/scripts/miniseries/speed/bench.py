"""One row of the bench, in this process: how fast the real trainer's step is on this device."""

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miniseries.data.shards import VOCAB_SIZE, Manifest, load_manifest
from miniseries.evaluation.choices import HELLASWAG_ITEMS, LLMC, Candidate, Question
from miniseries.evaluation.scoring import choice_scores, warm_up
from miniseries.metrics import write_json
from miniseries.model.gpt import GPT
from miniseries.shapes import flops_per_step
from miniseries.speed.breakdown import break_down, record_trace, write_top_kernels
from miniseries.speed.planning import counted_bytes
from miniseries.speed.rows import LADDER
from miniseries.speed.rungs import RungTrainer, missing, missing_for_precision, precision_on
from miniseries.training.assembly import attention_kernels
from miniseries.training.distributed import World, start_world
from miniseries.training.introduction import source_commit
from miniseries.training.memory import collect_garbage_again
from miniseries.training.trainer import Trainer

GIBIBYTE = 1 << 30
UNTIMED_STEPS = 2  # the first compiles, the second still warms up
PROFILED_STEPS = 1
# A CPU does some 1e11 operations a second: a step of more than this takes over a minute and a half
CPU_STEP_FLOPS = 1e13


@dataclass(frozen=True)
class Job:
    """One measurement: a row (see `rows`), on what data, and how long."""

    row: dict[str, Any]
    settings: dict[str, Any]
    manifest: Manifest
    world: World
    steps: int  # timed ones; 0 measures the start alone
    started: float  # when the process began, by `time.time()`
    imported: float  # when all modules were loaded
    profile: Path | None  # folder for trace and table; None takes no profile


def measure(
    row: dict[str, Any],
    manifest: Path,
    output: Path,
    steps: int,
    profile: Path | None,
    started: float,
) -> None:
    """Measure one row in this process, or as one of several, and write the result.

    What the device cannot do, and running out of memory, is a result as well: `not_measured`
    says why. Arguments as in `Job`.
    """
    imported = time.time()
    on_cpu = not torch.cuda.is_available()
    settings = row["settings_on_cpu"] if on_cpu and "settings_on_cpu" in row else row["settings"]
    if row["measure"] == "rung":
        device = torch.device("cpu" if on_cpu else "cuda")
        recipe = settings["recipe"] | {"precision": precision_on(LADDER[row["rung"]], device)}
        settings = settings | {"recipe": recipe}
    processes = int(os.environ.get("WORLD_SIZE", 1))
    result = facts(row, settings, processes)
    reason = not_measurable(row, settings, processes)
    if reason is None:
        world = start_world()
        data = load_manifest(manifest)
        job = Job(row, settings, data, world, steps, started, imported, profile)
        try:
            with attention_kernels(world.device):
                result |= MEASURES[row["measure"]](job) | memory()
        except torch.OutOfMemoryError:
            reason = f"out of memory with {settings['machine']['micro_batch']} sequences at once"
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        write_json(output, result | {"not_measured": reason})


def not_measurable(row: dict[str, Any], settings: dict[str, Any], processes: int) -> str | None:
    """Why this machine cannot measure a row; None if it can. The same on all processes."""
    recipe, found = settings["recipe"], torch.cuda.device_count()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found and processes > found:
        return f"needs {processes} GPUs, this machine has {found}"
    if device.type == "cpu" and flops_per_step(recipe) > CPU_STEP_FLOPS:
        return "needs a GPU"
    if row["measure"] == "huggingface" and processes > 1:
        return "the yardstick is a single process"
    if row["measure"] == "rung":
        return missing(LADDER[row["rung"]], device)
    return missing_for_precision(recipe["precision"], device)


def facts(row: dict[str, Any], settings: dict[str, Any], processes: int) -> dict[str, Any]:
    """What is measured, on what, by which code."""
    on_gpu = torch.cuda.is_available()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {
        "work": settings["run"],
        "measure": row["measure"],
        "rung": row.get("rung"),
        "precision": settings["recipe"]["precision"],
        "micro_batch": settings["machine"]["micro_batch"],
        "recompute": settings["machine"].get("recompute", 0),
        "tokens_per_step": settings["recipe"]["total_batch_tokens"],
        "sequence_length": settings["recipe"]["sequence_length"],
        "processes": processes,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}",
        "commit": source_commit(),
        "versions": versions,
    }


def memory() -> dict[str, float | None]:
    """Peaks of this process's GPU, GiB; None on a CPU."""
    if not torch.cuda.is_available():
        return {"peak_gib": None, "reserved_gib": None}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIBIBYTE,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIBIBYTE,
    }


# ---- steps ----------------------------------------------------------------------------------


def make_trainer(job: Job, folder: Path) -> Trainer:
    """What takes the steps: the real trainer, a rung of the ladder, or the yardstick."""
    arguments = (job.settings, job.manifest, None, folder, job.world)
    if job.row["measure"] == "rung":
        return RungTrainer(LADDER[job.row["rung"]], *arguments)
    if job.row["measure"] == "huggingface":
        from miniseries.speed.yardstick import (
            Yardstick,  # loads transformers, which training does not
        )

        return Yardstick(*arguments)
    return Trainer(*arguments)


class StopWatch:
    """Adds up the time that a function takes."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def compile_counter(group: str, name: str) -> int:
    """A count that torch.compile keeps for this process."""
    return torch._dynamo.utils.counters[group][name]


def has_compiled() -> bool:
    """Whether something was compiled in this process that no cache held."""
    names = ("fxgraph_cache_miss", "fxgraph_cache_bypass")
    return any(compile_counter("inductor", name) for name in names)


def measure_steps(job: Job) -> dict[str, Any]:
    """Take a first step, then the timed ones, then the profiled one.

    Returns:
        first_step_after_seconds from the start of the process, whether something was compiled
        that no cache held, what the start was made of; if steps were timed `speed` of them; with
        a profile `breakdown`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = make_trainer(job, Path(folder))
        built = time.time()
        loss = run.train_step(0, goes_on=True).loss
        ready = time.time()
        result: dict[str, Any] = {
            "micro_batch": run.micro_batch,
            **(run.model.implementations if isinstance(run.model, GPT) else {}),
            "first_step_after_seconds": ready - job.started,
            "was_cold": has_compiled(),
            "start": {
                "import_seconds": job.imported - job.started,
                "build_seconds": built - job.imported,
                "first_step_seconds": ready - built,
            },
            "loss_nats": loss,
        }
        if job.steps:
            result |= time_steps(run, job.steps)
        if job.profile and job.steps:
            result["breakdown"] = profile_step(run, UNTIMED_STEPS + job.steps, job.profile)
        run.journal.close()
    return result


def time_steps(run: Trainer, steps: int) -> dict[str, Any]:
    """Time some steps after the untimed ones, of which the first has been taken.

    Returns:
        Tokens/s (median, p10, p90), MFU by llm.c's formula, p99 by median of the steps' times,
        share of the time in which a step waits for its tokens, compilations after step 3, places
        where the compiler gave up and began anew, loss.
    """
    for step in range(1, UNTIMED_STEPS):
        run.train_step(step, goes_on=True)
    wait = run.loader.micro_batch_at = StopWatch(run.loader.micro_batch_at)
    timed = [run.train_step(UNTIMED_STEPS, goes_on=True)]  # the third step
    graphs = compile_counter("stats", "unique_graphs")
    later = range(UNTIMED_STEPS + 1, UNTIMED_STEPS + steps)
    timed += [run.train_step(step, goes_on=True) for step in later]
    seconds = np.array([report.seconds for report in timed])
    speeds = run.tokens_per_step / seconds
    middle = statistics.median(seconds)
    return {
        "tokens_per_second": {
            "median": run.tokens_per_step / middle,
            "p10": float(np.percentile(speeds, 10)),
            "p90": float(np.percentile(speeds, 90)),
        },
        "step_ms": 1e3 * middle,
        "mfu_percent": run.journal.mfu_percent(run.tokens_per_step / middle),
        "p99_by_median": float(np.percentile(seconds, 99)) / middle,
        "data_wait_share": wait.seconds / float(seconds.sum()),
        "recompiles_after_step_3": compile_counter("stats", "unique_graphs") - graphs,
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "repetitions": steps,
        "loss_nats": timed[-1].loss,
    }


def profile_step(run: Trainer, first: int, folder: Path) -> dict[str, Any] | None:
    """The breakdown of one step, on the main process; every process leaves a trace."""
    rank = run.world.rank
    trace = folder / ("trace.json.gz" if rank == 0 else f"trace.{rank}.json.gz")
    record_trace(run, first, PROFILED_STEPS, trace)
    if rank:
        return None
    found = break_down(trace)
    write_top_kernels(folder / "kernels.csv", found["top_kernels"])
    found["counted_bytes"] = counted_bytes(run.recipe, run.micro_batch, run.world.size)
    return found


# ---- HellaSwag ------------------------------------------------------------------------------


def made_up_questions(count: int, seed: int = 42) -> list[Question]:
    """Questions of random tokens with lengths like HellaSwag's.

    A third stands for its captions of videos, contexts of 15 to 50 tokens and endings of 6 to 25;
    two thirds for its WikiHow articles, 50 to 110 and 15 to 45: an assumption, made to need 192
    positions at the longest.
    """
    random = np.random.RandomState(seed)
    questions = []
    for number in range(count):
        ranges = ((15, 51), (6, 26)) if number % 3 == 0 else ((50, 111), (15, 46))
        context = random.randint(0, VOCAB_SIZE, random.randint(*ranges[0])).tolist()
        candidates = []
        for _ in range(4):
            length = random.randint(*ranges[1])
            ending = random.randint(0, VOCAB_SIZE, length).tolist()
            candidates.append(Candidate(context + ending, length, 4 * length))
        questions.append(Question(int(random.randint(4)), {LLMC: candidates}))
    return questions


def measure_hellaswag(job: Job) -> dict[str, Any]:
    """Seconds to score all questions, after a call that compiles; the weights are fresh ones."""
    questions = made_up_questions(job.row["num_items"] or HELLASWAG_ITEMS)
    with tempfile.TemporaryDirectory() as folder:
        run = make_trainer(job, Path(folder))
        shared: dict[str, Any] = {"micro_batch": run.micro_batch, "device": job.world.device}
        shared |= {"rank": job.world.rank, "world_size": job.world.size}
        begun = time.time()
        warm_up(run.model, questions, **shared)
        ready = time.time()
        collect_garbage_again()
        scores = choice_scores(run.model, questions, **shared)
        seconds = time.time() - ready
        run.journal.close()
    return {
        "micro_batch": run.micro_batch,
        "first_step_after_seconds": ready - job.started,
        "was_cold": has_compiled(),
        "hellaswag_seconds": seconds,
        "first_call_seconds": ready - begun,
        "num_items": scores["num_items"],
        "repetitions": 1,
    }


MEASURES = {
    "step": measure_steps,
    "rung": measure_steps,
    "huggingface": measure_steps,
    "hellaswag": measure_hellaswag,
}
