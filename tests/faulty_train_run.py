"""`train_run.py` with a fault that a test asks for: FAULT is a word, FAULT_STEP where it strikes.

Started in place of the real script, which it then runs unchanged; the processes of the run start
it again.
"""

import os
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))
RANK = int(os.environ.get("RANK", -1))  # -1 is the launcher
FAULT = os.environ.get("FAULT", "") if RANK >= 0 else ""
SECONDS = float(os.environ.get("FAULT_SECONDS", 0))


def slow_compile() -> None:
    """The first forward call takes very long."""
    from miniseries.model.gpt import GPT

    forward = GPT.forward

    def slow(*arguments, **more):
        GPT.forward = forward
        print("compiling", flush=True)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:  # a compiler is busy in Python, not asleep
            sum(range(1000))
        return forward(*arguments, **more)

    GPT.forward = slow


def slow_forward_in(name: str) -> None:
    """Each forward call without gradients takes a second: validation, HellaSwag, sampling."""
    import torch

    from miniseries.model.gpt import GPT

    forward = GPT.forward

    def slow(*arguments, **more):
        if not torch.is_grad_enabled():
            print(name, flush=True)
            time.sleep(SECONDS)
        return forward(*arguments, **more)

    GPT.forward = slow


def slow_save() -> None:
    """Each file of a checkpoint takes long to be synced, on the main process."""
    fsync = os.fsync

    def slow(handle):
        number = handle if isinstance(handle, int) else handle.fileno()
        path = Path(f"/proc/self/fd/{number}").readlink()
        if "checkpoints" in path.parts and RANK <= 0:
            print(f"syncing {path.name}", flush=True)
            time.sleep(SECONDS)
        return fsync(handle)

    os.fsync = slow


def slow_steps() -> None:
    """Each step takes some time: a test that wants to be there in the middle does not come late."""
    from miniseries.training.trainer import Trainer

    train_step = Trainer.train_step

    def slow(self, step, **more):
        time.sleep(SECONDS)
        return train_step(self, step, **more)

    Trainer.train_step = slow


def slow_finish() -> None:
    """Hashing the last checkpoint takes long."""
    from miniseries.training.trainer import Trainer

    finish = Trainer.finish

    def slow(*arguments):
        print("finishing", flush=True)
        time.sleep(SECONDS)
        return finish(*arguments)

    Trainer.finish = slow


def out_of_memory() -> None:
    """The second process has no memory for step 5 with more than two sequences at a time."""
    import torch

    from miniseries.training.trainer import Trainer

    train_step = Trainer.train_step

    def greedy(self, step, **more):
        if step == 5 and self.micro_batch > 2 and RANK == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return train_step(self, step, **more)

    Trainer.train_step = greedy


def greedy() -> None:
    """Real memory runs out at step 5 with more than 32 sequences at a time."""
    import torch

    from miniseries.training.trainer import Trainer

    train_step = Trainer.train_step

    def taking_all(self, step, **more):
        if step == 5 and self.micro_batch > 32:
            free, _ = torch.cuda.mem_get_info()
            self.hoard = torch.empty(free - (512 << 20), dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
            self.more = torch.empty(free, dtype=torch.uint8, device="cuda")
        return train_step(self, step, **more)

    Trainer.train_step = taking_all


def die_at_checkpoints(notes: Path) -> None:
    """The second process is killed in its last save, and when it loads that one; once each."""
    import signal

    import torch.distributed.checkpoint as dcp

    def dying(name, method):
        def dies(self, *arguments):
            if "00000012" in str(self.path) and not (notes / name).exists():
                (notes / name).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments)

        return dies

    dcp.FileSystemWriter.write_data = dying("died saving", dcp.FileSystemWriter.write_data)
    dcp.FileSystemReader.read_data = dying("died loading", dcp.FileSystemReader.read_data)


def note_batches(file: Path) -> None:
    """Write down a hash of each row of tokens and targets that the model is trained on."""
    import hashlib
    import json

    import torch

    from miniseries.model.gpt import GPT
    from miniseries.training.trainer import Trainer

    forward, train_step = GPT.forward, Trainer.train_step
    place = {"step": 0, "micro_step": 0}

    def noting_step(self, step, **more):
        place.update(step=step, micro_step=0)
        return train_step(self, step, **more)

    def noting_forward(self, tokens, targets=None, *more, **keywords):
        if torch.is_grad_enabled():
            rows = torch.cat([tokens, targets], dim=1).cpu().numpy()
            hashes = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]
            with file.open("a") as stream:
                stream.write(json.dumps({**place, "rank": RANK, "rows": hashes}) + "\n")
            place["micro_step"] += 1
        return forward(self, tokens, targets, *more, **keywords)

    GPT.forward, Trainer.train_step = noting_forward, noting_step


if "BATCHES" in os.environ and RANK >= 0:
    note_batches(Path(os.environ["BATCHES"]))
if FAULT == "slow compile":
    slow_compile()
elif FAULT == "slow evaluation":
    slow_forward_in("evaluating")
elif FAULT == "slow save":
    slow_save()
elif FAULT == "slow steps":
    slow_steps()
elif FAULT == "slow finish":
    slow_finish()
elif FAULT == "out of memory":
    out_of_memory()
elif FAULT == "greedy":
    greedy()
elif FAULT == "die at checkpoints" and RANK == 1:
    die_at_checkpoints(Path(os.environ["NOTES"]))
if os.environ.get("COLLECTIVE_SECONDS") and RANK >= 0:
    from datetime import timedelta

    from miniseries.training import distributed

    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"]))

exec(compile((SCRIPTS / "train_run.py").read_text(), "train_run.py", "exec"))
