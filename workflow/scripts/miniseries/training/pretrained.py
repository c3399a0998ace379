"""Weights that a run starts from, instead of random ones: whatever `init_from:` names.

One file stands for each source: config.json for a Hugging Face folder, model_{step}.bin for
llm.c, done.json or saved/{step}.json for a run of our own.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from miniseries.data import fetch
from miniseries.data.shards import file_sha256
from miniseries.evaluation import huggingface, llmc
from miniseries.metrics import read_json, write_json
from miniseries.model.gpt import GPT, GPTConfig, set_parameter
from miniseries.settings import frozen_start
from miniseries.training.checkpoint import (
    PINNED,
    checkpoint_folder,
    checksums,
    load_model_weights,
    read_marker,
    saved_steps,
    write_marker,
    write_state,
)

SHAPE = ("num_layers", "num_heads", "channels", "positions")
HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?")


def _is_huggingface(file: Path) -> bool:
    return file.name == "config.json"


def read_run(marker: Path) -> tuple[GPTConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Shape, fp32 weights, and settings with `step` of a marker's checkpoint.

    Raises:
        ValueError: the run folder or the checkpoint is damaged.
    """
    checkpoint, settings = read_marker(marker)
    _check_files(marker, checkpoint.parents[1])
    config = GPTConfig.of_recipe(settings["recipe"])
    weights = load_model_weights(checkpoint)
    huggingface.check_shapes(weights, config, checkpoint)
    return config, weights, settings


def _check_files(marker: Path, run_folder: Path) -> None:
    """Compare a checkpoint with the hashes that done.json has; other markers have none."""
    for name, facts in read_json(marker).get("files", {}).items():
        file = run_folder / name
        if not file.exists() or file_sha256(file) != facts["sha256"]:
            raise ValueError(
                f"{file}: missing, or not as it was when the run was completed; bring it back from "
                "a copy, or take an earlier step"
            )


def read_start(file: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Shape and weights of a source, under our names, in the precision that it has.

    Of a bf16 model of llm.c with its state files beside it the fp32 master weights are taken.

    Raises:
        ValueError: not a GPT-2 as we compute it, or a damaged file; names the file.
    """
    if _is_huggingface(file):
        return huggingface.read_weights(file.parent)
    if file.suffix == ".json":
        return read_run(file)[:2]
    config, weights = llmc.read_model(file)
    if llmc.state_path(file, 0).exists():
        weights = llmc.read_optimizer_state(file).master or weights
    return config, weights


def start_sha256(file: Path) -> str:
    """Hash that identifies the weights of a source.

    Raises:
        ValueError: there are none.
    """
    if _is_huggingface(file):
        return huggingface.weights_sha256(file.parent)
    if not file.exists():
        raise ValueError(f"{file}: no such file; check the run's `init_from:`")
    if file.suffix != ".json":
        return file_sha256(file)
    folder = read_marker(file)[0]
    parts = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != PINNED)
    return hashlib.sha256("".join(map(file_sha256, parts)).encode()).hexdigest()


@torch.no_grad()
def load_start(model: GPT, file: Path) -> None:
    """Put the weights of a source into a model, sharded or not; every rank calls it.

    Raises:
        ValueError: another shape than the model's, or a damaged file.
    """
    config, weights = read_start(file)
    differing = [key for key in SHAPE if getattr(config, key) != getattr(model.config, key)]
    if differing:
        found = ", ".join(f"{key} {getattr(config, key)}" for key in differing)
        wanted = ", ".join(f"{key} {getattr(model.config, key)}" for key in differing)
        raise ValueError(f"{file}: the model has {found}; the run's settings say {wanted}")
    for name, parameter in model.named_parameters():
        set_parameter(parameter, weights[name].float())


def freeze_start(file: Path, folder: Path) -> dict[str, str]:
    """What settings.json keeps of a run's source: its path and the hash of its weights.

    Once there is a checkpoint the source is read no more and may be gone.

    Raises:
        ValueError: the run was started from other weights under this name.
    """
    before = frozen_start(folder)
    if before and saved_steps(folder):
        return before
    now = {"path": str(file), "sha256": start_sha256(file)}
    if before and before["sha256"] != now["sha256"]:
        raise ValueError(
            f"{file}: holds other weights (sha256 {now['sha256'][:12]}) than {folder} was started "
            f"from ({before['sha256'][:12]}); bring those back, or start a run of another name"
        )
    return now


def fetch_weights(name: str, folder: Path, **options: Any) -> None:
    """Fetch a GPT-2 of the Hugging Face hub: its configuration and its weights.

    Args:
        name: "owner/name" or "owner/name@revision".
        folder: made, with config.json written last.
        options: `attempts`, `wait_seconds` of `fetch_file`.

    Raises:
        ValueError, OSError: as `fetch_file`; also what is no GPT-2.
    """
    match = HUB_NAME.fullmatch(name)
    if not match:
        raise ValueError(f"init_from: {name!r} is no owner/name of the Hugging Face hub")
    where = (match["repository"], match["revision"] or "main")
    options = {"repo_type": "model", **options}
    parts = folder / ".fetch-config"
    config, commit = fetch.fetch_file(where[0], "config.json", where[1], parts, **options)
    huggingface.read_config(config.parent)
    # this very commit, should the branch move on in between
    weights, _ = fetch.fetch_file(where[0], huggingface.WEIGHTS, commit, folder, **options)
    write_json(
        folder / "source.json",
        {"repository": where[0], "commit": commit, "weights_sha256": file_sha256(weights)},
    )
    config.replace(folder / "config.json")
    for leftover in (parts, folder / ".fetch"):
        shutil.rmtree(leftover, ignore_errors=True)


def import_llmc(model: Path, settings: Path, folder: Path) -> None:
    """Make a checkpoint of llm.c, with its optimizer state, the newest one of a run of ours.

    Training goes on at its step: weights, both moments, and the schedule. Three things are not in
    llm.c's files or mean something else here: the windows of the spike detector, which start
    empty; the order of the tokens, which is ours; and the generator that rounds to bf16.

    Args:
        model: llm.c's model_{step}.bin, with the state files of all ranks beside it.
        settings: of the run, as `results/settings/{run}.json`.
        folder: of the run; it must hold no checkpoint.

    Raises:
        ValueError: files that do not belong together, or that do not fit the run.
    """
    content = read_json(settings)
    state, (config, weights) = llmc.read_optimizer_state(model), llmc.read_model(model)
    wanted = GPTConfig.of_recipe(content["recipe"])
    if any(getattr(config, key) != getattr(wanted, key) for key in SHAPE):
        raise ValueError(f"{model}: is a {config}, but {settings} says {wanted}")
    if saved_steps(folder):
        raise ValueError(f"{folder}: holds checkpoints already; take a run with another name")
    if not 0 < state.step <= content["recipe"]["max_steps"]:
        raise ValueError(f"{model}: step {state.step} is not within the run's max_steps")
    kept_in = torch.float32 if content["recipe"].get("master_weights", True) else torch.bfloat16
    weights = state.master or weights
    tensors = {f"model.{name}": tensor.to(kept_in) for name, tensor in weights.items()}
    tensors |= {f"exp_avg.{name}": tensor for name, tensor in state.moments.items()}
    tensors |= {f"exp_avg_sq.{name}": tensor for name, tensor in state.squares.items()}
    final = checkpoint_folder(folder, state.step)
    temporary = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    dcp.save(tensors, checkpoint_id=temporary, no_dist=True)
    trainer_state = {
        "step": state.step,
        "adam_step": float(state.step),
        "run": content["run"],
        "fingerprint": content["fingerprint"],
        "recipe": content["recipe"],
        "loss_detector": [],
        "norm_detector": [],
        "wall_seconds": 0.0,
        "world_size": state.world_size,
        "micro_batch": "unknown",
        "imported_from": str(model),
    }
    write_state(temporary, trainer_state, checksums(tensors))
    temporary.rename(final)
    write_marker(folder, content["run"], state.step)
    print(f"{final}: {model}, to go on from step {state.step}")
