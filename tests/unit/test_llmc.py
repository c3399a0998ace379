"""llm.c's files: the bytes that its documentation states, and nothing lost on the way back."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from miniseries.data.encode import gpt2_encoding
from miniseries.evaluation import llmc
from miniseries.evaluation.llmc import (
    layout,
    num_elements,
    read_model,
    read_optimizer_state,
    write_debug_state,
    write_model,
    write_tokenizer,
)
from miniseries.model.gpt import GPT, GPTConfig

torch.set_num_threads(1)
CONFIG = GPTConfig(num_layers=2, num_heads=2, channels=16, sequence_length=32)
SIZES = {  # layers, heads, channels; elements, bytes of version 5 and 3
    "124M": (12, 12, 768, 124_475_904, 248_952_832, 497_904_640),
    "350M": (24, 16, 1024, 354_871_296, 709_743_616, 1_419_486_208),
    "774M": (36, 20, 1280, 774_090_240, 1_548_181_504, 3_096_361_984),
    "1558M": (48, 25, 1600, 1_557_686_400, 3_115_373_824, 6_230_746_624),
}
OFFSETS = {  # first element of each tensor of the smallest and the largest model
    "wte.weight": (0, 0),
    "wpe.weight": (38_633_472, 80_486_400),
    "h.0.ln_1.weight": (39_419_904, 82_124_800),
    "h.0.ln_1.bias": (39_429_120, 82_201_600),
    "h.0.attn.c_attn.weight": (39_438_336, 82_278_400),
    "h.0.attn.c_attn.bias": (60_672_000, 450_918_400),
    "h.0.attn.c_proj.weight": (60_699_648, 451_148_800),
    "h.0.attn.c_proj.bias": (67_777_536, 574_028_800),
    "h.0.ln_2.weight": (67_786_752, 574_105_600),
    "h.0.ln_2.bias": (67_795_968, 574_182_400),
    "h.0.mlp.c_fc.weight": (67_805_184, 574_259_200),
    "h.0.mlp.c_fc.bias": (96_116_736, 1_065_779_200),
    "h.0.mlp.c_proj.weight": (96_153_600, 1_066_086_400),
    "h.0.mlp.c_proj.bias": (124_465_152, 1_557_606_400),
    "ln_f.weight": (124_474_368, 1_557_683_200),
    "ln_f.bias": (124_475_136, 1_557_684_800),
}


def made_weights(seed=0, config=CONFIG):
    """Every number another one; padding rows are 0."""
    generator = torch.Generator().manual_seed(seed)
    names = [(name, shape) for name, _, shape in layout(config)]
    weights = {name: torch.randn(shape, generator=generator) for name, shape in names}
    weights["wte.weight"][50257:] = 0
    return weights


def made_model(weights):
    model = GPT(CONFIG)
    model.load_state_dict(weights)
    return model


def header(path):
    return struct.unpack("<256i", path.read_bytes()[:1024])


def change(path, **integers):
    """Overwrite integers of a header; i2=5 sets the third."""
    content = bytearray(path.read_bytes())
    for key, value in integers.items():
        struct.pack_into("<i", content, 4 * int(key[1:]), value)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def weights():
    return made_weights()


@pytest.fixture
def model_file(tmp_path, weights):
    write_model(tmp_path / "model_00000010.bin", weights, CONFIG, torch.float32)
    return tmp_path / "model_00000010.bin"


# ---- where each byte lies -----------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_all_four_sizes_have_the_elements_and_bytes_of_llm_c(size):
    layers, heads, channels, elements, bytes_v5, bytes_v3 = SIZES[size]
    config = GPTConfig(layers, heads, channels, 1024)
    *_, (name, offset, shape) = layout(config)
    assert (name, offset + math.prod(shape)) == ("ln_f.bias", elements)
    assert num_elements(config) == elements
    assert 1024 + 2 * elements == bytes_v5 and 1024 + 4 * elements == bytes_v3


@pytest.mark.parametrize(("size", "column"), [("124M", 0), ("1558M", 1)])
def test_every_tensor_starts_where_llm_c_reads_it(size, column):
    layers, heads, channels, *_ = SIZES[size]
    found = {name: first for name, first, _ in layout(GPTConfig(layers, heads, channels, 1024))}
    assert {name: found[name] for name in OFFSETS} == {n: o[column] for n, o in OFFSETS.items()}
    step = found["h.1.attn.c_attn.weight"] - found["h.0.attn.c_attn.weight"]
    assert step == 3 * channels * channels, "all layers of a tensor before the next one"


@pytest.mark.parametrize(
    ("dtype", "version", "width"), [(torch.float32, 3, 4), (torch.bfloat16, 5, 2)]
)
def test_header_and_tensors_of_a_file_are_where_the_layout_says(
    tmp_path, weights, dtype, version, width
):
    path = tmp_path / "model.bin"
    write_model(path, weights, CONFIG, dtype)
    assert header(path)[:8] == (20240326, version, 32, 50257, 2, 2, 16, 50304)
    assert not any(header(path)[8:])
    content = path.read_bytes()
    assert len(content) == 1024 + width * num_elements(CONFIG)
    for name, first, shape in layout(CONFIG):
        start = 1024 + width * first
        part = torch.frombuffer(
            bytearray(content[start : start + width * math.prod(shape)]), dtype=dtype
        )
        assert torch.equal(part.view(shape), weights[name].to(dtype)), name


# ---- there and back -----------------------------------------------------------------------


def test_fp32_comes_back_bit_for_bit_and_is_written_byte_for_byte_again(
    tmp_path, model_file, weights
):
    config, found = read_model(model_file)
    assert config == CONFIG
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    write_model(tmp_path / "again.bin", found, config, torch.float32)
    assert (tmp_path / "again.bin").read_bytes() == model_file.read_bytes()


def test_bf16_comes_back_as_it_was_rounded(tmp_path, weights):
    write_model(tmp_path / "model.bin", weights, CONFIG, torch.bfloat16)
    _, found = read_model(tmp_path / "model.bin")
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    write_model(tmp_path / "again.bin", found, CONFIG, torch.bfloat16)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()


def test_padding_rows_that_are_not_0_are_neither_written_nor_read(tmp_path, model_file, weights):
    table = weights["wte.weight"].clone()
    table[50303, 15] = 1e-30
    with pytest.raises(ValueError, match="rows 50257 on of the token table are padding"):
        write_model(tmp_path / "x.bin", weights | {"wte.weight": table}, CONFIG, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == [model_file.name]
    content = bytearray(model_file.read_bytes())
    content[1024 + 4 * 50257 * 16 + 3] = 0x3F
    model_file.write_bytes(content)
    with pytest.raises(ValueError, match="are padding and must be 0"):
        read_model(model_file)


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ({"i0": 20240520}, r"is a shard of tokens \(magic 20240520\); wanted is a model"),
        ({"i0": 20240803, "i1": 5}, "is a Llama 3 model"),
        ({"i0": 0x46554747}, "is no file of llm.c"),
        ({"i1": 2}, "a model of version 2; known is 3 or 5"),
        ({"i3": 128256}, "a vocabulary of 128256"),
        ({"i7": 50432}, "padded to 50432"),
        ({"i4": 0}, "no shape of a model: {'num_layers': 0"),
        ({"i4": 3}, "cut short, .* bytes where its header makes it"),
        ({"i2": 16}, "too long"),
    ],
)
def test_another_file_is_refused_in_one_line(model_file, change_of, message):
    change(model_file, **change_of)
    with pytest.raises(ValueError, match=message) as caught:
        read_model(model_file)
    assert str(caught.value).startswith(f"{model_file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("keep", "message"), [(-1, "cut short"), (500, "500 bytes are no file")])
def test_a_torn_file_is_refused(model_file, keep, message):
    model_file.write_bytes(model_file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=message):
        read_model(model_file)


def test_a_full_disk_leaves_neither_a_file_nor_a_part(tmp_path, weights, monkeypatch):
    calls = []

    def fail(*_arguments):
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llmc.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_model(tmp_path / "model.bin", weights, CONFIG, torch.float32)
    assert calls and list(tmp_path.iterdir()) == []


# ---- tokenizer and debug state ------------------------------------------------------------


def test_the_tokenizer_file_decodes_as_gpt_2_s(tmp_path):
    path = tmp_path / "gpt2_tokenizer.bin"
    write_tokenizer(path)
    assert header(path)[:4] == (20240328, 2, 50257, 50256)
    content, place, tokens = path.read_bytes(), 1024, []
    while place < len(content):
        length = content[place]
        tokens.append(content[place + 1 : place + 1 + length])
        place += 1 + length
    assert len(tokens) == 50257 and min(map(len, tokens)) >= 1
    assert tokens[50256] == b"<|endoftext|>"
    ids = gpt2_encoding().encode_ordinary("naïve café \N{GRINNING FACE}\n\n x")
    assert b"".join(tokens[i] for i in ids).decode() == "naïve café \N{GRINNING FACE}\n\n x"


def test_the_debug_state_holds_batch_logits_loss_and_gradients(tmp_path, weights):
    model, path = made_model(weights), tmp_path / "debug_state.bin"
    ids = torch.from_numpy(np.random.RandomState(0).randint(0, 50257, 2 * 8 + 1))
    tokens, targets = ids[:-1].view(2, 8), ids[1:].view(2, 8)
    write_debug_state(path, model, tokens, targets)
    assert header(path)[:4] == (20240327, 2, 2, 8)
    content = path.read_bytes()[1024:]
    assert np.array_equal(np.frombuffer(content, "<i4", 16), tokens.flatten())
    assert np.array_equal(np.frombuffer(content, "<i4", 16, 64), targets.flatten())
    logits = torch.from_numpy(np.frombuffer(content, "<f4", 16 * 50257, 128).copy())
    loss = F.cross_entropy(logits.view(16, 50257), targets.flatten())
    place = 128 + 4 * 16 * 50257
    assert struct.unpack_from("<f", content, place)[0] == pytest.approx(loss.item(), rel=1e-6)
    gradients = np.frombuffer(content, "<f4", offset=place + 4)
    assert len(gradients) == num_elements(CONFIG)
    model(tokens, targets).backward()
    for name, first, shape in layout(CONFIG):
        part = torch.from_numpy(gradients[first : first + math.prod(shape)].copy()).view(shape)
        assert torch.equal(part, model.get_parameter(name).grad), name
    assert not model.wte.weight.grad[50257:].any()


# ---- optimizer state ----------------------------------------------------------------------


def write_states(model_file, world_size, parts, *, shards=None, zero=True, step=10):
    """State files as llm.c writes them: each rank its slice of each layer's tensor."""
    for rank in range(world_size):
        head = [20240527, 1, world_size, rank, int(len(parts) == 3), int(shards is not None)]
        content = bytearray(1024)
        struct.pack_into("<6i", content, 0, *head)
        struct.pack_into("<i", content, 40, step)
        for part in parts:
            for name, _, _ in layout(CONFIG):
                flat = part[name].flatten()
                flat = flat.chunk(world_size)[rank] if zero else flat
                content += flat.numpy().tobytes()
        if shards is not None:
            content += struct.pack("<Q", shards) + bytes(4 * shards) + struct.pack("<Q", 7)
            content += bytes(4 * 7 + 2520)
        llmc.state_path(model_file, rank).write_bytes(content)


PARTS = [made_weights(seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize(
    ("world_size", "zero", "shards"),
    [(1, True, None), (8, True, None), (8, True, 5), (4, True, 1000), (2, False, 3)],
)
def test_the_states_of_all_ranks_merge_into_whole_tensors(model_file, world_size, zero, shards):
    write_states(model_file, world_size, PARTS, shards=shards, zero=zero)
    state = read_optimizer_state(model_file)
    assert (state.step, state.world_size) == (10, world_size)
    for found, wanted in zip((state.moments, state.squares, state.master), PARTS, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_run_without_master_weights_has_none(model_file):
    write_states(model_file, 2, PARTS[:2])
    state = read_optimizer_state(model_file)
    assert state.master is None
    assert torch.equal(state.squares["wte.weight"], PARTS[1]["wte.weight"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda path: path.unlink(), "00001.bin: no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "do not fit a model"),
        (lambda path: change(path, i10=11), r"wanted is \(2, 1, True, 10\)"),
        (lambda path: change(path, i0=20240326), "is a model .* wanted is an optimizer state"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(model_file, fault, message):
    write_states(model_file, 2, PARTS)
    fault(Path(llmc.state_path(model_file, 1)))
    with pytest.raises(ValueError, match=message):
        read_optimizer_state(model_file)


def test_the_size_of_a_rank_s_state_is_llm_c_s_for_the_largest_model():
    # eight ranks, 1,000 shards of 762 samples: the figure in llm.c's layout
    share = num_elements(GPTConfig(48, 25, 1600, 1024)) // 8
    order = 16 + 4 * (1000 + 762) + llmc.MT19937_BYTES
    assert llmc.HEADER_BYTES + 3 * 4 * share + order == 2_336_540_208
