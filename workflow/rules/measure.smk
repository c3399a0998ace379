"""Speed: the bench, the ladder of optimisations, profiles, the plan, and the comparison with others.

REQUIRED INPUTS:
    results/data/{dataset}/manifest.json    data.smk
    benchmarks/*.json                       measured before, part of the repository
OUTPUTS:
    results/bench/rows/{row}.json, results/bench/bench.md, results/bench/profile.md, compare.md
    results/ladder/rungs/{rung}.json, results/ladder/ladder.md, results/plots/ladder.png, .svg
    results/plan.md
Beside them, undeclared: results/bench/<device>.json, and traces in results/bench/profile/{row}.
Each row is measured by a process of its own; to measure again delete results/bench or ladder.
"""

from miniseries.speed.rows import LADDER, resolve_rows

try:
    BENCH_ROWS, LADDER_ROWS = resolve_rows(config, SCHEMA)
    ROWS_FAULT = None
except ValueError as error:
    BENCH_ROWS, LADDER_ROWS = {}, {}
    ROWS_FAULT = error
PROFILED_ROWS = [name for name, row in BENCH_ROWS.items() if row["profile"]]


rule measure_row:
    """Measure one row of the bench on this device."""
    input:
        manifest=f"results/data/{config['bench']['dataset']}/manifest.json",
    output:
        row="results/bench/rows/{row}.json",
    log:
        "results/logs/measure_row/{row}.log",
    wildcard_constraints:
        row=any_of(BENCH_ROWS),
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        row=lambda wildcards: json.dumps(BENCH_ROWS[wildcards.row]),
        steps=config["bench"]["steps"],
        profile=lambda wildcards, output: (
            ["--profile", f"results/bench/profile/{wildcards.row}"]
            if wildcards.row in PROFILED_ROWS
            else []
        ),
    shell:
        r"""
        {params.python:q} workflow/scripts/bench_run.py \
            --row {params.row:q} \
            --manifest {input.manifest:q} \
            --steps {params.steps:q} \
            {params.profile:q} \
            --output {output.row:q} >{log:q} 2>&1
        """


rule collect_bench:
    """Gather the rows of the bench in one file a device, and in a table."""
    input:
        rows=rows_of("results/bench/rows/{row}.json", BENCH_ROWS),
    output:
        table="results/bench/bench.md",
    log:
        "results/logs/collect_bench.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        folder=subpath(output.table, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/collect_bench.py \
            --rows {input.rows:q} \
            --folder {params.folder:q} \
            --output {output.table:q} 2>{log:q}
        """


rule write_profile:
    """Write what the rows with `profile: true` spend their time on."""
    input:
        rows=rows_of("results/bench/rows/{row}.json", PROFILED_ROWS),
    output:
        table="results/bench/profile.md",
    log:
        "results/logs/write_profile.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
    shell:
        r"""
        {params.python:q} workflow/scripts/write_profile.py \
            --rows {input.rows:q} \
            --output {output.table:q} 2>{log:q}
        """


use rule measure_row as measure_rung with:
    input:
        manifest=f"results/data/{config['ladder']['dataset']}/manifest.json",
    output:
        row="results/ladder/rungs/{rung}.json",
    log:
        "results/logs/measure_rung/{rung}.log",
    wildcard_constraints:
        rung=any_of(LADDER),
    params:
        python=interpreter,
        row=lambda wildcards: json.dumps(LADDER_ROWS[wildcards.rung]),
        steps=config["ladder"]["steps"],
        profile=[],


rule write_ladder:
    """Write the ladder as a table and as a bar chart."""
    input:
        rungs=rows_of("results/ladder/rungs/{row}.json", LADDER),
    output:
        table="results/ladder/ladder.md",
        figure=report(
            "results/plots/ladder.png",
            caption="../report/ladder.rst",
            category="Speed",
            labels={"figure": "ladder"},
        ),
        svg="results/plots/ladder.svg",
    log:
        "results/logs/write_ladder.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        dpi=config["plots"]["dpi"],
        width_inches=config["plots"]["width_inches"],
    shell:
        r"""
        {params.python:q} workflow/scripts/write_ladder.py \
            --rows {input.rungs:q} \
            --output {output.table:q} \
            --figures {output.figure:q} {output.svg:q} \
            --dpi {params.dpi:q} \
            --width-inches {params.width_inches:q} 2>{log:q}
        """


rule write_plan:
    """Predict what the runs of `plan:` take on each kind and number of GPUs."""
    output:
        plan="results/plan.md",
    log:
        "results/logs/write_plan.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        runs=json.dumps(
            [RUNS[run] for name in config["plan"]["runs"] for run in TARGETS[name]]
        ),
        gpus=config["plan"]["gpus"],
        prices=json.dumps(config["plan"]["prices"]),
    shell:
        r"""
        {params.python:q} workflow/scripts/write_plan.py \
            --runs {params.runs:q} \
            --gpus {params.gpus:q} \
            --prices {params.prices:q} \
            --output {output.plan:q} 2>{log:q}
        """


rule write_comparison:
    """Set speeds measured here and those kept in `benchmarks/` beside llm.c's and PyTorch's."""
    input:
        measured=measured_speeds,
    output:
        table="results/bench/compare.md",
    log:
        "results/logs/write_comparison.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
    shell:
        r"""
        {params.python:q} workflow/scripts/write_comparison.py \
            --measured {input.measured:q} \
            --output {output.table:q} 2>{log:q}
        """
