"""Token shards and question files.

OUTPUTS:
    results/data/{dataset}/manifest.json      names, sizes, and sha256 of the shards beside it
    results/data/{dataset}/hellaswag.jsonl    questions made from the dataset's own text
    results/data/hellaswag/hellaswag.jsonl    HellaSwag's validation questions, for hub datasets
Other rules depend on the small manifest alone, never on a shard: a touched shard changes nothing.
"""


rule prepare_dataset:
    """Tokenize local text into shards, and make questions of its held-out part."""
    output:
        manifest="results/data/{dataset}/manifest.json",
        questions="results/data/{dataset}/hellaswag.jsonl",
    log:
        "results/logs/prepare_dataset/{dataset}.log",
    benchmark:
        "results/benchmarks/prepare_dataset/{dataset}.tsv"
    wildcard_constraints:
        dataset=any_of(LOCAL),
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    params:
        python=interpreter,
        dataset=lambda wildcards: json.dumps(DATASETS[wildcards.dataset]),
        folder=subpath(output.manifest, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/prepare_dataset.py \
            --name {wildcards.dataset:q} \
            --dataset {params.dataset:q} \
            --folder {params.folder:q} \
            --manifest {output.manifest:q} >{log:q} 2>&1
        """


rule fetch_shard:
    """Download one shard and check it; an interrupted download goes on where it stopped."""
    output:
        shard="results/data/{dataset}/{shard}.bin",
    log:
        "results/logs/fetch_shard/{dataset}/{shard}.log",
    wildcard_constraints:
        dataset=any_of(ON_HUB),
        shard=r"[^/]+_(val|train)_\d{6}",
    retries: 3
    localrule: True  # compute nodes often have no network
    conda:
        "../envs/miniseries.yaml"
    resources:
        download=1,
    params:
        python=interpreter,
        # where it comes from and no more: other keys of the dataset must not fetch it again
        dataset=lambda wildcards: json.dumps(
            {
                key: DATASETS[wildcards.dataset][key]
                for key in ("repository", "revision")
            }
        ),
        folder=subpath(output.shard, parent=True),
        file=subpath(output.shard, basename=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/fetch_shard.py \
            --dataset {params.dataset:q} \
            --shard {params.file:q} \
            --folder {params.folder:q} >{log:q} 2>&1
        """


rule list_shards:
    """Write the manifest of a dataset once all its shards are there."""

    # `ancient`: a touched shard is no new one. A changed byte is what verify_<dataset> finds.
    input:
        shards=ancient(lambda wildcards: shards_of(wildcards.dataset)),
    output:
        manifest="results/data/{dataset}/manifest.json",
    log:
        "results/logs/list_shards/{dataset}.log",
    benchmark:
        "results/benchmarks/list_shards/{dataset}.tsv"
    wildcard_constraints:
        dataset=any_of(ON_HUB),
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
        dataset=lambda wildcards: json.dumps(DATASETS[wildcards.dataset]),
        folder=subpath(output.manifest, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/prepare_dataset.py \
            --name {wildcards.dataset:q} \
            --dataset {params.dataset:q} \
            --folder {params.folder:q} \
            --manifest {output.manifest:q} >{log:q} 2>&1
        """


rule fetch_questions:
    """Download HellaSwag's validation questions."""
    output:
        questions="results/data/hellaswag/hellaswag.jsonl",
    log:
        "results/logs/fetch_questions.log",
    retries: 3
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    resources:
        download=1,
    params:
        python=interpreter,
    shell:
        r"""
        {params.python:q} workflow/scripts/fetch_questions.py \
            --output {output.questions:q} >{log:q} 2>&1
        """


for name in DATASETS:

    rule:
        """Read every byte of a dataset again and name the shards that are not what they were."""
        name:
            f"verify_{name}"
        input:
            manifest=f"results/data/{name}/manifest.json",
        log:
            f"results/logs/verify/{name}.log",
        conda:
            "../envs/miniseries.yaml"
        params:
            python=interpreter,
        shell:
            r"""
            {params.python:q} workflow/scripts/verify_dataset.py \
                --manifest {input.manifest:q} >{log:q} 2>&1
            """
