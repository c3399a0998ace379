"""The training loop: the same for one CPU process and for many nodes."""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import Manifest
from miniseries.evaluation.choices import encode_questions
from miniseries.evaluation.scoring import open_validation
from miniseries.model.gpt import GPTConfig, draw_weights
from miniseries.settings import LATER_KEYS, LATER_MACHINE_KEYS, kept_steps
from miniseries.training import checkpoint, determinism, memory, microbatch
from miniseries.training.assembly import make_model
from miniseries.training.completion import mark_done
from miniseries.training.distributed import (
    Interrupted,
    Pace,
    StopFlag,
    World,
    device_name,
    peak_tflops,
    reshard,
    set_last_micro_step,
    shard_model,
    unshard,
)
from miniseries.training.evaluator import Evaluator
from miniseries.training.guards import Diverged, Guards, Rollbacks
from miniseries.training.introduction import Introduction
from miniseries.training.journal import Journal, StepReport
from miniseries.training.loader import Loader
from miniseries.training.optimizer import RoundingAdamW, clip_gradients, make_optimizer
from miniseries.training.ranges import alarms, all_ranges
from miniseries.training.restorer import Restorer, draw_ahead
from miniseries.training.saver import Saver
from miniseries.training.schedule import rate_of_recipe
from miniseries.training.supervisor import STEP, STOPPED, Heartbeat


class Trainer:
    """One process of one run.

    Args:
        settings: the run's frozen settings: `recipe` (what is trained) and `machine` (how).
        manifest: tokens with sizes and hashes.
        questions: HellaSwag-shaped JSON lines; None when there are none.
        folder: the run's folder; the newest checkpoint in it is resumed from.

    Raises:
        ValueError: the processes cannot share a batch equally, the tokens are too few, or a
            checkpoint is damaged.
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
        self.settings, self.machine = settings, LATER_MACHINE_KEYS | settings["machine"]
        self.recipe = LATER_KEYS | settings["recipe"]
        self.manifest, self.folder, self.world = manifest, folder, world
        if self.machine["deterministic"]:
            determinism.enforce()
        self.stop_flag, self.heartbeat = StopFlag(world), Heartbeat()
        self.pace = Pace(world.device)
        self.max_steps = self.recipe["max_steps"]
        self.tokens_per_step = self.recipe["total_batch_tokens"]
        self.has_stepped = False  # in this process
        self.notes: list[str] = []  # what happened before there was anybody to tell
        self._split_batch()
        # what these refuse the recipe can mend, which may change until something is written
        self.loader = self._make_loader()
        open_validation(manifest, self.recipe["sequence_length"])
        drawn = self._draw_weights()
        self._build_model()
        self.guards, self.rollbacks = Guards(self.recipe), Rollbacks(folder)
        self.wall_seconds_before = 0.0
        self.first_step = self._resume(drawn)
        self.steps_done = self.kept_step = self.first_step
        self.saver = Saver(folder, self.model, self.optimizer, world, self._rotate)
        self.started = time.monotonic()
        self.journal = self._make_journal()
        self.evaluator = self._make_evaluator(questions)

    # ---- getting ready ------------------------------------------------------------------

    def _split_batch(self) -> None:
        name = device_name(self.world.device)
        self.micro_batch, reason = microbatch.choose(
            self.folder, self.settings, self.world.size, name
        )
        self.grad_accum_steps = microbatch.micro_steps(
            self.folder, self.recipe, self.world.size, self.micro_batch
        )
        if reason is not None:
            self.notes.append(f"micro_batch {self.micro_batch}: {reason}")

    def _make_loader(self) -> Loader:
        return Loader(
            self.manifest.train_shards,
            self.recipe,
            micro_batch=self.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.world.device,
        )

    def _model_config(self) -> GPTConfig:
        return GPTConfig.of_recipe(self.recipe)

    def _draw_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Fresh weights; a run that begins anew needs them and draws them from now on."""
        config, seed = self._model_config(), self.recipe["seed"]
        if checkpoint.saved_steps(self.folder) or self.settings.get("start"):
            return draw_weights(config, seed)
        return draw_ahead(config, seed, self.world.size // self.world.num_nodes)

    def _build_model(self) -> None:
        recipe, device = self.recipe, self.world.device
        # "high" lets fp32 products run in TF32 where the device has it
        precise = "highest" if recipe["precision"] == "fp32" else "high"
        torch.set_float32_matmul_precision(precise)
        self.model, self.compiled = make_model(self._model_config(), recipe, self.machine, device)
        self.num_elements = sum(p.numel() for p in self.model.parameters())  # padding included
        shard_model(self.model, self.world, recipe["precision"])
        self.model.to_empty(device=device)
        self.optimizer = make_optimizer(self.model, recipe["weight_decay"], recipe["seed"])
        if self.compiled and isinstance(self.optimizer, RoundingAdamW):
            self.optimizer.compile()

    def _resume(self, drawn: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Take the weights to go on with, or fresh ones; returns the number of steps done."""
        self.restorer = Restorer(
            self.folder,
            self.settings,
            self.recipe,
            model=self.model,
            optimizer=self.optimizer,
            guards=self.guards,
            rollbacks=self.rollbacks,
            world=self.world,
        )
        beginning = self.restorer.begin(self.micro_batch, drawn)
        self.notes += beginning.notes
        self.wall_seconds_before = beginning.wall_seconds
        return beginning.step

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

    def _make_evaluator(self, questions: Path | None) -> Evaluator:
        wanted = self.machine["hellaswag"] and questions is not None
        asked = encode_questions(questions, gpt2_encoding()) if wanted else []
        if wanted and not asked:
            self.journal.say(f"{questions} is empty: no choice of endings is scored")
        return Evaluator(
            self.model,
            self.recipe,
            self.manifest,
            asked or None,
            world=self.world,
            micro_batch=self.micro_batch,
            sample_tokens=self.machine["sample_tokens"],
            journal=self.journal,
            go_on=self._go_on,
        )

    def _announce(self) -> None:
        self.buffers = memory.buffers(self.model, self.optimizer, self.recipe["precision"])
        Introduction(
            self.settings,
            self.recipe,
            self.manifest,
            self.world,
            self.model,
            compiled=self.compiled,
            buffers=self.buffers,
            micro_batch=self.micro_batch,
            grad_accum_steps=self.grad_accum_steps,
            batches_skipped=self.rollbacks.batches_skipped,
            notes=self.notes,
        ).announce(self.journal)

    # ---- one step -----------------------------------------------------------------------

    def train_step(self, step: int, goes_on: bool = False) -> StepReport:
        """Forward, backward and update on global batch `step`.

        Args:
            goes_on: the next step follows at once, and nobody looks at or changes the weights in
                between: they are gathered for it while the device still works on this one.

        Raises:
            Diverged: loss or gradient left its course; this step has not touched the weights.
        """
        if self.steps_done != self.first_step:
            memory.collect_garbage_again()
        start, batch = time.perf_counter(), self.rollbacks.batch_of(step)
        loss_sum, batch_hash = self._accumulate(batch)
        with record_function("clip"):
            shards = self.world.mesh.get_group("shard")
            norm = clip_gradients(self.model, shards, self.guards.scale)
        dist.all_reduce(loss_sum)
        dist.all_reduce(batch_hash)
        figures = torch.stack([loss_sum / self.world.size, norm])
        if self.guards.need_the_host or isinstance(self.optimizer, RoundingAdamW):
            loss, norm = figures.tolist()  # waits for the device
            verdict = self.guards.judge(step, loss, norm)
            self._update(step, verdict.reason_to_skip is not None, goes_on)
        else:  # the device has work while this process gets the next step ready
            self._update(step, self.guards.spoilt(figures), goes_on)
            loss, norm = figures.tolist()
            verdict = self.guards.judge(step, loss, norm)
        if verdict.reason_to_skip:
            self.journal.say(verdict.reason_to_skip)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.steps_done, self.has_stepped = step + 1, True
        self.heartbeat.beat(STEP)
        return StepReport(
            step=step,
            batch=batch,
            loss=loss,
            grad_norm=norm,
            loss_z=verdict.loss_z,
            grad_z=verdict.grad_z,
            learning_rate=rate_of_recipe(self.recipe, step),
            seconds=seconds,
            skipped=verdict.reason_to_skip is not None,
            reserved_mib=memory.peak(self.world.device)["reserved"],
            batch_hash=f"{batch_hash.item() % (1 << 64):016x}",
        )

    def _accumulate(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up the gradients of this rank's micro-steps; returns their loss and token hash."""
        loss_sum = torch.zeros((), device=self.world.device)
        batch_hash = torch.zeros((), dtype=torch.int64, device=self.world.device)
        for micro_step in range(self.grad_accum_steps):
            self._go_on()  # or drop what there is of this step
            if micro_step in (0, last := self.grad_accum_steps - 1):  # it goes through all modules
                set_last_micro_step(self.model, micro_step == last)
            with record_function("data"):  # the ranges that profiles are cut by
                tokens, targets = self.loader.micro_batch_at(batch, micro_step)
                batch_hash += self.loader.hash_of(micro_step, tokens, targets)
            with record_function("forward"):  # the share of a step is not rounded to bf16 so
                scale = self.guards.scale / self.grad_accum_steps
                loss = self.model(tokens, targets, "mean", scale)
            with record_function("backward"):
                loss.backward()
            loss_sum += loss.detach() / self.grad_accum_steps
            self.pace.keep()
        return loss_sum, batch_hash

    def _update(self, step: int, is_skipped: bool | torch.Tensor, goes_on: bool) -> None:
        """Update the weights unless the step is skipped, of which a tensor tells the device only.

        Gradients are dropped; the weights are gathered if the next step follows at once.
        """
        with record_function("optimizer"):
            if is_skipped is not True:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate_of_recipe(self.recipe, step)
                on_device = isinstance(is_skipped, torch.Tensor)
                # a name of PyTorch's fused optimizers: where it is 1 all stays as it was
                self.optimizer.found_inf = is_skipped.float() if on_device else None
                self.optimizer.step()
            self.optimizer.zero_grad()
            if goes_on:
                unshard(self.model)

    # ---- saving -------------------------------------------------------------------------

    def wall_seconds(self) -> float:
        """Time of this run so far, over all resumes."""
        return self.wall_seconds_before + time.monotonic() - self.started

    def save(self, step: int) -> None:
        """Copy the state after `step` updates; it is written while training goes on."""
        start = time.monotonic()
        self.wait_for_save()
        self.journal.say(f"Writing checkpoint at step {step}")
        self.journal.sync()
        state = {
            "run": self.settings["run"],
            "fingerprint": self.settings["fingerprint"],
            "data_fingerprint": self.settings.get("data_fingerprint"),
            "recipe": self.recipe,
            **self.guards.state_dict(),
            "wall_seconds": self.wall_seconds(),
            **self.restorer.roundings(self.micro_batch),
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
        if (finished := self.saver.finished()) is not None:
            self.journal.saved(*finished, waited=self.seconds_waited)

    def _rotate(self) -> None:
        """Remove checkpoints that need not be kept."""
        keep, keep_every = self.machine["keep_checkpoints"], self.machine["keep_every_steps"]
        since = self.guards.divergence.since  # not None: the loss is high since that step
        saved = checkpoint.saved_steps(self.folder) if since is not None else []
        sound = [step for step in saved if step <= since]  # the last may have to be gone back to
        pinned = kept_steps(self.machine) | set(sound[-1:])
        checkpoint.rotate(self.folder, keep, keep_every, pinned)

    # ---- the loop -----------------------------------------------------------------------

    def _due(self, step: int, every: int) -> bool:
        return step == self.max_steps or (every > 0 and step % every == 0)

    def _saves_at(self, step: int) -> bool:
        due = self._due(step, self.machine["checkpoint_every_steps"])
        return due or step in kept_steps(self.machine)

    def _goes_on_after(self, step: int) -> bool:
        """Whether the step after this one follows at once, without an evaluation or a save."""
        every = ("ranges_every_steps", "val_every_steps", "sample_every_steps")
        pauses = [self._due(step + 1, self.machine[key]) for key in every]
        return not (self._saves_at(step + 1) or any(pauses))

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
            self.stop_flag.watch(lambda: self.has_stepped)
            return self._run()
        except Interrupted:
            self.stop()
            raise SystemExit(STOPPED) from None

    def _run(self) -> float:
        self._announce()
        self.saver.prepare()
        if self.compiled:
            self.evaluator.warm_up()
        val_loss, step = math.nan, self.first_step
        while True:
            if (every := self.machine["ranges_every_steps"]) and step % every == 0:
                self._measure_ranges(step)
            if self._due(step, every := self.machine["val_every_steps"]):
                is_random = step == 0 and not self.settings.get("start")  # HellaSwag is by chance
                with self.journal.pausing("evaluation", every):
                    val_loss = self.evaluator.evaluate(step, with_questions=not is_random)
            wants_samples = step > 0 and self.machine["sample_tokens"] > 0
            if wants_samples and self._due(step, every := self.machine["sample_every_steps"]):
                with self.journal.pausing("sample", every):
                    self.journal.samples(step, self.evaluator.draw_text())
            if step == self.max_steps:
                if step == 0:  # nothing to train: the weights of `init_from` are the result
                    self.save(step)
                break
            try:
                self.journal.step(self.train_step(step, goes_on=self._goes_on_after(step)))
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

    def _measure_ranges(self, step: int) -> None:
        """Record how large weights and activations are, layer by layer."""
        tokens, _ = self.loader.micro_batch_at(self.rollbacks.batch_of(step), 0)
        found = all_ranges(self.model, tokens[:1], self.world.mesh.get_group("shard"))
        self.journal.record("ranges", step, **found)
        for sentence in alarms(found["weights"]):
            self.journal.say(f"warning: {sentence}")

    def _roll_back(self, step: int, divergence: Diverged) -> int:
        """Return to a sound checkpoint, if that may help; gives the step to go on with."""
        reshard(self.model)
        self.optimizer.zero_grad()
        self.wait_for_save()
        dist.barrier()  # the main process has given the newest one its final name
        try:
            back_to = self.restorer.go_back(step, divergence, self.journal)
        except ValueError:
            self.journal.close()
            raise
        self.kept_step = self.steps_done = back_to
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
        self.journal.finish(self.wall_seconds())
        mark_done(
            done,
            self.folder,
            self.settings,
            val_loss=val_loss,
            wall_seconds=self.wall_seconds(),
            unique_tokens=self.loader.tokens_per_epoch,
            beat=self.heartbeat.beat,
        )
