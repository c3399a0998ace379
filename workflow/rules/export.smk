"""Export to Hugging Face's format.

REQUIRED INPUTS:
    results/train/{run}/done.json or saved/{step}.json    train.smk
OUTPUTS:
    results/export/{model}/    {model} is {run}, its last step, or {run}@{step}
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
