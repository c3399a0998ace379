"""A compiled run on the CPU: nothing compiles again, and its files are those of a plain run."""

import itertools

import pytest
import torch
from stand_ins import losses, make_dataset, make_questions, make_settings
from transformers import GPT2LMHeadModel

from miniseries.data.shards import load_manifest
from miniseries.evaluation.export import export_model
from miniseries.evaluation.scoring import choice_scores
from miniseries.metrics import read_metrics
from miniseries.training import trainer
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights
from miniseries.training.distributed import start_world
from miniseries.training.launcher import freeze
from miniseries.training.optimizer import make_optimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(manifest):
    """A function that makes trainers, one after the other."""

    def end():
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch._dynamo.reset()

    def make(folder, questions=None, **changes):
        end()
        settings = freeze(make_settings(folder / "in.json", **changes), manifest, folder)
        data = load_manifest(manifest)
        return trainer.Trainer(settings, data, questions, folder, start_world())

    yield make
    end()


def test_nothing_compiles_after_the_first_steps_and_scores_are_those_of_a_plain_model(
    start, tmp_path, monkeypatch
):
    questions = make_questions(tmp_path / "questions.jsonl", 60)
    often = {"val_every_steps": 3, "sample_every_steps": 5, "hellaswag": True, "max_steps": 10}
    often |= {"sequence_length": 128, "micro_batch": 2, "checkpoint_every_steps": 0}
    run = start(tmp_path / "run", questions, compile=True, **often)
    train_step = run.train_step

    def watched(step, **more):
        torch._dynamo.config.error_on_recompile = True  # from the first step on, even
        return train_step(step, **more)

    monkeypatch.setattr(run, "train_step", watched)
    train_step(0)  # forward and backward for training; the warm-up of `run` compiles the rest
    try:
        run.run()
    finally:
        torch._dynamo.config.error_on_recompile = False
    compiled = choice_scores(
        run.model, run.evaluator.questions, **run.evaluator.shared, with_items=True
    )
    with torch.compiler.set_stance("force_eager"):
        plain = choice_scores(
            run.model, run.evaluator.questions, **run.evaluator.shared, with_items=True
        )
    assert compiled["num_correct"] == plain["num_correct"]
    for ours, expected in zip(compiled["items"], plain["items"], strict=True):
        assert ours["nats"] == pytest.approx(expected["nats"], rel=1e-4)
    counts = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(counts["val"]) == 5 and len(counts["hellaswag"]) == 4


def test_compiled_updates_of_bf16_weights_are_the_plain_ones_but_for_the_last_bit():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).bfloat16()
        optimizer = make_optimizer(model, 0.1, seed=3)
        if compiled:
            optimizer.compile()
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape).bfloat16()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten().float() for p in model.parameters()]))
    plain, ours = found
    assert ((plain - ours).abs() <= 2.0**-7 * plain.abs() + 1e-12).all()
    assert (plain == ours).float().mean() > 0.98  # the same bits decide


def test_compiled_and_plain_runs_resume_and_export_each_other(start, tmp_path):
    found = {}
    for first, second in itertools.product([True, False], repeat=2):
        folder = tmp_path / f"{first}-{second}"
        run = start(folder, compile=first)
        for step in range(3):
            run.journal.step(run.train_step(step))
        run.save(3)
        run.wait_for_save()
        run = start(folder, compile=second)
        assert run.first_step == 3
        for step in range(3, 6):
            run.journal.step(run.train_step(step))
        run.save(6)
        run.wait_for_save()
        found[first, second] = losses(folder)
        weights = load_model_weights(checkpoint_folder(folder, 6))
        assert weights.keys() == dict(run.model.named_parameters()).keys()
        assert not any("_orig_mod" in name for name in weights)
        marker = folder / "saved" / "6.json"
        export_model(marker, folder / "export")
        model, report = GPT2LMHeadModel.from_pretrained(folder / "export", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        torch.testing.assert_close(model.transformer.ln_f.weight, weights["ln_f.weight"])
    for values in found.values():
        for ours, expected in zip(values, found[False, False], strict=True):
            assert ours[1] == pytest.approx(expected[1], rel=1e-4)
