"""Texts that an exported model writes, through transformers and its key-value cache."""

import json
import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from miniseries.data.shards import DOCUMENT_MARK
from miniseries.evaluation.huggingface import END_OF_TEXT, read_config
from miniseries.metrics import read_json, write_json, write_text
from miniseries.training.distributed import choose_device

MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]<>#|~&!])")
# characters that a byte-level model can write and that no text file should hold
CONTROL_SIGNS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class SamplingSettings:
    """How texts are drawn. A temperature of 0 always takes the likeliest token.

    Raises:
        ValueError: a value out of its range; names it.
    """

    num_samples: int
    max_new_tokens: int
    top_k: int  # 0: all tokens
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")


@dataclass(frozen=True)
class Samples:
    """What the model wrote after one prompt."""

    prompt: str
    num_prompt_tokens: int
    num_dropped_tokens: int  # at the prompt's start, where it does not fit the model
    num_new_tokens: int  # the most that each text may have
    texts: list[str]
    is_finished: list[bool]  # the model itself ended the text


class Generator:
    """A Hugging Face GPT-2 folder, loaded to write text.

    Raises:
        ValueError: not a GPT-2, or a folder whose weights are not all there.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
        from transformers import AutoTokenizer, GPT2LMHeadModel
        from transformers.utils import logging

        self.num_positions = read_config(folder).sequence_length
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model, report = GPT2LMHeadModel.from_pretrained(
                folder, local_files_only=True, dtype="auto", output_loading_info=True
            )
        except Exception as error:  # transformers and safetensors raise a dozen kinds
            raise ValueError(f"{folder}: cannot be loaded by transformers ({error})") from error
        wrong = {name: keys for name, keys in report.items() if keys}
        if wrong:
            raise ValueError(f"{folder}: its weights do not fit its configuration: {wrong}")
        self.model.to(device).eval()
        self.device = device

    @torch.no_grad()
    def write(self, prompt: str, settings: SamplingSettings) -> Samples:
        """Continue one prompt; the same settings on the same machine give the same texts.

        An empty prompt is the start of a document. A prompt that leaves too little room loses
        tokens at its start, and new tokens end where the model's positions end.
        """
        ids = self.tokenizer(prompt)["input_ids"] or [DOCUMENT_MARK]
        room = min(settings.max_new_tokens, self.num_positions // 2)
        kept = ids[-(self.num_positions - room) :]
        num_new = min(settings.max_new_tokens, self.num_positions - len(kept))
        drawn = settings.temperature > 0
        choice = {"top_k": settings.top_k, "temperature": settings.temperature} if drawn else {}
        tokens = torch.tensor([kept] * settings.num_samples, device=self.device)
        # each prompt starts from the seed: its texts do not depend on the prompts before it
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(settings.seed)
            written = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_new,
                do_sample=drawn,
                pad_token_id=DOCUMENT_MARK,
                **choice,
            )
        rows = [row[len(kept) :] for row in written.tolist()]
        ends = [row.index(DOCUMENT_MARK) if DOCUMENT_MARK in row else None for row in rows]
        return Samples(
            prompt=prompt,
            num_prompt_tokens=len(kept),
            num_dropped_tokens=len(ids) - len(kept),
            num_new_tokens=num_new,
            texts=[self.tokenizer.decode(r[:end]) for r, end in zip(rows, ends, strict=True)],
            is_finished=[end is not None for end in ends],
        )


def text_block(text: str) -> str:
    """A Markdown block that shows any text as it is; control characters become U+FFFD."""
    text = CONTROL_SIGNS.sub("\N{REPLACEMENT CHARACTER}", text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}\n"


def _quoted(prompt: str) -> str:
    if not prompt:
        return f"> *no prompt: the text starts at `{END_OF_TEXT}`*\n"
    lines = CONTROL_SIGNS.sub("\N{REPLACEMENT CHARACTER}", prompt).split("\n")
    escaped = [MARKDOWN_SIGNS.sub(r"\\\1", line.strip()) for line in lines]
    return "".join(f"> **{line}**\n" if line else ">\n" for line in escaped)


def _prompt_section(samples: Samples, settings: SamplingSettings) -> str:
    parts = [f"## Prompt\n\n{_quoted(samples.prompt)}"]
    if samples.num_dropped_tokens:
        parts.append(
            f"The prompt is longer than the model's positions allow: its first "
            f"{samples.num_dropped_tokens} tokens are left out.\n"
        )
    if samples.num_new_tokens < settings.max_new_tokens:
        parts.append(
            f"After {samples.num_prompt_tokens} tokens of prompt there is room for "
            f"{samples.num_new_tokens} new tokens, not {settings.max_new_tokens}.\n"
        )
    pairs = zip(samples.texts, samples.is_finished, strict=True)
    for number, (text, finished) in enumerate(pairs, start=1):
        end = f" (ended by the model with `{END_OF_TEXT}`)" if finished else ""
        parts.append(f"### Text {number}{end}\n\n{text_block(text)}")
    return "\n".join(parts)


def samples_markdown(
    info: dict[str, Any], settings: SamplingSettings, samples: list[Samples]
) -> str:
    """Content of samples.md.

    Args:
        info: rows of the table at the top, which the sampling settings follow.
    """
    rows = info | vars(settings)
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    head = f"# Texts written by {info['model']}\n\n| what | value |\n|---|---|\n{table}"
    return "\n".join([head, *(_prompt_section(s, settings) for s in samples)])


def read_prompts(text: str, file: Path | None = None) -> list[str]:
    """Prompts from a JSON list; from a file instead, if there is one.

    Args:
        text: a JSON list of texts.
        file: a .json file with such a list, or a text in which blank lines part the prompts.

    Raises:
        ValueError: not a list of texts, or an empty one.
    """
    if file and file.suffix != ".json":
        blocks = re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
        text = json.dumps([block.strip("\n") for block in blocks if block.strip()])
    elif file:
        text = file.read_text(encoding="utf-8")
    where = file or "--prompts"
    try:
        prompts = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): {text}") from None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError(f'{where} must be a JSON list of texts, as ["Once", ""]: {text}')
    return prompts


def write_samples(
    export: Path,
    prompts: str,
    output: Path,
    json_output: Path,
    prompts_file: Path | None = None,
    device: str = "auto",
    **settings: Any,
) -> None:
    """Continue every prompt and write the texts as Markdown and as JSON.

    Args:
        export: a Hugging Face GPT-2 folder.
        prompts: a JSON list of texts.
        prompts_file: see `read_prompts`.
        settings: the fields of `SamplingSettings`.

    Raises:
        ValueError: bad prompts or settings, or a folder that cannot be loaded.
    """
    texts, how = read_prompts(prompts, prompts_file), SamplingSettings(**settings)
    generator = Generator(export, choose_device(device))
    described = export / "export.json"
    known = read_json(described) if described.exists() else {}
    keys = ("run", "step", "dataset", "num_parameters", "dtype", "weights_sha256")
    info = {"model": export.resolve().name} | {key: known[key] for key in keys if key in known}
    samples = [generator.write(text, how) for text in texts]
    write_text(output, samples_markdown(info, how, samples))
    write_json(json_output, {**info, "settings": vars(how), "samples": [vars(s) for s in samples]})


def side_by_side_html(models: list[dict[str, Any]]) -> str:
    """One table a prompt: a column a model, a row for each of its texts.

    Args:
        models: contents of the JSON files of `write_samples`.

    Raises:
        ValueError: the models were given other prompts or were sampled otherwise.
    """
    first = models[0]
    prompts = [sample["prompt"] for sample in first["samples"]]
    for model in models:
        same = [sample["prompt"] for sample in model["samples"]] == prompts
        if not same or model["settings"] != first["settings"]:
            raise ValueError(
                f"the texts of {model['model']} and {first['model']} have other prompts or "
                "settings; delete them to have them written again"
            )
    parts = [SIDE_BY_SIDE_HEAD]
    names = "".join(f"<th>{escape(model['model'])}</th>" for model in models)
    for number, prompt in enumerate(prompts):
        columns = [model["samples"][number]["texts"] for model in models]
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(_shown(text))}</td>" for text in row) + "</tr>"
            for row in zip(*columns, strict=True)
        )
        quoted = escape(prompt) or "<em>no prompt</em>"
        parts.append(f"<blockquote>{quoted}</blockquote><table><tr>{names}</tr>{rows}</table>")
    how = ", ".join(f"{key} {value}" for key, value in first["settings"].items())
    return "\n".join([*parts, f"<p>{escape(how)}</p>\n"])


SIDE_BY_SIDE_HEAD = """<!DOCTYPE html><meta charset="utf-8"><title>Side by side</title><style>
body { font-family: sans-serif; margin: 1em } table { table-layout: fixed; width: 100% }
td { font-family: serif; padding: 0.5em 1em; vertical-align: top; white-space: pre-wrap }
tr:nth-child(even) { background: #f0f0f0 }
</style><h1>The same prompts, side by side</h1>"""


def _shown(text: str) -> str:
    return CONTROL_SIGNS.sub("\N{REPLACEMENT CHARACTER}", text)


def compare_samples(files: list[Path], output: Path) -> None:
    """Write the texts of several models as one page.

    Args:
        files: JSON of `write_samples`, one a model.
        output: written, HTML.

    Raises:
        ValueError: as `side_by_side_html`, or a damaged file.
    """
    write_text(output, side_by_side_html([read_json(file) for file in files]))


def talk(export: Path, prompt: str | None, device: str = "auto", **settings: Any) -> None:
    """Continue one prompt, or each line typed at the terminal, and print the texts.

    Args:
        export: a Hugging Face GPT-2 folder.
        prompt: None asks for prompts until the end of the input.
        settings: the fields of `SamplingSettings`.

    Raises:
        ValueError: bad settings, or a folder that cannot be loaded.
    """
    how = SamplingSettings(**settings)
    generator = Generator(export, choose_device(device))
    while True:
        try:
            asked = input("prompt> ") if prompt is None else prompt
        except (EOFError, KeyboardInterrupt):
            print()
            return
        for text in generator.write(asked, how).texts:
            print(f"{asked}{_shown(text)}\n---", flush=True)
        if prompt is not None:
            return
