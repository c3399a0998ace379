"""Saving while training goes on: a thread writes a copy of the state in host memory."""

import concurrent.futures
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from miniseries.training import checkpoint
from miniseries.training.distributed import World, local_part

# Between the ranks' writers: a slow disk is no hang, and a rank that dies closes its connections
WRITERS_TIMEOUT = timedelta(days=1)
ALIGNMENT = 512  # bytes; where in the host memory a tensor may begin
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU's context, CUDA's driver_types.h


class HostCopy:
    """Room in host memory for one copy of this rank's tensors, pinned where there is a GPU.

    It is one block, not a tensor each: PyTorch rounds pinned memory up to powers of two. But each
    copy has a storage of its own, which ends where it does: PyTorch's writer clones all others, and
    holds the clones until it is done, which would be a second block.

    Args:
        tensors: sharded or plain, by name; `take` copies whatever they hold then.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], world: World) -> None:
        self.tensors, self.on_gpu = tensors, world.device.type == "cuda"
        mesh = world.mesh
        if self.on_gpu:
            torch.cuda.set_device(world.device)  # of this thread
            mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        sizes = {name: local_part(t).numel() * t.element_size() for name, t in tensors.items()}
        rounded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        block = torch.empty(sum(rounded.values()), dtype=torch.uint8)
        if self.on_gpu:
            torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), PORTABLE)
        room = block.numpy()
        self.places: dict[str, torch.Tensor] = {}  # where each local tensor goes
        self.copies: dict[str, torch.Tensor] = {}  # the same, as checkpoints are written from
        start = 0
        for name, tensor in tensors.items():
            place = torch.from_numpy(room[start : start + sizes[name]]).view(tensor.dtype)
            self.places[name] = place.view(local_part(tensor).shape)
            self.copies[name] = _like(tensor, self.places[name], mesh)
            start += rounded[name]

    def take(self) -> None:
        """Copy all tensors as they are now."""
        for name, tensor in self.tensors.items():
            self.places[name].copy_(local_part(tensor), non_blocking=True)
        if self.on_gpu:
            torch.cuda.synchronize()


def _like(tensor: torch.Tensor, place: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """`place` with the global shape and the shards of `tensor`."""
    if not isinstance(tensor, DTensor):
        return place
    return DTensor.from_local(
        place,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class Saver:
    """Writes the checkpoints of one process's run, one at a time; every rank has one.

    Args:
        when_complete: called in the writing thread of the main process after each checkpoint.
    """

    def __init__(
        self,
        run_folder: Path,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        world: World,
        when_complete: Callable[[], None],
    ) -> None:
        self.run_folder, self.world, self.when_complete = run_folder, world, when_complete
        self.model, self.optimizer = model, optimizer
        self.group = dist.new_group(backend="gloo", timeout=WRITERS_TIMEOUT)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self.host_copy: Future[HostCopy] | None = None
        self.pending: tuple[int, Future[float]] | None = None

    def prepare(self) -> None:
        """Take the memory; pinning 19 GB takes seconds, in which the first step compiles."""
        if self.host_copy is None:
            tensors = checkpoint.state_tensors(self.model, self.optimizer)
            self.host_copy = self.thread.submit(HostCopy, tensors, self.world)

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state after `step` updates and begin to write it; `wait` comes before.

        Args:
            state: the trainer's own, goes into `trainer.json`.
        """
        assert self.pending is None, "one checkpoint at a time"
        self.prepare()
        copy = self.host_copy.result()
        copy.take()
        adam_step = self.optimizer.state[next(iter(self.model.parameters()))]["step"].item()
        state = {"step": step, "adam_step": adam_step, **state}
        # of what was copied, not of the copy. On several nodes parts may come from any of them,
        # and whether all hold the same bits is not known
        sums = checkpoint.checksums(copy.tensors) if self.world.num_nodes == 1 else {}
        self.pending = step, self.thread.submit(self._write, step, copy.copies, state, sums)

    def _write(self, step: int, copies: dict, state: dict[str, Any], sums: dict) -> float:
        start = time.monotonic()
        arguments = (self.run_folder, step, copies, state, sums, self.world, self.group)
        checkpoint.save_checkpoint(*arguments)
        if self.world.is_main:
            self.when_complete()
        # all are done at the same time: one that went on would wait in a collective of training,
        # which may not last as long
        dist.barrier(group=self.group)
        return time.monotonic() - start

    def finished(self) -> tuple[int, float] | None:
        """Step and seconds of a checkpoint that has become complete since the last call.

        Raises:
            OSError: it could not be written.
        """
        if self.pending is None or not self.pending[1].done():
            return None
        step, future = self.pending
        self.pending = None
        return step, future.result()

    def wait(self, beat: Callable[[], None]) -> None:
        """Return when nothing is being written; `finished` tells how that went.

        Args:
            beat: called every second.
        """
        while self.pending is not None and not self.pending[1].done():
            concurrent.futures.wait([self.pending[1]], timeout=1.0)
            beat()
