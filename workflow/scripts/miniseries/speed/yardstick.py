"""The yardstick that anyone has: Hugging Face's GPT-2 as PyTorch's users train it.

The whole model under torch.compile, bf16 by autocast over fp32 weights, fused AdamW; shape,
micro-batches, tokens, clipping and learning rate are those of the run beside it.
"""

import time
from typing import NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from miniseries.evaluation.huggingface import huggingface_config
from miniseries.training import memory
from miniseries.training.optimizer import BETAS, EPSILON, MAX_GRAD_NORM
from miniseries.training.trainer import Trainer


class TimedStep(NamedTuple):
    """What the bench wants to know of a step: mean loss in nats, wall time in seconds."""

    loss: float
    seconds: float


class Yardstick(Trainer):
    """A trainer of one process whose model and step are Hugging Face's and PyTorch's own."""

    def _build_model(self) -> None:
        recipe, device = self.recipe, self.world.device
        content = huggingface_config(self._model_config(), "float32") | {"use_cache": False}
        torch.manual_seed(recipe["seed"])
        torch.set_float32_matmul_precision("high")
        with device:
            self.model = GPT2LMHeadModel(GPT2Config(**content)).train()
        self.num_elements = self.model.num_parameters()
        compiled = self.machine["compile"]
        self.compiled = device.type == "cuda" if compiled == "auto" else compiled
        self.loss_of = torch.compile(self._loss_of) if self.compiled else self._loss_of
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(
            parameters, lr=recipe["learning_rate"], betas=BETAS, eps=EPSILON, fused=True
        )

    def _draw_weights(self) -> tuple[()]:
        return ()  # its model draws for itself

    def _resume(self, drawn: tuple[()]) -> int:
        return 0

    def _loss_of(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, labels=tokens).loss  # shifts the labels itself

    def train_step(self, step: int, goes_on: bool = False) -> TimedStep:
        """One step on global batch `step`; as there are no shards, `goes_on` is all one."""
        if step:
            memory.collect_garbage_again()
        start = time.perf_counter()
        device = self.world.device
        loss_sum = torch.zeros((), device=device)
        in_bf16 = self.recipe["precision"] in ("bf16", "fp8")
        for micro_step in range(self.grad_accum_steps):
            tokens, _ = self.loader.micro_batch_at(step, micro_step)
            with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
                loss = self.loss_of(tokens) / self.grad_accum_steps
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss_sum.item()  # waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize()
        return TimedStep(mean, time.perf_counter() - start)
