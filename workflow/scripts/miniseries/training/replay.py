"""One step of a run done twice from the same state: other bits the second time are a fault."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miniseries.data.shards import load_manifest
from miniseries.metrics import die_with_parent, read_json, read_metrics, write_json
from miniseries.training import checkpoint, determinism, guards, microbatch
from miniseries.training.assembly import attention_kernels
from miniseries.training.distributed import World, device_name, local_part, reshard, start_world
from miniseries.training.supervisor import Heartbeat
from miniseries.training.trainer import Trainer


def replay(folder: Path, manifest: Path, step: int, output: Path, scratch: Path) -> None:
    """As one of the run's processes; the run's folder is read only, whatever happens.

    Trains from the newest checkpoint before `step` up to it with deterministic operations, then
    does it twice and compares loss, gradient norm, and every weight and moment bit by bit.

    Args:
        step: 0-based, as in metrics.jsonl.
        output: verdict, differing tensors by rank, and losses, JSON.
        scratch: an empty folder, which the launcher deletes whatever happens.

    Raises:
        ValueError: the run never did this step.
    """
    die_with_parent()
    Heartbeat().beat()  # the launcher may have died while PyTorch was loading
    determinism.enforce()
    world = start_world()
    settings = read_json(folder / "settings.json")
    last = settings["recipe"]["max_steps"] - 1
    if not 0 <= step <= last:
        raise ValueError(f"run {settings['run']!r} has the steps 0 to {last}, not {step}")
    _look_alike(folder, scratch, settings, step, world)
    trainer = Trainer(settings, load_manifest(manifest), None, scratch, world)
    with attention_kernels(world.device, deterministic=True):
        result = _do_twice(trainer, step)
    if world.is_main:
        _report(result, folder, settings["run"], step, output)
    trainer.journal.close()
    dist.barrier()
    dist.destroy_process_group()


def _look_alike(
    folder: Path, place: Path, settings: dict[str, Any], step: int, world: World
) -> None:
    """A folder for the trainer in which the run has just one checkpoint, the one to begin with."""
    tried = microbatch.remembered(folder, settings, world.size, device_name(world.device))
    if tried is not None:
        settings["machine"]["micro_batch"] = tried["micro_batch"]
    settings["machine"] |= {"deterministic": True, "checkpoint_every_steps": 0}
    before = [saved for saved in checkpoint.saved_steps(folder) if saved <= step]
    if before:
        source = checkpoint.checkpoint_folder(folder, before[-1])
        micro_batch = read_json(source / "trainer.json")["micro_batch"]
        if isinstance(micro_batch, int):  # an imported checkpoint does not say
            settings["machine"]["micro_batch"] = micro_batch
    if world.is_main:
        (place / "checkpoints").mkdir()
        if before:
            (place / "checkpoints" / source.name).symlink_to(source.resolve())
        if (folder / guards.RECORD).exists():
            shutil.copy(folder / guards.RECORD, place)
    dist.barrier()


def _do(trainer: Trainer, step: int) -> dict[str, Any]:
    """What the step came to; one that diverges has not touched the weights."""
    try:
        report = trainer.train_step(step)
    except guards.Diverged as divergence:
        reshard(trainer.model)
        trainer.optimizer.zero_grad()
        return {"loss_nats": None, "grad_norm": None, "diverged": str(divergence)}
    return {"loss_nats": report.loss, "grad_norm": report.grad_norm}


def _do_twice(trainer: Trainer, step: int) -> dict[str, Any]:
    trainer.guards.divergence.limit = 0.0  # of a loss that is only high the update is compared, too
    for earlier in range(trainer.first_step, step):
        trainer.journal.step(trainer.train_step(earlier))
    tensors = checkpoint.state_tensors(trainer.model, trainer.optimizer)
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    for number, state in enumerate(trainer.optimizer.state.values()):
        local[f"number of updates of weight {number}"] = state["step"]
    windows = trainer.guards.state_dict()
    before = {name: tensor.cpu().clone() for name, tensor in local.items()}
    first = _do(trainer, step)
    after = {name: tensor.cpu().clone() for name, tensor in local.items()}
    for name, tensor in local.items():
        tensor.copy_(before[name])
    trainer.guards.load_state_dict(windows)
    second = _do(trainer, step)
    differing = {
        name: int((tensor.cpu() != after[name]).sum())
        for name, tensor in local.items()
        if not torch.equal(tensor.cpu(), after[name])
    }
    ranks: list[Any] = [None] * trainer.world.size
    dist.all_gather_object(ranks, differing)
    return {
        "verdict": "identical" if first == second and not any(ranks) else "different",
        "processes": trainer.world.size,
        "from_step": trainer.first_step,
        "runs": [first, second],
        "differing_elements_by_rank": ranks,
    }


def _report(result: dict[str, Any], folder: Path, run: str, step: int, output: Path) -> None:
    recorded = [
        record["train_loss_nats"]
        for record in read_metrics(folder / "metrics.jsonl").get("train", [])
        if record["step"] == step
    ]
    result = {"run": run, "step": step, **result, "recorded_loss_nats": (recorded or [None])[0]}
    write_json(output, result)
    print(f"step {step} of {run}, done twice from the same state: {result['verdict']}")
    for rank, differing in enumerate(result["differing_elements_by_rank"]):
        for name, count in list(differing.items())[:1]:
            print(f"process {rank}: {name} is the first of {len(differing)}, {count} elements")
    losses = ", ".join(one.get("diverged") or f"{one['loss_nats']:.9f}" for one in result["runs"])
    logged = f"{recorded[0]:.9f}" if recorded else "none"
    print(f"losses {losses}; in metrics.jsonl {logged}")
    if result["verdict"] == "different":
        print("the same operations gave other bits: suspect the GPU or its memory, not the data")
