"""The model against Hugging Face's GPT-2 and against numbers that llm.c's own code gave."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from miniseries.evaluation.huggingface import from_huggingface
from miniseries.model.formulas import Formulas, chunk_rows, mean_loss, token_losses
from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.shapes import keys_of_model

torch.set_num_threads(1)

SHAPES = [GPTConfig(2, 2, 32, 24, 211, 256), GPTConfig(3, 5, 40, 17, 128, 128)]
FULL_VOCABULARY = GPTConfig(1, 2, 16, 130)


def random_weights(model, seed=0):
    """Weights of which no bias is 0 and no norm is 1; padding rows stay 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln_" in f".{name}" else 0.0, 0.2)
        model.wte.weight[model.config.vocab_size :] = 0
    return model


def random_batch(config, batch=2, seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (batch, config.sequence_length + 1))
    return ids[:, :-1], ids[:, 1:]


def pair(config):
    """Our model and Hugging Face's with the same weights, loaded by name."""
    reference = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.sequence_length,
            n_embd=config.channels,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if ".ln_" in name and "weight" in name else 0.0, 0.2)
    model = GPT(config)
    model.load_state_dict(from_huggingface(reference.state_dict(), config))
    return model, reference


@pytest.mark.parametrize("config", SHAPES)
def test_logits_are_those_of_hugging_face(config):
    model, reference = pair(config)
    tokens, _ = random_batch(config)
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", SHAPES)
def test_loss_and_every_gradient_are_those_of_hugging_face(config):
    model, reference = pair(config)
    tokens, targets = random_batch(config)
    loss = model(tokens, targets)
    loss.backward()
    expected = F.cross_entropy(reference(tokens).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    named = {name: p.grad for name, p in reference.named_parameters()}
    gradients = from_huggingface(named, config)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


def test_the_loss_is_taken_over_50257_entries_and_padding_rows_get_no_gradient():
    model = random_weights(GPT(FULL_VOCABULARY))
    tokens, targets = random_batch(FULL_VOCABULARY)
    assert model(tokens).shape == (2, 130, 50257)
    loss = model(tokens, targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    gradient = model.wte.weight.grad
    assert gradient[50257:].shape[0] == 47
    assert torch.equal(gradient[50257:], torch.zeros(47, 16))
    assert gradient[:50257].abs().sum(dim=1).min() > 0  # every real row takes part in the softmax


def test_large_padding_rows_do_not_change_the_loss():
    model = random_weights(GPT(SHAPES[0]))
    tokens, targets = random_batch(SHAPES[0])
    before = model(tokens, targets).detach()
    with torch.no_grad():
        model.wte.weight[211:] = 100.0
    assert torch.equal(model(tokens, targets).detach(), before)


def test_losses_of_single_positions_have_the_mean_loss_as_their_mean():
    model = random_weights(GPT(SHAPES[1]))
    tokens, targets = random_batch(SHAPES[1], batch=3)
    with torch.no_grad():
        losses = model(tokens, targets, reduction="none")
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses, expected.view(3, 17), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.mean(), model(tokens, targets), rtol=1e-6, atol=1e-6)


def test_a_target_of_minus_100_costs_nothing_when_scoring():
    model = random_weights(GPT(SHAPES[0]))
    tokens, targets = random_batch(SHAPES[0])
    ignored = targets.clone()
    ignored[:, 3:20] = -100
    with torch.no_grad():
        expected = model(tokens, targets, reduction="none")
        losses = model(tokens, ignored, reduction="none")
    expected[:, 3:20] = 0
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_chunk_borders_change_neither_loss_nor_gradients(extra):
    torch.manual_seed(3)
    head = torch.randn(50304, 4, requires_grad=True)
    count = 2 * chunk_rows(head) + extra
    assert chunk_rows(head) == 125
    hidden = torch.randn(count, 4, requires_grad=True)
    targets = torch.randint(0, 50257, (count,))
    losses = F.cross_entropy(hidden @ head[:50257].T, targets, reduction="none")
    expected = torch.autograd.grad(losses.mean(), (hidden, head))
    loss = mean_loss(hidden, head, targets, 50257, Formulas())
    torch.testing.assert_close(loss, losses.mean())
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(hidden, head, targets, 50257, Formulas()), losses)


def test_gradients_follow_the_factor_that_the_loss_is_multiplied_with():
    model = random_weights(GPT(SHAPES[0]))
    tokens, targets = random_batch(SHAPES[0])
    whole = torch.autograd.grad(model(tokens, targets), list(model.parameters()))
    quarter = torch.autograd.grad(model(tokens, targets) / 4, list(model.parameters()))
    for a, b in zip(whole, quarter, strict=True):
        torch.testing.assert_close(a / 4, b)


def test_a_later_token_changes_no_earlier_logits():
    model = random_weights(GPT(SHAPES[0]))
    tokens, _ = random_batch(SHAPES[0])
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 211
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="25 tokens, but the model has 24 positions"):
        GPT(SHAPES[0])(torch.zeros(1, 25, dtype=torch.int64))


# padded counts: llm.c's model files; unpadded: OpenAI's published models
@pytest.mark.parametrize(
    ("shape", "unpadded", "padded"),
    [
        ((12, 12, 768), 124_439_808, 124_475_904),
        ((24, 16, 1024), 354_823_168, 354_871_296),
        ((36, 20, 1280), 774_030_080, 774_090_240),
        ((48, 25, 1600), 1_557_611_200, 1_557_686_400),
    ],
)
def test_the_four_sizes_have_the_published_numbers_of_parameters(shape, unpadded, padded):
    with torch.device("meta"):
        model = GPT(GPTConfig(*shape, sequence_length=1024))
    assert model.num_parameters == unpadded
    assert sum(p.numel() for p in model.parameters()) == padded


@pytest.mark.parametrize(
    ("name", "padded"),
    # gpt3:c768 by llm.c; the others by hand: Vp C + T C + L (12 C^2 + 13 C) + 2 C
    [("gpt3:c768", 125_262_336), ("gpt2:d60", 2_754_259_200), ("gpt2:d84", 12_220_657_920)],
)
def test_models_by_name_have_the_numbers_of_parameters_of_llm_c(name, padded):
    with torch.device("meta"):
        model = GPT(GPTConfig(**keys_of_model(name)))
    assert sum(p.numel() for p in model.parameters()) == padded


@pytest.mark.parametrize("name", ["gpt2:d60", "gpt3:c12288"])
def test_a_deep_and_a_wide_model_make_a_step_without_memory(name):
    with torch.device("meta"):
        config = GPTConfig(**keys_of_model(name) | {"sequence_length": 16})
        model = GPT(config)
        tokens = torch.zeros(1, 17, dtype=torch.int64)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_more_positions_than_tokens_change_nothing_but_the_table_s_size():
    short = random_weights(GPT(SHAPES[0]))
    long = GPT(replace(SHAPES[0], num_positions=40))
    assert long.wpe.weight.shape == (40, 32)
    state = short.state_dict()
    state["wpe.weight"] = torch.cat([state["wpe.weight"], torch.full((16, 32), 9.0)])
    long.load_state_dict(state)
    tokens, targets = random_batch(SHAPES[0])
    losses = [model(tokens, targets) for model in (short, long)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert long.wpe.weight.grad[24:].abs().max() == 0
    assert long(torch.zeros(1, 40, dtype=torch.int64)).shape == (1, 40, 211)
    with pytest.raises(ValueError, match="41 tokens, but the model has 40 positions"):
        long(torch.zeros(1, 41, dtype=torch.int64))


def test_fresh_weights_are_those_of_llm_c():
    model = GPT(GPTConfig(1, 12, 768, 8))
    init_weights(model, draw_weights(model.config, seed=42))
    # first four values and the last one drawn for wte
    expected = torch.tensor([0.03853830, 0.02974568, 0.01801434, -0.04211043])
    torch.testing.assert_close(model.wte.weight[0, :4].detach(), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(
        model.wte.weight[50256, 767].detach(), torch.tensor(0.00170379), rtol=0, atol=1e-7
    )
    assert torch.equal(model.wte.weight[50257:], torch.zeros(47, 768))


def test_fresh_weights_are_scaled_by_depth_where_they_meet_the_residual():
    model = GPT(GPTConfig(8, 2, 128, 16, 211, 256))
    init_weights(model, draw_weights(model.config, seed=7))
    for name, parameter in model.named_parameters():
        values = parameter[:211] if name == "wte.weight" else parameter
        if name.endswith("c_proj.weight"):
            assert values.std().item() == pytest.approx(0.02 / 4, rel=0.02), name  # sqrt(2 * 8)
        elif name.endswith("weight") and ".ln_" not in f".{name}":
            assert values.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(values, torch.full_like(values, float(name.endswith("weight"))))


def loss_gradients_and_kept_bytes(level, backend=None):
    """Loss and gradients of a model, and the bytes that its blocks keep for the backward pass."""
    torch._dynamo.reset()
    config = GPTConfig(2, 2, 64, 32, 211, 256)
    model = random_weights(GPT(config))
    model.recompute(level)
    if backend:
        for block in model.h:
            block.compile(dynamic=False, backend=backend)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(*random_batch(config))
    loss.backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    size = sum(count for place, count in kept.items() if place not in weights)
    return [loss.detach(), *(p.grad for p in model.parameters())], size


# aot_eager_decomp_partition: the compiler without its code generation, which is the slow part
@pytest.mark.parametrize("backend", [None, "aot_eager_decomp_partition"])
def test_recomputing_changes_no_bit_and_keeps_less(backend):
    plain, size = loss_gradients_and_kept_bytes(0, backend)
    sizes = [size]
    for level in (1, 2):
        values, size = loss_gradients_and_kept_bytes(level, backend)
        assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True)), level
        sizes.append(size)
    stream_bytes = 2 * 2 * 32 * 64 * 4  # layers, sequences, tokens, channels, float32
    assert sizes[0] - sizes[1] == 4 * stream_bytes
    assert 2 * stream_bytes <= sizes[1] - sizes[2] < 2.1 * stream_bytes  # and two figures a row
