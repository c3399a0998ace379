"""What the bench and the ladder measure, and the fresh process that each measurement gets.

Loads no PyTorch: the workflow reads the rows while it is built, and what starts a process must not
take seconds itself.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import miniseries
from miniseries.metrics import read_json, write_json
from miniseries.settings import resolve_runs
from miniseries.validation import validate_config

# Keys of a row that are keys of a run; the others say how it is measured
RUN_KEYS = ("precision", "micro_batch", "total_batch_tokens", "gpus", "recompute")
# What a run may state that does not go with another precision or batch than its own
PLAIN = {"token_order": "shuffled", "master_weights": True}


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder; everything else is the run's own."""

    title: str
    precision: str
    compile: bool = False
    flash_attention: bool = False
    padded_vocabulary: bool = False
    own_kernels: bool = False


# In the order of the blog post that the ladder follows; each adds one thing to the one before
LADDER = {
    "fp32": Rung("fp32, eager, plain attention", "fp32"),
    "tf32": Rung("TF32", "tf32"),
    "bf16": Rung("bf16", "bf16"),
    "compile": Rung("torch.compile", "bf16", compile=True),
    "flash": Rung("flash attention", "bf16", compile=True, flash_attention=True),
    "padded": Rung("padded vocabulary", "bf16", True, True, padded_vocabulary=True),
    "kernels": Rung("kernels of this project", "bf16", True, True, True, own_kernels=True),
    "fp8": Rung("fp8", "fp8", True, True, True, True),
}


# ---- from the configuration -----------------------------------------------------------------


def resolve_rows(
    config: dict[str, Any], schema: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The rows of `bench:` and the rungs of `ladder:` by name, with settings checked like a run's.

    Returns:
        Two times name -> measure, settings, starts, profile; for HellaSwag num_items; for a
        rung its name and settings_on_cpu, of a tiny shape.

    Raises:
        ValueError: names no run, a wrong value, or a row that stands there twice.
    """
    runs = _bench_runs(config["bench"]) | _ladder_runs(config["ladder"])
    with_rows = config | {"runs": config["runs"] | runs}
    try:
        validate_config(with_rows, schema)
        settings = resolve_runs(with_rows, schema).runs
    except ValueError as error:
        text = str(error).replace("runs.bench.rows.", "bench.rows.")
        raise ValueError(text.replace("runs.ladder.", "ladder.")) from None
    for name, entry in runs.items():
        if name not in settings:
            raise ValueError(
                f"{name}: {entry['extends']!r} is a sweep; write one of its runs as an entry of "
                "`runs:`, and that one's name here"
            )
    settings = {name: settings[name] | {"run": runs[name]["extends"]} for name in runs}
    return _bench_rows(config["bench"], settings), _ladder_rows(settings)


def _bench_runs(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each row as an entry of `runs:`."""
    shared = {"gpus": 1, "dataset": section["dataset"], "token_order": "shuffled"}
    return {
        f"bench.rows.{number}": {"extends": row["run"]}
        | shared
        | (PLAIN if row.get("precision", "bf16") != "bf16" else {})
        | {key: row[key] for key in RUN_KEYS if key in row}
        for number, row in enumerate(section["rows"])
    }


def _ladder_runs(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each rung as an entry of `runs:`, and once more of the shape for CPUs."""
    runs = {}
    for name, rung in LADDER.items():
        shared = {"gpus": 1, "dataset": section["dataset"], **PLAIN}
        shared |= {"precision": rung.precision, "compile": rung.compile}
        size = {key: section[key] for key in ("micro_batch", "total_batch_tokens")}
        runs[f"ladder.{name}"] = {"extends": section["run"]} | shared | size
        runs[f"ladder.{name}.cpu"] = {"extends": section["run_on_cpu"]} | shared
    return runs


def _bench_rows(section: dict[str, Any], settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(section["rows"]):
        row = row_of_settings(settings[f"bench.rows.{number}"], entry.get("measure", "step"))
        row["starts"] = ["cold", "warm"] if entry.get("cold_start") else ["kept"]
        row["profile"] = entry.get("profile", False)
        row["num_items"] = entry.get("num_items")  # None is as many as HellaSwag has
        name = _row_name(row["settings"], row["measure"])
        if name in rows:
            raise ValueError(f"bench.rows.{number}: the row {name} stands there twice")
        rows[name] = row
    return rows


def _ladder_rows(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: row_of_settings(settings[f"ladder.{name}"], "rung")
        | {"rung": name, "settings_on_cpu": settings[f"ladder.{name}.cpu"], "starts": ["cold"]}
        for name in LADDER
    }


def row_of_settings(settings: dict[str, Any], measure: str = "step") -> dict[str, Any]:
    """A row that measures a run; where it leaves the number of GPUs open, on one."""
    machine = settings["machine"]
    gpus = 1 if machine["gpus"] == "auto" else machine["gpus"]
    settings = settings | {"machine": machine | {"gpus": gpus}}
    return {"measure": measure, "settings": settings, "starts": ["kept"], "profile": False}


def _row_name(settings: dict[str, Any], measure: str) -> str:
    recipe, machine = settings["recipe"], settings["machine"]
    parts = [settings["run"], recipe["precision"], f"b{machine['micro_batch']}"]
    parts += [f"t{recipe['total_batch_tokens']}"]
    parts += [f"r{machine['recompute']}"] if machine.get("recompute") else []
    parts += [f"{machine['gpus']}gpus"] if machine["gpus"] != 1 else []
    parts += [measure] if measure != "step" else []
    return "-".join(parts)


# ---- fresh processes ------------------------------------------------------------------------


def run_row(
    row: dict[str, Any], manifest: Path, output: Path, steps: int, profile: Path | None
) -> None:
    """Measure a row in processes of its own, and write the result.

    A cold start has compile caches that are empty, a warm one those that the cold one left, and
    `kept` those that all runs share: it is warm if they hold everything, and neither if they hold
    a part. Only the last of the starts takes the timed steps.

    Raises:
        ValueError: a process failed; its error stands above.
    """
    caches = Path(tempfile.mkdtemp(prefix="miniseries-cache-"))
    environment = dict(os.environ)
    if "cold" in row["starts"]:
        folders = miniseries.CACHE_FOLDERS.items()
        environment |= {name: str(caches / folder) for name, folder in folders}
    seconds: dict[str, float | None] = {"cold": None, "warm": None}
    try:
        write_json(caches / "row.json", row)
        for start in row["starts"]:
            is_last = start == row["starts"][-1]
            options = ["--row", str(caches / "row.json"), "--manifest", str(manifest)]
            options += ["--output", str(caches / "result.json")]
            options += ["--steps", str(steps if is_last else 0)]
            options += ["--profile", str(profile)] if profile and is_last else []
            _start_process(options, row["settings"]["machine"]["gpus"], environment)
            result = read_json(caches / "result.json")
            if result["not_measured"]:
                break
            if start != "kept" or not result["was_cold"]:
                label = "cold" if start == "cold" else "warm"
                seconds[label] = result["first_step_after_seconds"]
        write_json(output, result | {"seconds_to_first_step": seconds})
    finally:
        shutil.rmtree(caches)


def _start_process(options: list[str], processes: int, environment: dict[str, str]) -> None:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    script = Path(__file__).parents[2] / "bench_run.py"
    command += [str(script), *options, "--started", str(time.time())]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise ValueError(f"the measurement ended with exit code {code}; the error above says why")
