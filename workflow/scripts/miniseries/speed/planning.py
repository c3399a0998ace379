"""What a run will take before it is paid for: memory, micro-batch, hours, dollars, disk.

Letters: C channels, L layers, T tokens of a sequence, N parameters with padding, W processes.
Memory follows from what the trainer keeps; speed from three rates, measured on an H200 and scaled
by a device's published peaks. Tests compare both with `benchmarks/`.
"""

from pathlib import Path
from typing import Any

from miniseries.data.shards import HEADER_BYTES, PADDED_VOCAB_SIZE
from miniseries.markdown import markdown_table, number
from miniseries.metrics import write_text
from miniseries.settings import checkpoints_held
from miniseries.shapes import num_elements, num_parameters
from miniseries.training.devices import DEVICES
from miniseries.training.microbatch import largest_divisor, windows_per_process

GIBIBYTE = 1 << 30
HEAD_ROWS = 16384  # rows whose logits exist at once on a GPU, see formulas.chunk_rows
# Elements of C that a layer keeps for its backward, for each token, by `recompute`: two residual
# sums 2, their norms 2, queries keys values 3, attention 1, before GELU 4 and after it 4. 1 drops
# GELU, 2 the norms as well, and fp8 both in any case; a test holds all of them against the kernels
KEPT_ELEMENTS = {"bf16": (16, 12, 10), "fp8": (10, 10, 10)}
# Where GELU is made again within a product (`fused_products`), 0 keeps no more than 1: bf16, on
# these, with the extra `gpu`
FUSED_ON = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200")
# Elements of C a token that the backward of one layer and the ends of the model hold for a moment:
# fitted to the measured peaks
PASSING_ELEMENTS = 5
# Share of a GPU's memory that a run may take: the rest is for CUDA, cuBLAS, and fragments
USABLE_SHARE = 0.92
# Rates as shares of a device's bf16 peak and memory bandwidth, fitted to the H200's steps of
# afc9fc0 and 697d9bb (LOG.md): matrix products, attention (half its square), all else by bytes
MATMUL_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE = 0.70, 0.45, 0.50
# Time of a layer's products in fp8, with what it takes to get there, by their time in bf16:
# between `1558m`'s 0.69 and `124m`'s 0.90
FP8_TIME = 0.75
# Seconds that Python takes for a layer in the first micro-step of a step, and in a later one: the
# device waits when there is less to compute. From `124m`'s step of one micro-batch and from the
# ladder's of eight (commit 697d9bb)
PYTHON_SECONDS = {"bf16": (0.0050, 0.0039), "fp8": (0.0081, 0.0063)}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
SHARD_TOKENS = 100_000_000  # of a full shard on the hub
CHECKPOINT_BYTES = 12  # a parameter: master weight and AdamW's two moments, fp32


def grad_accum_steps(recipe: dict[str, Any], micro_batch: int, processes: int) -> int:
    """Micro-steps of one step; 0 when the batch cannot be shared so."""
    windows = recipe["total_batch_tokens"] // recipe["sequence_length"]
    share, rest = divmod(windows, processes)
    return 0 if rest or share % micro_batch else share // micro_batch


def memory_parts(
    recipe: dict[str, Any],
    micro_batch: int,
    processes: int = 1,
    recompute: int = 0,
    fused: bool = False,
) -> dict[str, float]:
    """GiB that one GPU holds at the peak of a step, compiled, with this project's kernels.

    Args:
        recipe: of a run's settings.
        micro_batch: sequences at once.
        recompute: 0, 1, or 2, as the machine's setting.
        fused: whether the products make GELU again on their way.
    """
    size, channels = ELEMENT_BYTES[recipe["precision"]], recipe["channels"]
    elements, tokens = num_elements(recipe), micro_batch * recipe["sequence_length"]
    accumulates = grad_accum_steps(recipe, micro_batch, processes) != 1
    fused = fused and recipe["precision"] == "bf16"
    by_level = KEPT_ELEMENTS["fp8" if recipe["precision"] == "fp8" else "bf16"]
    kept = by_level[max(recompute, int(fused))]
    logits = min(tokens, HEAD_ROWS) * PADDED_VOCAB_SIZE * size
    head = PADDED_VOCAB_SIZE * channels
    own = 4 if recipe.get("master_weights", True) else size
    parts = {
        "master_weights": own * elements / processes,
        "optimizer_state": 8 * elements / processes,
        "weights": size * elements,
        "gradients": 4 * elements / (1 if accumulates else processes),
        "activations": size * kept * channels * tokens * recipe["num_layers"],
        "passing": size * PASSING_ELEMENTS * channels * tokens,
        "classifier": logits + (4 + 2 * size) * head,
    }
    return {name: count / GIBIBYTE for name, count in parts.items()}


def peak_gib(recipe: dict[str, Any], micro_batch: int, processes: int = 1, **more: int) -> float:
    """Predicted peak of allocated memory of one GPU, GiB; arguments as for `memory_parts`."""
    return sum(memory_parts(recipe, micro_batch, processes, **more).values())


def largest_micro_batch(
    recipe: dict[str, Any], memory_gib: float, processes: int = 1, **more: int
) -> int | None:
    """Largest power of two of sequences that fits and divides the batch; None if not even one."""
    fitting = None
    for micro_batch in (2**power for power in range(13)):
        if not grad_accum_steps(recipe, micro_batch, processes):
            break
        if peak_gib(recipe, micro_batch, processes, **more) > USABLE_SHARE * memory_gib:
            break
        fitting = micro_batch
    return fitting


def counted_bytes(
    recipe: dict[str, Any], micro_batch: int, processes: int = 1
) -> dict[str, dict[str, float]]:
    """Bytes that one GPU has to read and write in a step, by phase, were nothing read twice.

    Products count their two inputs and their result; a chain of elementwise work one reading and
    one writing. What the caches save or spoil is not in it: a lower bound, not a measurement.

    Returns:
        phase -> `products` and `others`, bytes a step.
    """
    size, channels = ELEMENT_BYTES[recipe["precision"]], recipe["channels"]
    tokens = recipe["total_batch_tokens"] // processes
    micro_steps = max(1, grad_accum_steps(recipe, micro_batch, processes))
    row = size * channels * tokens  # one pass over the residual stream
    stream = row * recipe["num_layers"]
    matrices = size * 12 * channels**2 * recipe["num_layers"] * micro_steps
    logits = size * PADDED_VOCAB_SIZE * tokens
    head = size * PADDED_VOCAB_SIZE * channels * micro_steps
    elements = num_elements(recipe)
    return {
        "encoder": {"products": 0.0, "others": 3.0 * row},
        # qkv 1+3, attention 3+1, projection 1+1, fc 1+4, projection 4+1; two norms of 4, GELU 4+4
        "forward": {"products": 20.0 * stream + matrices, "others": 16.0 * stream},
        # logits are written, read and replaced by their gradient, read twice for both products
        "classifier": {"products": 3.0 * logits + 4.0 * row + 3 * head, "others": 2.0 * logits},
        # each product twice, for its input and its weights; attention 5+3; norms 4+4, GELU
        # 8+4, sums of biases 5
        "backward": {"products": 40.0 * stream + 2 * matrices, "others": 25.0 * stream},
        # micro-steps after the first add to fp32; norm and clipping 12, AdamW 28, cast 4 + size
        "optimizer": {
            "products": 0.0,
            "others": (size + 8.0) * elements * (micro_steps - 1)
            + 40.0 * elements / processes
            + (4.0 + size) * elements,
        },
    }


def tokens_per_second(
    recipe: dict[str, Any], micro_batch: int, device: str, processes: int = 1
) -> float | None:
    """Predicted speed of all processes together; None where no rate is known for the precision."""
    if recipe["precision"] not in ("bf16", "fp16", "fp8") or device not in DEVICES:
        return None
    place = DEVICES[device]
    peak = place.bf16_tflops * 1e12
    tokens = recipe["total_batch_tokens"] / processes
    layers, channels = recipe["num_layers"], recipe["channels"]
    in_layers = 6 * 12 * layers * channels**2 * tokens
    in_layers *= FP8_TIME if recipe["precision"] == "fp8" else 1
    in_products = in_layers + 6 * PADDED_VOCAB_SIZE * channels * tokens
    # half of the square forward, two and a half times that backward
    in_attention = 7 * layers * channels * recipe["sequence_length"] * tokens
    others = sum(part["others"] for part in counted_bytes(recipe, micro_batch, processes).values())
    seconds = in_products / (MATMUL_SHARE * peak) + in_attention / (ATTENTION_SHARE * peak)
    seconds += others / (BANDWIDTH_SHARE * place.terabytes_per_second * 1e12)
    later = max(0, grad_accum_steps(recipe, micro_batch, processes) - 1)
    first, each = PYTHON_SECONDS["fp8" if recipe["precision"] == "fp8" else "bf16"]
    at_least = layers * (first + later * each)
    # two GPUs take half the time of one (LOG.md); that more do so is an assumption
    return recipe["total_batch_tokens"] / max(seconds, at_least)


def plan_row(
    settings: dict[str, Any], device: str, gpus: int, price: float | None
) -> dict[str, Any]:
    """What one run takes on so many GPUs of a kind.

    Args:
        price: dollars an hour of one GPU; None if unknown.

    Returns:
        micro_batch: the run's, or the largest that fits; None where nothing fits, with what
        follows; whether so many processes can share a batch; the peak and speed that go with it;
        hours and dollars of the training steps alone.
    """
    recipe, machine = settings["recipe"], settings["machine"]
    more = {"recompute": machine.get("recompute", 0), "fused": device in FUSED_ON}
    largest = largest_micro_batch(recipe, DEVICES[device].memory_gib, gpus, **more)
    row = {"run": settings["run"], "device": device, "gpus": gpus, "micro_batch": None}
    row |= {"largest_micro_batch": largest, "peak_gib": None, "tokens_per_second": None}
    row |= {"hours": None, "dollars": None}
    row["can_share"] = grad_accum_steps(recipe, 1, gpus) > 0
    if largest is None:
        return row
    wanted = machine["micro_batch"]
    micro_batch = largest
    if wanted != "auto":
        windows = windows_per_process(recipe, gpus)
        micro_batch = largest_divisor(min(wanted, largest), windows)
    speed = tokens_per_second(recipe, micro_batch, device, gpus)
    row |= {"micro_batch": micro_batch, "tokens_per_second": speed}
    row["peak_gib"] = peak_gib(recipe, micro_batch, gpus, **more)
    if speed:
        row["hours"] = recipe["total_batch_tokens"] * recipe["max_steps"] / speed / 3600
        row["dollars"] = None if price is None else row["hours"] * gpus * price
    return row


def needs(settings: dict[str, Any]) -> dict[str, Any]:
    """What a run takes on any machine: tokens, disk, and what the data are to the model."""
    recipe = settings["recipe"]
    parameters = num_parameters(recipe)
    tokens = recipe["total_batch_tokens"] * recipe["max_steps"]
    checkpoint_bytes = CHECKPOINT_BYTES * num_elements(recipe)  # padding rows, too
    shards = recipe["data"].get("num_shards")
    size = recipe["data"].get("shard_tokens", SHARD_TOKENS)
    return {
        "run": settings["run"],
        "num_parameters": parameters,
        "tokens": tokens,
        "tokens_per_parameter": tokens / parameters,
        "epochs": None if shards is None else tokens / (shards * size),
        "checkpoint_gb": checkpoint_bytes * checkpoints_held(settings) / 1e9,
        # tokens are uint16
        "data_gb": None if shards is None else (shards + 1) * (HEADER_BYTES + 2 * size) / 1e9,
    }


# ---- as text --------------------------------------------------------------------------------


def _hours(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.1f} h" if value < 72 else f"{value / 24:.1f} days"


def _micro_batch(row: dict[str, Any]) -> str:
    if row["micro_batch"] is None:
        return "does not fit" if row["can_share"] else "cannot share the batch"
    return f"{row['micro_batch']}"


def plan_text(runs: list[dict[str, Any]], gpus: list[int], prices: dict[str, float | None]) -> str:
    """The plan of some runs as Markdown: what each takes anywhere, and on each kind of GPU."""
    anywhere = [
        {
            "run": row["run"],
            "parameters": f"{row['num_parameters']:,}",
            "tokens": f"{row['tokens'] / 1e9:.2f} B",
            "tokens a parameter": f"{row['tokens_per_parameter']:.0f}",
            "20 a parameter": f"{20 * row['num_parameters'] / 1e9:.1f} B",
            "times over the data": number(row["epochs"], ".2f"),
            "data": "n/a" if row["data_gb"] is None else f"{row['data_gb']:,.0f} GB",
            "checkpoints": number(row["checkpoint_gb"], ",.1f") + " GB",
        }
        for row in map(needs, runs)
    ]
    rows = [
        plan_row(settings, device, count, price)
        for settings in runs
        for device, price in prices.items()
        for count in gpus
    ]
    paid = [
        {
            "run": row["run"],
            "GPUs": f"{row['gpus']} x {row['device'].removeprefix('NVIDIA ')}",
            "micro-batch": _micro_batch(row),
            "largest": number(row["largest_micro_batch"]),
            "peak": "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB",
            "tokens/s": number(row["tokens_per_second"]),
            "training": _hours(row["hours"]),
            "dollars": number(row["dollars"]),
        }
        for row in rows
    ]
    return (
        "# Plan\n\nTraining steps alone, predicted: evaluation, checkpoints, and starts come on "
        "top. More than two GPUs are\nan assumption; without NVLink they are slower than it says. "
        "`largest` is the largest micro-batch that\nfits and divides a GPU's share of the batch. "
        "Parameters are counted without the rows that\npad the token table.\n\n"
        f"{markdown_table(anywhere)}\n{markdown_table(paid)}"
    )


def write_plan(
    runs: list[dict[str, Any]],
    gpus: list[int],
    prices: dict[str, float | None],
    output: Path,
) -> None:
    """Write the plan, and print it.

    Raises:
        ValueError: a device is not known.
    """
    unknown = sorted(set(prices) - set(DEVICES))
    if unknown:
        raise ValueError(
            f"plan.prices: nothing is known of {', '.join(unknown)}; known: {', '.join(DEVICES)}"
        )
    text = plan_text(runs, gpus, prices)
    write_text(output, text)
    print(text)
