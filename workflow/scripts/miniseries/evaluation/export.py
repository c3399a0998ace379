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

from miniseries.data.shards import DOCUMENT_MARK, file_sha256, load_manifest, open_shard
from miniseries.evaluation import llmc
from miniseries.evaluation.card import measured_scores, model_card, training_scores
from miniseries.evaluation.huggingface import (
    WEIGHTS,
    huggingface_config,
    to_huggingface,
    write_tokenizer,
)
from miniseries.metrics import locked, read_json, write_json, write_text
from miniseries.model.gpt import GPT
from miniseries.reporting.runlog import Run, load_json, load_run
from miniseries.training.checkpoint import read_marker
from miniseries.training.pretrained import read_run

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


@contextmanager
def _replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end, whole or not at all.

    `folder` may exist, empty (Snakemake makes it) or with an earlier export. Another export of the
    same model, of a second command or left by a killed one, is waited for.
    """
    folder = folder.resolve()  # of a link to another disk the folder there is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = locked(folder.with_name(f".{folder.name}.lock"))
    with lock, _exchanged(folder) as temporary:
        yield temporary


@contextmanager
def _exchanged(folder: Path) -> Iterator[Path]:
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


def run_of_marker(marker: Path, settings: dict[str, Any]) -> Run:
    """Log of the run that a marker belongs to, up to the marker's step."""
    folder = marker.parent.parent if marker.parent.name == "saved" else marker.parent
    run = load_run(settings["run"], folder / "metrics.jsonl", folder / "settings.json")
    return run.until(settings["step"])


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
    run = run_of_marker(marker, settings)
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
        card = model_card(info, recipe, run, training_scores(run, info["step"]))
        write_text(temporary / "README.md", card)
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


def push_model(
    marker: Path, export: Path, evaluation: Path, repository: str, output: Path, private: bool
) -> None:
    """Upload an export to the Hugging Face hub, with the scores in its card, as one commit.

    Args:
        marker: the one that the export was made of.
        export: a folder made by `export_model`.
        evaluation: folder with val_loss.json and hellaswag.json of these weights.
        repository: "owner/name", made if it is not there.
        output: written, JSON: where the weights went.
        private: whether a repository that is made is private.

    Raises:
        ValueError: the scores are those of other weights, or the hub refuses or is out of reach.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    info, settings = read_json(export / "export.json"), read_marker(marker)[1]
    scored, choices = (read_json(evaluation / f"{n}.json") for n in ("val_loss", "hellaswag"))
    if scored["weights_sha256"] != info["weights_sha256"]:
        raise ValueError(f"{evaluation}: scores of other weights than {export} holds; evaluate it")
    tasks = load_json(evaluation / "harness.json")
    current = tasks.get("weights_sha256") == info["weights_sha256"]
    scores = measured_scores(scored, choices, tasks["tasks"] if current else {})
    card = model_card(info, settings["recipe"], run_of_marker(marker, settings), scores)
    files = sorted(path for path in export.iterdir() if path.name != "README.md")
    operations = [CommitOperationAdd(path.name, str(path)) for path in files]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        message = f"{info['run']} after {info['step']} steps"
        commit = api.create_commit(repository, operations, commit_message=message)
    except Exception as error:  # of the hub's client, and of its client for HTTP
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{repository}: not pushed ({reason}); check the network, the name, and HF_TOKEN, and "
            "give the same command again"
        ) from error
    pushed = {"repository": repository, "commit": commit.oid, "url": commit.commit_url}
    write_json(output, pushed | {key: info[key] for key in ("run", "step", "weights_sha256")})
