"""Token shards and question files.

OUTPUTS:
    results/data/{dataset}/manifest.json       names, sizes, and sha256 of the shards beside it
    results/data/{dataset}/{shard}.bin.json    the same of one shard of the hub
    results/data/{dataset}/files.json          files of a repository that are tokenized here
    results/data/{dataset}/tokenized/*.json    what was found in each of them
    results/data/{dataset}/hellaswag.jsonl     questions made from the dataset's own text
    results/data/hellaswag/hellaswag.jsonl     HellaSwag's validation questions, for all others
    results/data/{dataset}/hellaswag_val.bin   either of them as llm.c's evaluation file
Snakemake deletes the outputs of a job before it runs again, also those that a second command is about
to make. So they are small notes; shards and streams of tokens lie beside them undeclared, guarded by
the scripts' file locks. Other rules depend on the manifest alone: a touched shard changes nothing.
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
        dataset=any_of(LOCAL_TEXT),
    conda:
        "../envs/miniseries.yaml"
    threads: 64
    params:
        python=interpreter,
        dataset=own_dataset,
        folder=subpath(output.manifest, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/prepare_dataset.py \
            --name {wildcards.dataset:q} \
            --dataset {params.dataset:q} \
            --folder {params.folder:q} \
            --workers {threads} \
            --manifest {output.manifest:q} >{log:q} 2>&1
        """


# token files that another tool made, converted where they need it
use rule prepare_dataset as check_shards with:
    output:
        manifest="results/data/{dataset}/manifest.json",
    log:
        "results/logs/check_shards/{dataset}.log",
    benchmark:
        "results/benchmarks/check_shards/{dataset}.tsv"
    wildcard_constraints:
        dataset=any_of(OWN_SHARDS),
    threads: 1


rule fetch_shard:
    """Download one shard and check it; an interrupted download goes on where it stopped."""
    output:
        note="results/data/{dataset}/{shard}.bin.json",
    log:
        "results/logs/fetch_shard/{dataset}/{shard}.log",
    wildcard_constraints:
        dataset=any_of(HUB_SHARDS),
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
        folder=subpath(output.note, parent=True),
        num_files=number_of_shards,
    shell:
        r"""
        {params.python:q} workflow/scripts/fetch_shard.py \
            --name {wildcards.dataset:q} \
            --dataset {params.dataset:q} \
            --shard {wildcards.shard:q}.bin \
            --num-files {params.num_files} \
            --folder {params.folder:q} 2> >(tee -i {log:q} >&2)
        """


# the manifest of a dataset once all its shards are there; one that is gone is fetched
use rule prepare_dataset as list_shards with:
    # `ancient`: a note that is written again is no new shard
    input:
        notes=ancient(lambda wildcards: shard_notes(wildcards.dataset)),
    output:
        manifest="results/data/{dataset}/manifest.json",
    log:
        "results/logs/list_shards/{dataset}.log",
    benchmark:
        "results/benchmarks/list_shards/{dataset}.tsv"
    wildcard_constraints:
        dataset=any_of(HUB_SHARDS),
    localrule: True
    threads: 1


checkpoint list_files:
    """Ask the hub which files a dataset consists of, with their sizes and hashes."""
    output:
        files="results/data/{dataset}/files.json",
    log:
        "results/logs/list_files/{dataset}.log",
    wildcard_constraints:
        dataset=any_of(HUB_TEXT),
    retries: 3
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    resources:
        download=1,
    params:
        python=interpreter,
        dataset=lambda wildcards: json.dumps(
            {
                key: value
                for key, value in DATASETS[wildcards.dataset].items()
                if key in ("repository", "revision", "files", "val_files", "num_files")
            }
        ),
    shell:
        r"""
        {params.python:q} workflow/scripts/list_files.py \
            --dataset {params.dataset:q} \
            --output {output.files:q} 2> >(tee -i {log:q} >&2)
        """


rule tokenize_file:
    """Fetch one file of text, tokenize it, and delete it."""

    # `ancient`: the same files listed again are no new ones. What changed in them the script knows.
    input:
        files=ancient("results/data/{dataset}/files.json"),
    output:
        done="results/data/{dataset}/tokenized/{number}.json",
    log:
        "results/logs/tokenize_file/{dataset}/{number}.log",
    wildcard_constraints:
        dataset=any_of(HUB_TEXT),
        number=r"\d{6}",
    retries: 3
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    resources:
        download=1,
    params:
        python=interpreter,
        dataset=lambda wildcards: json.dumps(text_options(wildcards.dataset)),
        folder=subpath(input.files, parent=True),
    shell:
        r"""
        {params.python:q} workflow/scripts/tokenize_file.py \
            --name {wildcards.dataset:q} \
            --dataset {params.dataset:q} \
            --number {wildcards.number:q} \
            --folder {params.folder:q} \
            --done {output.done:q} 2> >(tee -i {log:q} >&2)
        """


# the tokens of all files cut into shards, and the manifest
use rule list_shards as pack_dataset with:
    input:
        notes=tokenized_files,
    output:
        manifest="results/data/{dataset}/manifest.json",
    log:
        "results/logs/pack_dataset/{dataset}.log",
    benchmark:
        "results/benchmarks/pack_dataset/{dataset}.tsv"
    wildcard_constraints:
        dataset=any_of(HUB_TEXT),


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
        source=config["questions"]["source"],
        revision=config["questions"]["revision"],
    shell:
        r"""
        {params.python:q} workflow/scripts/fetch_questions.py \
            --source {params.source:q} \
            --revision {params.revision:q} \
            --output {output.questions:q} 2> >(tee -i {log:q} >&2)
        """


rule write_eval_file:
    """Write questions as llm.c reads them, in tokens."""
    input:
        questions="results/data/{folder}/hellaswag.jsonl",
    output:
        eval="results/data/{folder}/hellaswag_val.bin",
    log:
        "results/logs/write_eval_file/{folder}.log",
    wildcard_constraints:
        folder=any_of([*LOCAL_TEXT, "hellaswag"]),
    localrule: True
    conda:
        "../envs/miniseries.yaml"
    params:
        python=interpreter,
    shell:
        r"""
        {params.python:q} workflow/scripts/write_eval_file.py \
            --questions {input.questions:q} \
            --output {output.eval:q} >{log:q} 2>&1
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
                --manifest {input.manifest:q} 2>&1 | tee -i {log:q}
            """
