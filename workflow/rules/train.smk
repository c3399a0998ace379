"""Training.

REQUIRED INPUTS:
    results/data/{dataset}/manifest.json, hellaswag.jsonl    data.smk
OUTPUTS:
    results/settings/{run}.json            what the configuration says of the run
    results/train/{run}/done.json          the run is complete
    results/train/{run}/saved/{step}.json  a checkpoint is complete
    results/weights/{repository}/          a GPT-2 of the hub to start from
    results/replay/{run}@{step}.json       whether a step gives the same bits twice
Everything else in results/train/{run} (checkpoints, metrics.jsonl, logs) stays undeclared: Snakemake
deletes what a failed or repeated job declares.
"""

import time

COMMAND_STARTED = time.time()


rule write_settings:
    """Write the settings of one run, all defaults filled in."""
    output:
        settings="results/settings/{run}.json",
    log:
        "results/logs/settings/{run}.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        settings=settings_of_run,
    shell:
        r"""
        {params.python:q} workflow/scripts/write_settings.py \
            --settings {params.settings:q} \
            --output {output.settings:q} >{log:q} 2>&1
        """


checkpoint train:
    """Train one run; after any interruption the same command goes on from its newest checkpoint."""

    # The trainer itself and the check while the graph is built decide what may go on; another
    # micro-batch or a touched manifest must not train again.
    input:
        settings=until_done(lambda wildcards: f"results/settings/{wildcards.run}.json"),
        manifest=until_done(manifest_of_run),
        questions=until_done(questions_of_run),
        start=start_of_run,
    output:
        done="results/train/{run}/done.json",
    # What the launcher says on standard error. The trainer itself writes to the terminal and
    # appends to train.log in its folder.
    log:
        "results/logs/train/{run}.log",
    conda:
        "../envs/miniseries.yaml"
    # as many as there are, up to this: on larger machines downloads go on beside
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder=subpath(output.done, parent=True),
        start=start_option,
    shell:
        r"""
        {params.python:q} workflow/scripts/train_run.py \
            --settings {input.settings:q} \
            --manifest {input.manifest:q} \
            --questions {input.questions:q} {params.start:q} \
            --folder {params.folder:q} \
            --done {output.done:q} 2> >(tee -i {log:q} >&2)
        """


rule replay:
    """Do one step of a run twice and compare all bits: is it the hardware, or the batch?"""
    output:
        verdict="results/replay/{run}@{step}.json",
    log:
        "results/logs/replay/{run}@{step}.log",
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder="results/train/{run}",
        manifest=lambda wildcards, output: manifest_path(wildcards.run),
        replayed=replayed_run,  # unused below: another run of this name has another verdict
    shell:
        r"""
        {params.python:q} workflow/scripts/replay_step.py \
            --folder {params.folder:q} \
            --manifest {params.manifest:q} \
            --step {wildcards.step:q} \
            --output {output.verdict:q} 2> >(tee -i {log:q} >&2)
        """


rule find_checkpoint:
    """Say that a step's checkpoint is complete, or which steps there are instead.

    The trainer writes the same file along with each checkpoint; this rule only lets an export wait
    for the training that will make it.
    """
    input:
        done=ancient("results/train/{run}/done.json"),
    output:
        marker="results/train/{run}/saved/{step}.json",
    log:
        "results/logs/find_checkpoint/{run}@{step}.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        folder=subpath(input.done, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/find_checkpoint.py \
            --folder {params.folder:q} \
            --run {wildcards.run:q} \
            --step {wildcards.step:q} \
            --marker {output.marker:q} >{log:q} 2>&1
        """


rule fetch_weights:
    """Download a GPT-2 of the Hugging Face hub that a run starts from."""
    output:
        config="results/weights/{repository}/config.json",
        weights="results/weights/{repository}/model.safetensors",
    log:
        "results/logs/fetch_weights/{repository}.log",
    wildcard_constraints:
        repository=any_of(FROM_HUB),
    retries: 3
    localrule: True  # compute nodes often have no network
    conda:
        "../envs/miniseries.yaml"
    resources:
        download=1,
    params:
        python=interpreter,
        name=lambda wildcards: FROM_HUB[wildcards.repository],
        folder=subpath(output.config, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/fetch_weights.py \
            --name {params.name:q} \
            --folder {params.folder:q} 2> >(tee -i {log:q} >&2)
        """


onerror:
    # Of a run that was stopped: its last words, below Snakemake's own on the job that ended.
    for run in RUNS:
        said = Path(f"results/train/{run}/train.log")
        if said.exists() and said.stat().st_mtime > COMMAND_STARTED:
            last = said.read_text(errors="replace").rstrip().rpartition("\n")[2]
            if last.startswith("stopped at step"):
                logger.info(f"run {run}: {last}")
