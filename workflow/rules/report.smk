"""Pages for Snakemake's report, which shows figures and HTML, and offers all else as downloads.

REQUIRED INPUTS:
    results/settings/{run}.json, results/evaluate/{model}/*.json, results/samples/{model}.md,
    results/summary.tsv, baselines.tsv, crossovers.md
OUTPUTS:
    results/pages/{run}.settings.html, {model}.scores.html, {model}.samples.html, summary.html
"""


rule render_settings:
    """Make a page of a run's settings."""
    input:
        files="results/settings/{run}.json",
    output:
        page=report(
            "results/pages/{run}.settings.html",
            caption="../report/settings.rst",
            category="Settings",
            labels={"run": "{run}"},
        ),
    log:
        "results/logs/render_settings/{run}.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        title="Settings of {run}",
    shell:
        r"""
        {params.python:q} workflow/scripts/render_page.py \
            --title {params.title:q} \
            --files {input.files:q} \
            --output {output.page:q} >{log:q} 2>&1
        """


use rule render_settings as render_scores with:
    input:
        files=[
            "results/evaluate/{model}/val_loss.json",
            "results/evaluate/{model}/hellaswag.json",
        ],
    output:
        page=report(
            "results/pages/{model}.scores.html",
            caption="../report/scores.rst",
            category="Scores",
            labels={"model": "{model}"},
        ),
    log:
        "results/logs/render_scores/{model}.log",
    params:
        python=interpreter,
        title="Scores of {model}",


use rule render_settings as render_samples with:
    input:
        files="results/samples/{model}.md",
    output:
        page=report(
            "results/pages/{model}.samples.html",
            caption="../report/samples.rst",
            category="Samples",
            labels={"model": "{model}"},
        ),
    log:
        "results/logs/render_samples/{model}.log",
    params:
        python=interpreter,
        title="Texts by {model}",


use rule render_settings as render_summary with:
    input:
        files=[
            "results/crossovers.md",
            "results/summary.tsv",
            "results/baselines.tsv",
        ],
    output:
        page=report(
            "results/pages/summary.html",
            caption="../report/summary.rst",
            category="Comparisons",
            labels={"figure": "table of all runs"},
        ),
    log:
        "results/logs/render_summary.log",
    params:
        python=interpreter,
        title="All runs",
