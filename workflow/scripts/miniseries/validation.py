"""The configuration against its schema, and what does not fit in sentences.

The schema is `workflow/schemas/config.schema.yaml`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator as Validator

KINDS = {  # the schema's types in words
    "array": "a list",
    "object": "keys with values",
    "string": "text",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "null": "null",
}
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# YAML 1.1 takes neither 6e-4 (no point) nor 6.0e4 (no sign) for a number
NUMBER_AS_TEXT = re.compile(r"([+-]?\d+)(\.\d+)?[eE]([+-]?)(\d+)")


def suggest(word: str, known: Sequence[str]) -> str:
    """The nearest known word as a question, or the list of all."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"


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
    raise_problems(list(dict.fromkeys(problems)))


def check_unique_keys(file: Path) -> None:
    """Refuse a YAML file that states a key twice: YAML takes the last one without a word.

    Raises:
        ValueError: one line for each such key, with the lines of the file.
    """
    raise_problems(
        list(dict.fromkeys(_twice(yaml.compose(file.read_text(encoding="utf-8")), file)))
    )


def run_leaves(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of each key that a run has; `extends` and `model` stand for other ones."""
    leaves = schema["properties"]["runs"]["additionalProperties"]["properties"]
    return {key: leaf for key, leaf in leaves.items() if key not in ("extends", "model")}


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ValueError that holds them all, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError(f"the configuration has {count}:\n  " + "\n  ".join(problems))


def is_sweep(value: Any, leaf: dict[str, Any]) -> bool:
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
            lists = {k: v for k, v in entry.items() if k in leaves and is_sweep(v, leaves[k])}
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
    kinds = leaf["type"] if isinstance(leaf["type"], list) else [leaf["type"]]
    words = " or ".join(KINDS[kind] for kind in kinds)
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
