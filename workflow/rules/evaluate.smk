"""Scores and samples of exported models.

REQUIRED INPUTS:
    results/export/{model}/model.safetensors                 export.smk
    results/data/{dataset}/manifest.json, hellaswag.jsonl    data.smk
OUTPUTS:
    results/evaluate/{model}/val_loss.json, hellaswag.json
    results/samples/{model}.md
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
            --hellaswag {output.hellaswag:q} >{log:q} 2>&1
        """


rule write_samples:
    """Let one export continue the prompts of the configuration."""
    input:
        weights="results/export/{model}/model.safetensors",
    output:
        samples="results/samples/{model}.md",
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
        num_samples=config["samples"]["num_samples"],
        max_new_tokens=config["samples"]["max_new_tokens"],
        top_k=config["samples"]["top_k"],
        temperature=config["samples"]["temperature"],
        seed=config["samples"]["seed"],
    shell:
        r"""
        {params.python:q} workflow/scripts/write_samples.py \
            --export {params.folder:q} \
            --prompts {params.prompts:q} \
            --num-samples {params.num_samples:q} \
            --max-new-tokens {params.max_new_tokens:q} \
            --top-k {params.top_k:q} \
            --temperature {params.temperature:q} \
            --seed {params.seed:q} \
            --output {output.samples:q} >{log:q} 2>&1
        """
