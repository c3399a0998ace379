"""The configuration: what is accepted, what each run becomes, and what a started run refuses."""

import copy
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from miniseries.settings import (
    LATER_KEYS,
    LATER_MACHINE_KEYS,
    MACHINE_KEYS,
    RECIPE_KEYS,
    check_frozen,
    checkpoints_held,
    is_kept,
    recipe_fingerprint,
    resolve_runs,
    start_file,
)
from miniseries.shapes import MODELS
from miniseries.validation import check_unique_keys, run_leaves, validate_config

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/config.schema.yaml").read_text())
CONFIG = yaml.safe_load((ROOT / "config/config.yaml").read_text())

# Each key is a promise to users: adding, renaming, or dropping one is a decision, made here too.
FROZEN_RUN_KEYS = [
    "dataset",
    "init_from",
    "branch_from",
    "num_layers",
    "num_heads",
    "channels",
    "sequence_length",
    "num_positions",
    "total_batch_tokens",
    "max_steps",
    "learning_rate",
    "lr_schedule",
    "warmup_steps",
    "final_lr_fraction",
    "weight_decay",
    "skip_loss_z",
    "skip_grad_z",
    "divergence_z",
    "rollback_skip_steps",
    "seed",
    "token_order",
    "llm_c_micro_batch",
    "llm_c_processes",
    "overfit_batch",
    "precision",
    "master_weights",
    "micro_batch",
    "gpus",
    "compile",
    "deterministic",
    "recompute",
    "val_every_steps",
    "hellaswag",
    "sample_every_steps",
    "sample_tokens",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "keep_every_steps",
    "ranges_every_steps",
    "stall_seconds",
    "export_steps",
]
# Table of the scripts: layers, heads, channels, T, tokens a step, steps, rate, final share, skips.
LLM_C = {
    "124m": (12, 12, 768, 1024, 524288, 18865, 6e-4, 0.0, 0.0),
    "350m": (24, 16, 1024, 1024, 524288, 60000, 3e-4, 0.0, 0.0),
    "774m": (36, 20, 1280, 1024, 524288, 286102, 2.5e-4, 0.0, 0.0),
    "1558m": (48, 25, 1600, 1024, 1048576, 32000, 6e-4, 0.1, 0.0),
    "gpt3-125m": (12, 12, 768, 2048, 524288, 572204, 6e-4, 0.1, 7.0),
}


@pytest.fixture
def config():
    """The project's own configuration, to be spoilt."""
    return copy.deepcopy(CONFIG)


def resolve(config):
    validate_config(config, SCHEMA)
    return resolve_runs(config, SCHEMA)


def refusal(config) -> str:
    with pytest.raises(ValueError) as error:
        resolve(config)
    return str(error.value)


def leaves(schema, path=""):
    """(path, schema) of everything in a schema that holds a value."""
    kinds = schema.get("oneOf", []) if "properties" in schema.get("oneOf", [{}])[0] else []
    for kind in kinds:
        yield from leaves(kind, path)
    for key, entry in schema.get("properties", {}).items():
        yield from leaves(entry, f"{path}.{key}")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from leaves(schema["additionalProperties"], f"{path}.*")
    if not kinds and "properties" not in schema and "additionalProperties" not in schema:
        yield path, schema


def objects(schema):
    """Every object in a schema that names its keys."""
    if "properties" in schema:
        yield schema
    below = [*schema.get("oneOf", []), *schema.get("properties", {}).values()]
    if isinstance(schema.get("additionalProperties"), dict):
        below.append(schema["additionalProperties"])
    for entry in below:
        yield from objects(entry)


def test_schema_is_closed_and_describes_every_leaf():
    Draft202012Validator.check_schema(SCHEMA)
    assert all(entry["additionalProperties"] is False for entry in objects(SCHEMA))
    for path, leaf in leaves(SCHEMA):
        assert leaf.get("description", "").endswith("."), path
        assert {"type", "oneOf"} & leaf.keys(), path
        if leaf.get("type") in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum"} & leaf.keys(), path


def test_run_keys_are_frozen():
    assert list(run_leaves(SCHEMA)) == FROZEN_RUN_KEYS
    assert [*RECIPE_KEYS, *MACHINE_KEYS] == FROZEN_RUN_KEYS


def test_values_left_out_of_a_recipe_are_the_default_ones():
    for key, usual in (LATER_KEYS | LATER_MACHINE_KEYS).items():
        assert run_leaves(SCHEMA)[key]["default"] == usual, key


def test_default_values_obey_the_schema():
    for path, leaf in leaves(SCHEMA):
        if "default" in leaf:
            assert Draft202012Validator(leaf).is_valid(leaf["default"]), path


def test_config_and_schema_name_the_same_leaves():
    sections = {key: entry for key, entry in SCHEMA["properties"].items()}
    assert CONFIG.keys() == sections.keys()
    for section in ("machine", "plots", "samples"):
        assert CONFIG[section].keys() == sections[section]["properties"].keys()


def test_readme_explains_every_key():
    text = (ROOT / "config/README.md").read_text()
    for path, _ in leaves(SCHEMA):
        key = path.removesuffix(".*").rpartition(".")[2]  # names of the user's own are no keys
        assert f"`{key}`" in text, path


def test_readme_states_the_default_values():
    text = (ROOT / "config/README.md").read_text()
    machine = SCHEMA["properties"]["machine"]["properties"]
    for key, leaf in run_leaves(SCHEMA).items():
        row = re.search(rf"^\|[^|]*`{key}`[^|]*\|([^|]*)\|", text, re.MULTILINE)
        assert row, key
        default = machine.get(key, leaf).get("default", "")
        assert row[1].strip().lower() == str(default).lower(), key


def test_conda_environment_has_the_ranges_of_pyproject():
    environment = yaml.safe_load((ROOT / "workflow/envs/miniseries.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {entry for entry in project["dependencies"] if not entry.startswith("snakemake")}
    assert set(environment["dependencies"][-1]["pip"]) >= wanted


@pytest.mark.parametrize("run", LLM_C)
def test_catalogue_has_the_hyper_parameters_of_the_scripts(run):
    recipe = resolve(CONFIG).runs[run]["recipe"]
    keys = [
        "num_layers",
        "num_heads",
        "channels",
        "sequence_length",
        "total_batch_tokens",
        "max_steps",
        "learning_rate",
        "final_lr_fraction",
        "skip_loss_z",
    ]
    assert tuple(recipe[key] for key in keys) == LLM_C[run]
    assert recipe["skip_grad_z"] == recipe["skip_loss_z"]
    assert (recipe["weight_decay"], recipe["warmup_steps"]) == (0.1, 700)
    assert (recipe["lr_schedule"], recipe["precision"]) == ("cosine", "bf16")


def test_124m_finds_all_its_tokens_in_its_dataset():
    recipe = resolve(CONFIG).runs["124m"]["recipe"]
    assert recipe["max_steps"] * recipe["total_batch_tokens"] < recipe["data"]["num_shards"] * 10**8


def test_settings_have_the_agreed_form():
    settings = resolve(CONFIG).runs["tiny"]
    assert settings.keys() == {"run", "recipe", "fingerprint", "machine"}
    always = [key for key in RECIPE_KEYS if key not in LATER_KEYS]
    assert list(settings["recipe"]) == [*always, "data"]
    assert list(settings["machine"]) == list(MACHINE_KEYS)
    assert settings["fingerprint"] == recipe_fingerprint(settings["recipe"])
    assert settings["recipe"]["data"]["source"] == "builtin"
    assert settings == json.loads(json.dumps(settings))


@pytest.mark.parametrize("path", sorted((ROOT / "tests/config").glob("*.yaml")), ids=str)
def test_test_configurations_are_valid(config, path):
    def lay_over(base, top):
        for key, value in top.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                lay_over(base[key], value)
            else:
                base[key] = value

    lay_over(config, yaml.safe_load(path.read_text()))
    resolve(config)


def test_unknown_key_names_the_nearest_known_one(config):
    config["runs"]["tiny"]["learning_rte"] = 1.0e-3
    assert "runs.tiny.learning_rte: unknown key; did you mean learning_rate?" in refusal(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learning_rate", -1.0, "-1.0 is not allowed; needed is a number > 0 and <= 0.1"),
        ("learning_rate", "6e-4", "'6e-4' is not allowed; needed is a number"),
        ("learning_rate", "6e-4", "(YAML reads 6e-4 as text: write 6.0e-4)"),
        ("learning_rate", float("nan"), "nan is not allowed; needed is a finite number"),
        ("total_batch_tokens", "5.2e5", "(YAML reads 5.2e5 as text: write 5.2e+5)"),
        ("num_layers", 1.5, "1.5 is not allowed; needed is an integer >= 1 and <= 1000"),
        ("num_layers", True, "True is not allowed; needed is an integer"),
        ("num_layers", None, "None is not allowed; needed is an integer"),
        ("lr_schedule", "cos", "'cos' is not allowed; needed is one of cosine, linear, constant"),
        ("gpus", "all", "'all' is not allowed; needed is auto or an integer >= 1"),
        ("compile", "yes", "'yes' is not allowed; needed is auto or true or false"),
        ("export_steps", 3, "3 is not allowed; needed is a list, each an integer >= 1"),
    ],
)
def test_refused_value_is_named_with_what_is_allowed(config, key, value, message):
    config["runs"]["tiny"][key] = value
    text = refusal(config)
    assert f"runs.tiny.{key}: " in text
    assert message in text
    assert "1 problem:" in text


def test_suggested_spelling_is_a_number_for_yaml():
    assert yaml.safe_load("[6.0e-4, 5.2e+5]") == [6e-4, 5.2e5]
    assert yaml.safe_load("[6e-4, 5.2e5]") == ["6e-4", "5.2e5"]


@pytest.mark.parametrize("name", ["a@b", "a/b", "a b", "", ".a", 1558])
def test_names_that_are_no_file_names_are_refused(config, name):
    config["runs"][name] = {"extends": "tiny"}
    assert f"runs: {name!r} is no usable name" in refusal(config)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "web"}, "datasets.x.source: 'web' is not allowed; known: builtin"),
        ({"source": ["builtin"]}, "datasets.x.source: ['builtin'] is not allowed"),
        ({"paths": ["a"]}, "datasets.x.source: missing; needed is one of builtin"),
        ({"source": "files"}, "datasets.x.paths: missing; needed is a list"),
        ({"source": "builtin", "paths": ["a"]}, "datasets.x.paths: unknown key"),
        (3, "datasets.x: 3 is not allowed"),
    ],
)
def test_dataset_is_checked_as_what_its_source_says(config, entry, message):
    config["datasets"]["x"] = entry
    text = refusal(config)
    assert message in text
    assert "1 problem:" in text


def test_missing_section_is_named(config):
    del config["runs"]
    assert "runs: missing; needed is keys with values" in refusal(config)


def test_a_key_that_stands_twice_is_refused_with_its_lines(tmp_path):
    file = tmp_path / "mine.yaml"
    for text in ("", "runs:\n  a: &a {seed: 3}\n  b: {<<: *a, seed: 1}\n  c: [*a, *a]\n"):
        file.write_text(text)
        check_unique_keys(file)
    file.write_text("runs:\n  a: {seed: 1, seed: 2}\n  b: {}\n  a: {}\n")
    with pytest.raises(ValueError, match="has 2 problems") as refusal:
        check_unique_keys(file)
    assert f"{file}: seed stands in line 2 and in line 2" in str(refusal.value)
    assert f"{file}: a stands in line 2 and in line 4" in str(refusal.value)


def test_every_problem_gets_its_own_line(config):
    config["runs"]["tiny"]["seed"] = -1
    config["plots"]["dpi"] = "fine"
    lines = refusal(config).splitlines()
    assert lines[0] == "the configuration has 2 problems:"
    assert len(lines) == 3


def test_a_faulty_run_is_no_problem_of_those_that_start_from_it(config):
    config["runs"] |= {
        "x": {"extends": "tiny", "num_heads": 3},
        "y": {"extends": "tiny", "init_from": "x"},
        "z": {"extends": "tiny", "branch_from": "x@50"},
    }
    text = refusal(config)
    assert "runs.x.num_heads" in text and "1 problem:" in text


def test_extends_takes_over_what_is_not_stated(config):
    config["runs"]["child"] = {"extends": "tiny", "seed": 1}
    config["runs"]["grandchild"] = {"extends": "child", "num_layers": 2}
    runs = resolve(config).runs
    assert runs["grandchild"]["recipe"] == runs["tiny"]["recipe"] | {"seed": 1, "num_layers": 2}
    assert runs["grandchild"]["machine"] == runs["tiny"]["machine"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"x": {"extends": "tinny"}},
            "runs.x.extends: there is no run 'tinny'; did you mean tiny?",
        ),
        ({"x": {"extends": "y"}, "y": {"extends": "x"}}, "runs.x.extends: a circle, x -> y -> x"),
        (
            {"x": {"num_layers": 1}},
            "runs.x: dataset, num_heads, channels, max_steps, learning_rate",
        ),
        (
            {"x": {"extends": "tiny", "init_from": "tny@5"}},
            "runs.x.init_from: 'tny@5' is no run of this configuration (a path starts with / or ., "
            "a name of the Hugging Face hub is owner/name); did you mean tiny?",
        ),
        ({"x": {"extends": "tiny", "init_from": "tiny@last"}}, "'tiny@last' is no run"),
        (
            {
                "x": {"extends": "tiny", "init_from": "y"},
                "y": {"extends": "tiny", "init_from": "x@50"},
            },
            "runs.x.init_from: a circle, x -> y -> x",
        ),
        ({"miniseries": {"extends": "tiny"}}, "runs.miniseries: the name is taken"),
        ({"x.speed": {"extends": "tiny"}}, "runs.x.speed: the name is taken"),
    ],
)
def test_runs_that_do_not_fit_the_others_are_refused(config, entries, message):
    config["runs"] |= entries
    assert message in refusal(config)


@pytest.mark.parametrize(
    ("init_from", "file"),
    [
        ("", ""),
        ("openai-community/gpt2", "results/weights/openai-community--gpt2/config.json"),
        ("me/gpt2@v1", "results/weights/me--gpt2@v1/config.json"),
        ("./gpt2", str(Path("gpt2/config.json").absolute())),
        ("/data/log/model_00000010.bin", "/data/log/model_00000010.bin"),
        ("tiny", "results/train/tiny/done.json"),
        ("tiny@50", "results/train/tiny/saved/50.json"),
    ],
)
def test_each_kind_of_start_has_one_file_that_stands_for_it(config, init_from, file):
    config["runs"]["x"] = {"extends": "tiny", "init_from": init_from}
    recipe = resolve(config).runs["x"]["recipe"]
    assert recipe.get("init_from", "") == init_from
    assert start_file(init_from) == file


def test_the_baselines_have_the_shapes_of_the_four_sizes_and_train_no_step():
    runs = resolve(CONFIG).runs
    for size in ("124m", "350m", "774m", "1558m"):
        ours, theirs = runs[size]["recipe"], runs[f"gpt2-{size}-baseline"]["recipe"]
        for key in ("num_layers", "num_heads", "channels", "sequence_length", "precision"):
            assert ours[key] == theirs[key]
        assert theirs["max_steps"] == 0 and theirs["init_from"].startswith("openai-community/gpt2")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dataset": "buitin"}, "dataset: there is no dataset 'buitin'; did you mean builtin?"),
        ({"num_heads": 3}, "num_heads: 3 heads cannot share 128 channels equally"),
        (
            {"sequence_length": 100},
            "total_batch_tokens: 1024 is no multiple of sequence_length, 100",
        ),
        ({"master_weights": False}, "master_weights: false needs precision bf16"),
        (
            {"token_order": "llm.c"},
            "total_batch_tokens: 1024 is no multiple of 65536, which llm.c reads at once",
        ),
        ({"num_positions": 100}, "num_positions: 100 is less than sequence_length, 128"),
        ({"warmup_steps": 201}, "warmup_steps: 201 is more than max_steps, 200"),
        ({"export_steps": [200, 201]}, "export_steps: [201] is after the last step, max_steps 200"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(config, entry, message):
    config["runs"]["x"] = {"extends": "tiny"} | entry
    assert f"runs.x.{message}" in refusal(config)


def test_model_stands_for_shape_and_context_and_own_keys_count_more(config):
    config["runs"] |= {
        "a": {"extends": "124m", "model": "gpt3:c1536"},
        "b": {"extends": "a", "sequence_length": 512, "num_positions": 2048},
        "c": {"extends": "b", "model": "gpt2:d6"},
    }
    runs = resolve(config).runs
    keys = ("num_layers", "num_heads", "channels", "sequence_length", "num_positions")
    shapes = {name: tuple(runs[name]["recipe"].get(key, 0) for key in keys) for name in "abc"}
    assert shapes["a"] == (24, 16, 1536, 2048, 0)
    assert shapes["b"] == (24, 16, 1536, 512, 2048)
    assert shapes["c"] == (6, 6, 384, 1024, 2048)
    config["runs"]["a"]["model"] = "gpt2:d13"
    assert "runs.a.model: no model 'gpt2:d13'; known: gpt2:d6, gpt2:d12, " in refusal(config)


def test_models_of_the_series_are_those_that_the_schema_and_the_readme_name():
    described = SCHEMA["properties"]["runs"]["additionalProperties"]["properties"]["model"]
    names = re.findall(r"\b[cd]\d+\b", described["description"])
    row = re.search(r"^\| `model` .*$", (ROOT / "config/README.md").read_text(), re.MULTILINE)[0]
    assert names == re.findall(r"`([cd]\d+)`", row) == [name.partition(":")[2] for name in MODELS]


def test_list_of_unknown_runs_is_refused(config):
    config["series"] = ["124n"]
    assert "series: there is no run '124n'; did you mean 124m?" in refusal(config)


def test_sweep_makes_a_run_of_each_value(config):
    config["runs"]["rates"] = {"extends": "tiny", "learning_rate": [2.0e-4, 6.0e-4, 1.2e-3]}
    catalogue = resolve(config)
    names = [f"rates-learning_rate-{rate}" for rate in (0.0002, 0.0006, 0.0012)]
    assert catalogue.sweeps == {"rates": names}
    assert "rates" not in catalogue.runs
    assert [catalogue.runs[name]["recipe"]["learning_rate"] for name in names] == [
        2e-4,
        6e-4,
        1.2e-3,
    ]
    assert len({catalogue.runs[name]["fingerprint"] for name in names}) == 3


def test_several_lists_make_every_combination(config):
    config["runs"]["grid"] = {"extends": "tiny", "seed": [1, 2], "num_layers": [1, 2]}
    assert resolve(config).sweeps["grid"] == [
        f"grid-num_layers-{layers}-seed-{seed}" for layers in (1, 2) for seed in (1, 2)
    ]


def test_run_that_extends_a_sweep_is_one_too(config):
    config["runs"]["seeds"] = {"extends": "tiny", "seed": [1, 2]}
    config["runs"]["deep"] = {"extends": "seeds", "num_layers": 8}
    assert resolve(config).sweeps["deep"] == ["deep-seed-1", "deep-seed-2"]


@pytest.mark.parametrize("values", [[], [1, 1]])
def test_sweep_without_different_values_is_refused(config, values):
    config["runs"]["x"] = {"extends": "tiny", "seed": values}
    assert "runs.x.seed: a sweep is a list of different values" in refusal(config)


def test_values_of_a_sweep_are_checked(config):
    config["runs"]["x"] = {"extends": "tiny", "learning_rate": [1.0e-3, "6e-4"]}
    assert "runs.x.learning_rate: '6e-4' is not allowed" in refusal(config)


def test_sweep_cannot_take_the_name_of_a_run(config):
    config["runs"] |= {"x": {"extends": "tiny", "seed": [1, 2]}, "x-seed-1": {"extends": "tiny"}}
    assert "runs.x: its run 'x-seed-1' has the name of another run" in refusal(config)


@pytest.mark.parametrize("starts", [["tiny", "tiny@50"], ["./a", "./b"]])
def test_a_list_of_starts_is_refused_since_its_runs_would_have_no_names(config, starts):
    config["runs"]["x"] = {"extends": "tiny", "init_from": starts}
    assert "is no name of a run; write an entry of its own" in refusal(config)


def test_a_run_that_is_only_measured_needs_no_other_warm_up(config):
    config["runs"]["x"] = {"extends": "tiny", "init_from": "someone/gpt2", "max_steps": 0}
    assert resolve(config).runs["x"]["recipe"]["max_steps"] == 0


def test_list_of_export_steps_is_no_sweep(config):
    config["runs"]["tiny"]["export_steps"] = [50, 100]
    assert resolve(config).runs["tiny"]["machine"]["export_steps"] == [50, 100]


def test_machine_section_holds_for_runs_that_state_nothing(config):
    config["machine"] = {"gpus": 4}
    config["runs"]["124m"]["gpus"] = 2
    runs = resolve(config).runs
    assert (runs["tiny"]["machine"]["gpus"], runs["124m"]["machine"]["gpus"]) == (4, 2)
    assert runs["tiny"]["machine"]["compile"] == "auto"


def test_fingerprint_follows_the_recipe_alone(config):
    before = resolve(config).runs["tiny"]["fingerprint"]
    config["runs"]["tiny"] |= {"micro_batch": 1, "gpus": 1, "learning_rate": 1e-3, "skip_loss_z": 0}
    assert resolve(config).runs["tiny"]["fingerprint"] == before
    config["datasets"]["builtin"]["val_tokens"] = 99
    assert resolve(config).runs["tiny"]["fingerprint"] != before


def test_checkpoints_that_stay_are_known():
    settings = copy.deepcopy(resolve(CONFIG).runs["124m"])  # every 5000 of 18865, newest 5
    settings["machine"] |= {"export_steps": [7], "keep_every_steps": 10000}
    assert [s for s in (0, 7, 5000, 10000, 18865, 20000) if is_kept(settings, s)] == [
        7,
        10000,
        18865,
    ]
    settings["machine"]["keep_checkpoints"] = 0
    assert is_kept(settings, 5000)
    assert not is_kept(settings, 5001)


class TestFrozenSettings:
    """What the folder of a started run says against the settings asked for."""

    @pytest.fixture
    def started(self, tmp_path):
        """Frozen settings of `tiny` and the manifest of its data."""
        frozen, manifest = tmp_path / "tiny/settings.json", tmp_path / "data/manifest.json"
        frozen.parent.mkdir()
        manifest.parent.mkdir()
        settings = resolve(CONFIG).runs["tiny"] | {"data_fingerprint": "a" * 64}
        frozen.write_text(json.dumps(settings))
        (tmp_path / "tiny/metrics.jsonl").touch()
        manifest.write_text(json.dumps({"fingerprint": "a" * 64}))
        return frozen, manifest

    def test_unchanged_run_goes_on(self, config, started):
        check_frozen(resolve(config).runs["tiny"], *started)

    def test_run_that_never_started_may_change(self, config, tmp_path):
        check_frozen(resolve(config).runs["tiny"], tmp_path / "none.json", tmp_path / "none.json")

    def test_run_that_was_refused_at_its_start_may_change(self, config, started):
        folder = started[0].parent
        (folder / "metrics.jsonl").unlink()
        (folder / "checkpoints").mkdir()
        config["runs"]["tiny"]["learning_rate"] = 2.0e-3
        check_frozen(resolve(config).runs["tiny"], *started)
        (folder / "checkpoints/step-00000050").mkdir()
        with pytest.raises(ValueError, match=r"learning_rate: 0\.001 -> 0\.002"):
            check_frozen(resolve(config).runs["tiny"], *started)

    def test_other_speed_goes_on(self, config, started):
        config["runs"]["tiny"] |= {"micro_batch": 1, "gpus": 1, "compile": False}
        check_frozen(resolve(config).runs["tiny"], *started)

    def test_other_recipe_is_refused_with_keys_values_and_remedy(self, config, started):
        config["runs"]["tiny"]["learning_rate"] = 2.0e-3
        config["datasets"]["builtin"]["val_tokens"] = 5
        with pytest.raises(ValueError) as error:
            check_frozen(resolve(config).runs["tiny"], *started)
        text = str(error.value)
        assert "learning_rate: 0.001 -> 0.002" in text
        assert "data.val_tokens: 16384 -> 5" in text
        assert "give the dataset with them another name" in text
        assert "`extends: tiny`" in text

    def test_other_tokens_are_refused(self, config, started):
        started[1].write_text(json.dumps({"fingerprint": "b" * 64}))
        with pytest.raises(
            ValueError, match=r"other tokens than .* \(fingerprint a{12} -> b{12}\)"
        ):
            check_frozen(resolve(config).runs["tiny"], *started)

    def test_missing_manifest_is_not_compared(self, config, started):
        started[1].unlink()
        check_frozen(resolve(config).runs["tiny"], *started)

    def test_damaged_settings_are_named(self, config, started):
        for text, problem in (
            ("{", "not valid JSON"),
            ("[]", "lacks recipe"),
            ("{}", "lacks recipe"),
        ):
            started[0].write_text(text)
            with pytest.raises(ValueError, match=rf"settings\.json: .*{problem}.*; bring it back"):
                check_frozen(resolve(config).runs["tiny"], *started)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, 6),  # the last one is written while five are kept
        ({"checkpoint_every_steps": 0}, 1),
        ({"keep_checkpoints": 0}, 20),
        ({"keep_checkpoints": 30}, 20),
        ({"keep_every_steps": 500}, 6 + 1),
        ({"export_steps": [10, 300]}, 6 + 2),
        ({"checkpoint_every_steps": 300}, 4),
    ],
)
def test_how_many_checkpoints_are_on_the_disk_at_once_is_known(changes, held):
    machine = {"checkpoint_every_steps": 50, "keep_checkpoints": 5, "keep_every_steps": 0}
    machine |= {"export_steps": []} | changes
    assert checkpoints_held({"recipe": {"max_steps": 1000}, "machine": machine}) == held
