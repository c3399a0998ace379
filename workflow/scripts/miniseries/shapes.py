"""Shapes of the GPT-2 and GPT-3 series by the names that llm.c gives them, and their sizes."""

from typing import Any

from miniseries.data.shards import PADDED_VOCAB_SIZE, VOCAB_SIZE

# layers, heads, channels. GPT-2 paper table 2 for d12 to d48; the others are llm.c's
# (`train_gpt2.cu`): wider or deeper ones that OpenAI never trained
GPT2 = {
    "d6": (6, 6, 384),
    "d12": (12, 12, 768),
    "d24": (24, 16, 1024),
    "d36": (36, 20, 1280),
    "d48": (48, 25, 1600),
    "d60": (60, 30, 1920),
    "d72": (72, 30, 2880),
    "d84": (84, 36, 3456),
}
# GPT-3 paper table 2.1; heads as llm.c where the table's heads do not fit the width (1.3B has 24
# of 128 there), and 5,120 channels for 13B, which its 40 heads of 128 make (the table says 5,140)
GPT3 = {
    "c384": (6, 6, 384),
    "c768": (12, 12, 768),
    "c1024": (24, 16, 1024),
    "c1536": (24, 16, 1536),
    "c2048": (24, 16, 2048),
    "c2560": (32, 32, 2560),
    "c4096": (32, 32, 4096),
    "c5120": (40, 40, 5120),
    "c12288": (96, 96, 12288),
}
CONTEXT = {"gpt2": 1024, "gpt3": 2048}  # tokens, the same papers
MODELS = {f"gpt2:{name}": shape for name, shape in GPT2.items()}
MODELS |= {f"gpt3:{name}": shape for name, shape in GPT3.items()}


def keys_of_model(name: str) -> dict[str, int]:
    """The keys of a run that a model's name stands for; the name must be one of MODELS."""
    keys = ("num_layers", "num_heads", "channels", "sequence_length")
    return dict(zip(keys, (*MODELS[name], CONTEXT[name.partition(":")[0]]), strict=True))


def num_elements(recipe: dict[str, Any]) -> int:
    """Parameters of the model, padding of the vocabulary included."""
    channels, layers = recipe["channels"], recipe["num_layers"]
    positions = recipe.get("num_positions") or recipe["sequence_length"]
    embeddings = (PADDED_VOCAB_SIZE + positions) * channels
    return embeddings + layers * (12 * channels**2 + 13 * channels) + 2 * channels


def num_parameters(recipe: dict[str, Any]) -> int:
    """Parameters of the published model: padding rows of the token table are not counted."""
    return num_elements(recipe) - (PADDED_VOCAB_SIZE - VOCAB_SIZE) * recipe["channels"]


def flops_per_step(recipe: dict[str, Any]) -> int:
    """Floating point operations of a step's products by weights; attention's come on top.

    6 a weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1).
    """
    return 6 * num_elements(recipe) * recipe["total_batch_tokens"]
