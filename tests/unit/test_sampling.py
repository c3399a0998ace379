"""Texts by the exported model: reproducible, inside the vocabulary, and readable as Markdown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miniseries.data.encode import gpt2_encoding
from miniseries.evaluation import sampling
from miniseries.evaluation.huggingface import huggingface_config, to_huggingface, write_tokenizer
from miniseries.evaluation.sampling import (
    Generator,
    Samples,
    SamplingSettings,
    read_prompts,
    samples_markdown,
    side_by_side_html,
    talk,
    text_block,
    write_samples,
)
from miniseries.model.gpt import GPT, GPTConfig

torch.set_num_threads(1)

CPU = torch.device("cpu")
CONFIG = GPTConfig(num_layers=2, num_heads=2, channels=16, sequence_length=32)
UNICORN = (
    "In a shocking finding, scientist discovered a herd of unicorns living in a remote, "
    "previously unexplored valley, in the Andes Mountains. Even more surprising to the "
    "researchers was the fact that the unicorns spoke perfect English."
)


def how(num_samples=2, max_new_tokens=8, top_k=50, temperature=1.0, seed=42):
    return SamplingSettings(num_samples, max_new_tokens, top_k, temperature, seed)


def make_model():
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln_" in f".{name}" else 0.0, 0.3)
        model.wte.weight[50257:] = 0
    return model


def write_export(folder, model):
    folder.mkdir()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    converted = to_huggingface(weights, CONFIG, torch.float32)
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(CONFIG, "float32")))
    write_tokenizer(folder, CONFIG.sequence_length)
    info = {"run": "small", "step": 10, "weights_sha256": "ab12"}
    (folder / "export.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    return write_export(tmp_path_factory.mktemp("export") / "small", model)


@pytest.fixture(scope="module")
def generator(folder):
    return Generator(folder, CPU)


def test_the_same_seed_gives_the_same_texts_and_another_seed_others(generator):
    first = generator.write("The cat", how())
    torch.rand(7)  # the state of the global generator plays no part
    assert generator.write("The cat", how()) == first
    assert generator.write("The cat", how(seed=43)).texts != first.texts
    assert len(set(first.texts)) == 2


def test_sampling_leaves_the_global_generator_alone(generator):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    generator.write("The cat", how())
    assert torch.equal(torch.rand(3), expected)


def test_the_cache_gives_what_a_full_pass_for_every_token_gives(generator, model):
    ids = gpt2_encoding().encode_ordinary("The cat sat")
    for _ in range(10):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    written = generator.write("The cat sat", how(1, 10, temperature=0.0))
    assert written.texts == [gpt2_encoding().decode(ids[3:])]


def test_no_id_outside_the_vocabulary_ever_comes_out(generator):
    seen = []
    decode = generator.tokenizer.decode
    generator.tokenizer.decode = lambda ids: seen.extend(ids) or decode(ids)
    try:
        generator.write("", how(66, 31, top_k=0, temperature=2.0))
    finally:
        del generator.tokenizer.decode
    assert len(seen) > 2000
    assert max(seen) < 50257


def test_an_empty_prompt_starts_a_document(generator, model):
    written = generator.write("", how(1, 1, temperature=0.0))
    with torch.no_grad():
        best = model(torch.tensor([[50256]]))[0, -1].argmax().item()
    assert written.texts == [gpt2_encoding().decode([best])]
    assert (written.num_prompt_tokens, written.num_dropped_tokens) == (1, 0)


def test_new_tokens_end_where_the_positions_end(generator):
    written = generator.write("The cat sat", how(max_new_tokens=500))
    assert (written.num_prompt_tokens, written.num_new_tokens) == (3, 29)


def test_a_prompt_longer_than_the_model_keeps_its_end(generator):
    num_tokens = len(gpt2_encoding().encode_ordinary(UNICORN))
    written = generator.write(UNICORN, how(max_new_tokens=500))
    assert num_tokens > 32
    assert (written.num_prompt_tokens, written.num_new_tokens) == (16, 16)
    assert written.num_dropped_tokens == num_tokens - 16
    end = gpt2_encoding().decode(gpt2_encoding().encode_ordinary(UNICORN)[-16:])
    assert generator.write(end, how(max_new_tokens=500)).texts == written.texts


def test_a_text_that_the_model_ends_is_cut_there(tmp_path):
    model = make_model()
    with (
        torch.no_grad()
    ):  # the last norm's output is the row of <|endoftext|>, whatever came before
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(100 * model.wte.weight[50256])
        model.wte.weight[50256] *= 3
    generator = Generator(write_export(tmp_path / "ends", model), CPU)
    written = generator.write("The cat", how())
    assert written.texts == ["", ""]
    assert written.is_finished == [True, True]


def test_the_file_holds_model_settings_prompts_and_texts(folder, tmp_path):
    output = tmp_path / "samples" / "small.md"
    prompts = json.dumps([UNICORN, ""])
    settings = {
        "num_samples": 2, "max_new_tokens": 500, "top_k": 50, "temperature": 1.0, "seed": 42
    }  # fmt: skip
    write_samples(folder, prompts, output, tmp_path / "s.json", device="cpu", **settings)
    text = output.read_text()
    assert text.startswith("# Texts written by small\n")
    for row in ("| step | 10 |", "| weights_sha256 | ab12 |", "| top_k | 50 |", "| seed | 42 |"):
        assert row in text
    assert f"> **{UNICORN}**" in text
    assert "its first" in text and "tokens are left out" in text
    assert "room for 31 new tokens, not 500" in text
    assert "starts at `<|endoftext|>`" in text
    assert text.count("```text\n") == 4
    again = tmp_path / "again.md", tmp_path / "again.json"
    write_samples(folder, prompts, *again, device="cpu", **settings)
    assert (tmp_path / "again.md").read_text() == text


def test_texts_with_backticks_and_control_characters_stay_inside_their_block():
    assert text_block("a\n````\nb") == "`````text\na\n````\nb\n`````\n"
    assert text_block("a\x00b\x1b[0m\r\tc") == "```text\na\ufffdb\ufffd[0m\ufffd\tc\n```\n"


def test_a_prompt_with_markdown_signs_and_lines_is_shown_as_it_is():
    samples = Samples("# *a*\n\n<b>", 4, 0, 8, ["x"], [True])
    text = samples_markdown({"model": "m"}, how(), [samples])
    assert "> **\\# \\*a\\***\n>\n> **\\<b\\>**\n" in text
    assert "### Text 1 (ended by the model with `<|endoftext|>`)" in text


@pytest.mark.parametrize("prompts", ["unicorn", '"unicorn"', "[]", "[1]", '{"a": 1}'])
def test_prompts_must_be_a_list_of_texts(prompts):
    with pytest.raises(ValueError, match="--prompts"):
        read_prompts(prompts)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_samples", 0), ("max_new_tokens", 0), ("top_k", -1), ("temperature", -0.1)],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        how(**{name: value})


def test_a_folder_whose_weights_do_not_fit_is_refused(tmp_path, model):
    folder = write_export(tmp_path / "holed", model)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.ln_2.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit its configuration.*h\.1\.ln_2\.bias"):
        Generator(folder, CPU)
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="cannot be loaded by transformers"):
        Generator(folder, CPU)


def test_the_command_writes_the_file_and_stays_quiet(folder, tmp_path):
    script = Path(sampling.__file__).parents[2] / "write_samples.py"
    arguments = ["--export", folder, "--prompts", '["The cat"]', "--output", tmp_path / "s.md"]
    arguments += ["--json", tmp_path / "s.json"]
    arguments += ["--num-samples", 1, "--max-new-tokens", 4, "--top-k", 50, "--temperature", 0.9]
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments), "--seed", "1", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "> **The cat**" in (tmp_path / "s.md").read_text()


def test_prompts_come_from_a_file_of_either_kind(tmp_path):
    (tmp_path / "p.txt").write_text("Once upon\na time\n\n\nThe cat\n")
    assert read_prompts("[]", tmp_path / "p.txt") == ["Once upon\na time", "The cat"]
    (tmp_path / "p.json").write_text('["", "x"]')
    assert read_prompts("[]", tmp_path / "p.json") == ["", "x"]
    (tmp_path / "p.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"p\.txt must be a JSON list of texts"):
        read_prompts("[]", tmp_path / "p.txt")


def test_texts_of_two_models_stand_side_by_side(tmp_path):
    settings = {"num_samples": 2, "seed": 42}
    sample = {"prompt": "A <b>cat</b>", "texts": ["one <i>", "two"]}
    first = {"model": "ours", "settings": settings, "samples": [sample]}
    second = {"model": "gpt2", "settings": settings, "samples": [sample | {"texts": ["3", "4"]}]}
    page = side_by_side_html([first, second])
    assert "<th>ours</th><th>gpt2</th>" in page and "A &lt;b&gt;cat" in page
    assert "<tr><td>one &lt;i&gt;</td><td>3</td></tr><tr><td>two</td><td>4</td></tr>" in page
    with pytest.raises(ValueError, match="of gpt2 and ours have other prompts or settings"):
        side_by_side_html([first, second | {"settings": settings | {"seed": 1}}])


def test_one_prompt_or_every_typed_line_is_continued(folder, monkeypatch, capsys):
    settings = vars(how(1, 3))
    talk(folder, "The cat", "cpu", **settings)
    once = capsys.readouterr().out
    assert once.startswith("The cat") and once.endswith("---\n")
    lines = iter(["The cat"])

    def typed(_sign):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    talk(folder, None, "cpu", **settings)
    assert capsys.readouterr().out == once + "\n"
