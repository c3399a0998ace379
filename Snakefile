# GPT-2's miniseries from raw data to evaluated models. Targets: README.md, or `snakemake --list`.
from snakemake.utils import min_version

min_version("9.13")


configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"


wildcard_constraints:
    run=any_of(RUNS),
    model=rf"({any_of(RUNS)})(@(0|[1-9]\d*))?",
    step=r"0|[1-9]\d*",
    dataset=any_of(DATASETS),


include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/plot.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/measure.smk"


rule all:
    """Everything for the runs of `default_runs:`, from data to the report's figures."""
    default_target: True
    input:
        pages(DEFAULT_RUNS, ["scores", "samples"]),
        [figures_after_training(run) for run in DEFAULT_RUNS],
        series_after_training("miniseries", DEFAULT_RUNS),
        [
            series_after_training(name, SWEEPS[name])
            for name in config["default_runs"]
            if name in SWEEPS
        ],
        summary_after_evaluation(DEFAULT_RUNS),


rule miniseries:
    """The runs of `series:`, one after the other, with their joint figure."""
    input:
        pages(SERIES, ["scores"]),
        [figures_after_training(run) for run in SERIES],
        series_after_training("miniseries", SERIES),
        summary_after_evaluation(SERIES),


rule side_by_side:
    """Texts of the runs of `samples: side_by_side:` in one page."""
    input:
        "results/pages/side_by_side.html",


rule plots:
    """Draw what the logs hold, also of runs in progress; never trains anything."""
    input:
        figures_of_logs,


rule bench:
    """Measure the speed of the training step on this device, in the ways that `bench:` says."""
    input:
        "results/bench/bench.md",


rule profile:
    """Show where the time of a step goes: by kernel, by phase, and as a trace for Perfetto."""
    input:
        "results/bench/profile.md",


rule ladder:
    """Measure what each optimisation brings, from fp32 to all that this project does."""
    input:
        "results/ladder/ladder.md",


rule plan:
    """Predict hours, dollars, memory, and disk of runs before anything is paid for."""
    input:
        "results/plan.md",


rule compare:
    """Set the measured speeds beside those of llm.c and PyTorch."""
    input:
        "results/bench/compare.md",


for name, runs in TARGETS.items():

    rule:
        """Train the run; of a sweep all runs, with their joint figure."""
        name:
            f"train_{name}"
        input:
            expand("results/train/{run}/done.json", run=runs),
            [series_after_training(name, runs)] if name in SWEEPS else [],

    rule:
        """Export the last step and those of `export_steps:` in Hugging Face's format."""
        name:
            f"export_{name}"
        input:
            exports(runs),

    rule:
        """Write the same checkpoints as files that llm.c reads."""
        name:
            f"llmc_{name}"
        input:
            expand("results/llmc/{model}/model.bin", model=models_of(runs)),

    rule:
        """Upload the exports to the Hugging Face hub, with their scores; never done by itself."""
        name:
            f"push_{name}"
        input:
            expand("results/pushed/{model}.json", model=models_of(runs)),

    rule:
        """Measure validation loss and HellaSwag of each export."""
        name:
            f"evaluate_{name}"
        input:
            evaluations(runs),

    for kind in ("harness", "leaderboard"):

        rule:
            """Score each export with lm-evaluation-harness on its list of tasks."""
            name:
                f"{kind}_{name}"
            input:
                expand(
                    "results/evaluate/{model}/{kind}.json",
                    model=models_of(runs),
                    kind=kind,
                ),

    rule:
        """Let each export continue the prompts of `samples:`."""
        name:
            f"samples_{name}"
        input:
            samples(runs),


for name in DATASETS:

    rule:
        """Make or fetch a dataset."""
        name:
            f"data_{name}"
        input:
            f"results/data/{name}/manifest.json",
            shard_notes(name),


rule explain_unknown_target:
    """Say which targets there are; taken for any word that is none of them."""
    input:
        refuse_target,
    output:
        "{target,[^/]+}",
