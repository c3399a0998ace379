import pytest
import torch
import torch.nn.functional as F

from miniseries import formulas, model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCAB, PADDED = 50257, 50304


def distance(ours, reference):
    """Relative difference in the Frobenius norm, against a reference in higher precision."""
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_the_classifier_kernel_gives_the_plain_formulas_loss_and_gradient(dtype, limit):
    from miniseries import kernels

    logits = (torch.randn(333, PADDED, device="cuda") * 4).to(dtype)
    targets = torch.randint(VOCAB, (333,), device="cuda")
    targets[:2] = torch.tensor([0, VOCAB - 1])
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact[:, :VOCAB], targets, reduction="sum")
    (loss * 0.125).backward()
    ours, gradient = kernels.gradients_of_logits(logits.clone(), targets, VOCAB, 0.125)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    assert distance(gradient, exact.grad) < limit
    assert gradient[:, VOCAB:].abs().max() == 0


def test_logits_as_large_as_bf16_allows_stay_finite():
    from miniseries import kernels

    logits = torch.full((4, PADDED), -3e38, device="cuda", dtype=torch.bfloat16)
    logits[:, 7] = 3e38
    targets = torch.full((4,), 7, device="cuda")
    loss, gradient = kernels.gradients_of_logits(logits, targets, VOCAB, 1.0)
    assert loss.item() == 0 and gradient.isfinite().all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("shape", [(1000, 6400), (77, 300)])
def test_the_gelu_kernel_gives_both_gradients(dtype, limit, shape):
    from miniseries import kernels

    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    upstream = torch.randn(shape, device="cuda").to(dtype)
    exact = x.double().requires_grad_()
    F.gelu(exact, approximate="tanh").backward(upstream.double())
    gradient, sums = kernels.gelu_backward(x, upstream)
    assert distance(gradient, exact.grad) < limit
    assert distance(sums, exact.grad.sum(dim=0)) < 1e-4


def gradients_through(function, inputs, upstreams):
    """Outputs of the function, and the gradients by all its inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstreams)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("channels", [768, 1600])
def test_the_norm_kernels_give_the_plain_formulas_values_and_gradients(dtype, limit, channels):
    from miniseries import kernels

    shape = (3, 111, channels)
    inputs = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    inputs += [torch.randn(channels, device="cuda").to(dtype) for _ in range(2)]
    upstreams = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    ours = gradients_through(kernels.add_norm, inputs, upstreams)
    exact = gradients_through(
        formulas.add_norm, [t.double() for t in inputs], [t.double() for t in upstreams]
    )
    for a, b in zip(ours, exact, strict=True):
        assert distance(a, b) < limit


@pytest.mark.parametrize("shape", [(2, 128, 3, 4, 64), (3, 1024, 3, 25, 64)])
def test_attention_by_cudnns_front_end_is_that_of_pytorch(shape):
    from miniseries import cudnn_attention

    if not cudnn_attention.is_available():
        pytest.skip("needs the package nvidia-cudnn-frontend and a Hopper GPU")
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(shape[0], shape[1], *shape[3:], device="cuda", dtype=torch.bfloat16)
    ours = gradients_through(cudnn_attention.attention, [qkv], [upstream])
    exact = gradients_through(formulas.attention, [qkv.float()], [upstream.float()])
    for a, b in zip(ours, exact, strict=True):
        assert distance(a, b.double()) < 1e-2


@pytest.mark.parametrize(("dtype", "loss_limit", "limit"), [
    (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 1e-3, 5e-2),
])  # fmt: skip
def test_a_compiled_model_with_kernels_has_the_plain_models_loss_and_gradients(
    dtype, loss_limit, limit
):
    config = model.GPTConfig(2, 4, 256, 128)
    plain, fast = model.GPT(config).cuda(), model.GPT(config).cuda()
    model.init_weights(plain, 42)
    fast.load_state_dict(plain.state_dict())
    fast.to(dtype).compile(torch.device("cuda"))
    tokens = torch.randint(VOCAB, (4, 129), device="cuda")
    losses = [m(tokens[:, :-1], tokens[:, 1:]) for m in (plain, fast)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=loss_limit)
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if "c_attn.bias" not in name:  # its middle third, of the keys, has a gradient of zero
            assert distance(b.grad, a.grad.double()) < limit, name
