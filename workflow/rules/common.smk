"""What the rules share: the catalogue of runs, and functions that name files."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

sys.path.append(f"{workflow.basedir}/workflow/scripts")
from miniseries.data.hub_shards import shard_files
from miniseries.data.origin import check_origin
from miniseries.metrics import read_json
from miniseries.settings import check_frozen, is_kept, resolve_runs, start_file
from miniseries.training.launcher import newest_checkpoint
from miniseries.validation import check_unique_keys, suggest, validate_config

with open(f"{workflow.basedir}/workflow/schemas/config.schema.yaml") as file:
    SCHEMA = yaml.safe_load(file)
try:
    for configfile in workflow.configfiles:
        check_unique_keys(Path(configfile))
    validate_config(config, SCHEMA)
    CATALOGUE = resolve_runs(config, SCHEMA)
except ValueError as error:
    raise WorkflowError(error) from None
RUNS, DATASETS, SWEEPS = CATALOGUE.runs, CATALOGUE.datasets, CATALOGUE.sweeps
# What train_<name> and the like stand for.
TARGETS = {run: [run] for run in RUNS} | SWEEPS
DEFAULT_RUNS = [run for name in config["default_runs"] for run in TARGETS[name]]
SERIES = [run for name in config["series"] for run in TARGETS[name]]
# Runs drawn together: all in the figure of the miniseries, those of a sweep in its own, too.
SERIES_FIGURES = {"miniseries": list(RUNS)} | SWEEPS


def refuse(error):
    """End before anything runs, with one message.

    For functions that Snakemake calls while it builds the job graph: it would wrap an exception in
    its own words, or swallow it and call old files up to date.
    """
    raise SystemExit(f"error: {error}") from None


def datasets_from(*sources):
    """Names of the datasets with one of these sources."""
    return [name for name, entry in DATASETS.items() if entry["source"] in sources]


LOCAL_TEXT = datasets_from("builtin", "builtin-large", "files")
OWN_SHARDS = datasets_from("shards")
HUB_SHARDS = datasets_from("hub-shards")
HUB_TEXT = datasets_from("hub-text")


STARTS = [run["recipe"].get("init_from", "") for run in RUNS.values()]
# Further tasks to score models on, those that have data.
# Absolute, since the Snakefile takes a bare name in the working folder for a target.
TASK_DATA = {
    task: str(Path(file).absolute())
    for task, file in config["evaluation"]["data"].items()
    if file
}
HARNESS = config["evaluation"]["harness"]
PROMPTS_FILE = [
    str(Path(file).absolute()) for file in [config["samples"]["prompts_file"]] if file
]
# Weights of the Hugging Face hub that runs start from, by the folder that they are kept in.
FROM_HUB = {
    Path(start_file(start)).parent.name: start
    for start in STARTS
    if start_file(start).startswith("results/weights/")
}


def any_of(names):
    """Regular expression that matches these names only; nothing if there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


# Parameters that take `output` are no rerun trigger for Snakemake. So are those here, since they
# change no result: which Python runs a step, and how much it holds in memory at once.


def interpreter(wildcards, output):
    """The Python that runs Snakemake, or the environment's where conda is asked for."""
    methods = {m.name for m in workflow.deployment_settings.deployment_method}
    return "python" if "CONDA" in methods else sys.executable


def micro_batch(wildcards, output):
    """Sequences at once for the evaluation of a model: those of its training."""
    found = RUNS[run_of(wildcards.model)]["machine"]["micro_batch"]
    return (
        8 if found == "auto" else found
    )  # without gradients that fits wherever training does


def run_of(model):
    """Run of a model: 124m@2000 is step 2000 of the run 124m."""
    return model.partition("@")[0]


# Data


def manifest_path(run):
    """Manifest of the run's dataset."""
    return f"results/data/{RUNS[run]['recipe']['dataset']}/manifest.json"


def questions_path(run):
    """Question file for the run: made along with local text, HellaSwag's own for other data."""
    dataset = RUNS[run]["recipe"]["dataset"]
    folder = dataset if dataset in LOCAL_TEXT else "hellaswag"
    return f"results/data/{folder}/hellaswag.jsonl"


def shard_notes(dataset):
    """Notes of the shards to fetch; none for datasets that are made here."""
    if dataset not in HUB_SHARDS:
        return []
    files = [file for file, split in shard_files(DATASETS[dataset])]
    return expand("results/data/{dataset}/{file}.json", dataset=dataset, file=files)


def number_of_shards(wildcards, output):
    """Shards of the dataset; says only how far it is, so it is no rerun trigger."""
    return len(shard_notes(wildcards.dataset))


WARNED = set()  # datasets whose files have changed, said once


def own_dataset(wildcards):
    """A dataset's entry as JSON, for the rules that read files of one's own.

    Snakemake asks while it builds the job graph, before it deletes the manifest: so a changed entry
    that could make nothing better is refused here, and changed files are told of.
    """
    name = wildcards.dataset
    folder = Path(f"results/data/{name}")
    try:
        warning = check_origin(name, DATASETS[name], folder, Path("results/train"))
    except ValueError as error:
        refuse(error)
    if warning and name not in WARNED:
        WARNED.add(name)
        logger.warning(f"warning: {warning}")
    return json.dumps(DATASETS[name])


def text_options(dataset):
    """What of a dataset's entry decides the tokens of its files, not how they are cut."""
    keys = ("source", "repository", "revision", "text_key", "min_doc_tokens")
    return {key: value for key, value in DATASETS[dataset].items() if key in keys}


def tokenized_files(wildcards):
    """Notes of the files of text that a dataset consists of, once the hub has listed them."""
    listed = checkpoints.list_files.get(dataset=wildcards.dataset).output.files
    numbers = range(len(json.loads(Path(listed).read_text())["files"]))
    folder = f"results/data/{wildcards.dataset}/tokenized"
    return [f"{folder}/{number:06d}.json" for number in numbers]


# Training


def manifest_of_run(wildcards):
    """Manifest for the rule that trains; refuses other settings than the run was started with.

    Snakemake asks while it builds the job graph: before anything runs, in a dry run too, and also
    for a run that is complete, whose done.json therefore stays.
    """
    folder = Path(f"results/train/{wildcards.run}")
    manifest = manifest_path(wildcards.run)
    try:
        check_frozen(RUNS[wildcards.run], folder / "settings.json", Path(manifest))
    except ValueError as error:
        refuse(error)
    return manifest


# Where a job must run again whose existing output is `ancient`, Snakemake 9.27 passes over all jobs
# behind it, even those whose own output is missing; where the output is missing, `ancient` is void.
# Hence the functions that follow: what training waits for is not `ancient`, and what a complete run
# was made of may change, go, and be made again.


def is_done(run):
    """Whether the run is complete."""
    return Path(f"results/train/{run}/done.json").exists()


def was_input(path):
    """An input of a complete run: nobody makes it for its sake, and its time does not count."""
    return before_update(ancient(path))


def until_done(path):
    """Input function: a file that training waits for; it counts no more once the run is done."""

    def file(wildcards):
        found = path(wildcards)
        return was_input(found) if found and is_done(wildcards.run) else found

    return file


def questions_of_run(wildcards):
    """Input function: what training is measured by on the way; nothing with `hellaswag: false`.

    Of a complete run as it was trained: another set of inputs would train it again.
    """
    wanted = json.loads(settings_of_run(wildcards))["machine"]["hellaswag"]
    return questions_path(wildcards.run) if wanted else []


def start_of_run(wildcards):
    """Input function: where the run's first weights come from; nothing if they are random."""
    recipe = RUNS[wildcards.run]["recipe"]
    init_from = recipe.get("branch_from") or recipe.get("init_from", "")
    start = start_file(init_from)
    if run_of(init_from) in RUNS:
        start = marker_of(init_from)
    if not start:
        return []
    if not is_done(wildcards.run):
        if Path(start).is_absolute() and not Path(start).exists():
            refuse(
                f"runs.{wildcards.run}.init_from: there is no {start}; an export of a run "
                "of this configuration is better named by that run, which also makes it"
            )
        return start
    with suppress(ValueError, KeyError):  # gone or damaged
        # where it was: in a project that has moved its path would be another input, as above
        start = read_json(Path(f"results/train/{wildcards.run}/settings.json"))[
            "start"
        ]["path"]
    return was_input(start)


def start_option(wildcards, input, output):
    """The trainer's option for `start_of_run`."""
    return ["--init-from", input.start] if input.start else []


def replayed_run(wildcards):
    """Fingerprints of the run that a step is done twice of; refuses steps that it never has."""
    run = wildcards.run
    try:
        settings = read_json(
            Path(f"results/train/{run}/settings.json"),
            ["recipe", "fingerprint"],
            f"no step of run {run!r} can be done twice before it was trained",
        )
    except ValueError as error:
        refuse(error)
    last = settings["recipe"]["max_steps"] - 1
    if int(wildcards.step) > last:
        refuse(f"run {run!r} has the steps 0 to {last}, not {wildcards.step}")
    return [settings["fingerprint"], settings.get("data_fingerprint")]


def settings_of_run(wildcards):
    """Settings of the run as JSON; of a complete run those that it was trained with."""
    if is_done(wildcards.run):
        with suppress(ValueError):  # gone or damaged
            return json.dumps(read_json(Path(f"results/settings/{wildcards.run}.json")))
    return json.dumps(RUNS[wildcards.run])


# Exported models


def models_of(runs):
    """Names of the models to export: the last step of each run, and its `export_steps:`."""
    for run in runs:
        yield run
        for step in RUNS[run]["machine"]["export_steps"]:
            yield f"{run}@{step}"


def marker_of_model(wildcards):
    """Input function: see `marker_of`."""
    return marker_of(wildcards.model)


def marker_of(model):
    """The file that says that the checkpoint behind a model is complete.

    A step that training is going to delete again, or will never reach, is refused beforehand.
    """
    run, _, step = model.partition("@")
    folder = Path(f"results/train/{run}")
    marker = folder / f"saved/{step}.json" if step else folder / "done.json"
    if not step or marker.exists() or (folder / "done.json").exists():
        return str(marker)
    if not is_kept(RUNS[run], int(step)):
        refuse(
            f"run {run!r} keeps no checkpoint of step {step}: add it to the run's `export_steps:`"
        )
    # where a checkpoint lacks its marker, training writes it again
    saved = folder / f"checkpoints/step-{int(step):08d}"
    try:
        newest = newest_checkpoint(folder)
    except ValueError as error:
        refuse(error)
    if 0 < int(step) <= newest and not saved.exists():
        refuse(
            f"run {run!r} is at step {newest} and has kept no checkpoint of step {step}, since "
            "that was asked for too late: take it out of `export_steps:`, or name a step to come "
            f"or one of {folder}/saved"
        )
    return str(marker)


def repository_of_model(wildcards):
    """Where on the hub a model goes."""
    owner = config["hub"]["owner"]
    if not owner:
        refuse("hub.owner is empty; name the account or organisation to push to")
    return f"{owner}/{wildcards.model.replace('@', '-step-')}"


def exports(runs):
    """Weight files of the models of these runs."""
    return expand("results/export/{model}/model.safetensors", model=models_of(runs))


def evaluations(runs):
    """Score files of the models of these runs."""
    return expand(
        "results/evaluate/{model}/{score}.json",
        model=models_of(runs),
        score=["val_loss", "hellaswag", *TASK_DATA],
    )


def task_data_option(wildcards, output):
    """Option for lm-eval's data on this machine."""
    return ["--task-data", HARNESS["task_data"]] if HARNESS["task_data"] else []


def tasks_of(kind):
    """lm-eval's tasks of `harness` or `leaderboard`; refuses unknown ones as `own_dataset` does."""

    def tasks(wildcards):
        wanted = HARNESS["tasks" if kind == "harness" else kind]
        scores = Path(f"results/evaluate/{wildcards.model}/{kind}.json")
        if scores.exists():
            # here, since it loads PyTorch, which takes seconds
            from miniseries.evaluation.harness import check_tasks

            try:
                check_tasks(wanted, scores)
            except ValueError as error:
                refuse(f"{error}. Nothing of {scores} was touched")
        return wanted

    return tasks


def samples_side_by_side(wildcards):
    """Input function: texts of the models of `samples: side_by_side:`; refuses unknown ones."""
    models = config["samples"]["side_by_side"]
    for model in models:
        if run_of(model) not in RUNS:
            refuse(
                f"samples.side_by_side: there is no run {model!r}; {suggest(model, list(RUNS))}"
            )
    return expand("results/samples/{model}.json", model=models)


def rows_of(pattern, names):
    """Input function: files of rows or rungs; refuses faulty ones when somebody asks for them.

    A run that is changed may not fit a row of the bench any more: no reason not to train it.
    `measure.smk` has the rows.
    """

    def files(wildcards):
        if ROWS_FAULT:
            refuse(ROWS_FAULT)
        if not names:
            refuse(
                "no row of `bench: rows:` has `profile: true`; set it for one of them"
            )
        return expand(pattern, row=names)

    return files


def pages(runs, kinds):
    """Pages of the report on these runs and their models."""
    found = expand("results/pages/{run}.settings.html", run=runs)
    return found + expand(
        "results/pages/{model}.{kind}.html", kind=kinds, model=models_of(runs)
    )


def samples(runs):
    """Text files of the models of these runs."""
    return expand("results/samples/{model}.md", model=models_of(runs))


# Figures and the table are drawn from the logs that exist. A log is no output of training, or
# Snakemake would delete it; so figures do not depend on training. A target that trains first waits
# for the checkpoint `train` (Snakemake's word for a job after which the graph is looked at anew),
# and asks for the figures then: `snakemake plots` draws the same files and never trains.


def log_path(run):
    """The log of a run, written and appended to by the trainer alone."""
    return f"results/train/{run}/metrics.jsonl"


def logged(runs):
    """Those of the runs that have a log."""
    return [run for run in runs if Path(log_path(run)).exists()]


def logged_anywhere():
    """All runs that have a log, also those that the configuration no longer has."""
    logs = Path("results/train").glob("*/metrics.jsonl")
    return sorted(log.parent.name for log in logs)


def figures_of_run(run):
    """Figures of one run."""
    return [f"results/plots/{run}.png", f"results/plots/{run}.speed.png"]


def figures_of_logs(wildcards):
    """All figures that can be drawn now, and the table."""
    runs = logged(RUNS)
    if not runs:
        logger.info(
            "plots: nothing to draw, no run has a log (results/train/<run>/metrics.jsonl)"
        )
        return []
    figures = [figure for run in runs for figure in figures_of_run(run)]
    figures += [
        f"results/plots/{name}.png" for name, of in SERIES_FIGURES.items() if logged(of)
    ]
    return [*figures, "results/pages/summary.html"]


def figures_after_training(run):
    """Input function: the figures of a run, once it is trained."""

    def figures(wildcards):
        checkpoints.train.get(run=run)
        return figures_of_run(run)

    return figures


def series_after_training(name, runs):
    """Input function: the figure of the miniseries or a sweep, once these runs are trained."""

    def figure(wildcards):
        for run in runs:
            checkpoints.train.get(run=run)
        return f"results/plots/{name}.png"

    return figure


def summary_after_evaluation(runs):
    """Input function: the table, once all models of these runs are evaluated."""

    def summary(wildcards):
        for model in models_of(runs):
            checkpoints.score.get(model=model)
        return "results/pages/summary.html"

    return summary


def evaluated_models(wildcards):
    """Models that have scores, each with when they were measured: the table follows these."""
    files = sorted(Path("results/evaluate").glob("*/*.json"))
    return [
        f"{file.parent.name}/{file.name} {file.stat().st_mtime_ns}" for file in files
    ]


# Speed


def measured_speeds(wildcards):
    """Results of the bench by device: those of this folder first, then those of the repository."""
    folders = ["results/bench", f"{workflow.basedir}/benchmarks"]
    return [
        str(file) for folder in folders for file in sorted(Path(folder).glob("*.json"))
    ]


# Messages


def refuse_target(wildcards):
    """Refuse a target, with the names of those near it."""
    known = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
    wanted = wildcards.target
    hint = (
        f"did you mean train_{wanted}?" if wanted in TARGETS else suggest(wanted, known)
    )
    refuse(
        f"there is no target {wanted!r}; {hint} "
        f"Runs: {', '.join(TARGETS)}. Datasets: {', '.join(DATASETS)}. "
        "Runs of a file of your own need its --configfile."
    )
