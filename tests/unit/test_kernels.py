"""The GPU's formulas against the plain ones, by Triton's interpreter where there is no GPU."""

import functools
import importlib.util
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from miniseries.model import formulas
from miniseries.model.gpt import GPT, GPTConfig
from miniseries.speed.planning import KEPT_ELEMENTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)]
VOCAB, PADDED = 1000, 1024


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    if DEVICE == "cpu":
        properties = types.SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


@pytest.fixture(autouse=True)
def _fp8_is_rounded_as_a_gpu_does(monkeypatch):
    """Triton's interpreter drops the carry of a mantissa of ones; PyTorch rounds as the GPU."""
    if DEVICE != "cpu":
        return
    from triton.language import float8e4nv
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def rounded(values, from_type, to_type, rounding_mode):
        if to_type is not float8e4nv:
            return plain(values, from_type, to_type, rounding_mode)
        exact = torch.from_numpy(values.view("float32").copy()).clamp(-448, 448)
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


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
@pytest.mark.parametrize("rows_at_once", [1, 2, 4])
def test_addition_and_norm_are_the_plain_ones(dtype, limit, rows_at_once, monkeypatch):
    from miniseries.model import fast_formulas, kernels

    monkeypatch.setattr(kernels, "NORM_ROWS", rows_at_once)
    monkeypatch.setattr(kernels, "NORM_PROGRAMS_PER_PROCESSOR", 1)
    rows = [randn(3, 7, 48, dtype=dtype), randn(3, 7, 48, dtype=dtype).flip(0)]
    vectors = [randn(48, dtype=dtype), randn(48, dtype=dtype) + 1, randn(48, dtype=dtype)]
    assert_same(fast_formulas.add_norm, formulas.add_norm, rows + vectors, limit)


def layer_inputs(dtype):
    """Stream, norm, and layers as `norm_mlp` takes them; `norm_linear` takes all but the last."""
    channels = 48
    inputs = [randn(2, 21, channels, dtype=dtype), randn(2, 21, channels, dtype=dtype).flip(0)]
    inputs += [randn(channels, dtype=dtype, scale=0.1), randn(channels, dtype=dtype) + 1]
    inputs += [randn(channels, dtype=dtype), randn(4 * channels, channels, dtype=dtype, scale=0.2)]
    inputs += [randn(4 * channels, dtype=dtype)]
    return [*inputs, randn(channels, 4 * channels, dtype=dtype, scale=0.1)]


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_both_halves_of_a_block_are_the_plain_ones(dtype, limit):
    from miniseries.model import fast_formulas

    def halves(formulas):
        return (
            lambda *inputs: formulas.norm_linear(*inputs, 0),
            lambda *inputs: formulas.norm_mlp(*inputs, 0),
        )

    inputs = layer_inputs(dtype)
    for ours, plain, count in zip(halves(fast_formulas), halves(formulas), (7, 8), strict=True):
        assert_same(ours, plain, inputs[:count], limit)


def gradients_and_kept_bytes(block, recompute):
    """Gradients of a compiled block by its inputs and weights, and what it keeps for them."""
    torch._dynamo.reset()
    block.recompute = recompute
    # the compiler without its code generation, which is the slow part; in one piece or not at all
    backend = "aot_eager_decomp_partition"
    compiled = torch.compile(block, dynamic=False, fullgraph=True, backend=backend)
    x = randn(1, 16, 32, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, x.flip(1), x[0, 0].clone())] + [*block.parameters()]
    own = {t.untyped_storage().data_ptr() for t in leaves}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = compiled(*leaves[:3])
    upstreams = [randn(*out.shape, dtype=out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstreams)], sum(kept.values())


@pytest.fixture
def package():
    """What `fused_products` takes from quack-kernels, in plain PyTorch."""
    from miniseries.model import fused_products

    def linear_act(rows, weight, *, bias, activation, tuned, config):
        assert activation == fused_products.GELU and not tuned
        assert weight.shape[1] % config.tile_n == 0 or not config.pingpong
        hidden = torch.addmm(bias, rows, weight)
        return hidden, F.gelu(hidden, approximate="tanh")

    def act_backward(upstream, weight, hidden, *, out, tuned, config):
        for_active, x = upstream.float() @ weight.float(), hidden.float()
        gradient = torch.ops.aten.gelu_backward(for_active, x, approximate="tanh")
        out["D"].copy_(gradient)
        out["postact"].copy_(F.gelu(x, approximate="tanh"))
        return {**out, "dbias": gradient.sum(dim=0)}

    def cross_entropy(logits, targets, _target_logits, losses, _lse, gradient, _weight, _ignored):
        log_probabilities = F.log_softmax(logits.float(), dim=1)
        losses.copy_(F.nll_loss(log_probabilities, targets, reduction="none"))
        gradient.copy_(log_probabilities.exp() - F.one_hot(targets, logits.shape[1]))

    config = types.SimpleNamespace
    return config(
        config=config, linear_act=linear_act, act_backward=act_backward, cross_entropy=cross_entropy
    )


@pytest.fixture
def quack(monkeypatch, package):
    """`fused_products` with them, on small shapes, too."""
    from miniseries.model import fused_products

    monkeypatch.setattr(fused_products, "quack", lambda: package)
    monkeypatch.setattr(fused_products, "SMALLEST", 16)
    monkeypatch.setattr(fused_products, "FEWEST_ROWS", 1)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fused"])
def test_recomputing_changes_no_bit_and_keeps_what_is_planned(precision, quack):
    from miniseries.model import fast_formulas, fp8_formulas

    fast = fp8_formulas if precision == "fp8" else fast_formulas
    mlp = fast_formulas.fused_norm_mlp if precision == "fused" else fast.norm_mlp
    planned = KEPT_ELEMENTS["fp8" if precision == "fp8" else "bf16"]
    planned = planned[1:2] + planned[1:] if precision == "fused" else planned
    torch.manual_seed(0)
    block = GPT(GPTConfig(1, 2, 32, 16, VOCAB, PADDED)).to(DEVICE, torch.bfloat16).h[0]
    block.formulas = formulas.Formulas(norm_linear=fast.norm_linear, norm_mlp=mlp)
    expected, most = gradients_and_kept_bytes(block, 0)
    figures = most - 16 * 2 * 32 * planned[0]
    assert 0 < figures <= 16 * 4 * 8  # of each row, in float32: of the norms, of attention
    for level in (1, 2) if precision == "bf16" else (2,):
        found, kept = gradients_and_kept_bytes(block, level)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), level
        assert kept == figures + 16 * 2 * 32 * planned[level]


def test_fused_products_give_the_plain_layers_values_and_gradients(quack):
    from miniseries.model import fast_formulas

    inputs = layer_inputs(torch.bfloat16)
    assert_same(
        lambda *given: fast_formulas.fused_norm_mlp(*given, 0),
        lambda *given: formulas.norm_mlp(*given, 0),
        inputs,
        2e-2,
    )


def test_all_four_sizes_take_fused_products_in_bf16():
    from miniseries.model import fused_products

    fits = {c: fused_products.fit(randn(1, 256, c, dtype=torch.bfloat16)) for c in
            (64, 768, 1024, 1280, 1600)}  # fmt: skip
    assert fits == {64: False, 768: True, 1024: True, 1280: True, 1600: True}
    assert not fused_products.fit(randn(1, 256, 768))
    assert not fused_products.fit(randn(1, 255, 768, dtype=torch.bfloat16))  # a sample's tokens


def test_tiles_are_as_wide_as_the_layer_can_be_divided(quack):
    from miniseries.model import fused_products

    package = fused_products.quack()
    for columns, forward, backward in ((3072, 192, 256), (4096, 256, 256), (6400, 160, 160)):
        found = fused_products._config(package, columns, fused_products.FORWARD_COLUMNS)
        assert (found.tile_n, found.pingpong) == (forward, forward != 256)
        found = fused_products._config(package, columns, fused_products.BACKWARD_COLUMNS)
        assert (found.tile_n, found.pingpong) == (backward, backward != 256)


def test_the_loss_in_one_pass_leaves_padding_out(quack):
    from miniseries.model import fused_products

    logits = randn(5, PADDED, dtype=torch.bfloat16, scale=3.0)
    targets = torch.tensor([0, 5, 700, 999, 3], device=DEVICE)
    loss, gradient = fused_products.gradients_of_logits(logits.clone(), targets, VOCAB)
    exact_loss, exact = formulas.gradients_of_logits(logits.double(), targets, VOCAB)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)
    assert distance(gradient, exact) < 4e-3
    assert gradient[:, VOCAB:].abs().max() == 0


@pytest.fixture
def untried():
    """As in a process that has tried no package yet."""
    from miniseries.model import cudnn_attention, fused_products

    cached = (fused_products.quack, fused_products.work)
    cached += (cudnn_attention._works, cudnn_attention.flash_attention_4)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_without_a_hopper_gpu_nothing_is_fused(untried, monkeypatch):
    from miniseries.model import fused_products

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not fused_products.work(768)


def test_a_package_that_does_not_load_is_named_in_one_line(untried, monkeypatch):
    from miniseries.model import fused_products

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    with pytest.warns(UserWarning, match="quack-kernels cannot be used .*quack.cross_entropy"):
        assert not fused_products.work(768)


def pretend_to_have(monkeypatch, package, modules):
    """A Hopper GPU, and a package with these modules and what is taken from them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == package or find_spec(name)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    parents = {
        ".".join(name.split(".")[:n]) for name in modules for n in range(1, name.count(".") + 1)
    }
    for name in {*parents, *modules}:
        module = types.ModuleType(name)
        module.__dict__.update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("channels", [48, 256])  # too narrow for its products, and not
@pytest.mark.parametrize("fault", ["", "does not compile", "is wrong"])
def test_a_package_whose_loss_fails_is_not_used_and_named_in_one_line(
    package, fault, channels, untried, monkeypatch
):
    from miniseries.model import fused_products

    def cross_entropy(logits, *more):
        if fault == "does not compile":
            raise RuntimeError("no such instruction")
        package.cross_entropy(logits, *more)
        logits *= 1.1 if fault else 1

    tried = []

    def linear_act(rows, weight, **more):
        tried.append(weight.shape)
        return package.linear_act(rows, weight, **more)

    modules = {
        "quack.cross_entropy": {"cross_entropy_fwd_out": cross_entropy},
        "quack.epilogue.library": {"dgelu_dbias_mod": package.act_backward},
        "quack.gemm_config": {"GemmConfig": package.config},
        "quack.gemm_interface": {"gemm_act": linear_act},
    }
    pretend_to_have(monkeypatch, "quack", modules)
    monkeypatch.setattr(fused_products._check, "__defaults__", (DEVICE,))
    if not fault:
        assert fused_products.work(channels)
    else:
        reason = {"does not compile": "no such instruction", "is wrong": r"10\.\d% away"}[fault]
        with pytest.warns(UserWarning, match=f"quack-kernels cannot be used .*{reason}"):
            assert not fused_products.work(channels)
    width = 256 if channels == 256 else 128
    assert tried == [(width, 4 * width)]  # the tiles that the model's own layers are cut into


@pytest.mark.parametrize(
    ("fault", "named", "chosen"),
    [
        ("", None, "backward FlashAttention-4"),
        ("wrong", "FlashAttention-4 cannot be used .*10.0% away", "backward cuDNN"),
        ("broken", "FlashAttention-4 cannot be used .*no plan", "backward cuDNN"),
        ("no cuDNN", "nvidia-cudnn-frontend cannot be used .*no plan", "PyTorch's; pip install"),
    ],
)
def test_attention_that_fails_when_it_is_tried_is_named_and_the_next_one_taken(
    fault, named, chosen, untried, monkeypatch, recwarn
):
    from miniseries.model import cudnn_attention, fast_formulas

    def forward(qkv):
        if fault == "no cuDNN":
            raise RuntimeError("no plan")
        return formulas.attention(qkv), torch.zeros(2, 4, 128, 1, device=DEVICE)

    def cudnn_backward(qkv, _out, _stats, upstream):
        leaf = qkv.detach().requires_grad_()
        return torch.autograd.grad(formulas.attention(leaf), leaf, upstream)[0]

    def flash_backward(q, k, v, out, upstream, figures, *, causal, dq, dk, dv):
        assert causal and figures.shape == (2, 4, 128)
        if fault == "broken":
            raise RuntimeError("no plan")
        gradient = cudnn_backward(torch.stack([q, k, v], dim=2), out, figures, upstream)
        for place, part in zip((dq, dk, dv), gradient.unbind(2), strict=True):
            place.copy_(part * (1.1 if fault == "wrong" else 1))

    modules = {"flash_attn.cute.interface": {"_flash_attn_bwd": flash_backward}, "cudnn": {}}
    for package in ("flash_attn", "cudnn"):
        pretend_to_have(monkeypatch, package, modules)
    monkeypatch.setattr(fast_formulas.fused_products, "quack", lambda: None)
    monkeypatch.setattr(cudnn_attention, "_forward", forward)
    monkeypatch.setattr(cudnn_attention, "_cudnn_backward", cudnn_backward)
    monkeypatch.setattr(cudnn_attention._try, "__defaults__", (DEVICE,))
    assert chosen in fast_formulas.choose(768).attention_name
    said = [str(warning.message) for warning in recwarn if "cannot be used" in str(warning.message)]
    assert len(said) == (named is not None) and all(re.search(named, line) for line in said)


def test_attention_of_heads_that_cudnn_does_not_take_is_pytorchs(monkeypatch):
    from miniseries.model import cudnn_attention

    taken = []
    monkeypatch.setattr(
        cudnn_attention._Attention, "apply", lambda qkv: taken.append(qkv.shape[-1])
    )
    for size in (8, 12, 64, 128, 136):
        cudnn_attention.attention(randn(1, 2, 3, 1, size, dtype=torch.bfloat16))
    cudnn_attention.attention(randn(1, 2, 3, 1, 64))
    assert taken == [8, 64, 128]


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
def test_loss_and_gradient_of_the_logits_are_the_plain_ones(dtype, limit):
    from miniseries.model import kernels

    logits = randn(5, PADDED, dtype=dtype, scale=3.0)
    logits[1, 700] = 300  # more than e^x holds in float32, if nothing were subtracted
    targets = torch.tensor([0, 5, 700, 999, 3], device=DEVICE)
    loss, gradient = kernels.gradients_of_logits(logits.clone(), targets, VOCAB)
    exact_loss, exact = formulas.gradients_of_logits(logits.double(), targets, VOCAB)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)
    assert distance(gradient, exact) < limit
    assert gradient[:, VOCAB:].abs().max() == 0


def test_rows_are_scaled_to_the_range_of_fp8_and_back():
    from miniseries.model.quantization import quantize_rows, scales_of, transpose_quantized

    x = randn(7, 300) * torch.logspace(-6, 2, 7, device=DEVICE)[:, None]
    x[3] = 0
    quantized, scales, norms = quantize_rows(x)
    assert torch.equal(scales, scales_of(x.abs().amax(dim=1, keepdim=True)))
    assert torch.allclose(norms, x.norm(dim=1, keepdim=True))
    assert torch.equal(quantized.float(), (x / scales).to(torch.float8_e4m3fn).float())
    largest = quantized.float().abs().amax(dim=1)
    assert largest[3] == 0 and ((largest > 223) & (largest <= 448)).sum() == 6
    transposed, sums = transpose_quantized(quantized, scales, scales.amax(), True)
    assert torch.allclose(sums, (quantized.float() * scales).sum(dim=0), rtol=1e-4, atol=1e-5)
    rows = transposed.float().t() * scales.amax()
    same = rows == quantized.float() * scales
    assert (same | (x.abs() < scales.amax() * 2**-6)).all()  # but for the smallest numbers


def test_scales_are_the_next_powers_of_two():
    from miniseries.model.quantization import scales_of

    largest = 448 * torch.tensor([1.0, 1.1, 2.0, 2**-20, 3e-8, 0.0])
    assert scales_of(largest).tolist() == [1, 2, 2, 2**-20, 2**-24, 2.0**-99]


def test_layers_in_fp8_are_near_the_plain_ones():
    from miniseries.model import fp8_formulas

    inputs = layer_inputs(torch.bfloat16)
    for name, count in (("norm_linear", 7), ("norm_mlp", 8)):
        ours, plain = getattr(fp8_formulas, name), getattr(formulas, name)
        assert_same(
            lambda *given, ours=ours: ours(*given, 0),
            lambda *given, plain=plain: plain(*given, 0),
            inputs[:count],
            0.1,
        )
    assert_same(fp8_formulas.linear, formulas.linear, [inputs[0], inputs[5]], 0.06)


def test_gradients_of_weights_in_fp8_are_within_4_percent_and_not_smaller_or_larger():
    from miniseries.model.fp8_formulas import Quantized, _weight_gradient

    tokens = torch.logspace(0, -2, 512, device=DEVICE)[:, None]  # some learn more than others
    channels = torch.logspace(1, -1, 48, device=DEVICE)[None]  # some are larger than others
    upstream, inputs = randn(512, 64) * tokens, randn(512, 48).flip(1) * channels
    inputs += 0.1 * upstream[:, :48]
    left, right = (Quantized.of(t).transposed()[0] for t in (upstream, inputs))
    ours = _weight_gradient(left, right)
    exact = upstream.double().t() @ inputs.double()
    assert distance(ours, exact) < 0.04
    along = (ours.double() * exact).sum() / exact.square().sum()
    assert along.item() == pytest.approx(1, abs=5e-3)


def test_bounds_of_products_hold_and_are_not_far_off():
    from miniseries.model.fp8_formulas import Quantized, _bounds, _product

    x, weight = randn(32, 48, dtype=torch.bfloat16), randn(64, 48, dtype=torch.bfloat16).flip(0)
    weight[5], bias = x[7], randn(64, dtype=torch.bfloat16)  # one product is as large as can be
    rows, columns = Quantized.of(x), Quantized.of(weight)
    largest = _product(rows, columns, bias).abs().amax(dim=1, keepdim=True)
    bounds = _bounds(rows, columns, bias)
    assert (largest <= bounds).all() and (bounds < 8 * largest).all()
    assert largest[7] > 0.5 * bounds[7]


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
            norm_linear=fast_formulas.norm_linear,
            norm_mlp=fast_formulas.norm_mlp,
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
    chosen = fast_formulas.choose(768)
    assert chosen.add_norm is formulas.add_norm and chosen.norm_mlp is formulas.norm_mlp
    assert chosen.attention is formulas.attention
    with pytest.raises(ValueError, match=r"precision fp8 needs a Hopper GPU.*Tesla T4.*bf16"):
        fp8_formulas.choose(chosen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    chosen = fast_formulas.choose(768)
    assert chosen.add_norm is fast_formulas.add_norm
    assert chosen.attention is formulas.attention  # cuDNN's front end is for Hopper


def test_a_device_without_our_kernels_compiles_no_more_when_the_loss_scale_changes(monkeypatch):
    from torch._dynamo.testing import CompileCounter

    from miniseries.model import fast_formulas

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    chosen = fast_formulas.choose(768)
    targets = torch.arange(5, device=DEVICE)
    hidden, head = randn(5, 32).requires_grad_(), randn(PADDED, 32).requires_grad_()
    found = []
    for scale in (2.0**16, 2.0**15, 0.3):
        for which in (chosen, formulas.Formulas()):
            loss = formulas.mean_loss(hidden, head, targets, VOCAB, which, scale)
            found.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    for ours, plain in zip(found[::2], found[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("channels", "length", "key"), [(32, 24, "sequence_length"), (40, 32, "channels")]
)
def test_fp8_refuses_shapes_that_its_products_cannot_take(channels, length, key):
    from miniseries.training.assembly import make_model

    machine = {"recompute": 0, "compile": True, "deterministic": False}
    config = GPTConfig(1, 2, channels, length)
    with pytest.raises(ValueError, match=rf"{key} to be a multiple of 16, .* (24|40); .*bf16"):
        make_model(config, {"precision": "fp8"}, machine, torch.device("cuda"))
