import math

import pytest
import torch

from miniseries.model import GPT, GPTConfig, init_weights
from miniseries.optimizer import ZScore, clip_gradients, make_optimizer


def test_only_the_50_tensors_of_two_dimensions_of_the_124m_model_decay():
    with torch.device("meta"):
        model = GPT(GPTConfig(12, 12, 768, 1024))
    decayed, others = make_optimizer(model, weight_decay=0.1).param_groups
    assert (len(decayed["params"]), decayed["weight_decay"]) == (50, 0.1)
    assert others["weight_decay"] == 0.0
    assert len(others["params"]) == 12 * 8 + 2
    assert all(p.dim() == 2 for p in decayed["params"])


def test_clipping_reports_the_norm_before_and_leaves_at_most_one():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[30.0, 40.0]])
    assert clip_gradients(model).item() == pytest.approx(50.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    model.weight.grad = torch.tensor([[0.3, 0.4]])
    clip_gradients(model)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.3, 0.4]]))


def test_our_optimizer_equals_plain_adamw_with_gpt3s_constants():
    config = GPTConfig(1, 2, 8, 4, vocab_size=10, padded_vocab_size=16)
    ours, plain = GPT(config), GPT(config)
    init_weights(ours, 1)
    plain.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, weight_decay=0.1)
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    rest = [p for p in plain.parameters() if p.dim() != 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for _ in range(5):
        ours(tokens, tokens.roll(1, 1)).backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            b.grad = a.grad.clone()  # the same gradients: only the update is compared
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert ours.wte.weight[10:].abs().max() == 0  # padding rows stay exactly 0


def test_z_scores_begin_with_the_128th_value_and_count_the_value_itself():
    detector = ZScore()
    assert all(math.isnan(detector.update(1.0)) for _ in range(127))
    # 127 ones and x: mean 1 + (x-1)/128, and the largest possible z is sqrt(127) = 11.27
    assert detector.update(5.0) == pytest.approx(math.sqrt(127))


def test_equal_values_have_a_z_score_of_zero_and_spoilt_ones_do_not_enter():
    detector = ZScore()
    for _ in range(128):
        detector.update(2.0)
    assert detector.update(2.0) == 0.0
    assert math.isnan(detector.update(math.inf))
    assert detector.update(2.0) == 0.0


def test_a_detector_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened():
    values = [math.sin(i) for i in range(140)]
    unbroken, first = ZScore(), ZScore()
    expected = [unbroken.update(v) for v in values]
    for value in values[:70]:
        first.update(value)
    second = ZScore()
    second.load_state_dict(first.state_dict())
    assert [second.update(v) for v in values[70:]][-12:] == expected[-12:]
