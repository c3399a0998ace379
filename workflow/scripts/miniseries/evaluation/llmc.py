"""Files of llm.c, read and written byte for byte: model, tokenizer, debug state, optimizer state.

All are little-endian and start with 256 int32, of which the first two are magic and version.
Tensors follow without gaps in one order, each with all its layers; linear weights are (out, in) as
in torch. The token table has Vp rows, those from V on 0: llm.c's loss kernel relies on that.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import DOCUMENT_MARK
from miniseries.model.gpt import GPT, PADDED_VOCAB_SIZE, VOCAB_SIZE, GPTConfig, parameter_shapes

HEADER_BYTES = 1024
MODEL_MAGIC, DEBUG_MAGIC, TOKENIZER_MAGIC, STATE_MAGIC = 20240326, 20240327, 20240328, 20240527
OTHER_MAGICS = {
    20240520: "a shard of tokens",
    20240522: "a file of questions",
    20240801: "a shard of Llama 3's tokens",
    20240803: "a Llama 3 model",
    DEBUG_MAGIC: "a debug state",
    TOKENIZER_MAGIC: "a tokenizer",
    STATE_MAGIC: "an optimizer state",
    MODEL_MAGIC: "a model",
}
MODEL_VERSIONS = {3: torch.float32, 5: torch.bfloat16}  # all tensors, the norms too
SHAPE = ("num_layers", "num_heads", "channels")  # integers 4 to 6 of a model's header
DEBUG_BATCH = (4, 64)  # sequences and tokens of the batch in a debug state, as llm.c's
MT19937_BYTES = 2520  # llm.c's generator, behind the orders of shards and samples

LAYER_TENSORS = (
    "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
    "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
    "mlp.c_proj.weight", "mlp.c_proj.bias",
)  # fmt: skip


def ordered_names(config: GPTConfig) -> list[str]:
    """Our names of the weights in llm.c's order."""
    layers = [f"h.{layer}.{t}" for t in LAYER_TENSORS for layer in range(config.num_layers)]
    return ["wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias"]


def layout(config: GPTConfig) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, first element, shape) of every weight in the order of the file."""
    shapes, offset = parameter_shapes(config), 0
    for name in ordered_names(config):
        yield name, offset, shapes[name]
        offset += math.prod(shapes[name])


def num_elements(config: GPTConfig) -> int:
    """Elements of all tensors, padding rows included."""
    return sum(map(math.prod, parameter_shapes(config).values()))


# ---- writing --------------------------------------------------------------------------------


@contextmanager
def _new_file(path: Path, *header: int) -> Iterator[IO[bytes]]:
    """A file with this header, which appears under its name at the end, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack(f"<{len(header)}i", *header).ljust(HEADER_BYTES, b"\0"))
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_tensors(
    file: IO[bytes], tensors: Callable[[str], torch.Tensor], config: GPTConfig, dtype: torch.dtype
) -> None:
    for name in ordered_names(config):
        tensor = tensors(name).detach().to(device="cpu", dtype=dtype).contiguous()
        file.write(tensor.view(torch.uint8).numpy().data)


def _model_header(config: GPTConfig, version: int) -> list[int]:
    shape = [config.num_layers, config.num_heads, config.channels]
    head = [MODEL_MAGIC, version, config.positions, config.vocab_size]
    return [*head, *shape, config.padded_vocab_size]


def write_model(
    path: Path, weights: dict[str, torch.Tensor], config: GPTConfig, dtype: torch.dtype
) -> None:
    """Write a model file, version 3 for float32 and 5 for bfloat16, atomically.

    Raises:
        ValueError: a padding row of the token table is not 0.
    """
    _check_padding(weights["wte.weight"], config, path)
    (version,) = (number for number, kind in MODEL_VERSIONS.items() if kind == dtype)
    with _new_file(path, *_model_header(config, version)) as file:
        _write_tensors(file, weights.__getitem__, config, dtype)


def write_tokenizer(path: Path) -> None:
    """Write gpt2_tokenizer.bin, from which llm.c turns ids into text."""
    encoding = gpt2_encoding()
    with _new_file(path, TOKENIZER_MAGIC, 2, VOCAB_SIZE, DOCUMENT_MARK) as file:
        for token in range(VOCAB_SIZE):
            text = encoding.decode_single_token_bytes(token)
            file.write(struct.pack("B", len(text)) + text)


def write_debug_state(path: Path, model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """Write what llm.c's own test program compares with: logits, loss, and all gradients.

    Args:
        model: in float32; its gradients are replaced.
        tokens: (B, T) int64.
        targets: (B, T) int64.
    """
    model.zero_grad()
    with torch.no_grad():
        logits = model(tokens)  # (B, T, V)
    loss = model(tokens, targets)
    loss.backward()
    with _new_file(path, DEBUG_MAGIC, 2, *tokens.shape) as file:
        for ids in (tokens, targets):
            file.write(ids.to(torch.int32).numpy().tobytes())
        file.write(logits.numpy().tobytes())
        file.write(struct.pack("<f", loss.item()))
        _write_tensors(file, lambda n: model.get_parameter(n).grad, model.config, torch.float32)
    model.zero_grad()


# ---- reading --------------------------------------------------------------------------------


def _read_header(path: Path, magic: int, version: tuple[int, ...]) -> tuple[int, ...]:
    """The 256 integers of a file of this kind.

    Raises:
        ValueError: another kind of file, or another version.
    """
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    wanted = OTHER_MAGICS[magic]
    if len(content) < HEADER_BYTES:
        raise ValueError(f"{path}: {len(content)} bytes are no file of llm.c; wanted is {wanted}")
    header = struct.unpack("<256i", content)
    if header[0] != magic:
        found = OTHER_MAGICS.get(header[0], "no file of llm.c")
        raise ValueError(f"{path}: is {found} (magic {header[0]}); wanted is {wanted} ({magic})")
    if header[1] not in version:
        known = " or ".join(map(str, version))
        raise ValueError(f"{path}: {wanted} of version {header[1]}; known is {known}")
    return header


def read_model_config(path: Path) -> tuple[GPTConfig, torch.dtype]:
    """Shape and dtype of a model file.

    Raises:
        ValueError: no GPT-2 of llm.c, or its size is not what its header says.
    """
    header = _read_header(path, MODEL_MAGIC, tuple(MODEL_VERSIONS))
    length, vocab_size, *shape, padded = header[2:8]
    dtype = MODEL_VERSIONS[header[1]]
    if (vocab_size, padded) != (VOCAB_SIZE, PADDED_VOCAB_SIZE):
        raise ValueError(
            f"{path}: a vocabulary of {vocab_size}, padded to {padded}; GPT-2's has {VOCAB_SIZE}, "
            f"padded to {PADDED_VOCAB_SIZE}"
        )
    if min(length, *shape) < 1 or shape[2] % shape[1]:
        raise ValueError(f"{path}: no shape of a model: {dict(zip(SHAPE, shape, strict=True))}")
    config = GPTConfig(*shape, length)
    _check_size(path, HEADER_BYTES + num_elements(config) * dtype.itemsize)
    return config, dtype


def read_model(path: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """A model file under our names; tensors are read from disk as they are used.

    Raises:
        ValueError: no GPT-2 of llm.c, cut short, or padding rows that are not 0.
    """
    config, dtype = read_model_config(path)
    weights = _split(_mapped(path, HEADER_BYTES, num_elements(config), dtype), config)
    _check_padding(weights["wte.weight"], config, path)
    return config, weights


def _mapped(path: Path, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """(count,) elements of a file, from byte `offset`; changes stay in memory."""
    kind = {torch.float32: "<f4", torch.bfloat16: "<i2"}[dtype]
    numbers = np.memmap(path, dtype=kind, mode="c", offset=offset, shape=(count,))
    return torch.from_numpy(numbers).view(dtype)


def _split(flat: torch.Tensor, config: GPTConfig) -> dict[str, torch.Tensor]:
    """Named views of the concatenated tensors."""
    return {
        name: flat[first : first + math.prod(shape)].view(shape)
        for name, first, shape in layout(config)
    }


def _check_size(path: Path, wanted: int) -> None:
    found = path.stat().st_size
    if found != wanted:
        fault = "cut short" if found < wanted else "too long"
        raise ValueError(
            f"{path}: {fault}, {found:,} bytes where its header makes it {wanted:,}; "
            "copy it here again"
        )


def _check_padding(table: torch.Tensor, config: GPTConfig, path: Path) -> None:
    if table[config.vocab_size :].any():
        raise ValueError(
            f"{path}: rows {config.vocab_size} on of the token table are padding and must be 0"
        )


# ---- optimizer state ------------------------------------------------------------------------


class OptimizerState(NamedTuple):
    """What the state files of all ranks hold together, under our names, float32."""

    step: int
    world_size: int
    moments: dict[str, torch.Tensor]
    squares: dict[str, torch.Tensor]
    master: dict[str, torch.Tensor] | None  # None: the run kept no fp32 copy of its weights


def state_path(model: Path, rank: int) -> Path:
    """State file of one rank beside a model_{step}.bin."""
    return model.with_name(f"state_{model.stem.rpartition('_')[2]}_{rank:05d}.bin")


def read_optimizer_state(model: Path) -> OptimizerState:
    """Merge the state files beside a model file, one a rank, into whole tensors.

    With ZeRO-1 a rank holds, tensor by tensor and layer by layer, its share of the flat tensor.

    Raises:
        ValueError: a file is missing, of another run or step, or cut short.
    """
    config, _ = read_model_config(model)
    first = _read_header(state_path(model, 0), STATE_MAGIC, (1,))
    world_size, has_master, step = first[2], bool(first[4]), first[10]
    if world_size < 1:
        raise ValueError(f"{state_path(model, 0)}: says that it is one of {world_size} ranks")
    parts = []
    for rank in range(world_size):
        path = state_path(model, rank)
        header = _read_header(path, STATE_MAGIC, (1,))
        found = (header[2], header[3], bool(header[4]), header[10])
        if found != (world_size, rank, has_master, step):
            raise ValueError(
                f"{path}: says world size, rank, master weights, step {found}; "
                f"wanted is {(world_size, rank, has_master, step)}, as in the files beside it"
            )
        parts.append(_state_buffers(path, header, config))
    merged = [_merge([part[i] for part in parts], config) for i in range(2 + has_master)]
    return OptimizerState(step, world_size, *merged, *([] if has_master else [None]))


def _state_buffers(path: Path, header: tuple[int, ...], config: GPTConfig) -> list[torch.Tensor]:
    """m, v, and the master weights if there are any, of one rank; whole or its share of each."""
    total, world_size, num_buffers = num_elements(config), header[2], 2 + bool(header[4])
    for count in dict.fromkeys((total // world_size, total)):
        end = HEADER_BYTES + 4 * num_buffers * count
        if path.stat().st_size == end + _order_bytes(path, end, bool(header[5])):
            buffers = _mapped(path, HEADER_BYTES, num_buffers * count, torch.float32)
            return list(buffers.split(count))
    raise ValueError(
        f"{path}: {path.stat().st_size:,} bytes do not fit a model of {total:,} elements on "
        f"{world_size} ranks; the file is cut short or belongs to another model"
    )


def _order_bytes(path: Path, offset: int, is_shuffled: bool) -> int:
    """Size of the data order that a state file of a shuffled run ends with; -1 if there is none."""
    if not is_shuffled:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        counts = []
        for _ in ("shards", "samples of a shard"):
            content = file.read(8)
            if len(content) < 8:
                return -1
            counts.append(struct.unpack("<Q", content)[0])
            if counts[-1] > path.stat().st_size:
                return -1
            file.seek(4 * counts[-1], os.SEEK_CUR)
    return 16 + 4 * sum(counts) + MT19937_BYTES


def _merge(shares: list[torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """Whole tensors of every rank's share; of equal whole buffers the first one's."""
    if len(shares[0]) == num_elements(config):
        return _split(shares[0], config)
    merged = {}
    world_size = len(shares)
    for name, first, shape in layout(config):
        if math.prod(shape) % world_size:
            raise ValueError(f"{name} of {math.prod(shape)} elements on {world_size} ranks")
        part = slice(first // world_size, (first + math.prod(shape)) // world_size)
        merged[name] = torch.cat([share[part] for share in shares]).view(shape)
    return merged
