"""The training loop: the same for one CPU process and for many nodes."""

import contextlib
import math
import platform
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from miniseries import checkpoint
from miniseries.distributed import (
    StopFlag,
    World,
    peak_tflops,
    reshard,
    set_last_micro_step,
    shard_model,
    start_world,
)
from miniseries.encode import gpt2_encoding
from miniseries.journal import Journal, StepReport
from miniseries.loader import Loader
from miniseries.metrics import read_json, read_metrics, write_json
from miniseries.model import GPT, GPTConfig, init_weights
from miniseries.optimizer import ZScore, clip_gradients, make_optimizer
from miniseries.schedule import learning_rate_at
from miniseries.scoring import encode_questions, hellaswag_scores, validation_loss
from miniseries.shards import DOCUMENT_MARK, Manifest, load_manifest

STOPPED = 130  # exit code of a run that a signal ended; everything up to its last step is saved
# First choice first: on Hopper cuDNN's kernels take about half of FlashAttention-2's time
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def source_commit() -> str | None:
    """Commit of the code that trains, with `-dirty` where files were changed; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def attention_kernels(device: torch.device) -> contextlib.AbstractContextManager:
    """Context in which attention takes the fastest kernels that the device has."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(ATTENTION_BACKENDS, set_priority=True)


def largest_micro_batch(wanted: int, windows_per_rank: int) -> int:
    """The largest number of sequences, at most `wanted`, that divides a rank's share of a batch."""
    sizes = range(1, min(wanted, windows_per_rank) + 1)
    return max(size for size in sizes if windows_per_rank % size == 0)


class Trainer:
    """One process of one run.

    Args:
        settings: the run's frozen settings: `recipe` (what is trained) and `machine` (how).
        manifest: tokens with sizes and hashes.
        questions: HellaSwag-shaped JSON lines; None when there are none.
        folder: the run's folder; the newest checkpoint in it is resumed from.

    Raises:
        ValueError: the processes cannot share a batch equally, or a checkpoint is damaged.
        OSError: not even one checkpoint fits on the disk.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        manifest: Manifest,
        questions: Path | None,
        folder: Path,
        world: World,
    ) -> None:
        self.settings, self.recipe, self.machine = settings, settings["recipe"], settings["machine"]
        self.manifest, self.folder, self.world = manifest, folder, world
        self.stop_flag = StopFlag(world)
        self._queued: deque[torch.cuda.Event] = deque()
        self.max_steps = self.recipe["max_steps"]
        self.tokens_per_step = self.recipe["total_batch_tokens"]
        self._split_batch()
        self._build_model()
        self.loss_detector, self.norm_detector = ZScore(), ZScore()
        self.wall_seconds_before = 0.0
        self.first_step = self._resume()
        self.started = time.monotonic()
        self.loader = Loader(
            manifest.train_shards,
            sequence_length=self.recipe["sequence_length"],
            seed=self.recipe["seed"],
            batch_windows=self.tokens_per_step // self.recipe["sequence_length"],
            micro_batch=self.micro_batch,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )
        wants_questions = self.machine["hellaswag"] and questions is not None
        self.questions = encode_questions(questions, gpt2_encoding()) if wants_questions else None
        self.journal = self._make_journal()

    # ---- getting ready ------------------------------------------------------------------

    def _split_batch(self) -> None:
        length = self.recipe["sequence_length"]
        windows, rest = divmod(self.tokens_per_step // length, self.world.size)
        if rest or windows == 0:
            raise ValueError(
                f"total_batch_tokens {self.tokens_per_step} is {self.tokens_per_step // length} "
                f"sequences of {length} tokens, which {self.world.size} processes cannot share "
                "equally; set machine.gpus to a number that divides it"
            )
        self.micro_batch = largest_micro_batch(self.machine["micro_batch"], windows)
        self.grad_accum_steps = windows // self.micro_batch

    def _model_config(self) -> GPTConfig:
        shape = ("num_layers", "num_heads", "channels", "sequence_length")
        return GPTConfig(*(self.recipe[key] for key in shape))

    def _build_model(self) -> None:
        recipe, device = self.recipe, self.world.device
        # "high" lets fp32 products run in TF32 where the device has it
        precise = "highest" if recipe["precision"] == "fp32" else "high"
        torch.set_float32_matmul_precision(precise)
        with torch.device("meta"):
            self.model = GPT(self._model_config())
        self.num_parameters = self.model.num_parameters
        self.num_elements = sum(p.numel() for p in self.model.parameters())  # padding included
        compiled = self.machine["compile"]
        self.compiled = device.type == "cuda" if compiled == "auto" else compiled
        if recipe["precision"] == "fp8" and not (self.compiled and device.type == "cuda"):
            raise ValueError("precision fp8 needs a GPU and machine.compile; set it to bf16")
        if self.compiled:
            self.model.compile(device, recipe["precision"])
        shard_model(self.model, self.world, recipe["precision"])
        self.model.to_empty(device=device)
        self.optimizer = make_optimizer(self.model, recipe["weight_decay"])

    def _resume(self) -> int:
        """Load the newest checkpoint, or draw fresh weights; returns the number of steps done."""
        if self.world.is_main:
            checkpoint.clean_up(self.folder)
            checkpoint.check_space(self.folder, self.num_elements)
        dist.barrier()
        steps = checkpoint.saved_steps(self.folder)
        if not steps:
            init_weights(self.model, self.recipe["seed"])
            return 0
        newest = checkpoint.checkpoint_folder(self.folder, steps[-1])
        state = checkpoint.load_checkpoint(newest, self.model, self.optimizer)
        if state["fingerprint"] != self.settings["fingerprint"]:
            raise ValueError(
                f"{newest} belongs to other settings than {self.folder / 'settings.json'}; "
                "give the new settings a run name of their own"
            )
        self.loss_detector.load_state_dict(state["loss_detector"])
        self.norm_detector.load_state_dict(state["norm_detector"])
        self.wall_seconds_before = state["wall_seconds"]
        return state["step"]

    def _make_journal(self) -> Journal:
        peak = peak_tflops(self.world.device)
        layers, channels = self.recipe["num_layers"], self.recipe["channels"]
        # llm.c's formula: 6 for each weight, and 6 L C T for attention's two products
        attention = 6 * layers * channels * self.recipe["sequence_length"]
        return Journal(
            self.folder,
            is_main=self.world.is_main,
            first_step=self.first_step,
            max_steps=self.max_steps,
            tokens_per_step=self.tokens_per_step,
            tokens_per_epoch=self.loader.tokens_per_epoch,
            flops_per_token=6 * self.num_elements + attention,
            peak_flops=None if peak is None else peak * 1e12 * self.world.size,
        )

    def announce(self) -> None:
        """The table of settings, and the lines that llm.c prints at its start."""
        device = self.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"commit": source_commit(), "host": platform.node()}
        versions |= {"started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        resolved = {"processes": self.world.size, "compiled": self.compiled}
        resolved["device"] = name or f"{device.type}, {torch.get_num_threads()} threads a process"
        resolved["attention"] = self.model.formulas.attention_name
        run = {"run": self.settings["run"]}
        self.journal.table(run | self.recipe | self.machine | resolved | versions)
        self.journal.sizes(
            num_elements=self.num_elements,
            element_bytes=2 if self.recipe["precision"] in ("bf16", "fp8") else 4,
            processes=self.world.size,
            micro_batch=self.micro_batch,
            sequence_length=self.recipe["sequence_length"],
            grad_accum_steps=self.grad_accum_steps,
        )
        self.journal.start(
            fingerprint=self.settings["fingerprint"],
            world_size=self.world.size,
            device=device.type,
            gpu_name=name,
            peak_tflops=peak_tflops(device),
            num_parameters=self.num_parameters,
            tokens_per_step=self.tokens_per_step,
            micro_batch=self.micro_batch,
            grad_accum_steps=self.grad_accum_steps,
            versions=versions,
        )

    # ---- one step -----------------------------------------------------------------------

    def train_step(self, step: int) -> StepReport:
        """Forward, backward and update on global batch `step`.

        Raises:
            ValueError: loss or gradient is not finite; the weights are untouched.
        """
        start = time.perf_counter()
        loss_sum = torch.zeros((), device=self.world.device)
        for micro_step in range(self.grad_accum_steps):
            if self.stop_flag.is_up():
                self.stop(step)  # drops what there is of this step
            set_last_micro_step(self.model, micro_step == self.grad_accum_steps - 1)
            with record_function("data"):  # the ranges that profiles are cut by
                tokens, targets = self.loader.micro_batch_at(step, micro_step)
            with record_function("forward"):
                loss = self.model(tokens, targets) / self.grad_accum_steps
            with record_function("backward"):
                loss.backward()
            loss_sum += loss.detach()
            self._pace()
        with record_function("clip"):
            norm = clip_gradients(self.model, self.world.mesh.get_group("shard"))
        dist.all_reduce(loss_sum)
        loss, norm = torch.stack(
            [loss_sum / self.world.size, norm]
        ).tolist()  # waits for the device
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(
                f"step {step}: loss {loss}, gradient norm {norm}; stopped before this update, so "
                f"the checkpoints in {self.folder / 'checkpoints'} are sound"
            )
        loss_z, grad_z = self.loss_detector.update(loss), self.norm_detector.update(norm)
        learning_rate = self._learning_rate(step)
        skipped = self._is_outlier("loss", loss_z) or self._is_outlier("grad", grad_z)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            with record_function("optimizer"):
                self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return StepReport(step, loss, norm, loss_z, grad_z, learning_rate, seconds, skipped)

    def _learning_rate(self, step: int) -> float:
        return learning_rate_at(
            step,
            peak=self.recipe["learning_rate"],
            schedule=self.recipe["lr_schedule"],
            warmup_steps=self.recipe["warmup_steps"],
            max_steps=self.max_steps,
            final_fraction=self.recipe["final_lr_fraction"],
        )

    def _is_outlier(self, name: str, z: float) -> bool:
        """True when the update is to be skipped; NaN compares false: a short window never skips."""
        limit = self.recipe[f"skip_{name}_z"]
        if limit and z > limit:
            self.journal.say(f"skipping update due to {name} z-score of {z:f}")
            return True
        return False

    # ---- evaluation and saving ----------------------------------------------------------

    def evaluate(self, step: int) -> float:
        """Validation loss and, from the first update on, HellaSwag; all ranks share the work."""
        shared: dict[str, Any] = {"micro_batch": self.micro_batch, "device": self.world.device}
        shared |= {"rank": self.world.rank, "world_size": self.world.size}
        scores = validation_loss(self.model, self.manifest, **shared)
        self.journal.validation(step, scores)
        if self.questions is not None and step > 0:
            self.journal.hellaswag(step, hellaswag_scores(self.model, self.questions, **shared))
        return scores["val_loss_nats"]

    @torch.no_grad()
    def sample(self, step: int) -> None:
        """One text of `sample_tokens` tokens that begins a new document; same seed, same text."""
        generator = torch.Generator().manual_seed(self.recipe["seed"])
        tokens = torch.tensor([[DOCUMENT_MARK]], device=self.world.device)
        # growing lengths would compile again and again
        with torch.compiler.set_stance("force_eager"):
            for _ in range(self.machine["sample_tokens"]):
                logits = self.model(tokens[:, -self.recipe["sequence_length"] :])[0, -1]  # (V,)
                probabilities = torch.softmax(logits.double().cpu(), dim=0)
                following = torch.multinomial(probabilities, 1, generator=generator)
                tokens = torch.cat([tokens, following.to(tokens.device)[None]], dim=1)
        reshard(self.model)
        self.journal.samples(step, gpt2_encoding().decode(tokens[0, 1:].tolist()))

    def wall_seconds(self) -> float:
        """Time of this run so far, over all resumes."""
        return self.wall_seconds_before + time.monotonic() - self.started

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` updates, then remove what need not be kept."""
        start = time.monotonic()
        self.journal.say(f"Writing checkpoint at step {step}")
        state = {
            "run": self.settings["run"],
            "fingerprint": self.settings["fingerprint"],
            "recipe": self.recipe,
            "loss_detector": self.loss_detector.state_dict(),
            "norm_detector": self.norm_detector.state_dict(),
            "wall_seconds": self.wall_seconds(),
            "world_size": self.world.size,
            "micro_batch": self.micro_batch,
        }
        checkpoint.save_checkpoint(self.folder, step, self.model, self.optimizer, state, self.world)
        self.journal.record("checkpoint", step, seconds=time.monotonic() - start)
        if self.world.is_main:
            keep, keep_every = self.machine["keep_checkpoints"], self.machine["keep_every_steps"]
            checkpoint.rotate(self.folder, keep, keep_every, set(self.machine["export_steps"]))

    # ---- the loop -----------------------------------------------------------------------

    def _due(self, step: int, every: int) -> bool:
        return step == self.max_steps or (every > 0 and step % every == 0)

    def _saves_at(self, step: int) -> bool:
        due = self._due(step, self.machine["checkpoint_every_steps"])
        return due or step in self.machine["export_steps"]

    def _pace(self) -> None:
        """Queue at most two micro-steps on the GPU, so that a stop never waits for a whole step."""
        if self.world.device.type != "cuda":
            return
        self._queued.append(torch.cuda.Event())
        self._queued[-1].record()
        if len(self._queued) > 2:
            self._queued.popleft().synchronize()

    def run(self) -> float:
        """Train to the last step.

        Returns:
            The final validation loss, nats.

        Raises:
            SystemExit: a signal came; the last whole step is saved.
        """
        self.stop_flag.watch()
        self.announce()
        val_loss = math.nan
        for step in range(self.first_step, self.max_steps + 1):
            if self._due(step, self.machine["val_every_steps"]):
                val_loss = self.evaluate(step)
            if step > 0 and self._due(step, self.machine["sample_every_steps"]):
                self.sample(step)
            if step == self.max_steps:
                break
            self.journal.step(self.train_step(step))
            if self._saves_at(step + 1):
                self.save(step + 1)
        return val_loss

    def stop(self, step: int) -> None:
        """Save the last whole step and leave."""
        reshard(self.model)
        self.save(step)
        self.journal.record("stop", step, signal=self.stop_flag.signal)
        self.journal.say(f"stopped at step {step}; the same command goes on from here")
        self.journal.close()
        raise SystemExit(STOPPED)

    def finish(self, done: Path, val_loss: float) -> None:
        """Write the file that marks the run as complete; last of all."""
        records = read_metrics(self.folder / "metrics.jsonl").get("train", [])
        times = [record["step_time_ms"] for record in records]
        if times:
            self.journal.say(f"total average iteration time: {sum(times) / len(times):f} ms")
        folder = checkpoint.checkpoint_folder(self.folder, self.max_steps)
        self.journal.record("done", self.max_steps, wall_seconds=self.wall_seconds())
        content = {
            "run": self.settings["run"],
            "step": self.max_steps,
            "fingerprint": self.settings["fingerprint"],
            "data_fingerprint": self.manifest.fingerprint,
            "checkpoint": str(folder.relative_to(self.folder)),
            "files": checkpoint.describe_files(folder, self.folder),
            "val_loss_nats": val_loss,
            "wall_seconds": self.wall_seconds(),
        }
        write_json(done, content)


def train(manifest: Path, questions: Path | None, folder: Path, done: Path) -> None:
    """Train the run whose frozen `settings.json` lies in `folder`, in this process.

    Raises:
        ValueError: bad data, damaged checkpoint, or numbers that are not finite.
        OSError: the disk is full.
        SystemExit: stopped by a signal; everything is saved.
    """
    world = start_world()
    try:
        settings = read_json(folder / "settings.json")
        trainer = Trainer(settings, load_manifest(manifest), questions, folder, world)
        with attention_kernels(world.device):
            val_loss = trainer.run()
        if world.is_main:
            trainer.finish(done, val_loss)
        trainer.journal.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
