"""Small data and settings on which the real trainer runs in seconds."""

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import build_manifest, describe_shard, write_shard
from miniseries.metrics import read_metrics, write_json

PROJECT = Path(__file__).parents[1]
TRAIN_SCRIPT = PROJECT / "workflow" / "scripts" / "train_run.py"
FAULTY = PROJECT / "tests" / "faulty_train_run.py"  # the same with a fault


def make_dataset(folder: Path, train_tokens: int = 20_000, val_tokens: int = 1_025) -> Path:
    """One validation and two training shards of a little language that can be learnt.

    Returns:
        The manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(0)
    following = random.permutation(500)  # each token is mostly followed by one other
    paths = []
    sizes = {"val": [val_tokens], "train": [train_tokens // 2, train_tokens - train_tokens // 2]}
    number = 0
    for split, counts in sizes.items():
        for count in counts:
            tokens = [0]
            for jump in random.random(count - 1):
                tokens.append(int(following[tokens[-1]]) if jump < 0.9 else random.randint(500))
            path = folder / f"made_{split}_{number:06d}.bin"
            write_shard(path, np.array(tokens))
            paths.append((path, split))
            number += 1
    manifest = folder / "manifest.json"
    shards = [describe_shard(path, split) for path, split in paths]
    write_json(
        manifest,
        build_manifest(folder, "made", shards, val_tokens=val_tokens, source={"kind": "made"}),
    )
    return manifest


def make_questions(path: Path, count: int) -> Path:
    """Questions in HellaSwag's form, of words that follow each other by chance."""
    random = np.random.RandomState(1)
    words = ["the", "of", "a", "cat", "dog", "house", "runs", "sees", "blue", "quickly", "under"]

    def text(low: int, high: int) -> str:
        return " ".join(random.choice(words, random.randint(low, high)))

    lines = []
    for number in range(count):
        start, end = text(5, 60), text(1, 5)
        item = {"ind": number, "activity_label": "Words", "ctx_a": start, "ctx_b": end}
        item |= {"ctx": f"{start} {end}", "endings": [text(3, 20) for _ in range(4)]}
        lines.append(json.dumps(item | {"label": int(random.randint(4))}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_settings(path: Path, **changes: Any) -> Path:
    """Settings of a model of two layers; `changes` go into the recipe or the machine part."""
    recipe = {
        "dataset": "made",
        "num_layers": 2,
        "num_heads": 2,
        "channels": 16,
        "sequence_length": 32,
        "num_positions": 0,
        "branch_from": "",
        "total_batch_tokens": 256,
        "max_steps": 12,
        "learning_rate": 3e-3,
        "lr_schedule": "cosine",
        "warmup_steps": 3,
        "final_lr_fraction": 0.1,
        "weight_decay": 0.1,
        "skip_loss_z": 0.0,
        "skip_grad_z": 0.0,
        "divergence_z": 0.0,
        "rollback_skip_steps": 0,
        "seed": 42,
        "token_order": "shuffled",
        "llm_c_micro_batch": 2,
        "llm_c_processes": 2,
        "overfit_batch": False,
        "precision": "fp32",
        "master_weights": True,
        "data": {"source": "files"},
    }
    machine = {
        "micro_batch": 4,
        "gpus": 1,
        "compile": False,
        "deterministic": False,
        "recompute": 0,
        "val_every_steps": 0,
        "hellaswag": False,
        "sample_every_steps": 0,
        "sample_tokens": 4,
        "checkpoint_every_steps": 4,
        "keep_checkpoints": 0,
        "keep_every_steps": 0,
        "ranges_every_steps": 0,
        "stall_seconds": 300,
        "export_steps": [],
    }
    for key, value in changes.items():
        assert key in recipe or key in machine, key
        (recipe if key in recipe else machine)[key] = value
    fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    settings = {"run": "made", "recipe": recipe, "fingerprint": fingerprint, "machine": machine}
    write_json(path, settings)
    return path


def train_command(settings: Path, manifest: Path, folder: Path) -> list[str]:
    """The command line of rule `train`."""
    command = [sys.executable, str(TRAIN_SCRIPT), "--settings", str(settings)]
    command += ["--manifest", str(manifest), "--folder", str(folder)]
    return command + ["--done", str(folder / "done.json")]


def train_here(
    settings: Path, manifest: Path, folder: Path, **more: Any
) -> subprocess.CompletedProcess:
    """Run the trainer as the workflow does, and wait for it."""
    command = train_command(settings, manifest, folder)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


def batch_hashes(folder: Path) -> list[str]:
    """What each step read, as the devices saw it."""
    return [record["batch_hash"] for record in read_metrics(folder / "metrics.jsonl")["train"]]


def pretend_checkpoint(folder, step):
    """What stands for a complete checkpoint as long as nobody reads it."""
    checkpoint = f"checkpoints/step-{step:08d}"
    (folder / checkpoint).mkdir(parents=True, exist_ok=True)
    write_json(folder / f"saved/{step}.json", {"checkpoint": checkpoint})


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each step in the metrics."""
    records = read_metrics(folder / "metrics.jsonl")["train"]
    return [(r["step"], r["train_loss_nats"], r["grad_norm"]) for r in records]


def llmc_shards(texts: list[str], val_tokens: int, shard_tokens: int) -> dict[str, bytes]:
    """An independent writer of llm.c's layout: file name -> bytes."""
    ids = []
    for text in texts:
        ids += [50256, *gpt2_encoding().encode_ordinary(text)]
    files = {}
    for split, part, number in (("val", ids[:val_tokens], 0), ("train", ids[val_tokens:], 1)):
        for start in range(0, len(part), shard_tokens):
            piece = part[start : start + shard_tokens]
            header = struct.pack("<256i", 20240520, 1, len(piece), *[0] * 253)
            files[f"d_{split}_{number:06d}.bin"] = header + struct.pack(f"<{len(piece)}H", *piece)
            number += 1
    return files
