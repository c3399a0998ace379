"""The reference run: what this project does on a machine's GPUs, in minutes, by its own commands.

Short runs that `extends:` the real ones go through `snakemake` as a user types it, one leg after
the other. Each GPU gets as many tokens a step as one of eight would, so a step on fewer GPUs is the
same work for each.

An unbroken run is compared with one that is stopped: both have the same recipe and start at step 0,
one goes to its end (leg `large`), the other is stopped by TERM at a random moment, resumed, stopped
again, and resumed on half the GPUs. Nothing is copied or prepared for the second.
"""

import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from miniseries.metrics import read_json, read_metrics, write_json, write_text
from miniseries.settings import resolve_runs
from miniseries.shapes import flops_per_step
from miniseries.speed.bench import CPU_STEP_FLOPS
from miniseries.speed.breakdown import exposed_share
from miniseries.speed.comparison import read_devices
from miniseries.speed.legs import FAILED, Course, Leg
from miniseries.speed.rows import resolve_rows
from miniseries.speed.rungs import missing_for_precision
from miniseries.speed.tables import device_file
from miniseries.speed.verdicts import (
    NODE_GPUS,
    Record,
    bench_row,
    compare_steps,
    loss_differences,
    one_gpu_speed,
    result_text,
    shard_mib,
    speed_figures,
    verdicts,
)
from miniseries.training.introduction import source_commit
from miniseries.training.launcher import local_processes
from miniseries.validation import validate_config

ROOT = Path(__file__).resolve().parents[4]
PREFIX = "reference-"  # of the runs' names
# Steps before the signals: the first comes after one of these, at random
STOP_AFTER, RESUMED_STEPS, HALVED_STEPS = (2, 5), 2, 5
# The stopped run must not come to its end: a signal may take a step or two to be heard
LEAST_LARGE_STEPS = STOP_AFTER[1] + RESUMED_STEPS + HALVED_STEPS + 4
PROFILED_AFTER_STEPS = 3
NO_DIFFERENCE = ("budget_seconds", "legs", "output")  # options of no account for what a leg finds


@dataclass(frozen=True)
class Options:
    """What to run; the names are those of runs and datasets of the configuration."""

    large: str
    small: str
    large_steps: int
    second_precision: str
    second_steps: int
    small_steps: int
    dataset: str
    gpus: int | None  # None: all visible
    micro_batch: int | None  # of the large run; None: its own
    budget_seconds: float
    legs: list[str] | None  # None: all
    configfile: list[Path]  # laid over config/config.yaml before ours
    output: Path


class Reference:
    """All legs of one call.

    Raises:
        ValueError: an unknown run, too few steps, or more GPUs than there are.
    """

    def __init__(self, options: Options, root: Path = ROOT) -> None:
        self.options, self.root, self.begun = options, root, time.monotonic()
        if options.large_steps < LEAST_LARGE_STEPS:
            raise ValueError(
                f"--large-steps is {options.large_steps}; at least {LEAST_LARGE_STEPS} are needed, "
                "so that a run can be stopped and resumed twice before its end"
            )
        if options.gpus is not None and options.gpus < 1:
            raise ValueError(f"--gpus is {options.gpus}; at least one is needed")
        self.gpus, self.device = local_processes(options.gpus or "auto")
        self.config = read_config(root, options.configfile)
        self.schema = yaml.safe_load((root / "workflow/schemas/config.schema.yaml").read_text())
        runs = self._real_runs()
        self.real = {name: run["recipe"] for name, run in runs.items()}
        self.recompute = {name: run["machine"].get("recompute", 0) for name, run in runs.items()}
        self.large, self.small = PREFIX + options.large, PREFIX + options.small
        self.stopped = f"{self.large}-stopped"
        self.second = f"{self.large}-{options.second_precision}"
        self.overlay = options.output / "reference.yaml"
        self.half_overlay = options.output / "half.yaml"
        self._write_configuration()
        self.legs = self._legs()
        unknown = [name for name in options.legs or [] if name not in self.legs]
        if unknown:
            raise ValueError(f"no leg {', '.join(unknown)}; there are {', '.join(self.legs)}")

    def _real_runs(self) -> dict[str, Record]:
        """Settings of the runs that are tried."""
        names = (self.options.large, self.options.small)
        if len(set(names)) < len(names):
            raise ValueError(f"--large and --small are both {names[0]}; name two runs")
        validate_config(self.config, self.schema)
        runs = resolve_runs(self.config, self.schema).runs
        unknown = [name for name in names if name not in runs]
        if unknown:
            raise ValueError(f"there is no run {', '.join(unknown)}; known: {', '.join(runs)}")
        for name in names:
            share = flops_per_step(runs[name]["recipe"]) / NODE_GPUS
            if self.device == "cpu" and share > CPU_STEP_FLOPS:
                raise ValueError(f"{name} needs a GPU, and there is none; name small runs instead")
        return {name: runs[name] for name in names}

    def runs(self) -> dict[str, Record]:
        """The short runs, as entries of `runs:`."""
        options = self.options
        large = self._short(options.large, options.large_steps)
        large |= {"micro_batch": options.micro_batch} if options.micro_batch else {}
        second = {"extends": self.large, "precision": options.second_precision}
        return {
            self.large: large,
            self.stopped: {"extends": self.large},
            self.second: second,
            self.small: self._short(options.small, options.small_steps),
        }

    def _short(self, run: str, steps: int) -> Record:
        recipe = self.real[run]
        return {
            "extends": run,
            "dataset": self.options.dataset,
            "total_batch_tokens": recipe["total_batch_tokens"] * self.gpus // NODE_GPUS,
            "max_steps": steps,
            "warmup_steps": min(steps, recipe["warmup_steps"]),
            "gpus": self.gpus,
            "keep_checkpoints": 1,
            "export_steps": [],
        }

    def _write_configuration(self) -> None:
        row = {"run": self.large, "gpus": self.gpus, "profile": True}
        bench = {"dataset": self.options.dataset, "steps": PROFILED_AFTER_STEPS, "rows": [row]}
        ours = {"runs": self.runs(), "bench": bench}
        write_text(self.overlay, yaml.safe_dump(ours, sort_keys=False))
        half = {"runs": {self.stopped: {"gpus": max(1, self.gpus // 2)}}}
        write_text(self.half_overlay, yaml.safe_dump(half))
        whole = merge(self.config, ours)
        validate_config(whole, self.schema)
        resolve_runs(whole, self.schema)
        (self.row,) = resolve_rows(whole, self.schema)[0]

    def _legs(self) -> dict[str, Leg]:
        """All legs in their order, what matters most first."""
        large, stopped, second, small = self.large, self.stopped, self.second, self.small
        options = self.options
        is_short = options.second_steps < options.large_steps
        device = torch.device("cpu" if self.device == "cpu" else "cuda")
        figures = [f"results/plots/{run}.png" for run in (large, small)]
        return {
            "data": Leg([f"data_{options.dataset}"]),
            "large": self._whole_run(large),
            "stopped": Leg(
                [f"train_{stopped}"],
                self.folder(stopped),
                old=self.folder(stopped),
                stop_after=random.randint(*STOP_AFTER),
            ),
            "resumed": Leg(
                [f"train_{stopped}"],
                self.folder(stopped),
                stop_after=RESUMED_STEPS,
                needs=("large", "stopped"),
                figures=lambda: {"compared": self._compared()},
            ),
            "halved": Leg(
                [f"train_{stopped}"],
                self.folder(stopped),
                stop_after=HALVED_STEPS,
                configfile=(self.half_overlay,),
                needs=("resumed",),
                impossible=None if self.gpus > 1 else "needs two GPUs",
                is_last=True,
                figures=lambda: {"compared": self._compared()[-1:]},
            ),
            "small": self._whole_run(small),
            "profile": Leg(
                [f"results/bench/rows/{self.row}.json"],
                old=self.root / f"results/bench/rows/{self.row}.json",
                log=self.root / f"results/logs/measure_row/{self.row}.log",
                figures=self._profile,
            ),
            options.second_precision: Leg(
                [f"train_{second}"],
                self.folder(second),
                old=self.folder(second),
                stop_after=options.second_steps if is_short else None,
                impossible=missing_for_precision(options.second_precision, device),
                is_last=True,
                figures=self._second,
            ),
            "export": Leg([f"export_{large}", *figures], needs=("large", "small")),
        }

    def _whole_run(self, run: str) -> Leg:
        folder = self.folder(run)
        return Leg([f"train_{run}"], folder, old=folder, figures=lambda: self._speed(run))

    def folder(self, run: str) -> Path:
        """The run's."""
        return self.root / "results/train" / run

    def _speed(self, run: str) -> Record:
        real = self.options.small if run == self.small else self.options.large
        price = self.config["plan"]["prices"].get(self.device)
        return speed_figures(self.folder(run), self.real[real], self.gpus, price)

    def _compared(self) -> list[Record]:
        return compare_steps(self.folder(self.large), self.folder(self.stopped))

    def _second(self) -> Record:
        """Speed in the other precision, and how far its losses are from the first one's."""
        first = read_metrics(self.folder(self.large) / "metrics.jsonl").get("train", [])
        records = read_metrics(self.folder(self.second) / "metrics.jsonl").get("train", [])
        pairs = list(zip(records, first, strict=False))
        apart = loss_differences(pairs)
        found = {"largest_loss_difference": max(apart, default=None)}
        found["last_loss_difference"] = apart[-1] if apart else None
        return self._speed(self.second) | found

    def _profile(self) -> Record:
        row = read_json(self.root / f"results/bench/rows/{self.row}.json")
        breakdown = row.get("breakdown")
        if breakdown is None:
            raise ValueError(row["not_measured"] or "the row has no profile")
        kept = {key: breakdown[key] for key in ("step_ms", "idle_ms", "hidden_ms", "kinds")}
        return {"exposed_share": exposed_share(breakdown), "profiled_step": kept}

    def circumstances(self) -> Record:
        """What makes the legs of two calls comparable."""
        asked = {k: v for k, v in asdict(self.options).items() if k not in NO_DIFFERENCE}
        asked |= {"configfile": list(map(str, self.options.configfile)), "gpus": self.gpus}
        return asked | {"device": self.device, "commit": source_commit()}

    def run(self) -> Record:
        """Run all legs within the budget, and judge them.

        Returns:
            What `reference.json` holds.
        """
        course = Course(
            root=self.root,
            output=self.options.output,
            configfile=[*self.options.configfile, self.overlay],
            deadline=self.begun + self.options.budget_seconds,
            circumstances=self.circumstances(),
            asked=self.options.legs,
        )
        return self._result(course.run(self.legs))

    def _result(self, legs: dict[str, Record]) -> Record:
        options = self.options
        rows = read_devices(sorted((self.root / "benchmarks").glob("*.json")))
        precisions = {name: recipe["precision"] for name, recipe in self.real.items()}
        result = {
            "device": self.device,
            "gpus": self.gpus,
            "commit": source_commit(),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "seconds": time.monotonic() - self.begun,
            "budget_seconds": options.budget_seconds,
            "large": options.large,
            "small": options.small,
            "second_precision": options.second_precision,
            "large_precision": precisions[options.large],
            "small_precision": precisions[options.small],
            "one_gpu": {
                name: one_gpu_speed(rows, name, self.device, precision)
                for name, precision in precisions.items()
            },
            "shard_mib": shard_mib(self.real[options.large], self.gpus),
            "legs": legs,
        }
        return result | {"verdicts": [verdict.record() for verdict in verdicts(result)]}

    def rows(self, result: Record) -> list[Record]:
        """The speeds as rows of `benchmarks/<device>.json`, for the README's table."""
        options = self.options
        timed = {
            "large": (options.large, result["large_precision"]),
            options.second_precision: (options.large, options.second_precision),
            "small": (options.small, result["small_precision"]),
        }
        legs = result["legs"]
        return [
            bench_row(
                legs[name],
                run,
                precision,
                self.real[run]["sequence_length"],
                self.recompute[run],
            )
            for name, (run, precision) in timed.items()
            if legs[name].get("tokens_per_second") and "memory_mib" in legs[name]
        ]


def merge(base: Record, changes: Record) -> Record:
    """`base` with `changes` laid over it as `--configfile` does: key by key, lists replaced."""
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if nested else value
    return merged


def read_config(root: Path, overlays: list[Path]) -> dict[str, Any]:
    """The configuration as a command with these `--configfile`s sees it."""
    config = yaml.safe_load((root / "config/config.yaml").read_text(encoding="utf-8"))
    for overlay in overlays:
        config = merge(config, yaml.safe_load(overlay.read_text(encoding="utf-8")))
    return config


def run_reference(**arguments: Any) -> None:
    """Run all legs and write `reference.json` and `reference.md`; arguments as in `Options`.

    Raises:
        ValueError: see `Reference`.
        SystemExit: 1 if a leg failed; all others ran nevertheless.
    """
    options = Options(**arguments)
    reference = Reference(options)
    where, most = f"{reference.gpus} x {reference.device}", f"{options.budget_seconds:.0f} s"
    print(f"{where}; {len(reference.legs)} legs, at most {most}", flush=True)
    result = reference.run()
    for figure in (reference.root / "results/plots").glob(f"{PREFIX}*.png"):
        shutil.copy(figure, options.output)
    write_json(options.output / "reference.json", result)
    rows = {"device": result["device"], "rows": reference.rows(result)}
    write_json(device_file(options.output, result["device"]), rows)
    write_text(options.output / "reference.md", result_text(result))
    print(result_text(result))
    if any(leg["state"] == FAILED for leg in result["legs"].values()):
        raise SystemExit(1)
