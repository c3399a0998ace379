import math
import os
import socket

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.training.bits import scramble
from miniseries.training.distributed import shard_model, start_world
from miniseries.training.optimizer import (
    LossScale,
    RoundingAdamW,
    ZScore,
    _first_element,
    clip_gradients,
    make_optimizer,
    round_by_chance,
)


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
    init_weights(ours, draw_weights(config, 1))
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


def test_clipping_takes_the_loss_scale_out():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[30.0, 40.0]]) * 1024
    assert clip_gradients(model, loss_scale=1024.0).item() == pytest.approx(50.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))


# ---- weights in bf16 alone ----------------------------------------------------------------


def test_rounding_by_chance_is_right_on_average_and_leaves_exact_values_alone():
    # bf16 has 8 bits: between 1 and 2 its steps are 1/128
    noise = scramble(torch.arange(100_000))
    rounded = round_by_chance(torch.full((100_000,), 1 + 0.25 / 128), noise).float()
    assert rounded.unique().tolist() == [1.0, 1 + 1 / 128]
    assert ((rounded - 1) * 128).mean().item() == pytest.approx(0.25, abs=0.005)
    negative = round_by_chance(torch.full((100_000,), -1 - 0.75 / 128), noise).float()
    assert ((negative + 1) * 128).mean().item() == pytest.approx(-0.75, abs=0.005)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-120, 1.5 * 2.0**100])
    for bits in (0, 0x7FFF, 0xFFFF):
        assert torch.equal(round_by_chance(exact, torch.full((6,), bits)).float(), exact)


def bf16_model(seed=1):
    model = GPT(GPTConfig(1, 2, 8, 4, vocab_size=10, padded_vocab_size=16)).bfloat16()
    init_weights(model, draw_weights(model.config, seed))
    return model


def one_update(model, seed, gradients=1e-3, steps=1):
    optimizer = make_optimizer(model, 0.1, seed)
    assert isinstance(optimizer, RoundingAdamW)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(100 * step + number)
            parameter.grad = (gradients * torch.randn(parameter.shape)).bfloat16()
        model.wte.weight.grad[10:] = 0
        optimizer.step()
    return optimizer


def test_updates_of_bf16_weights_are_adamw_s_but_for_the_last_bit():
    model, plain = bf16_model(), bf16_model().float()
    one_update(model, seed=3)
    reference = make_optimizer(plain, 0.1)
    for group in reference.param_groups:
        group["lr"] = 1e-3
    for number, parameter in enumerate(plain.parameters()):
        torch.manual_seed(number)
        parameter.grad = (1e-3 * torch.randn(parameter.shape)).bfloat16().float()
    plain.wte.weight.grad[10:] = 0
    reference.step()
    errors = []
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        last_bit = 2.0**-7 * expected.abs()  # at most: 8 bits, the first one not stored
        assert ((ours.float() - expected).abs() <= last_bit + 1e-12).all()
        errors.append(((ours.float() - expected) / (last_bit + 1e-12)).flatten())
    assert abs(torch.cat(errors).mean().item()) < 0.02  # rounded up as often as down
    assert model.wte.weight[10:].abs().max() == 0  # padding rows stay exactly 0


def test_updates_of_bf16_weights_hang_on_seed_and_step_alone():
    first, again, other = bf16_model(), bf16_model(), bf16_model()
    one_update(first, seed=3, steps=2)
    one_update(again, seed=3, steps=2)
    one_update(other, seed=4, steps=2)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_two_weights_are_not_rounded_by_the_same_chance():
    pair = torch.nn.ParameterList(torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    optimizer = make_optimizer(pair, 0.0, 5)
    optimizer.param_groups[0]["lr"] = 2.0**-9  # half of the step of bf16 below 1
    for weight in pair:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    # as often unlike as alike
    assert (pair[0] != pair[1]).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_updates_too_small_for_bf16_add_up_over_steps():
    weight = torch.nn.Linear(64, 64, bias=False).bfloat16()
    with torch.no_grad():
        weight.weight.fill_(1.0)
    optimizer = make_optimizer(weight, 0.0, 5)
    optimizer.param_groups[0]["lr"] = 1e-4  # a seventieth of the step of bf16 at 1
    for _ in range(100):
        weight.weight.grad = torch.ones_like(weight.weight)
        optimizer.step()
    assert weight.weight.float().mean().item() == pytest.approx(1 - 100 * 1e-4, abs=5e-4)
    assert (weight.weight < 1).float().mean() > 0.8  # by chance anew in each update


def test_state_without_fp32_weights_takes_ten_bytes_less_four_of_gradients():
    model, full = bf16_model(), bf16_model().float()

    def bytes_of(m):
        state = [
            t
            for s in make_optimizer(m, 0.1).state.values()
            for t in (s["exp_avg"], s["exp_avg_sq"])
        ]
        return sum(t.nbytes for t in [*m.parameters(), *m.parameters(), *state])  # and gradients

    assert bytes_of(full) - bytes_of(model) == 4 * sum(p.numel() for p in model.parameters())


def shard_and_update(rank, world_size, port, folder):
    """One rank's part of an update with given gradients, gathered again."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    world = start_world()
    model = bf16_model()
    shard_model(model, world, "bf16")
    optimizer = make_optimizer(model, 0.1, 3)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for number, parameter in enumerate(model.parameters()):
        torch.manual_seed(number)
        full = (1e-3 * torch.randn(parameter.shape)).bfloat16()
        full[10:] = 0 if parameter is model.wte.weight else full[10:]
        place = (parameter.device_mesh, parameter.placements)
        parameter.grad = distribute_tensor(full, *place, src_data_rank=None)
    firsts = [_first_element(p) for p in model.parameters()]
    optimizer.step()
    whole = [p.full_tensor().detach() for p in model.parameters()]
    torch.save((whole, firsts), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_every_sharding_rounds_bf16_weights_alike(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(shard_and_update, (3, port, tmp_path), nprocs=3)
    alone = bf16_model()
    one_update(alone, seed=3)
    for rank in range(3):
        whole, firsts = torch.load(tmp_path / f"{rank}.pt")
        assert firsts[0] == min(6 * rank, 16) * 8  # 16 rows of 8: 6, 6 and 4
        for ours, expected in zip(whole, alone.parameters(), strict=True):
            assert torch.equal(ours, expected)


def test_a_loss_scale_halves_on_overflow_doubles_after_2000_good_steps_and_can_be_saved():
    scale = LossScale()
    assert scale.value == 65536
    for _ in range(1999):
        scale.update(False)
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    again.update(False)
    assert again.value == 131072
    again.update(True)
    assert (again.value, again.good_steps) == (65536, 0)
    with pytest.raises(ValueError, match="not finite even with a loss scale below 1"):
        for _ in range(20):
            again.update(True)


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


@pytest.mark.parametrize("seen", [127, 128, 300])
@pytest.mark.parametrize("limit", [0.5, 3.0, 7.0])
def test_only_values_above_the_ceiling_have_a_z_score_above_the_limit(seen, limit):
    detector = ZScore()
    for number in range(seen):
        detector.update(math.sin(number) + 0.001 * number)
    ceiling, window = detector.ceiling(limit), detector.state_dict()
    for factor in (1 - 1e-9, 1 + 1e-9, 2.0):
        detector.load_state_dict(window)
        assert (detector.update(ceiling * factor) > limit) == (factor > 1)


def test_there_is_no_ceiling_without_a_limit_a_full_window_or_a_value_that_reaches_it():
    detector = ZScore()
    for number in range(127):
        assert detector.ceiling(3.0) == math.inf
        detector.update(number % 7)
    assert detector.ceiling(3.0) < 10
    assert detector.ceiling(0.0) == detector.ceiling(11.3) == math.inf  # 11.27 is the largest z


def test_a_detector_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened():
    values = [math.sin(i) for i in range(140)]
    unbroken, first = ZScore(), ZScore()
    expected = [unbroken.update(v) for v in values]
    for value in values[:70]:
        first.update(value)
    second = ZScore()
    second.load_state_dict(first.state_dict())
    assert [second.update(v) for v in values[70:]][-12:] == expected[-12:]
