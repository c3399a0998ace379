"""Export to Hugging Face's format and to llm.c's.

REQUIRED INPUTS:
    results/train/{run}/done.json or saved/{step}.json    train.smk
OUTPUTS:
    results/export/{model}/    {model} is {run}, its last step, or {run}@{step}
    results/llmc/{model}/
    results/pushed/{model}.json    on the hub, on demand
"""


rule export:
    """Write one checkpoint as a Hugging Face folder."""
    input:
        marker=marker_of_model,
    output:
        weights="results/export/{model}/model.safetensors",
        config="results/export/{model}/config.json",
        record="results/export/{model}/export.json",
    log:
        "results/logs/export/{model}.log",
    benchmark:
        "results/benchmarks/export/{model}.tsv"
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        folder=subpath(output.weights, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/export_model.py \
            --checkpoint-marker {input.marker:q} \
            --folder {params.folder:q} >{log:q} 2>&1
        """


rule write_llmc:
    """Write one checkpoint as files that llm.c reads."""
    input:
        marker=marker_of_model,
        manifest=lambda wildcards: manifest_path(run_of(wildcards.model)),
    output:
        model="results/llmc/{model}/model.bin",
        rounded="results/llmc/{model}/model_bf16.bin",
        tokenizer="results/llmc/{model}/gpt2_tokenizer.bin",
        debug_state="results/llmc/{model}/debug_state.bin",
    log:
        "results/logs/write_llmc/{model}.log",
    benchmark:
        "results/benchmarks/write_llmc/{model}.tsv"
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        folder=subpath(output.model, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/export_llmc.py \
            --checkpoint-marker {input.marker:q} \
            --manifest {input.manifest:q} \
            --folder {params.folder:q} >{log:q} 2>&1
        """


rule upload_model:
    """Upload one export to the Hugging Face hub, with its scores; only ever on demand."""
    input:
        marker=marker_of_model,
        weights="results/export/{model}/model.safetensors",
        val_loss="results/evaluate/{model}/val_loss.json",
        choices="results/evaluate/{model}/hellaswag.json",
    output:
        pushed="results/pushed/{model}.json",
    log:
        "results/logs/upload_model/{model}.log",
    localrule: True  # compute nodes often have no network
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        export=subpath(input.weights, parent=True),
        evaluation=subpath(input.val_loss, parent=True),
        repository=repository_of_model,
        private="--private" if config["hub"]["private"] else "",
    shell:
        r"""
        {params.python:q} workflow/scripts/push_model.py \
            --checkpoint-marker {input.marker:q} \
            --export {params.export:q} \
            --evaluation {params.evaluation:q} \
            --repository {params.repository:q} {params.private} \
            --output {output.pushed:q} >{log:q} 2>&1
        """
