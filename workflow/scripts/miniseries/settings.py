"""The settings of every run, worked out from the configuration and kept unchanged once it started.

The defaults are the schema's; `extends:` is followed, and each value of a sweep makes a run.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniseries.metrics import read_json
from miniseries.shapes import MODELS, keys_of_model
from miniseries.training.branches import branch_problems, note_branches, with_step
from miniseries.validation import is_sweep, raise_problems, run_leaves, suggest

# fmt: off
# What changes the result of a run: fingerprinted, and frozen when the run starts.
RECIPE_KEYS = (
    "dataset", "init_from", "branch_from", "num_layers", "num_heads", "channels", "sequence_length",
    "num_positions", "total_batch_tokens", "max_steps", "learning_rate", "lr_schedule",
    "warmup_steps", "final_lr_fraction", "weight_decay", "skip_loss_z", "skip_grad_z",
    "divergence_z", "rollback_skip_steps", "seed", "token_order", "llm_c_micro_batch",
    "llm_c_processes", "overfit_batch", "precision", "master_weights",
)
# These values are left out of the recipe: a run started before the key came stays the same run.
LATER_KEYS = {
    "init_from": "", "branch_from": "", "num_positions": 0, "token_order": "shuffled",
    "llm_c_micro_batch": 64, "llm_c_processes": 8, "overfit_batch": False, "master_weights": True,
    "divergence_z": 0.0, "rollback_skip_steps": 0,
}
# What a run that was started before these keys came is taken to have, where it is only read.
LATER_MACHINE_KEYS = {
    "deterministic": False, "recompute": 0, "ranges_every_steps": 100, "stall_seconds": 300,
}
# Speed, cadence, and logging: may change whenever a run is resumed.
MACHINE_KEYS = (
    "micro_batch", "gpus", "compile", "deterministic", "recompute", "val_every_steps",
    "hellaswag", "sample_every_steps", "sample_tokens", "checkpoint_every_steps",
    "keep_checkpoints", "keep_every_steps", "ranges_every_steps", "stall_seconds",
    "export_steps",
)
# fmt: on


@dataclass(frozen=True)
class Catalogue:
    """Every run and dataset by name, sweeps written out, all defaults filled in."""

    runs: dict[str, dict[str, Any]]  # "run", "recipe", "fingerprint", "machine"
    sweeps: dict[str, list[str]]  # name of the swept entry -> names of its runs
    datasets: dict[str, dict[str, Any]]


def recipe_fingerprint(recipe: dict[str, Any]) -> str:
    """sha256 of the recipe as canonical JSON: equal recipes, equal results."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def resolve_runs(config: dict[str, Any], schema: dict[str, Any]) -> Catalogue:
    """Work out every run: defaults, `machine:`, `extends:`, and sweeps.

    Args:
        config: passed by `validate_config`.
        schema: the configuration's schema; its `default:` values are filled in.

    Raises:
        ValueError: one line for each run or name that does not fit the others.
    """
    leaves = run_leaves(schema)
    defaults = {key: leaf["default"] for key, leaf in leaves.items() if "default" in leaf}
    for key, leaf in schema["properties"]["machine"]["properties"].items():
        defaults[key] = config.get("machine", {}).get(key, leaf["default"])
    datasets = {name: _with_defaults(entry, schema) for name, entry in config["datasets"].items()}
    catalogue = Catalogue({}, {}, datasets)
    problems = []
    for name in config["runs"]:
        try:
            merged = defaults | _follow_extends(name, config["runs"])
            for run, values in _sweep(name, merged, leaves):
                if run in catalogue.runs or (run in config["runs"] and run != name):
                    raise ValueError(f"runs.{name}: its run {run!r} has the name of another run")
                if set(run) & {"@", "/"}:  # from a list of init_from or branch_from
                    raise ValueError(
                        f"runs.{name}: {run!r} is no name of a run; write an entry of its own for "
                        "each value of that list"
                    )
                catalogue.runs[run] = _settings(run, name, values, leaves, datasets)
                if run != name:
                    catalogue.sweeps.setdefault(name, []).append(run)
        except ValueError as error:
            problems.append(str(error))
    if not problems:  # else a faulty run would be missing where another one starts from it
        problems += _start_problems(catalogue.runs)
        problems += branch_problems(catalogue.runs)
        note_branches(catalogue.runs)
    problems += _name_problems(config, catalogue)
    raise_problems(problems)
    return catalogue


def is_kept(settings: dict[str, Any], step: int) -> bool:
    """Whether the checkpoint of a step is made and is still there when the run is complete."""
    machine, last = settings["machine"], settings["recipe"]["max_steps"]
    every, major = machine["checkpoint_every_steps"], machine["keep_every_steps"]
    if step == last or step in kept_steps(machine):
        return True
    if not 0 < step < last or not every or step % every:
        return False
    is_major = major > 0 and step % major == 0
    return is_major or machine["keep_checkpoints"] == 0


def kept_steps(machine: dict[str, Any]) -> set[int]:
    """Steps whose checkpoints are made and never removed: of exports, and where runs branch off."""
    return {*machine["export_steps"], *machine.get("branch_steps", ())}


def checkpoints_held(settings: dict[str, Any]) -> int:
    """Checkpoints of a run on the disk at once, at most; the one that is being written is one."""
    machine, last = settings["machine"], settings["recipe"]["max_steps"]
    every = machine["checkpoint_every_steps"]
    made = {*range(every, last, every)} if every else set()
    made |= kept_steps(machine) | {last}
    stay = sum(is_kept(settings, step) for step in made)
    return min(len(made), machine["keep_checkpoints"] + stay)


def start_file(init_from: str) -> str:
    """The file that `init_from:` stands for, of which `pretrained` reads weights; "" for none."""
    if not init_from:
        return ""
    if init_from.startswith((".", "/")):
        is_file = init_from.endswith((".bin", ".json"))
        # a bare name in the working folder would be taken for a target of the workflow
        file = Path(init_from) if is_file else Path(init_from) / "config.json"
        return str(file.absolute())
    if "/" in init_from:
        return f"results/weights/{init_from.replace('/', '--')}/config.json"
    run, _, step = init_from.partition("@")
    return f"results/train/{run}/" + (f"saved/{step}.json" if step else "done.json")


def has_begun(folder: Path) -> bool:
    """Whether a run's folder holds more than what one that was refused at its start leaves."""
    if (folder / "metrics.jsonl").exists():
        return True
    checkpoints = folder / "checkpoints"  # made to see whether there is room in it
    return checkpoints.exists() and any(checkpoints.iterdir())


def frozen_start(folder: Path) -> dict[str, str] | None:
    """What a run that has begun started from, as `pretrained.freeze_start` noted it."""
    frozen = folder / "settings.json"
    return read_json(frozen).get("start") if frozen.exists() and has_begun(folder) else None


def check_frozen(settings: dict[str, Any], frozen: Path, manifest: Path) -> None:
    """Refuse to go on with a run under other settings or other data than it was started with.

    Args:
        settings: of the run as it is asked for now.
        frozen: `settings.json` in the run's folder; no check before the run has begun.
        manifest: of the run's dataset; its data are compared if it exists.

    Raises:
        ValueError: names each key that differs with its old and new value, and the remedy.
    """
    folder = frozen.parent
    if not frozen.exists() or not has_begun(folder):
        return
    remedy = "bring it back from a copy; while the run is not complete it may also be deleted"
    old = read_json(frozen, ["recipe"], remedy)
    run = settings["run"]
    changes = list(_differences(old["recipe"], settings["recipe"], ""))
    if changes:
        raise ValueError(
            f"run {run!r} was started with other settings (old -> new):\n  "
            + "\n  ".join(changes)
            + f"\nNothing in {folder} was touched. Put the old values back; to try the new ones, "
            + _first_of_data(changes)
            + f"{_advice(run)} and states only what differs"
        )
    if manifest.exists():
        after = read_json(manifest, ["fingerprint"])["fingerprint"]
        check_tokens(run, old.get("data_fingerprint"), after, manifest, folder)


def check_tokens(run: str, before: str | None, after: str, manifest: Path, folder: Path) -> None:
    """Refuse to go on with a run on other tokens.

    Args:
        before: fingerprint of the data in the run's frozen settings, if they have it.
        after: the one that the manifest has now.

    Raises:
        ValueError: they differ; names both, and the remedy.
    """
    if before and before != after:
        raise ValueError(
            f"run {run!r} was started on other tokens than {manifest.parent} holds now "
            f"(fingerprint {before[:12]} -> {str(after)[:12]}).\nNo checkpoint in {folder} was "
            "touched. Bring the old shards and their manifest back. To train on the new tokens "
            "give them a dataset of their own, so that nothing is written over, and "
            f"{_advice(run)}"
        )


def _advice(run: str) -> str:
    return f"add a run with another name that says `extends: {run}`"


def _with_defaults(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A dataset's entry with every key that its kind has, in the schema's order."""
    for kind in schema["properties"]["datasets"]["additionalProperties"]["oneOf"]:
        leaves = kind["properties"]
        if entry["source"] in leaves["source"]["enum"]:
            values = {key: leaf["default"] for key, leaf in leaves.items() if "default" in leaf}
            values |= entry
            return {key: _plain(values[key], leaves[key]) for key in leaves if key in values}
    raise AssertionError(f"source {entry['source']!r} passed the schema")


def _follow_extends(name: str, runs: dict[str, Any]) -> dict[str, Any]:
    """What a run states together with what it takes over from the runs that it extends."""
    chain = [name]
    while "extends" in runs[chain[-1]]:
        parent = runs[chain[-1]]["extends"]
        if parent not in runs:
            raise ValueError(
                f"runs.{chain[-1]}.extends: there is no run {parent!r}; "
                f"{suggest(parent, list(runs))}"
            )
        if parent in chain:
            raise ValueError(f"runs.{name}.extends: a circle, {' -> '.join([*chain, parent])}")
        chain.append(parent)
    merged: dict[str, Any] = {}
    for run in reversed(chain):
        entry = dict(runs[run])
        entry.pop("extends", None)
        model = entry.pop("model", None)
        if model is not None and model not in MODELS:
            raise ValueError(f"runs.{run}.model: no model {model!r}; known: {', '.join(MODELS)}")
        merged |= keys_of_model(model) if model else {}
        merged |= entry  # what the entry states itself counts more than its `model:`
    return merged


def _sweep(name: str, values: dict, leaves: dict) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, settings) for each combination of the keys given as lists; one without any list."""
    swept = [key for key in leaves if is_sweep(values.get(key), leaves[key])]
    for choice in itertools.product(*(values[key] for key in swept)):
        pairs = zip(swept, choice, strict=True)
        parts = [f"{key}-{_plain(value, leaves[key])}" for key, value in pairs]
        yield "-".join([name, *parts]), values | dict(zip(swept, choice, strict=True))


def _plain(value: Any, leaf: dict[str, Any]) -> Any:
    """The value in the schema's type, so that 1 and 1.0 give the same fingerprint."""
    kind = leaf.get("type")
    if kind == "number":
        return float(value)
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if kind == "array":
        return [_plain(entry, leaf.get("items", {})) for entry in value]
    return value


def _settings(
    run: str, entry: str, values: dict[str, Any], leaves: dict, datasets: dict
) -> dict[str, Any]:
    """The settings of one run, checked across keys."""
    missing = [key for key in leaves if key not in values]
    if missing:
        raise ValueError(f"runs.{entry}: {', '.join(missing)} missing, here and where it extends")
    values = {key: _plain(values[key], leaves[key]) for key in leaves}
    values["branch_from"] = with_step(values["branch_from"], values["max_steps"])
    problems = list(_cross_problems(values, datasets))
    if problems:
        raise ValueError("\n  ".join(f"runs.{entry}.{problem}" for problem in problems))
    later = {key for key, usual in LATER_KEYS.items() if values[key] == usual}
    recipe = {key: values[key] for key in RECIPE_KEYS if key not in later}
    recipe["data"] = datasets[values["dataset"]]
    return {
        "run": run,
        "recipe": recipe,
        "fingerprint": recipe_fingerprint(recipe),
        "machine": {key: values[key] for key in MACHINE_KEYS},
    }


def _cross_problems(values: dict[str, Any], datasets: dict[str, Any]) -> Iterator[str]:
    """What no key alone can be blamed for; each starts with the key to change."""
    channels, heads = values["channels"], values["num_heads"]
    if values["dataset"] not in datasets:
        hint = suggest(values["dataset"], list(datasets))
        yield f"dataset: there is no dataset {values['dataset']!r}; {hint}"
    if channels % heads:
        yield f"num_heads: {heads} heads cannot share {channels} channels equally"
    batch, length = values["total_batch_tokens"], values["sequence_length"]
    if 0 < values["num_positions"] < length:
        yield f"num_positions: {values['num_positions']} is less than sequence_length, {length}"
    if batch % length:
        yield f"total_batch_tokens: {batch} is no multiple of sequence_length, {length}"
    if not values["master_weights"] and values["precision"] != "bf16":
        yield "master_weights: false needs precision bf16"
    sample = values["llm_c_micro_batch"] * values["llm_c_processes"] * length
    if values["token_order"] == "llm.c" and batch % sample:
        yield (
            f"total_batch_tokens: {batch} is no multiple of {sample}, which llm.c reads at once: "
            "llm_c_micro_batch * llm_c_processes * sequence_length"
        )
    steps, warmup = values["max_steps"], values["warmup_steps"]
    if warmup > steps > 0:
        yield f"warmup_steps: {warmup} is more than max_steps, {steps}"
    late = [step for step in values["export_steps"] if step > steps]
    if late:
        yield f"export_steps: {late} is after the last step, max_steps {steps}"


def _start_problems(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Runs that start from a run that is not there, or in the end from themselves."""
    for name in runs:
        chain = [name]
        while True:
            start = runs[chain[-1]]["recipe"].get("init_from", "")
            parent, _, step = start.partition("@")
            if not start or "/" in start:
                break
            if parent not in runs or not (step.isdecimal() or start == parent):
                if chain == [name]:
                    yield (
                        f"runs.{name}.init_from: {start!r} is no run of this configuration (a path "
                        "starts with / or ., a name of the Hugging Face hub is owner/name); "
                        f"{suggest(parent, list(runs))}"
                    )
                break
            if parent in chain:
                yield f"runs.{name}.init_from: a circle, {' -> '.join([*chain, parent])}"
                break
            chain.append(parent)


def _name_problems(config: dict[str, Any], catalogue: Catalogue) -> Iterator[str]:
    """Names that collide with files of the workflow, and lists that name unknown runs."""
    for name in config["runs"]:
        # a run's figures are {run}.png and {run}.speed.png, beside these two
        if name in ("miniseries", "ladder") or name.endswith(".speed"):
            yield f"runs.{name}: the name is taken by a figure of the workflow; choose another"
    if "hellaswag" in config["datasets"]:
        yield "datasets.hellaswag: the name is taken by the question file; choose another"
    known = [*catalogue.runs, *catalogue.sweeps]
    lists = {section: config[section] for section in ("default_runs", "series")}
    lists["plan.runs"] = config["plan"]["runs"]
    for section, names in lists.items():
        for name in names:
            if name not in known and name not in config["runs"]:
                yield f"{section}: there is no run {name!r}; {suggest(name, known)}"


def _first_of_data(changes: list[str]) -> str:
    """What else the advice says if an entry of `datasets:` has changed, which others may use."""
    is_data = any(change.startswith("data.") for change in changes)
    return "give the dataset with them another name in `datasets:`, and " if is_data else ""


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """`key: old -> new` for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            name = f"{path}.{key}" if path else key
            yield from _differences(old.get(key, "absent"), new.get(key, "absent"), name)
    elif old != new:
        yield f"{path}: {old} -> {new}"
