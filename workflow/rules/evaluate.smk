"""Scores and samples of exported models.

REQUIRED INPUTS:
    results/export/{model}/model.safetensors                 export.smk
    results/data/{dataset}/manifest.json, hellaswag.jsonl    data.smk
OUTPUTS:
    results/evaluate/{model}/val_loss.json, hellaswag.json, hellaswag_items.jsonl
    results/evaluate/{model}/mmlu.json, wikitext.json    where the configuration names their data
    results/evaluate/{model}/harness.json, leaderboard.json, and their *_items.jsonl    lm-eval's, on demand
    results/samples/{model}.md, {model}.json
"""


checkpoint score:
    """Measure validation loss and HellaSwag (by tokens and by characters) of one export."""
    input:
        weights="results/export/{model}/model.safetensors",
        manifest=lambda wildcards: manifest_path(run_of(wildcards.model)),
        questions=lambda wildcards: questions_path(run_of(wildcards.model)),
    output:
        val_loss="results/evaluate/{model}/val_loss.json",
        hellaswag="results/evaluate/{model}/hellaswag.json",
        answers="results/evaluate/{model}/hellaswag_items.jsonl",
    log:
        "results/logs/score/{model}.log",
    benchmark:
        "results/benchmarks/score/{model}.tsv"
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder=subpath(input.weights, parent=True),
        micro_batch=micro_batch,
    shell:
        r"""
        {params.python:q} workflow/scripts/score_model.py \
            --export {params.folder:q} \
            --manifest {input.manifest:q} \
            --questions {input.questions:q} \
            --micro-batch {params.micro_batch:q} \
            --val-loss {output.val_loss:q} \
            --hellaswag {output.hellaswag:q} \
            --items {output.answers:q} 2>&1 | tee -i {log:q}
        """


rule score_task:
    """Measure one export on MMLU or WikiText, whose data `evaluation:` names."""
    input:
        weights="results/export/{model}/model.safetensors",
        data=lambda wildcards: TASK_DATA[wildcards.task],
    output:
        scores="results/evaluate/{model}/{task}.json",
    log:
        "results/logs/score_task/{model}-{task}.log",
    benchmark:
        "results/benchmarks/score_task/{model}-{task}.tsv"
    wildcard_constraints:
        task=any_of(TASK_DATA),
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder=subpath(input.weights, parent=True),
        micro_batch=micro_batch,
    shell:
        r"""
        {params.python:q} workflow/scripts/score_task.py \
            --export {params.folder:q} \
            --task {wildcards.task:q} \
            --data {input.data:q} \
            --micro-batch {params.micro_batch:q} \
            --output {output.scores:q} 2>&1 | tee -i {log:q}
        """


rule write_samples:
    """Let one export continue the prompts of the configuration."""
    input:
        weights="results/export/{model}/model.safetensors",
        prompts=PROMPTS_FILE,
    output:
        samples="results/samples/{model}.md",
        record="results/samples/{model}.json",
    log:
        "results/logs/samples/{model}.log",
    benchmark:
        "results/benchmarks/samples/{model}.tsv"
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder=subpath(input.weights, parent=True),
        prompts=json.dumps(config["samples"]["prompts"]),
        prompts_file=["--prompts-file", *PROMPTS_FILE] if PROMPTS_FILE else [],
        num_samples=config["samples"]["num_samples"],
        max_new_tokens=config["samples"]["max_new_tokens"],
        top_k=config["samples"]["top_k"],
        temperature=config["samples"]["temperature"],
        seed=config["samples"]["seed"],
    shell:
        r"""
        {params.python:q} workflow/scripts/write_samples.py \
            --export {params.folder:q} \
            --prompts {params.prompts:q} {params.prompts_file:q} \
            --num-samples {params.num_samples:q} \
            --max-new-tokens {params.max_new_tokens:q} \
            --top-k {params.top_k:q} \
            --temperature {params.temperature:q} \
            --seed {params.seed:q} \
            --output {output.samples:q} \
            --json {output.record:q} >{log:q} 2>&1
        """


rule compare_samples:
    """Show the texts of the runs of `samples: side_by_side:` in one page."""
    input:
        files=samples_side_by_side,
    output:
        page=report(
            "results/pages/side_by_side.html",
            caption="../report/side_by_side.rst",
            category="Samples",
            labels={"model": "side by side"},
        ),
    log:
        "results/logs/compare_samples.log",
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
    shell:
        r"""
        {params.python:q} workflow/scripts/compare_samples.py \
            --files {input.files:q} \
            --output {output.page:q} >{log:q} 2>&1
        """


rule harness:
    """Score one export with lm-evaluation-harness on the tasks of `evaluation: harness:`."""
    input:
        weights="results/export/{model}/model.safetensors",
        questions=lambda wildcards: questions_path(run_of(wildcards.model)),
    output:
        scores="results/evaluate/{model}/harness.json",
        answers="results/evaluate/{model}/harness_items.jsonl",
    log:
        "results/logs/harness/{model}.log",
    benchmark:
        "results/benchmarks/harness/{model}.tsv"
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    resources:
        gpu_slot=1,
    params:
        python=interpreter,
        folder=subpath(input.weights, parent=True),
        tasks=tasks_of("harness"),
        task_data=task_data_option,
        batch_size=micro_batch,
    shell:
        r"""
        {params.python:q} workflow/scripts/run_harness.py \
            --export {params.folder:q} \
            --tasks {params.tasks:q} \
            --questions {input.questions:q} {params.task_data:q} \
            --batch-size {params.batch_size:q} \
            --output {output.scores:q} \
            --items {output.answers:q} >{log:q} 2>&1
        """


use rule harness as leaderboard with:
    output:
        scores="results/evaluate/{model}/leaderboard.json",
        answers="results/evaluate/{model}/leaderboard_items.jsonl",
    log:
        "results/logs/leaderboard/{model}.log",
    benchmark:
        "results/benchmarks/leaderboard/{model}.tsv"
    params:
        python=interpreter,
        folder=subpath(input.weights, parent=True),
        tasks=tasks_of("leaderboard"),
        task_data=task_data_option,
        batch_size=micro_batch,
