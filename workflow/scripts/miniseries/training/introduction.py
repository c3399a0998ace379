"""What a run says of itself at its start: settings, versions, memory, how a batch is divided."""

import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miniseries.data.shards import Manifest
from miniseries.model.gpt import GPT
from miniseries.training.distributed import World, device_name, peak_tflops
from miniseries.training.journal import Journal


def source_commit() -> str | None:
    """Commit of the code that trains, with `-dirty` where files were changed; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """What trains, where, and since when."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": source_commit(),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


@dataclass(frozen=True)
class Introduction:
    """One start of a run.

    Args:
        settings: the run's frozen ones; `recipe` has the defaults of later keys besides.
        buffers: MiB by name, as `memory.buffers` gives them.
        batches_skipped: by going back after divergences, until now.
        notes: what happened before there was anybody to tell.
    """

    settings: dict[str, Any]
    recipe: dict[str, Any]
    manifest: Manifest
    world: World
    model: GPT
    compiled: bool
    buffers: dict[str, float | None]
    micro_batch: int
    grad_accum_steps: int
    batches_skipped: int
    notes: list[str]

    def announce(self, journal: Journal) -> None:
        """The table of settings, and the lines that llm.c prints at its start."""
        found = versions()
        journal.table(self._table() | found)
        journal.sizes(
            num_elements=sum(p.numel() for p in self.model.parameters()),
            buffers=self.buffers,
            processes=self.world.size,
            micro_batch=self.micro_batch,
            sequence_length=self.recipe["sequence_length"],
            grad_accum_steps=self.grad_accum_steps,
        )
        for note in self.notes:
            journal.say(note)
        length, positions = self.recipe["sequence_length"], self.model.config.positions
        if length < positions:
            journal.say(f"warning: positions {length} to {positions - 1} are not trained")
        self._start(journal, found)

    def _table(self) -> dict[str, Any]:
        device = self.world.device
        on_cpu = f"{device.type}, {torch.get_num_threads()} threads a process"
        return {
            "run": self.settings["run"],
            **self.recipe,
            **self.settings["machine"],
            "processes": self.world.size,
            "compiled": self.compiled,
            "device": device_name(device) if device.type == "cuda" else on_cpu,
            **self.model.implementations,
        }

    def _start(self, journal: Journal, found: dict[str, str | None]) -> None:
        device, manifest = self.world.device, self.manifest
        journal.start(
            branch_from=self.recipe["branch_from"] or None,
            batches_skipped=self.batches_skipped,
            val_tokens=min(manifest.val_tokens, manifest.num_val_tokens),
            fingerprint=self.settings["fingerprint"],
            world_size=self.world.size,
            device=device.type,
            gpu_name=device_name(device) if device.type == "cuda" else None,
            peak_tflops=peak_tflops(device),
            num_parameters=self.model.num_parameters,
            tokens_per_step=self.recipe["total_batch_tokens"],
            micro_batch=self.micro_batch,
            grad_accum_steps=self.grad_accum_steps,
            **self.model.implementations,
            versions=found,
        )
