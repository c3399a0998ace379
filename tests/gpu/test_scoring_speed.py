"""Seconds that HellaSwag takes inside training: made-up items of HellaSwag's number and lengths."""

import time

import pytest
import torch
from torch._dynamo.utils import counters

from miniseries.evaluation.choices import HELLASWAG_ITEMS
from miniseries.evaluation.scoring import choice_scores
from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.speed.bench import made_up_questions
from miniseries.training.distributed import shard_model, start_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    ("shape", "micro_batch", "seconds_on_h200"),
    [((12, 12, 768), 64, 8.0), ((48, 25, 1600), 16, 40.0)],
    ids=["124M", "1558M"],
)
def test_all_of_hellaswag_is_scored_in_seconds_and_compiled_once(
    shape, micro_batch, seconds_on_h200
):
    torch._dynamo.reset()
    world = start_world()
    try:
        with torch.device("meta"):
            model = GPT(GPTConfig(*shape, 1024))
        model.compile(world.device)
        shard_model(model, world, "bf16")
        model.to_empty(device=world.device)
        init_weights(model, draw_weights(model.config, 42))
        questions = made_up_questions(HELLASWAG_ITEMS)
        split = {"micro_batch": micro_batch, "device": world.device}
        started = time.perf_counter()
        choice_scores(model, questions, **split)  # compiles a few shapes
        first = time.perf_counter() - started
        graphs = counters["stats"]["unique_graphs"]
        torch.cuda.synchronize()
        started = time.perf_counter()
        scores = choice_scores(model, questions, **split)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    finally:
        torch.distributed.destroy_process_group()
    name = torch.cuda.get_device_name()
    print(
        f"\n{shape}: {seconds:.2f} s for {scores['num_items']} items on {name}, "
        f"{first:.1f} s the first time, {graphs} graphs"
    )
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again"
    assert abs(scores["acc_token_mean"] - 0.25) < 0.02, "random weights guess"
    if "H200" in name:
        assert seconds < seconds_on_h200
