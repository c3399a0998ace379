"""One process of a run from its start to its exit code."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from miniseries.data.shards import load_manifest
from miniseries.metrics import die_with_parent, read_json
from miniseries.settings import check_tokens
from miniseries.training import determinism
from miniseries.training.assembly import attention_kernels
from miniseries.training.distributed import Interrupted, start_world
from miniseries.training.supervisor import (
    CRASHED,
    OUT_OF_MEMORY,
    SECONDS_FOR_THE_OTHERS,
    STOPPED,
    Heartbeat,
)
from miniseries.training.trainer import Trainer


def train(manifest: Path, questions: Path | None, folder: Path, done: Path) -> None:
    """Train the run whose frozen `settings.json` lies in `folder`, as one of its processes.

    Raises:
        ValueError: bad data, damaged checkpoint, or numbers that are not finite.
        OSError: the disk is full.
        SystemExit: stopped by a signal, everything is saved; or out of memory, or another error
            of the machine, after which the launcher starts all processes again.
    """
    die_with_parent()
    Heartbeat().beat()  # the launcher may have died while PyTorch was loading
    faulthandler.register(signal.SIGUSR1)  # the launcher asks where a process hangs
    trainer = None
    try:
        data = load_manifest(manifest)
        # the launcher's settings have it; those that were put there for torchrun do not
        settings = {"data_fingerprint": data.fingerprint, **read_json(folder / "settings.json")}
        # the launcher looked when it started; this process may be a later restart
        before, now = settings["data_fingerprint"], data.fingerprint
        check_tokens(settings["run"], before, now, manifest, folder)
        deterministic = settings["machine"]["deterministic"]
        if deterministic:
            determinism.enforce()
        world = start_world()
        trainer = Trainer(settings, data, questions, folder, world)
        with attention_kernels(world.device, deterministic):
            val_loss = trainer.run()
        if world.is_main:
            trainer.finish(done, val_loss)
        trainer.journal.close()
    except (ValueError, OSError):
        raise
    except (SystemExit, Interrupted):
        _leave_at_once(STOPPED)
    except torch.OutOfMemoryError as error:
        with contextlib.suppress(OSError):  # whoever listened may be gone
            print(f"process {world.rank}: {error}", file=sys.stderr)
        _leave_at_once(OUT_OF_MEMORY)
    except Exception as error:
        # when the others have left already, what they leave behind is no fault
        is_stop = trainer is not None and trainer.stop_flag.signal is not None
        if not is_stop:
            if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                # perhaps another one failed: then the launcher ends this one before it speaks
                time.sleep(SECONDS_FOR_THE_OTHERS + 1)
            with contextlib.suppress(OSError):
                traceback.print_exc()
        _leave_at_once(STOPPED if is_stop else CRASHED)
    dist.destroy_process_group()
    _leave_at_once(0)  # taking an interpreter with PyTorch to pieces takes seconds


def _leave_at_once(code: int) -> None:
    """End without waiting for other processes or threads, which may wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
