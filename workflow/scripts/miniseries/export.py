"""Checkpoints in the formats of others: Hugging Face folders and llm.c's files.

Needs neither network nor GPU.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from miniseries import llmc
from miniseries.huggingface import (
    WEIGHTS,
    huggingface_config,
    to_huggingface,
    write_tokenizer,
)
from miniseries.metrics import write_json, write_text
from miniseries.model import GPT
from miniseries.pretrained import read_run
from miniseries.shards import DOCUMENT_MARK, file_sha256, load_manifest, open_shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What a run computed in is what its export holds; the fp32 master weights stay in the checkpoint
# and, of an fp16 run, are exported: much software scores in fp16 on GPUs only
EXPORT_DTYPES = {
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float32",
    "fp8": "bfloat16",
}


def model_card(info: dict[str, Any], recipe: dict[str, Any]) -> str:
    """README.md of an export: what it is, how it was trained, how to load it."""
    rows = "".join(
        f"| {key} | {value} |\n" for key, value in recipe.items() if not isinstance(value, dict)
    )
    start = f"`{recipe['init_from']}`" if recipe.get("init_from") else "scratch"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {info["run"]} after {info["step"]} steps

A GPT-2 with {info["num_parameters"]:,} parameters, trained from {start} on the data set
`{info["dataset"]}`: {info["tokens_seen"]:,} tokens read. It continues text; it follows no
instructions, and its training text may show through.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("this/folder")
    model = AutoModelForCausalLM.from_pretrained("this/folder")

Weights are {info["dtype"]}, sha256 of `{WEIGHTS}`: `{info["weights_sha256"]}`.

| setting | value |
|---|---|
{rows}"""


@contextmanager
def _replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end, whole or not at all.

    `folder` may exist, empty (Snakemake makes it) or with an earlier export.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
    for leftover in (temporary, old):  # of an export that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def _export_info(settings: dict[str, Any], num_parameters: int, dtype: str) -> dict[str, Any]:
    recipe, step = settings["recipe"], settings["step"]
    return {
        "run": settings["run"],
        "step": step,
        "fingerprint": settings["fingerprint"],
        "data_fingerprint": settings.get("data_fingerprint"),
        "dataset": recipe["dataset"],
        "val_tokens": recipe["data"].get("val_tokens"),
        "tokens_seen": step * recipe["total_batch_tokens"],
        "num_parameters": num_parameters,
        "precision": recipe["precision"],
        "dtype": dtype,
    }


def export_model(marker: Path, folder: Path, dtype: str | None = None) -> None:
    """Write one checkpoint as a Hugging Face GPT-2 folder.

    Args:
        marker: a run's done.json or saved/{step}.json.
        folder: made, or replaced as a whole; a killed export leaves no part of itself in it.
        dtype: "bfloat16" or "float32"; None takes what the run computed in.

    Raises:
        ValueError: the run folder or the checkpoint is damaged.
        OSError: the disk is full.
    """
    config, weights, settings = read_run(marker)
    recipe = settings["recipe"]
    dtype = dtype or EXPORT_DTYPES[recipe["precision"]]
    tensors = to_huggingface(weights, config, DTYPES[dtype])
    info = _export_info(settings, sum(t.numel() for t in tensors.values()), dtype)
    with _replaced_folder(folder) as temporary:
        try:
            # one file of any size: loaders read it piecewise, and its name is known beforehand
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / WEIGHTS}: could not be written ({error})") from error
        (temporary / WEIGHTS).chmod(0o644)  # safetensors makes private files; results are for all
        info["weights_sha256"] = file_sha256(temporary / WEIGHTS)
        write_json(temporary / "config.json", huggingface_config(config, dtype))
        ends = {"bos_token_id": DOCUMENT_MARK, "eos_token_id": DOCUMENT_MARK}
        write_json(temporary / "generation_config.json", ends)
        write_tokenizer(temporary, config.sequence_length)
        write_text(temporary / "README.md", model_card(info, recipe))
        write_json(temporary / "export.json", info)


def export_llmc(marker: Path, manifest: Path, folder: Path) -> None:
    """Write one checkpoint as files that llm.c reads.

    These are model.bin (version 3, fp32), model_bf16.bin (version 5), gpt2_tokenizer.bin, and
    debug_state.bin, for which llm.c's batch of 4 x 64 tokens is taken from the validation data.

    Args:
        marker: a run's done.json or saved/{step}.json.
        manifest: of the run's data.
        folder: made, or replaced as a whole.

    Raises:
        ValueError: the run folder, the checkpoint, or the data are damaged, or too few.
        OSError: the disk is full.
    """
    config, weights, _ = read_run(marker)
    tokens, targets = _debug_batch(manifest, config.sequence_length)
    with _replaced_folder(folder) as temporary:
        llmc.write_model(temporary / "model.bin", weights, config, torch.float32)
        llmc.write_model(temporary / "model_bf16.bin", weights, config, torch.bfloat16)
        llmc.write_tokenizer(temporary / "gpt2_tokenizer.bin")
        with torch.device("meta"):
            model = GPT(config)
        model.load_state_dict(weights, assign=True)
        model.requires_grad_(True)
        llmc.write_debug_state(temporary / "debug_state.bin", model, tokens, targets)


def _debug_batch(manifest: Path, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a debug state, (B, T) int64 each, from the first validation shard."""
    rows, length = llmc.DEBUG_BATCH[0], min(llmc.DEBUG_BATCH[1], sequence_length)
    shard = load_manifest(manifest).val_shards[0]
    ids = torch.from_numpy(open_shard(shard)[: rows * length + 1].astype("int64"))
    if len(ids) < rows * length + 1:
        raise ValueError(f"{shard}: a debug state takes {rows * length + 1} tokens, here are fewer")
    return ids[:-1].view(rows, length), ids[1:].view(rows, length)
