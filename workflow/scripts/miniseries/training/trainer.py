"""The training loop: the same for one CPU process and for many nodes."""

import contextlib
import functools
import math
import platform
import subprocess
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import DOCUMENT_MARK, Manifest
from miniseries.evaluation.choices import encode_questions
from miniseries.evaluation.scoring import choice_scores, validation_loss, warm_up
from miniseries.metrics import read_metrics, write_json
from miniseries.model.gpt import GPT, GPTConfig, init_weights
from miniseries.settings import LATER_KEYS, kept_steps
from miniseries.training import checkpoint, determinism, memory, microbatch, ranges
from miniseries.training.branches import trunk_and_step
from miniseries.training.distributed import (
    Interrupted,
    StopFlag,
    World,
    device_name,
    peak_tflops,
    reshard,
    set_last_micro_step,
    shard_model,
)
from miniseries.training.guards import (
    MAX_ROLLBACKS,
    NUM_PINNED,
    Diverged,
    DivergenceDetector,
    Rollbacks,
)
from miniseries.training.journal import Journal, StepReport
from miniseries.training.loader import Loader
from miniseries.training.optimizer import (
    LossScale,
    RoundingAdamW,
    ZScore,
    clip_gradients,
    make_optimizer,
)
from miniseries.training.pretrained import load_start
from miniseries.training.saver import Saver
from miniseries.training.schedule import rate_of_recipe
from miniseries.training.supervisor import STEP, STOPPED, Heartbeat

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


def attention_kernels(
    device: torch.device, deterministic: bool = False
) -> contextlib.AbstractContextManager:
    """Context in which attention takes the fastest kernels that the device has."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    backends = determinism.ATTENTION_BACKENDS if deterministic else ATTENTION_BACKENDS
    return sdpa_kernel(backends, set_priority=True)


def make_model(
    config: GPTConfig, recipe: dict[str, Any], machine: dict[str, Any], device: torch.device
) -> tuple[GPT, bool]:
    """A model on no device yet, with the formulas for this one; and whether it is compiled."""
    with torch.device("meta"):
        model = GPT(config)
    if not recipe.get("master_weights", True):
        model.to(torch.bfloat16)
    model.recompute(machine["recompute"])
    compiled = device.type == "cuda" if machine["compile"] == "auto" else machine["compile"]
    if recipe["precision"] == "fp8" and not (compiled and device.type == "cuda"):
        raise ValueError("precision fp8 needs a GPU and machine.compile; set it to bf16")
    if compiled:
        model.compile(device, recipe["precision"])
    if machine["deterministic"]:
        determinism.use_repeatable_attention(model)
    return model, compiled


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
        self.settings, self.machine = settings, settings["machine"]
        self.recipe = LATER_KEYS | settings["recipe"]
        self.manifest, self.folder, self.world = manifest, folder, world
        if self.machine["deterministic"]:
            determinism.enforce()
        self.stop_flag = StopFlag(world)
        self.heartbeat = Heartbeat()
        self._queued: deque[torch.cuda.Event] = deque()
        self.max_steps = self.recipe["max_steps"]
        self.tokens_per_step = self.recipe["total_batch_tokens"]
        self.notes: list[str] = []  # what happened before there was anybody to tell
        self._split_batch()
        self._build_model()
        self.loss_detector, self.norm_detector = ZScore(), ZScore()
        self.loss_scale = LossScale() if self.recipe["precision"] == "fp16" else None
        self.divergence = DivergenceDetector(self.recipe["divergence_z"])
        self.rollbacks = Rollbacks(folder)
        self.wall_seconds_before = 0.0
        self.first_step = self._resume()
        self.steps_done = self.kept_step = self.first_step
        self.saver = Saver(folder, self.model, self.optimizer, world, self._rotate)
        self.started = time.monotonic()
        self.loader = Loader(
            manifest.train_shards,
            self.recipe,
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
        name = device_name(self.world.device)
        self.micro_batch, reason = microbatch.choose(
            self.folder, self.settings, self.world.size, name
        )
        windows = microbatch.windows_per_process(self.recipe, self.world.size)
        self.grad_accum_steps = windows // self.micro_batch
        if reason is not None:
            self.notes.append(f"micro_batch {self.micro_batch}: {reason}")

    def _model_config(self) -> GPTConfig:
        return GPTConfig.of_recipe(self.recipe)

    def _build_model(self) -> None:
        recipe, device = self.recipe, self.world.device
        # "high" lets fp32 products run in TF32 where the device has it
        precise = "highest" if recipe["precision"] == "fp32" else "high"
        torch.set_float32_matmul_precision(precise)
        self.model, self.compiled = make_model(self._model_config(), recipe, self.machine, device)
        self.num_parameters = self.model.num_parameters
        self.num_elements = sum(p.numel() for p in self.model.parameters())  # padding included
        shard_model(self.model, self.world, recipe["precision"])
        self.model.to_empty(device=device)
        self.optimizer = make_optimizer(self.model, recipe["weight_decay"], recipe["seed"])
        if self.compiled and isinstance(self.optimizer, RoundingAdamW):
            self.optimizer.compile()

    def _resume(self) -> int:
        """Load the newest checkpoint, or draw fresh weights; returns the number of steps done."""
        if self.world.is_main:
            checkpoint.clean_up(self.folder)
            checkpoint.check_space(self.folder, self.num_elements)
        dist.barrier()
        state, problems = checkpoint.load_newest(
            self.folder, self.model, self.optimizer, self.world
        )
        self.notes += [
            f"{problem}; it is put aside, and an older one is taken" for problem in problems
        ]
        start = self.settings.get("start")
        if state is not None:
            return self._go_on_from(state, self.settings["fingerprint"])
        if start and self.recipe["branch_from"]:
            return self._branch_off(Path(start["path"]))
        if start:
            load_start(self.model, Path(start["path"]))
        else:
            init_weights(self.model, self.recipe["seed"])
        return 0

    def _go_on_from(self, state: dict[str, Any], fingerprint: str) -> int:
        """Take over what a checkpoint holds besides the weights and the optimizer."""
        if state["fingerprint"] != fingerprint:
            raise ValueError(
                f"the checkpoint of step {state['step']} belongs to other settings than "
                f"{self.folder / 'settings.json'}; give the new settings a run name of their own"
            )
        self._load_detectors(state)
        self.wall_seconds_before = state["wall_seconds"]
        for key, now in (("world_size", self.world.size), ("micro_batch", self.micro_batch)):
            if state[key] != now:
                self.notes.append(
                    f"the checkpoint was made with {key} {state[key]}, now it is {now}: the same "
                    "batches, and losses equal but for rounding"
                )
        return state["step"]

    def _branch_step(self) -> int:
        """First step that this run trains itself."""
        found = trunk_and_step(self.recipe)
        return found[1] if found else 0

    def _branch_off(self, marker: Path) -> int:
        """Begin as the trunk was at the step of a marker, optimizer and all."""
        folder, trunk = checkpoint.read_marker(marker)
        if trunk["data_fingerprint"] != self.settings["data_fingerprint"]:
            raise ValueError(
                f"{folder}: this run's trunk was trained on other tokens; bring those back, or "
                "train the trunk again under another name"
            )
        state = checkpoint.load_checkpoint(folder, self.model, self.optimizer)
        step = self._go_on_from(state, trunk["fingerprint"])
        self.wall_seconds_before = 0.0  # the trunk counts its own time
        return step

    def _load_detectors(self, state: dict[str, Any]) -> None:
        self.loss_detector.load_state_dict(state["loss_detector"])
        self.norm_detector.load_state_dict(state["norm_detector"])
        if "divergence" in state:  # not in a checkpoint of llm.c, nor in one made before it came
            self.divergence.load_state_dict(state["divergence"])
        if self.loss_scale and state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])

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
        name = device_name(device) if device.type == "cuda" else None
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"commit": source_commit(), "host": platform.node()}
        versions |= {"started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        resolved = {"processes": self.world.size, "compiled": self.compiled}
        resolved["device"] = name or f"{device.type}, {torch.get_num_threads()} threads a process"
        resolved["attention"] = self.model.formulas.attention_name
        run = {"run": self.settings["run"]}
        self.journal.table(run | self.recipe | self.machine | resolved | versions)
        self.buffers = memory.buffers(self.model, self.optimizer, self.recipe["precision"])
        self.journal.sizes(
            num_elements=self.num_elements,
            buffers=self.buffers,
            processes=self.world.size,
            micro_batch=self.micro_batch,
            sequence_length=self.recipe["sequence_length"],
            grad_accum_steps=self.grad_accum_steps,
        )
        for note in self.notes:
            self.journal.say(note)
        length, positions = self.recipe["sequence_length"], self.model.config.positions
        if length < positions:
            self.journal.say(f"warning: positions {length} to {positions - 1} are not trained")
        self.journal.start(
            branch_from=self.recipe["branch_from"] or None,
            val_tokens=min(self.manifest.val_tokens, self.manifest.num_val_tokens),
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
            Diverged: loss or gradient left its course; this step has not touched the weights.
        """
        start = time.perf_counter()
        scale = self.loss_scale.value if self.loss_scale else 1.0
        loss_sum = torch.zeros((), device=self.world.device)
        batch_hash = torch.zeros((), dtype=torch.int64, device=self.world.device)
        for micro_step in range(self.grad_accum_steps):
            self._go_on()  # or drop what there is of this step
            set_last_micro_step(self.model, micro_step == self.grad_accum_steps - 1)
            with record_function("data"):  # the ranges that profiles are cut by
                batch = self.rollbacks.batch_of(step)
                tokens, targets = self.loader.micro_batch_at(batch, micro_step)
                batch_hash += self.loader.hash_of(micro_step, tokens, targets)
            with record_function("forward"):
                loss = self.model(tokens, targets, "mean", scale) / self.grad_accum_steps
            with record_function("backward"):
                loss.backward()
            loss_sum += loss.detach()
            self._pace()
        with record_function("clip"):
            norm = clip_gradients(self.model, self.world.mesh.get_group("shard"), scale)
        dist.all_reduce(loss_sum)
        dist.all_reduce(batch_hash)
        loss, norm = torch.stack(
            [loss_sum / self.world.size, norm]
        ).tolist()  # waits for the device
        overflowed = self._overflowed(loss, norm)
        if not overflowed:
            self.divergence.check_finite(step, loss, norm)
        loss_z, grad_z = self.loss_detector.update(loss), self.norm_detector.update(norm)
        self.divergence.check_course(step, loss_z)
        learning_rate = rate_of_recipe(self.recipe, step)
        skipped = overflowed
        skipped = skipped or self._is_outlier("loss", loss_z) or self._is_outlier("grad", grad_z)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            with record_function("optimizer"):
                self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.steps_done = step + 1
        self.heartbeat.beat(STEP)
        reserved = memory.peak(self.world.device)["reserved"]
        batch = f"{batch_hash.item() % (1 << 64):016x}"
        return StepReport(
            step, loss, norm, loss_z, grad_z, learning_rate, seconds, skipped, reserved, batch
        )

    def _overflowed(self, loss: float, norm: float) -> bool:
        """Whether fp16 could not hold this step's gradients; the loss scale follows."""
        if self.loss_scale is None or not math.isfinite(loss):
            return False
        before, overflowed = self.loss_scale.value, not math.isfinite(norm)
        self.loss_scale.update(overflowed)
        if overflowed:
            self.journal.say(f"skipping update due to overflow with loss scale {before:g}")
        return overflowed

    def _is_outlier(self, name: str, z: float) -> bool:
        """True when the update is to be skipped; NaN compares false: a short window never skips."""
        limit = self.recipe[f"skip_{name}_z"]
        if limit and z > limit:
            self.journal.say(f"skipping update due to {name} z-score of {z:f}")
            return True
        return False

    # ---- evaluation and saving ----------------------------------------------------------

    def _shared_work(self) -> dict[str, Any]:
        """How all ranks score together, as `scoring` takes it."""
        shared = {"micro_batch": self.micro_batch, "device": self.world.device}
        return shared | {"rank": self.world.rank, "world_size": self.world.size}

    def warm_up(self) -> None:
        """Compile for evaluations, and take their memory, before the first step."""
        if self.compiled:
            warm_up(self.model, self.questions, **self._shared_work())
            self.draw_text()

    def evaluate(self, step: int) -> float:
        """Validation loss and, unless weights are still random, HellaSwag; ranks share the work."""
        shared = self._shared_work()
        progress = functools.partial(self._go_on, "validation")
        scores = validation_loss(self.model, self.manifest, **shared, progress=progress)
        val_loss = scores["val_loss_nats"]
        self.journal.validation(step, scores)
        if self.questions is not None and (step > 0 or self.settings.get("start")):
            progress = functools.partial(self._go_on, "HellaSwag")
            scores = choice_scores(self.model, self.questions, **shared, progress=progress)
            self.journal.hellaswag(step, scores)
        return val_loss

    @torch.no_grad()
    def draw_text(self) -> str:
        """`sample_tokens` tokens that begin a new document; the same seed draws the same text."""
        generator = torch.Generator().manual_seed(self.recipe["seed"])
        tokens = torch.tensor([[DOCUMENT_MARK]], device=self.world.device)
        # growing lengths would compile again and again
        with torch.compiler.set_stance("force_eager"):
            for number in range(self.machine["sample_tokens"]):
                self._go_on("sample", number, self.machine["sample_tokens"])
                logits = self.model(tokens[:, -self.recipe["sequence_length"] :])[0, -1]  # (V,)
                probabilities = torch.softmax(logits.double().cpu(), dim=0)
                following = torch.multinomial(probabilities, 1, generator=generator)
                tokens = torch.cat([tokens, following.to(tokens.device)[None]], dim=1)
        reshard(self.model)
        return gpt2_encoding().decode(tokens[0, 1:].tolist())

    def measure_ranges(self, step: int) -> None:
        """Record how large weights and activations are, layer by layer."""
        start = time.monotonic()
        weights = ranges.weight_ranges(self.model, self.world.mesh.get_group("shard"))
        tokens, _ = self.loader.micro_batch_at(self.rollbacks.batch_of(step), 0)
        activations = ranges.activation_ranges(self.model, tokens[:1])
        found = {"weights": weights, "activations": activations}
        self.journal.record("ranges", step, **found, seconds=time.monotonic() - start)
        for sentence in ranges.alarms(weights):
            self.journal.say(f"warning: {sentence}")

    def wall_seconds(self) -> float:
        """Time of this run so far, over all resumes."""
        return self.wall_seconds_before + time.monotonic() - self.started

    def save(self, step: int) -> None:
        """Copy the state after `step` updates; it is written while training goes on."""
        start = time.monotonic()
        self.wait_for_save()
        self.journal.say(f"Writing checkpoint at step {step}")
        state = {
            "run": self.settings["run"],
            "fingerprint": self.settings["fingerprint"],
            "recipe": self.recipe,
            "loss_detector": self.loss_detector.state_dict(),
            "norm_detector": self.norm_detector.state_dict(),
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
            "divergence": self.divergence.state_dict(),
            "wall_seconds": self.wall_seconds(),
            "world_size": self.world.size,
            "micro_batch": self.micro_batch,
        }
        self.saver.start(step, state)
        self.kept_step = step
        self.seconds_waited = time.monotonic() - start

    def wait_for_save(self) -> None:
        """Return when no checkpoint is being written.

        Raises:
            OSError: the last one could not be written.
        """
        self.saver.wait(self.heartbeat.beat)
        self._note_saved()

    def _note_saved(self) -> None:
        finished = self.saver.finished()
        if finished is not None:
            step, seconds = finished
            waited = self.seconds_waited
            self.journal.record("checkpoint", step, seconds=seconds, training_waited_seconds=waited)
            self.journal.say(
                f"checkpoint of step {step} is complete: {seconds:.1f} s, "
                f"of which training waited {waited:.1f} s"
            )

    def _rotate(self) -> None:
        """Remove checkpoints that need not be kept."""
        keep, keep_every = self.machine["keep_checkpoints"], self.machine["keep_every_steps"]
        checkpoint.rotate(self.folder, keep, keep_every, kept_steps(self.machine))

    # ---- the loop -----------------------------------------------------------------------

    def _due(self, step: int, every: int) -> bool:
        return step == self.max_steps or (every > 0 and step % every == 0)

    def _saves_at(self, step: int) -> bool:
        due = self._due(step, self.machine["checkpoint_every_steps"])
        return due or step in kept_steps(self.machine)

    def _pace(self) -> None:
        """Queue at most two micro-steps on the GPU, so that a stop never waits for a whole step."""
        if self.world.device.type != "cuda":
            return
        self._queued.append(torch.cuda.Event())
        self._queued[-1].record()
        if len(self._queued) > 2:
            self._queued.popleft().synchronize()

    def _go_on(self, what: str = "", done: int = 0, total: int = 0) -> None:
        """Between two pieces of work: say that all is well, and leave if a signal came."""
        self.heartbeat.beat()
        if self.stop_flag.is_up():
            raise Interrupted
        if what:
            self.journal.progress(what, done, total)

    def run(self) -> float:
        """Train to the last step.

        Returns:
            The final validation loss, nats.

        Raises:
            SystemExit: a signal came; the last whole step is saved.
        """
        try:
            # before the first step is done there is nothing to save, but much to compile
            self.stop_flag.watch(lambda: self.steps_done != self.first_step)
            return self._run()
        except Interrupted:
            self.stop()
            raise SystemExit(STOPPED) from None

    def _run(self) -> float:
        self.announce()
        self.saver.prepare()
        self.warm_up()
        val_loss, step = math.nan, self.first_step
        while True:
            every = self.machine["ranges_every_steps"]
            if every and step % every == 0:
                self.measure_ranges(step)
            if self._due(step, every := self.machine["val_every_steps"]):
                with self.journal.pausing("evaluation", every):
                    val_loss = self.evaluate(step)
            if step > 0 and self._due(step, every := self.machine["sample_every_steps"]):
                with self.journal.pausing("sample", every):
                    self.journal.samples(step, self.draw_text())
            if step == self.max_steps:
                if step == 0:  # nothing to train: the weights of `init_from` are the result
                    self.save(step)
                break
            try:
                self.journal.step(self.train_step(step))
            except Diverged as divergence:
                step = self._roll_back(step, divergence)
                continue
            step += 1
            self._note_saved()
            if step == self.first_step + 1:
                self.journal.memory(step - 1, memory.report(self.buffers, self.world.device))
            if self._saves_at(step):
                with self.journal.pausing("save", self.machine["checkpoint_every_steps"]):
                    self.save(step)
        self.wait_for_save()
        return val_loss

    def _roll_back(self, step: int, divergence: Diverged) -> int:
        """Pin the last sound checkpoints, go back to the newest, and skip what led astray.

        Returns:
            The step to go on with.

        Raises:
            ValueError: it is not asked for, not possible, or was done too often.
        """
        reshard(self.model)
        self.optimizer.zero_grad()
        self.wait_for_save()
        dist.barrier()  # the main process has given the newest one its final name
        saved = checkpoint.saved_steps(self.folder)
        sound = [s for s in saved if s <= divergence.since]
        if self.world.is_main:
            checkpoint.pin(self.folder, sound[-NUM_PINNED:])
        pinned = f"checkpoints kept for good: {sound[-NUM_PINNED:]}"
        self.journal.record("divergence", step, reason=str(divergence), pinned=sound[-NUM_PINNED:])
        more = self.recipe["rollback_skip_steps"]
        if not (more and sound and len(self.rollbacks.done) < MAX_ROLLBACKS):
            self.journal.close()
            raise ValueError(f"{divergence}; {pinned}") from None
        self.kept_step = self.steps_done = back_to = sound[-1]
        if self.world.is_main:
            for later in saved[len(sound) :]:
                checkpoint.forget(self.folder, later)
        folder = checkpoint.checkpoint_folder(self.folder, back_to)
        self._load_detectors(checkpoint.load_checkpoint(folder, self.model, self.optimizer))
        rollback = self.rollbacks.plan(step, back_to, more)
        self.rollbacks.note(rollback, write=self.world.is_main)
        self.journal.record("rollback", back_to, **asdict(rollback))
        skipped = rollback.batches_skipped
        self.journal.say(f"{divergence}; {pinned}")
        self.journal.say(f"going back to step {back_to} and on without the next {skipped} batches")
        return back_to

    def stop(self) -> None:
        """Save the last whole step, if there is one that is not saved yet."""
        step = self.steps_done
        if step != self.kept_step:
            reshard(self.model)
            self.save(step)
        self.wait_for_save()
        self.journal.record("stop", step, signal=self.stop_flag.signal)
        self.journal.say(f"stopped at step {step}; the same command goes on from here")
        self.journal.close()

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
            "files": checkpoint.describe_files(folder, self.folder, self.heartbeat.beat),
            "val_loss_nats": val_loss,
            "wall_seconds": self.wall_seconds(),
            "tokens_seen": self.max_steps * self.tokens_per_step,
            "unique_tokens": self.loader.tokens_per_epoch,
            "trained_tokens": (self.max_steps - self._branch_step()) * self.tokens_per_step,
        }
        write_json(done, content)
