"""Export to Hugging Face's format and to llm.c's.

REQUIRED INPUTS:
    results/train/{run}/done.json or saved/{step}.json    train.smk
OUTPUTS:
    results/export/{model}/    {model} is {run}, its last step, or {run}@{step}
    results/llmc/{model}/
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


rule export_llmc:
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
        "results/logs/export_llmc/{model}.log",
    benchmark:
        "results/benchmarks/export_llmc/{model}.tsv"
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
