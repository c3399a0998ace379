"""The GPU's formulas against the plain ones, by Triton's interpreter where there is no GPU."""

import types

import pytest
import torch

from miniseries.model import formulas
from miniseries.model.gpt import GPT, GPTConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)]
VOCAB, PADDED = 1000, 1024


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    if DEVICE == "cpu":
        properties = types.SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


def distance(ours, reference):
    """Relative difference in the Frobenius norm, against a reference in float64."""
    return ((ours.double() - reference).norm() / reference.norm()).item()


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * scale).to(
        DEVICE, dtype
    )


def assert_same(ours, plain, inputs, limit):
    """Same outputs and same gradients by all inputs, the plain ones computed in float64."""
    results = []
    for function, dtype in ((ours, inputs[0].dtype), (plain, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstreams = [randn(*out.shape, dtype=dtype) for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstreams)])
    for a, b in zip(*results, strict=True):
        assert distance(a, b) < limit


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_addition_and_norm_are_the_plain_ones(dtype, limit):
    from miniseries.model import fast_formulas

    rows = [randn(3, 7, 48, dtype=dtype), randn(3, 7, 48, dtype=dtype).flip(0)]
    vectors = [randn(48, dtype=dtype), randn(48, dtype=dtype) + 1, randn(48, dtype=dtype)]
    assert_same(fast_formulas.add_norm, formulas.add_norm, rows + vectors, limit)


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_the_mlp_is_the_plain_one(dtype, limit):
    from miniseries.model import fast_formulas

    inputs = [randn(2, 21, 40, dtype=dtype), randn(160, 40, dtype=dtype, scale=0.2)]
    inputs += [randn(160, dtype=dtype), randn(40, 160, dtype=dtype, scale=0.1)]
    assert_same(fast_formulas.mlp, formulas.mlp, inputs, limit)


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_loss_and_gradient_of_the_logits_are_the_plain_ones(dtype, limit):
    from miniseries.model import kernels

    logits = randn(5, PADDED, dtype=dtype, scale=3.0)
    logits[1, 700] = 300  # more than e^x holds in float32, if nothing were subtracted
    targets = torch.tensor([0, 5, 700, 999, 3], device=DEVICE)
    loss, gradient = kernels.gradients_of_logits(logits.clone(), targets, VOCAB, 0.25)
    exact_loss, exact = formulas.gradients_of_logits(logits.double(), targets, VOCAB, 0.25)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)
    assert distance(gradient, exact) < limit
    assert gradient[:, VOCAB:].abs().max() == 0


def test_rows_are_scaled_to_the_range_of_fp8_and_back():
    from miniseries.model.quantization import quantize_rows

    x = randn(7, 300) * torch.logspace(-6, 2, 7, device=DEVICE)[:, None]
    x[3] = 0
    quantized, scales = quantize_rows(x)
    assert torch.allclose(scales, x.abs().amax(dim=1, keepdim=True).clamp(min=448e-30) / 448)
    # tests/gpu asks for PyTorch's rounding; the interpreter drops the carry of a mantissa of ones
    assert ((quantized.float() * scales - x).abs() <= x.abs() / 2 + scales * 2**-6).all()
    assert quantized.float().abs().amax(dim=1).tolist() == [448.0] * 3 + [0.0] + [448.0] * 3


def test_linear_layers_in_fp8_are_near_the_plain_ones():
    from miniseries.model import fp8_formulas

    def norm_and_mlp(x, bias, *parameters):
        _, normed = fp8_formulas.add_norm(x, torch.zeros_like(x), bias, bias + 1, bias)
        return fp8_formulas.mlp(normed, *parameters)

    def plain(x, bias, *parameters):
        _, normed = formulas.add_norm(x, torch.zeros_like(x), bias, bias + 1, bias)
        return formulas.mlp(normed, *parameters)

    bf16 = torch.bfloat16
    inputs = [randn(2, 24, 48, dtype=bf16), randn(48, dtype=bf16, scale=0.1)]
    inputs += [randn(192, 48, dtype=bf16, scale=0.15), randn(192, dtype=bf16)]
    inputs += [randn(48, 192, dtype=bf16, scale=0.1)]
    assert_same(norm_and_mlp, plain, inputs, 0.2)
    assert_same(fp8_formulas.linear, formulas.linear, [inputs[0], inputs[2], inputs[3]], 0.2)


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_a_model_with_all_of_them_has_the_plain_models_loss_and_gradients(dtype, limit):
    from miniseries.model import fast_formulas, kernels

    torch.manual_seed(0)
    plain = GPT(GPTConfig(2, 2, 32, 16, VOCAB, PADDED)).to(DEVICE, dtype)
    fast = GPT(plain.config).to(DEVICE, dtype)
    fast.load_state_dict(plain.state_dict())
    fast.use(
        formulas.Formulas(
            add_norm=fast_formulas.add_norm,
            mlp=fast_formulas.mlp,
            gradients_of_logits=kernels.gradients_of_logits,
        )
    )
    tokens = torch.randint(VOCAB, (2, 17), device=DEVICE)
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, fast)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=limit)
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if "c_attn.bias" not in name:  # its middle third, of the keys, has a gradient of zero
            assert distance(b.grad, a.grad.double()) < 5 * limit, name


def test_a_device_without_our_kernels_gets_the_plain_formulas(monkeypatch):
    from miniseries.model import fast_formulas, fp8_formulas

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    chosen = fast_formulas.choose()
    assert chosen.add_norm is formulas.add_norm and chosen.mlp is formulas.mlp
    assert chosen.attention is formulas.attention
    with pytest.raises(ValueError, match=r"precision fp8 needs a Hopper GPU.*Tesla T4.*bf16"):
        fp8_formulas.choose(chosen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    chosen = fast_formulas.choose()
    assert chosen.add_norm is fast_formulas.add_norm
    assert chosen.attention is formulas.attention  # cuDNN's front end is for Hopper
