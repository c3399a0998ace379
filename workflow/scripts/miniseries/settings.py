"""The settings of every run, worked out from the configuration and kept unchanged once it started.

The schema (`workflow/schemas/config.schema.yaml`) states each key's type, range, unit, and default
value; this module turns its findings into sentences, fills the defaults, follows `extends:`, and
makes one run of each value of a sweep.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator as Validator

from miniseries.metrics import read_json
from miniseries.shapes import MODELS, keys_of_model
from miniseries.training.branches import branch_problems, note_branches, with_step

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
KINDS = {  # the schema's types in words
    "array": "a list",
    "object": "keys with values",
    "string": "text",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
}
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# YAML 1.1 takes neither 6e-4 (no point) nor 6.0e4 (no sign) for a number
NUMBER_AS_TEXT = re.compile(r"([+-]?\d+)(\.\d+)?[eE]([+-]?)(\d+)")


@dataclass(frozen=True)
class Catalogue:
    """Every run and dataset by name, sweeps written out, all defaults filled in."""

    runs: dict[str, dict[str, Any]]  # "run", "recipe", "fingerprint", "machine"
    sweeps: dict[str, list[str]]  # name of the swept entry -> names of its runs
    datasets: dict[str, dict[str, Any]]


def suggest(word: str, known: Sequence[str]) -> str:
    """The nearest known word as a question, or the list of all."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"


def recipe_fingerprint(recipe: dict[str, Any]) -> str:
    """sha256 of the recipe as canonical JSON: equal recipes, equal results."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def validate_config(config: dict[str, Any], schema: dict[str, Any]) -> None:
    """Check the whole configuration against the schema.

    Raises:
        ValueError: one line for each problem: full key, value, what is allowed.
    """
    plain, swept = _take_sweeps_out(config, schema)
    validator = Validator(schema)
    problems = list(_problems(validator, plain, []))
    leaves = run_leaves(schema)
    for (run, key), values in swept.items():
        path = f"runs.{run}.{key}"
        if not values or len({repr(value) for value in values}) < len(values):
            problems.append(f"{path}: a sweep is a list of different values, at least one")
        for value in values:
            leaf = validator.evolve(schema=leaves[key])
            problems += list(_problems(leaf, value, ["runs", run, key]))
    problems += _non_finite(config, "")
    _raise_problems(list(dict.fromkeys(problems)))


def check_unique_keys(file: Path) -> None:
    """Refuse a YAML file that states a key twice: YAML takes the last one without a word.

    Raises:
        ValueError: one line for each such key, with the lines of the file.
    """
    _raise_problems(
        list(dict.fromkeys(_twice(yaml.compose(file.read_text(encoding="utf-8")), file)))
    )


def _twice(node: yaml.Node | None, file: Path) -> Iterator[str]:
    lines: dict[str, int] = {}
    for entry in node.value if isinstance(node, yaml.CollectionNode) else []:
        key, value = entry if isinstance(entry, tuple) else (None, entry)
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if key.value in lines:
                yield f"{file}: {key.value} stands in line {lines[key.value]} and in line {line}"
            lines[key.value] = line
        yield from _twice(value, file)


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
                catalogue.runs[run] = _settings(run, name, values, leaves, datasets)
                if run != name:
                    catalogue.sweeps.setdefault(name, []).append(run)
        except ValueError as error:
            problems.append(str(error))
    problems += _start_problems(catalogue.runs)
    problems += branch_problems(catalogue.runs)
    note_branches(catalogue.runs)
    problems += _name_problems(config, catalogue)
    _raise_problems(problems)
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


def check_frozen(settings: dict[str, Any], frozen: Path, manifest: Path) -> None:
    """Refuse to go on with a run under other settings or other data than it was started with.

    Args:
        settings: of the run as it is asked for now.
        frozen: `settings.json` in the run's folder; no check while there is none.
        manifest: of the run's dataset; its data are compared if it exists.

    Raises:
        ValueError: names each key that differs with its old and new value, and the remedy.
    """
    if not frozen.exists():
        return
    remedy = "bring it back from a copy; while the run is not complete it may also be deleted"
    old = read_json(frozen, ["recipe"], remedy)
    run, folder = settings["run"], frozen.parent
    advice = f"add a run with another name that says `extends: {run}`"
    changes = list(_differences(old["recipe"], settings["recipe"], ""))
    if changes:
        raise ValueError(
            f"run {run!r} was started with other settings (old -> new):\n  "
            + "\n  ".join(changes)
            + f"\nNothing in {folder} was touched. Put the old values back; to try the new ones, "
            + f"{advice} and states only what differs"
        )
    before = old.get("data_fingerprint")
    after = read_json(manifest, ["fingerprint"])["fingerprint"] if manifest.exists() else before
    if before and before != after:
        raise ValueError(
            f"run {run!r} was started on other tokens than {manifest.parent} holds now "
            f"(fingerprint {before[:12]} -> {str(after)[:12]}).\nNo checkpoint in {folder} was "
            "touched. Bring the old shards and their manifest back. To train on the new tokens "
            f"give them a dataset of their own, so that nothing is written over, and {advice}"
        )


def run_leaves(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of each key that a run has; `extends` and `model` stand for other ones."""
    leaves = schema["properties"]["runs"]["additionalProperties"]["properties"]
    return {key: leaf for key, leaf in leaves.items() if key not in ("extends", "model")}


def _raise_problems(problems: Sequence[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"the configuration has {count}:\n  " + "\n  ".join(problems))


def _is_sweep(value: Any, leaf: dict[str, Any]) -> bool:
    """Whether a list stands where the schema has one value."""
    return isinstance(value, list) and leaf.get("type") != "array"


def _take_sweeps_out(config: dict, schema: dict) -> tuple[dict, dict[tuple[str, str], list]]:
    """The configuration without its sweeps, and those: (run, key) -> values."""
    swept = {}
    leaves = run_leaves(schema)
    runs = config.get("runs")
    if not isinstance(runs, dict):
        return config, swept
    plain = dict(runs)
    for run, entry in runs.items():
        if isinstance(entry, dict):
            lists = {k: v for k, v in entry.items() if k in leaves and _is_sweep(v, leaves[k])}
            swept |= {(run, key): values for key, values in lists.items()}
            plain[run] = {key: value for key, value in entry.items() if key not in lists}
    return config | {"runs": plain}, swept


def _problems(validator: Validator, value: Any, path: list[Any]) -> Iterator[str]:
    """One sentence for each thing that the schema refuses."""
    for error in validator.iter_errors(value):
        where = [*path, *error.absolute_path]
        name = ".".join(map(str, where)) or "the configuration"
        start = f"{name}." if where else ""
        if error.validator == "additionalProperties":
            known = list(error.schema["properties"])
            for key in sorted(set(map(str, error.instance)) - set(known)):
                yield f"{start}{key}: unknown key; {suggest(key, known)}"
        elif error.validator == "required":
            leaves = error.schema["properties"]
            for key in [key for key in error.schema["required"] if key not in error.instance]:
                yield f"{start}{key}: missing; needed is {_allowed(leaves[key])}"
        elif "propertyNames" in error.absolute_schema_path:
            yield (
                f"{name}: {error.instance!r} is no usable name; letters, digits, '.', '_', and '-' "
                "are allowed, the first one a letter or digit (quote a name of digits only)"
            )
        elif error.validator == "oneOf" and where[0] == "datasets":
            yield from _source_problems(validator, error.schema["oneOf"], error.instance, where)
        else:
            yield _refusal(name, error.instance, error.schema)


def _source_problems(
    validator: Validator, kinds: list[dict], entry: Any, where: list[Any]
) -> Iterator[str]:
    """The problems of a dataset's entry, seen as the kind of dataset that its `source` names."""
    sources = {source: kind for kind in kinds for source in kind["properties"]["source"]["enum"]}
    name = ".".join(map(str, where))
    if not isinstance(entry, dict):
        yield f"{name}: {entry!r} is not allowed; keys are needed, `source` the first of them"
    elif "source" not in entry:
        yield f"{name}.source: missing; needed is one of {', '.join(sources)}"
    elif str(entry["source"]) not in sources:
        hint = suggest(str(entry["source"]), list(sources))
        yield f"{name}.source: {entry['source']!r} is not allowed; {hint}"
    else:
        yield from _problems(validator.evolve(schema=sources[entry["source"]]), entry, where)


def _refusal(name: str, value: Any, leaf: dict[str, Any]) -> str:
    """Key, value, what is allowed, and what the key means."""
    text = f"{name}: {value!r} is not allowed; needed is {_allowed(leaf)}"
    number = NUMBER_AS_TEXT.fullmatch(value) if isinstance(value, str) else None
    if number:
        spelling = f"{number[1]}{number[2] or '.0'}e{number[3] or '+'}{number[4]}"
        text += f" (YAML reads {value} as text: write {spelling})"
    return f"{text}. {leaf['description']}" if "description" in leaf else text


def _allowed(leaf: dict[str, Any]) -> str:
    """The type and range of a leaf in words."""
    if "enum" in leaf:
        return f"one of {', '.join(map(str, leaf['enum']))}"
    if "oneOf" in leaf:
        return " or ".join(_allowed(choice) for choice in leaf["oneOf"])
    if "const" in leaf:
        return str(leaf["const"])
    words = KINDS[leaf["type"]]
    ranges = [f"{sign} {leaf[key]}" for key, sign in LIMITS.items() if key in leaf]
    words += f" {' and '.join(ranges)}" if ranges else ""
    words += " with at least one entry" if "minItems" in leaf else ""
    return words + (f", each {_allowed(leaf['items'])}" if "items" in leaf else "")


def _non_finite(value: Any, path: str) -> list[str]:
    """Numbers that pass every range check although they are none: .nan and .inf."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list):
        items = [(path, entry) for entry in value]
    else:
        bad = isinstance(value, float) and not math.isfinite(value)
        return [f"{path}: {value} is not allowed; needed is a finite number"] if bad else []
    return [problem for name, entry in items for problem in _non_finite(entry, name)]


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
    swept = [key for key in leaves if _is_sweep(values.get(key), leaves[key])]
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
    if warmup > steps:
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
    lists["plan.runs"] = config.get("plan", {}).get("runs", [])
    for section, names in lists.items():
        for name in names:
            if name not in known and name not in config["runs"]:
                yield f"{section}: there is no run {name!r}; {suggest(name, known)}"


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """`key: old -> new` for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            name = f"{path}.{key}" if path else key
            yield from _differences(old.get(key, "absent"), new.get(key, "absent"), name)
    elif old != new:
        yield f"{path}: {old} -> {new}"
