"""What the records of a reference run say: speed, memory, equality after a stop, and the aims."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from miniseries.markdown import markdown_table, number
from miniseries.metrics import read_metrics
from miniseries.shapes import num_elements
from miniseries.speed.bench import UNTIMED_STEPS
from miniseries.speed.comparison import is_ours
from miniseries.speed.legs import DONE, FAILED, Record
from miniseries.speed.tables import gib, percent, share

MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
# The aims of a run on one node, for each of its NODE_GPUS GPUs so that fewer can be judged: llm.c
# takes 24 hours at 381,400 tokens/s on eight H100 (its discussion 677)
NODE_GPUS = 8
AIMS = {"1558m": {"tokens_per_second": 450_000 / NODE_GPUS, "gpu_hours": 20.7 * NODE_GPUS}}
LARGE_SCALING, SMALL_SCALING = 0.97, 0.95  # of the speed of one GPU, for each of several
MAX_P99_BY_MEDIAN = 1.05
MAX_EXPOSED = 0.05  # share of a step in which only collectives are at work
MAX_LOSS_DIFFERENCE = 2e-3  # nats, of equal batches on another number of processes
SHARDED = ("adamw_m", "adamw_v", "master_copy")  # buffers that ZeRO-1 cuts by the processes
SHARD_TOLERANCE = 0.01  # rows do not always divide by the processes
# What a run's start says about itself that a row of `benchmarks/` needs, too
START_KEYS = ("tokens_per_step", "micro_batch", "grad_accum_steps", "world_size", "versions")
START_KEYS += ("attention", "mlp")


# ---- figures of one run ---------------------------------------------------------------------


def speed_figures(folder: Path, recipe: Record, gpus: int, price: float | None) -> Record:
    """Speed and memory of a run that was started once, from its `metrics.jsonl`.

    Args:
        folder: the run's.
        recipe: of the real run, whose hours and dollars are wanted.
        price: dollars an hour of one GPU; None where none is configured.

    Returns:
        tokens/s and MFU (medians of the steps after UNTIMED_STEPS), p99 by median of their times,
        MiB of rank 0's buffers and peak, hours and dollars of the real run's tokens, last scores.
    """
    records = read_metrics(folder / "metrics.jsonl")
    steps = records.get("train", [])
    found: Record = {"num_steps": len(steps), "tokens_per_second": None}
    timed = [record for record in steps if record["step"] >= UNTIMED_STEPS]
    if timed:
        found |= _of_steps(timed)
        tokens = recipe["total_batch_tokens"] * recipe["max_steps"]
        found["hours"] = tokens / found["tokens_per_second"] / 3600
        found["dollars"] = None if price is None else price * gpus * found["hours"]
    for start in records.get("start", [])[-1:]:
        found |= {key: start[key] for key in START_KEYS}
    for memory in records.get("memory", [])[-1:]:
        found["memory_mib"] = {
            name.removesuffix("_mib"): mib for name, mib in memory.items() if name.endswith("_mib")
        }
    for kind in ("val", "hellaswag"):
        found[kind] = next(iter(records.get(kind, [])[-1:]), None)
    return found


def _of_steps(timed: list[Record]) -> Record:
    milliseconds = [record["step_time_ms"] for record in timed]
    speeds = [record["tokens_per_second"] for record in timed]
    middle = statistics.median(milliseconds)
    mfu = [r["mfu_percent"] for r in timed if r["mfu_percent"] is not None]
    return {
        "tokens_per_second": statistics.median(speeds),
        "step_ms": middle,
        "p99_by_median": float(np.percentile(milliseconds, 99)) / middle,
        "mfu_percent": statistics.median(mfu) if mfu else None,
        "tokens_per_second_p10": float(np.percentile(speeds, 10)),
        "tokens_per_second_p90": float(np.percentile(speeds, 90)),
        "num_timed": len(timed),
    }


def one_gpu_speed(rows: Sequence[Record], work: str, device: str, precision: str) -> float | None:
    """The fastest tokens/s of one GPU among the rows of `benchmarks/`; None if there is none."""
    speeds = [
        row["tokens_per_second"]["median"]
        for row in rows
        if is_ours(row)
        and (row["work"], row["measure"], row["device"]) == (work, "step", device)
        and (row["precision"], row["processes"]) == (precision, 1)
    ]
    return max(speeds, default=None)


def bench_row(
    leg: Record, work: str, precision: str, sequence_length: int, recompute: int
) -> Record:
    """A leg's speed as a row of `benchmarks/<device>.json`, as `snakemake bench` writes them."""
    memory, speed = leg["memory_mib"], leg["tokens_per_second"]
    spread = {"p10": leg["tokens_per_second_p10"], "p90": leg["tokens_per_second_p90"]}
    versions = leg["versions"]
    return {
        "work": work,
        "measure": "step",
        "precision": precision,
        "micro_batch": leg["micro_batch"],
        "recompute": recompute,
        "tokens_per_step": leg["tokens_per_step"],
        "sequence_length": sequence_length,
        "processes": leg["world_size"],
        "commit": versions["commit"],
        "versions": {key: versions[key] for key in ("python", "torch")},
        "attention": leg["attention"],
        "mlp": leg["mlp"],
        "tokens_per_second": {"median": speed} | spread,
        "step_ms": leg["step_ms"],
        "mfu_percent": leg["mfu_percent"],
        "p99_by_median": leg["p99_by_median"],
        "peak_gib": memory["peak"] * MEBIBYTE / GIBIBYTE,
        "reserved_gib": None if memory["reserved"] is None else memory["reserved"] / 1024,
        "seconds_to_first_step": {"cold": None, "warm": None},
        "repetitions": leg["num_timed"],
        "not_measured": None,
    }


# ---- equality -------------------------------------------------------------------------------


def compare_steps(unbroken: Path, broken: Path) -> list[Record]:
    """Each start of the broken run against the same steps of the unbroken one.

    Args:
        unbroken, broken: folders of two runs of the same recipe.

    Returns:
        By start: its first step, number of processes, number of steps that both runs did, first
        step of other token ids (None if there is none), and the largest difference of losses,
        nats (None without a step).
    """
    whole = {r["step"]: r for r in read_metrics(unbroken / "metrics.jsonl").get("train", [])}
    records = read_metrics(broken / "metrics.jsonl")
    starts = records.get("start", [])
    ends = [start["step"] for start in starts[1:]] + [None]
    found = []
    for start, end in zip(starts, ends, strict=True):
        pairs = [
            (record, whole[record["step"]])
            for record in records.get("train", [])
            if record["step"] >= start["step"]
            and (end is None or record["step"] < end)
            and record["step"] in whole
        ]
        other = [a["step"] for a, b in pairs if a["batch_hash"] != b["batch_hash"]]
        found.append(
            {
                "first_step": start["step"],
                "processes": start["world_size"],
                "num_steps": len(pairs),
                "first_step_of_other_tokens": min(other, default=None),
                "largest_loss_difference": max(loss_differences(pairs), default=None),
            }
        )
    return found


def loss_differences(pairs: Sequence[tuple[Record, Record]]) -> list[float]:
    """How far two runs' losses of one step are apart, nats."""
    return [abs(a["train_loss_nats"] - b["train_loss_nats"]) for a, b in pairs]


# ---- the aims -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One aim: what was wanted, what was found, and whether that is enough."""

    aim: str
    wanted: str
    found: str
    is_met: bool | None  # None: not measured, and `found` says why

    @property
    def word(self) -> str:
        """In one or two words."""
        return {True: "met", False: "not met", None: "not run"}[self.is_met]

    def record(self) -> Record:
        """As JSON."""
        return asdict(self) | {"verdict": self.word}


def verdicts(result: Record) -> list[Verdict]:
    """Each aim, judged by what `reference.json` holds."""
    legs = result["legs"]
    return [
        *_speed_verdicts(result, "large", LARGE_SCALING),
        *_large_verdicts(result),
        _exposed_verdict(result),
        *_equality_verdicts(legs),
        *_speed_verdicts(result, "small", SMALL_SCALING),
        *_cleanliness_verdicts(legs),
    ]


def _judge(
    leg: Record, aim: str, wanted: str, found: tuple[str, bool] | None, otherwise: str = "no figure"
) -> Verdict:
    """A verdict by what was found and whether that is enough; without it by what became of the leg.

    Args:
        otherwise: why nothing was found although the leg is done.
    """
    if found is not None:
        return Verdict(aim, wanted, *found)
    is_met = False if leg["state"] == FAILED else None
    return Verdict(aim, wanted, leg["reason"] or otherwise, is_met)


def _speed_verdicts(result: Record, size: str, scaling: float) -> Iterator[Verdict]:
    """Tokens/s against the floor, where there is one, and against one GPU.

    Args:
        size: large or small.
    """
    run, gpus, leg = result[size], result["gpus"], result["legs"][size]
    speed, alone = leg.get("tokens_per_second"), result["one_gpu"][run]
    if run in AIMS:
        floor = AIMS[run]["tokens_per_second"] * gpus
        found = (f"{speed:,.0f} tokens/s", speed >= floor) if speed else None
        yield _judge(leg, f"{run}: speed", f">= {floor:,.0f} tokens/s", found)
    wanted = f">= {scaling * gpus:.2f} x {number(alone)} tokens/s"
    found = None
    if speed and alone:
        found = (f"{speed / alone:.2f} x", speed >= scaling * gpus * alone)
    work = f"{run}, {result[f'{size}_precision']}, {result['device']}"
    nothing = f"no row of one GPU in benchmarks/ ({work})"
    yield _judge(leg, f"{run}: speed against one GPU", wanted, found, nothing)


def _large_verdicts(result: Record) -> Iterator[Verdict]:
    """Steadiness, sharding, and hours of the large run."""
    run, gpus, leg = result["large"], result["gpus"], result["legs"]["large"]
    ratio, memory, hours = (leg.get(key) for key in ("p99_by_median", "memory_mib", "hours"))
    found = (f"{ratio:.3f}", ratio < MAX_P99_BY_MEDIAN) if ratio else None
    aim = f"{run}: p99 / median of the step time"
    yield _judge(leg, aim, f"< {MAX_P99_BY_MEDIAN}", found)
    expected, found = result["shard_mib"], None
    if memory:
        sizes = [memory[name] for name in SHARDED if memory[name] is not None]
        cells = ", ".join(f"{size:,.1f}" for size in sizes)
        is_met = all(abs(size / expected - 1) < SHARD_TOLERANCE for size in sizes)
        found = (f"{cells} MiB (peak {peak(leg)})", is_met)
    aim = f"{run}: m, v, master of each process"
    yield _judge(leg, aim, f"{expected:,.1f} MiB each", found)
    if run in AIMS:
        limit = AIMS[run]["gpu_hours"] / gpus
        found = (f"{hours:.1f} hours, {dollars(leg)}", hours <= limit) if hours else None
        yield _judge(leg, f"{run}: the whole run", f"<= {limit:.1f} hours", found)


def _exposed_verdict(result: Record) -> Verdict:
    leg = result["legs"]["profile"]
    exposed, found = leg.get("exposed_share"), None
    if exposed is not None and result["gpus"] > 1:
        found = (share(exposed, 2), exposed < MAX_EXPOSED)
    aim = "communication that hides behind nothing"
    return _judge(leg, aim, f"< {100 * MAX_EXPOSED:.0f} % of a step", found, "one GPU has none")


def _equality_verdicts(legs: Record) -> Iterator[Verdict]:
    """Token ids and losses after each resumption, by the comparison that its leg made."""
    for name, title in (("resumed", "stopped, resumed"), ("halved", "resumed on half the GPUs")):
        leg, ids, losses = legs[name], None, None
        steps = [part for part in leg.get("compared", []) if part["num_steps"]]
        if steps and leg["state"] == DONE:
            count = sum(part["num_steps"] for part in steps)
            other = [part["first_step_of_other_tokens"] for part in steps]
            other = [step for step in other if step is not None]
            text = f"others from step {min(other)} on" if other else f"the same in {count} steps"
            ids = (text, not other)
            worst = max(part["largest_loss_difference"] for part in steps)
            losses = (f"{worst:.2e} nats at most", worst <= MAX_LOSS_DIFFERENCE)
        nothing = "no step in common"
        yield _judge(leg, f"{title}: token ids", "those of an unbroken run", ids, nothing)
        yield _judge(leg, f"{title}: losses", f"within {MAX_LOSS_DIFFERENCE} nats", losses, nothing)


def _cleanliness_verdicts(legs: Record) -> Iterator[Verdict]:
    """Nothing left behind, and no word of NCCL's watchdog, in all legs that began."""
    began = [leg for leg in legs.values() if leg["seconds"]]
    keys = {"processes left behind": "leftovers", "lines of NCCL's watchdog": "watchdog"}
    for aim, key in keys.items():
        lines = [line for leg in began for line in leg[key]]
        text = f"{len(lines)} in {len(began)} legs" + (f": {lines[0][:80]}" if lines else "")
        yield Verdict(aim, "none", text, not lines if began else None)


# ---- as text --------------------------------------------------------------------------------


def peak(leg: Record) -> str:
    """Peak of allocated memory of rank 0."""
    memory = leg.get("memory_mib")
    return gib(memory["peak"] * MEBIBYTE / GIBIBYTE if memory else None)


def dollars(leg: Record) -> str:
    """Price of the whole run."""
    if "dollars" not in leg:
        return "n/a"
    return "no price configured" if leg["dollars"] is None else f"$ {leg['dollars']:,.0f}"


def shard_mib(recipe: Record, gpus: int) -> float:
    """MiB of one process's part of an fp32 copy of all parameters, padding included."""
    return 4 * num_elements(recipe) / gpus / MEBIBYTE


def notes(result: Record) -> Iterator[str]:
    """What the tables have no room for, a sentence each."""
    large, second = result["legs"]["large"], result["legs"][result["second_precision"]]
    val, items = large.get("val"), large.get("hellaswag")
    if val and items:
        yield (
            f"After {val['step']} steps of {result['large']}: validation loss "
            f"{val['val_loss_nats']:.4f}, {items['num_correct']} of {items['num_items']} questions "
            f"right, by {large['world_size']} processes together."
        )
    legs = result["legs"].items()
    stops = [
        f"{name} at step {leg['stopped_at']} ({leg['seconds_to_stop']:.1f} s until all was over)"
        for name, leg in legs
        if "stopped_at" in leg
    ]
    if stops:
        yield f"Stopped by TERM: {', '.join(stops)}."
    if second.get("largest_loss_difference") is not None:
        yield (
            f"{result['second_precision']}: losses within {second['largest_loss_difference']:.2e} "
            f"nats of {result['large_precision']}'s, {second['num_steps']} steps; at the last one "
            f"{second['last_loss_difference']:.2e} apart."
        )


def result_text(result: Record) -> str:
    """The result as Markdown: what was measured, each leg, and each aim."""
    legs = [
        {
            "leg": name,
            "state": leg["state"] + (f": {leg['reason']}" if leg["reason"] else ""),
            "seconds": number(leg["seconds"], ".1f"),
            "steps": number(leg.get("num_steps")),
            "tokens a step": number(leg.get("tokens_per_step")),
            "tokens/s": number(leg.get("tokens_per_second")),
            "p99 / median": number(leg.get("p99_by_median"), ".3f"),
            "MFU": percent(leg.get("mfu_percent")),
            "peak": peak(leg),
            "hours": number(leg.get("hours"), ".1f"),
            "dollars": dollars(leg),
        }
        for name, leg in result["legs"].items()
    ]
    aims = [
        {"aim": v.aim, "wanted": v.wanted, "found": v.found, "verdict": v.word}
        for v in verdicts(result)
    ]
    return (
        f"# Reference run\n\n{result['gpus']} x {result['device']}, commit {result['commit']}, "
        f"{result['date']}; {result['seconds']:.0f} s of {result['budget_seconds']:.0f} s. Speeds "
        f"are medians without the\nfirst {UNTIMED_STEPS} steps; hours and dollars are those of all "
        f"steps of the real run at this speed.\n\n{markdown_table(legs)}\n{markdown_table(aims)}\n"
        + "".join(f"- {note}\n" for note in notes(result))
    )
