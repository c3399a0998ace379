"""Processes and devices: one code path from one CPU process to many nodes."""

import contextlib
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miniseries.model.gpt import GPT
from miniseries.training.devices import DEVICES
from miniseries.training.supervisor import GPUS_SEEN, signals_heard

# Blocks whose weights travel together. FSDP2's hooks run in Python, once a group and micro-step:
# with a group for each block they took a third of Python's time (LOG.md)
BLOCKS_PER_GROUP = 4
COMPUTE_DTYPES = {
    "fp32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
# Longer than a hang may last until the launcher ends it, which knows better what is a hang
COLLECTIVE_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class World:
    """This process's place among all, and its device."""

    rank: int
    size: int
    num_nodes: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and speaks."""
        return self.rank == 0


def choose_device(device: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def start_world(backend: str | None = None) -> World:
    """Join the other processes that torchrun started; alone when there are none.

    Raises:
        ValueError: the launcher saw GPUs, and this process cannot use them.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_cuda = torch.cuda.is_available()
    if GPUS_SEEN in os.environ and not use_cuda:  # a run must not go on on the CPU unnoticed
        raise ValueError(
            f"the driver shows {os.environ[GPUS_SEEN]}, but PyTorch {torch.__version__} cannot use "
            "it; update the driver, see whether the fabric manager runs, or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    backend = backend or ("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    num_nodes = size // local_size
    if num_nodes > 1:  # shard inside a node, replicate across: only gradients cross the network
        mesh = init_device_mesh(
            device.type, (num_nodes, local_size), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return World(rank, size, num_nodes, device, mesh)


class Interrupted(BaseException):
    """Raised out of whatever goes on when a signal comes while there is nothing to save.

    No Exception: a compiler that it interrupts must not take it for a failure of its own.
    """


class StopFlag:
    """Whether Ctrl-C, TERM or the end of the terminal came, to any process of the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.signal: str | None = None

    def watch(self, has_something_to_save: Callable[[], bool]) -> None:
        """Note these signals from now on instead of ending at once."""

        def note(number: int, _frame: Any) -> None:
            if self.signal is not None:
                return
            self.signal = signal.Signals(number).name
            if not has_something_to_save():
                raise Interrupted
            if self.world.is_main:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(1, b"stopping: the last whole step is saved, please wait\n")

        for number in signals_heard():
            signal.signal(number, note)

    def is_up(self) -> bool:
        """The same answer on every rank; all must ask, before each micro-step."""
        if self.world.size == 1:
            return self.signal is not None
        flag = torch.tensor(int(self.signal is not None))  # on the CPU: no GPU has to wait
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


class Pace:
    """Queues at most two micro-steps on the GPU, so that a stop never waits for a whole step."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.queued: deque[torch.cuda.Event] = deque()

    def keep(self) -> None:
        """After each micro-step: wait for the one before the last."""
        if not self.on_gpu:
            return
        self.queued.append(torch.cuda.Event())
        self.queued[-1].record()
        if len(self.queued) > 2:
            self.queued.popleft().synchronize()


def shard_model(model: GPT, world: World, precision: str) -> None:
    """ZeRO-1 by FSDP2: each rank keeps its part of the fp32 weights and of AdamW's state.

    Whole weights are gathered once a step, in the compute precision, and stay until the last
    micro-step's backward; gradients are summed in fp32.
    """
    # a block hands on a linear layer's output, a view; nothing here works in place on it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    starts = range(0, len(model.h), BLOCKS_PER_GROUP)
    groups = [list(model.h[start : start + BLOCKS_PER_GROUP]) for start in starts]
    for group in [*groups, [model]]:
        fully_shard(group, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)


def set_last_micro_step(model: GPT, is_last: bool) -> None:
    """Sum gradients over ranks and give the whole weights up only after the last micro-step."""
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


def unshard(model: GPT) -> None:
    """Gather the whole weights for the next forward call, which else does it layer by layer."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(model: GPT) -> None:
    """Give up the whole weights that `unshard` or a forward call without a backward leaves.

    The optimizer and the checkpoints know the sharded ones only.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_name(device: torch.device) -> str:
    """What kind of device this is: the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_tflops(device: torch.device) -> float | None:
    """Peak bf16 rate of this device, TFLOP/s; None when unknown: never a guess."""
    if device.type != "cuda":
        return None
    found = DEVICES.get(torch.cuda.get_device_name(device))
    return found and found.bf16_tflops
