import importlib.util

import pytest
import torch
import torch.nn.functional as F

from miniseries.model import formulas
from miniseries.model import gpt as model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB, PADDED = 50257, 50304


def skip_without(module):
    """Of the extra `gpu`; one that is installed and does not work is a failure."""
    if torch.cuda.get_device_capability()[0] != 9 or not importlib.util.find_spec(module):
        pytest.skip(f"needs a Hopper GPU and the extra `gpu`, which holds {module}")


def distance(ours, reference):
    """Relative difference in the Frobenius norm, against a reference in higher precision."""
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_the_classifier_kernel_gives_the_plain_formulas_loss_and_gradient(dtype, limit):
    from miniseries.model import kernels

    logits = (torch.randn(333, PADDED, device="cuda") * 4).to(dtype)
    targets = torch.randint(VOCAB, (333,), device="cuda")
    targets[:2] = torch.tensor([0, VOCAB - 1])
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact[:, :VOCAB], targets, reduction="sum")
    loss.backward()
    ours, gradient = kernels.gradients_of_logits(logits.clone(), targets, VOCAB)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    assert distance(gradient, exact.grad) < limit
    assert gradient[:, VOCAB:].abs().max() == 0


def test_logits_as_large_as_bf16_allows_stay_finite():
    from miniseries.model import kernels

    logits = torch.full((4, PADDED), -3e38, device="cuda", dtype=torch.bfloat16)
    logits[:, 7] = 3e38
    targets = torch.full((4,), 7, device="cuda")
    loss, gradient = kernels.gradients_of_logits(logits, targets, VOCAB)
    assert loss.item() == 0 and gradient.isfinite().all()


def test_a_row_whose_largest_logit_comes_late_is_right():
    from miniseries.model import kernels

    logits = torch.zeros(4, PADDED, device="cuda", dtype=torch.bfloat16)
    logits[:, 40000] = 300.0  # e^300 is more than float32 holds
    targets = torch.full((4,), 7, device="cuda")
    loss, gradient = kernels.gradients_of_logits(logits, targets, VOCAB)
    assert loss.item() == pytest.approx(1200) and gradient[:, 40000].tolist() == [1.0] * 4


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", [(1000, 6400), (77, 300)])
def test_the_gelu_kernels_give_value_and_both_gradients(dtype, limit, shape):
    from miniseries.model import kernels

    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    upstream = torch.randn(shape, device="cuda").to(dtype)
    exact = x.double().requires_grad_()
    value = F.gelu(exact, approximate="tanh")
    value.backward(upstream.double())
    gradient, sums, active = kernels.gelu_backward(x, upstream, True)
    assert distance(kernels.gelu(x), value.detach()) < limit
    assert torch.equal(active, kernels.gelu(x))
    assert distance(gradient, exact.grad) < limit
    assert distance(sums, exact.grad.sum(dim=0)) < 1e-4


def test_rows_are_rounded_to_fp8_as_pytorch_does():
    from miniseries.model.quantization import quantize_rows, scales_of, transpose_quantized

    x = torch.randn(333, 4800, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-6, 3, 333, device="cuda")[:, None].bfloat16()
    x[5] = 0
    quantized, scales, norms = quantize_rows(x)
    assert torch.equal(scales, scales_of(x.float().abs().amax(dim=1, keepdim=True)))
    assert torch.equal(quantized.float(), (x.float() / scales).to(torch.float8_e4m3fn).float())
    assert distance(quantized.float() * scales, x.double()) < 4e-2
    assert distance(norms, x.double().norm(dim=1, keepdim=True)) < 1e-5
    transposed, sums = transpose_quantized(quantized, scales, scales.amax(), True)
    assert distance(sums, (quantized.double() * scales).sum(dim=0)) < 1e-5
    expected = (quantized.float() * (scales / scales.amax())).to(torch.float8_e4m3fn)
    assert torch.equal(transposed.float(), expected.float().t())


def gradients_through(function, inputs, upstreams):
    """Outputs of the function, and the gradients by all its inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstreams)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("channels", [768, 1600])
def test_the_norm_kernels_give_the_plain_formulas_values_and_gradients(dtype, limit, channels):
    from miniseries.model import fast_formulas

    shape = (3, 111, channels)
    inputs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    inputs += [torch.randn(channels, device="cuda").to(dtype) for _ in range(3)]
    upstreams = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    ours = gradients_through(fast_formulas.add_norm, inputs, upstreams)
    exact = gradients_through(
        formulas.add_norm, [t.double() for t in inputs], [t.double() for t in upstreams]
    )
    for a, b in zip(ours, exact, strict=True):
        assert distance(a, b) < limit


def layer_inputs(channels):
    """Stream, norm and layers as `norm_mlp` takes them, bf16; and upstream gradients."""
    shapes = [(3, 128, channels)] * 2 + [(channels,)] * 3
    shapes += [(4 * channels, channels), (4 * channels,), (channels, 4 * channels)]
    inputs = [torch.randn(shape, device="cuda") for shape in shapes]
    inputs[3] += 1
    scales = [1.0] * 5 + [channels**-0.5, 1.0, (4 * channels) ** -0.5]
    inputs = [(t * scale).bfloat16() for t, scale in zip(inputs, scales, strict=True)]
    return inputs, [torch.randn(shapes[0], device="cuda").bfloat16() for _ in range(2)]


@pytest.mark.parametrize("rows", [1024, 208])
def test_gelus_gradient_in_fp8_is_that_of_the_plain_kernels(rows):
    from miniseries.model import fp8_kernels, kernels
    from miniseries.model.quantization import scales_of

    x = (torch.randn(rows, 6400, device="cuda") * 3).bfloat16()
    upstream = torch.randn(rows, 6400, device="cuda").bfloat16()
    plain, sums, active = kernels.gelu_backward(x.float(), upstream.float(), True)
    scales = scales_of(30 * plain.abs().amax(dim=1, keepdim=True))  # a bound may be far off
    scale, active_scale = scales.amax(), scales_of(30 * active.abs().amax())
    ours = fp8_kernels.gelu_backward_quantized(x, upstream, scales, scale, active_scale)
    for found, factor, exact in (
        (ours[0], scales, plain),
        (ours[1].t(), scale, plain),
        (ours[2].t(), active_scale, active),
        (fp8_kernels.gelu_quantized(x, scales), scales, active),
    ):
        assert distance(found.float() * factor, exact.double()) < 4e-2
    assert distance(ours[3], sums.double()) < 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("name", "count"), [("norm_linear", 7), ("norm_mlp", 8)])
def test_half_a_block_has_the_plain_formulas_values_and_gradients(precision, name, count):
    from miniseries.model import fast_formulas, fp8_formulas

    if precision == "fp8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    fast, limit = {"bf16": (fast_formulas, 6e-3), "fp8": (fp8_formulas, 0.1)}[precision]
    inputs, upstreams = layer_inputs(768)
    if name == "norm_linear":
        upstreams[1] = torch.randn(3, 128, 4 * 768, device="cuda").bfloat16()

    def found(half, level, dtype):
        given = [[t.to(dtype) for t in tensors] for tensors in (inputs[:count], upstreams)]
        return gradients_through(lambda *tensors: half(*tensors, level), *given)

    levels = [found(getattr(fast, name), level, torch.bfloat16) for level in (0, 1, 2)]
    exact = found(getattr(formulas, name), 0, torch.float64)
    for a, b in zip(levels[0], exact, strict=True):
        assert distance(a, b) < limit
    for level in levels[1:]:
        assert all(torch.equal(a, b) for a, b in zip(level, levels[0], strict=True))


def test_a_linear_layer_in_fp8_is_near_the_plain_formula():
    from miniseries.model import fp8_formulas

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    inputs, _ = layer_inputs(768)
    inputs = [inputs[0], inputs[5]]
    upstream = torch.randn(3, 128, 4 * 768, device="cuda").bfloat16()
    ours = gradients_through(fp8_formulas.linear, inputs, [upstream])
    exact = gradients_through(formulas.linear, [t.double() for t in inputs], [upstream.double()])
    for a, b in zip(ours, exact, strict=True):
        assert distance(a, b) < 6e-2


@pytest.mark.parametrize("columns", [512, 960, 3072, 6400])
def test_products_with_gelu_in_them_give_the_separate_kernels_values(columns):
    from miniseries.model import fused_products, kernels

    skip_without("quack")
    assert fused_products.work(columns // 4 // 8 * 8), "it is installed, but does not work"
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape, scale=1.0):
        values = torch.randn(shape, device="cuda", generator=generator) * scale
        return values.bfloat16()

    rows, upstream = drawn(1000, columns // 4 // 8 * 8), drawn(1000, columns // 4 // 8 * 8)
    channels = rows.shape[1]
    weight, bias = drawn(columns, channels, scale=0.05), drawn(columns)
    proj_weight = drawn(channels, columns, scale=0.05)
    hidden, active = fused_products.linear_gelu(rows, weight, bias)
    exact = F.linear(rows.double(), weight.double(), bias.double())
    assert distance(hidden, exact) < 4e-3
    assert distance(active, F.gelu(exact, approximate="tanh")) < 4e-3
    ours = fused_products.gelu_linear_backward(upstream, proj_weight, hidden)
    theirs = kernels.gelu_backward(hidden, upstream @ proj_weight, True)
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b.double()) < 6e-3


def test_the_loss_in_one_pass_is_the_classifier_kernels():
    from miniseries.model import fused_products, kernels

    skip_without("quack")
    assert fused_products.work(768), "it is installed, but does not work"
    logits = (torch.randn(333, PADDED, device="cuda") * 4).bfloat16()
    targets = torch.randint(VOCAB, (333,), device="cuda")
    theirs = kernels.gradients_of_logits(logits.clone(), targets, VOCAB)
    ours = fused_products.gradients_of_logits(logits.clone(), targets, VOCAB)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-5)
    assert distance(ours[1], theirs[1].double()) < 4e-3
    assert ours[1][:, VOCAB:].abs().max() == 0


@pytest.mark.parametrize("backward", ["FlashAttention-4", "cuDNN"])
@pytest.mark.parametrize("shape", [(2, 128, 3, 4, 64), (2, 96, 3, 4, 32), (3, 1024, 3, 25, 64)])
def test_attention_by_cudnns_front_end_is_that_of_pytorch(shape, backward, monkeypatch):
    from miniseries.model import cudnn_attention

    skip_without("cudnn")
    assert cudnn_attention.is_available(), "it is installed, but does not work"
    if backward == "cuDNN":
        monkeypatch.setattr(cudnn_attention, "flash_attention_4", lambda: None)
    else:
        skip_without("flash_attn")
        assert cudnn_attention.flash_attention_4(), "it is installed, but does not work"
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(shape[0], shape[1], *shape[3:], device="cuda", dtype=torch.bfloat16)
    ours = gradients_through(cudnn_attention.attention, [qkv], [upstream])
    exact = gradients_through(formulas.attention, [qkv.float()], [upstream.float()])
    for a, b in zip(ours, exact, strict=True):
        assert distance(a, b.double()) < 1e-2


@pytest.mark.parametrize(("precision", "loss_limit", "limit"), [
    ("fp32", 1e-5, 1e-3), ("bf16", 1e-3, 5e-2), ("fp8", 2e-3, 0.15),
])  # fmt: skip
def test_a_compiled_model_with_kernels_has_the_plain_models_loss_and_gradients(
    precision, loss_limit, limit
):
    if precision == "fp8" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a Hopper GPU")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    config = model.GPTConfig(2, 4, 256, 128)
    plain, fast = model.GPT(config).cuda(), model.GPT(config).cuda()
    model.init_weights(plain, model.draw_weights(config, 42))
    fast.load_state_dict(plain.state_dict())
    fast.to(dtype).compile(torch.device("cuda"), precision)
    torch._dynamo.utils.counters.clear()
    tokens = torch.randint(VOCAB, (4, 129), device="cuda")
    losses = [m(tokens[:, :-1], tokens[:, 1:]) for m in (plain, fast)]
    for loss in losses:
        loss.backward()
    assert not torch._dynamo.utils.counters["graph_break"], "a block is not compiled in one piece"
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=loss_limit)
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if "c_attn.bias" not in name:  # its middle third, of the keys, has a gradient of zero
            assert distance(b.grad, a.grad.double()) < limit, name
