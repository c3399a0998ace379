"""Figures and the table, drawn from whatever logs there are.

REQUIRED INPUTS:
    results/train/{run}/metrics.jsonl    the trainer's; of no rule, see common.smk
OUTPUTS:
    results/plots/{run}.png, .svg, {run}.speed.png, .svg
    results/plots/miniseries.png, .svg and {sweep}.png, .svg
    results/summary.tsv, summary.json, baselines.tsv, crossovers.md
"""


rule plot_run:
    """Draw loss, HellaSwag, speed, gradients, and ranges of one run, as far as it has come."""
    input:
        metrics="results/train/{run}/metrics.jsonl",
    output:
        loss=report(
            "results/plots/{run}.png",
            caption="../report/run.rst",
            category="Training",
            labels={"run": "{run}", "figure": "loss and HellaSwag"},
        ),
        loss_svg="results/plots/{run}.svg",
        speed=report(
            "results/plots/{run}.speed.png",
            caption="../report/speed.rst",
            category="Training",
            labels={"run": "{run}", "figure": "speed, gradients, and ranges"},
        ),
        speed_svg="results/plots/{run}.speed.svg",
    log:
        "results/logs/plot_run/{run}.log",
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        settings="results/train/{run}/settings.json",
        dpi=config["plots"]["dpi"],
        width_inches=config["plots"]["width_inches"],
        smoothing=config["plots"]["smoothing"],
    shell:
        r"""
        {params.python:q} workflow/scripts/plot_run.py \
            --run {wildcards.run:q} \
            --metrics {input.metrics:q} \
            --settings {params.settings:q} \
            --output {output.loss:q} {output.loss_svg:q} \
            --speed {output.speed:q} {output.speed_svg:q} \
            --dpi {params.dpi:q} \
            --width-inches {params.width_inches:q} \
            --smoothing {params.smoothing:q} >{log:q} 2>&1
        """


rule plot_series:
    """Draw all runs, or the runs of a sweep, in one figure."""
    input:
        metrics=lambda wildcards: [
            log_path(run) for run in logged(SERIES_FIGURES[wildcards.series])
        ],
    output:
        figure=report(
            "results/plots/{series}.png",
            caption="../report/series.rst",
            category="Comparisons",
            labels={"figure": "{series}"},
        ),
        svg="results/plots/{series}.svg",
    log:
        "results/logs/plot_series/{series}.log",
    wildcard_constraints:
        series=any_of(SERIES_FIGURES),
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        title=lambda wildcards: (
            "GPT-2 miniseries"
            if wildcards.series == "miniseries"
            else wildcards.series
        ),
        runs=lambda wildcards: logged(SERIES_FIGURES[wildcards.series]),
        settings=lambda wildcards: [
            f"results/train/{run}/settings.json"
            for run in logged(SERIES_FIGURES[wildcards.series])
        ],
        sweep=lambda wildcards: "--sweep" if wildcards.series in SWEEPS else "",
        dpi=config["plots"]["dpi"],
        width_inches=config["plots"]["width_inches"],
        smoothing=config["plots"]["smoothing"],
    shell:
        r"""
        {params.python:q} workflow/scripts/plot_series.py \
            --title {params.title:q} \
            --runs {params.runs:q} \
            --metrics {input.metrics:q} \
            --settings {params.settings:q} \
            --output {output.figure:q} {output.svg:q} \
            --dpi {params.dpi:q} \
            --width-inches {params.width_inches:q} \
            --smoothing {params.smoothing:q} {params.sweep} >{log:q} 2>&1
        """


rule write_summary:
    """Write the table of all runs that have a log, with the scores measured so far."""
    input:
        metrics=lambda wildcards: [log_path(run) for run in logged_anywhere()],
    output:
        table=report(
            "results/summary.tsv",
            caption="../report/summary.rst",
            category="Comparisons",
            labels={"figure": "table of all runs, as a file"},
        ),
        json_table="results/summary.json",
        baselines="results/baselines.tsv",
        crossovers="results/crossovers.md",
    log:
        "results/logs/write_summary.log",
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        results=subpath(output.table, parent=True),
        evaluated=evaluated_models,  # unused below: makes the table follow new scores
        smoothing=config["plots"]["smoothing"],
    shell:
        r"""
        {params.python:q} workflow/scripts/write_summary.py \
            --results {params.results:q} \
            --smoothing {params.smoothing:q} \
            --table {output.table:q} \
            --json {output.json_table:q} \
            --baselines {output.baselines:q} \
            --crossovers {output.crossovers:q} >{log:q} 2>&1
        """
