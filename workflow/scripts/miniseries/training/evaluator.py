"""What the training loop stops for: validation loss, HellaSwag, a text of the model's own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import DOCUMENT_MARK, Manifest
from miniseries.evaluation.choices import Question
from miniseries.evaluation.scoring import choice_scores, validation_loss, warm_up
from miniseries.model.gpt import GPT
from miniseries.training.distributed import World, reshard
from miniseries.training.journal import Journal


class Evaluator:
    """Scores the model as it is; every rank calls every method.

    Args:
        questions: HellaSwag's; None leaves them out.
        micro_batch: sequences that a process takes at once.
        go_on: called between two pieces of work with what is done, how much, and of how much.
    """

    def __init__(
        self,
        model: GPT,
        recipe: dict[str, Any],
        manifest: Manifest,
        questions: Sequence[Question] | None,
        *,
        world: World,
        micro_batch: int,
        sample_tokens: int,
        journal: Journal,
        go_on: Callable[[str, int, int], None],
    ) -> None:
        self.model, self.manifest, self.questions = model, manifest, questions
        self.seed, self.length = recipe["seed"], recipe["sequence_length"]
        self.device, self.sample_tokens = world.device, sample_tokens
        self.journal, self.go_on = journal, go_on
        # how all ranks score together, as `scoring` takes it
        self.shared = {"micro_batch": micro_batch, "device": world.device}
        self.shared |= {"rank": world.rank, "world_size": world.size}

    def warm_up(self) -> None:
        """Compile for evaluations, and take their memory, before the first step."""
        warm_up(self.model, self.questions, **self.shared)
        self.draw_text()

    def evaluate(self, step: int, with_questions: bool) -> float:
        """Validation loss in nats and, if asked for, HellaSwag, of the weights after `step`."""
        progress = functools.partial(self.go_on, "validation")
        scores = validation_loss(self.model, self.manifest, **self.shared, progress=progress)
        val_loss = scores["val_loss_nats"]
        self.journal.validation(step, scores)
        if with_questions and self.questions is not None:
            progress = functools.partial(self.go_on, "endings of questions")
            scores = choice_scores(self.model, self.questions, **self.shared, progress=progress)
            self.journal.hellaswag(step, scores)
        return val_loss

    @torch.no_grad()
    def draw_text(self) -> str:
        """`sample_tokens` tokens that begin a new document; the same seed draws the same text."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.tensor([[DOCUMENT_MARK]], device=self.device)
        # growing lengths would compile again and again
        with torch.compiler.set_stance("force_eager"):
            for number in range(self.sample_tokens):
                self.go_on("sample", number, self.sample_tokens)
                logits = self.model(tokens[:, -self.length :])[0, -1]  # (V,)
                probabilities = torch.softmax(logits.double().cpu(), dim=0)
                following = torch.multinomial(probabilities, 1, generator=generator)
                tokens = torch.cat([tokens, following.to(tokens.device)[None]], dim=1)
        reshard(self.model)
        return gpt2_encoding().decode(tokens[0, 1:].tolist())
