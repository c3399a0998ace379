"""Starts from other weights: every kind of source gives the very weights that are in it."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from stand_ins import TRAIN_SCRIPT, losses, make_dataset, make_settings, train_command, train_here
from test_llmc import PARTS, made_weights, write_states
from transformers import GPT2Config, GPT2LMHeadModel

from miniseries.evaluation.export import export_model
from miniseries.evaluation.huggingface import load_export, read_weights, to_huggingface
from miniseries.evaluation.llmc import write_model
from miniseries.metrics import read_json, read_metrics
from miniseries.model.gpt import GPT, GPTConfig
from miniseries.training import pretrained
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights
from miniseries.training.pretrained import (
    fetch_weights,
    freeze_start,
    import_llmc,
    load_start,
    read_start,
    start_sha256,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = GPTConfig(num_layers=2, num_heads=2, channels=16, sequence_length=32)


@pytest.fixture(scope="module")
def reference():
    """A GPT-2 of transformers in place of OpenAI's; no norm is 1 and no bias 0."""
    torch.manual_seed(3)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


@pytest.fixture
def safetensors_folder(tmp_path, reference):
    reference.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def old_folder(folder):
    """As OpenAI's models were published first: one pickle, no prefix, masks, the head as well."""
    weights = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    weights["lm_head.weight"] = weights["wte.weight"]
    weights["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_parts(folder):
    """Weights in two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for part in set(place.values()):
        save_file({n: t for n, t in weights.items() if place[n] == part}, folder / part)
    index = {"weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def logits_of(weights, tokens):
    model = GPT(CONFIG)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("change", [lambda folder: None, old_folder, in_parts])
def test_a_folder_of_any_age_gives_the_reference_s_logits(safetensors_folder, reference, change):
    change(safetensors_folder)
    config, weights = read_start(safetensors_folder / "config.json")
    assert config == CONFIG
    assert not weights["wte.weight"][50257:].any()
    tokens = torch.randint(50257, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = reference(tokens).logits
    torch.testing.assert_close(logits_of(weights, tokens), wanted, rtol=0, atol=1e-4)
    assert len(start_sha256(safetensors_folder / "config.json")) == 64


def test_a_head_of_its_own_is_refused(safetensors_folder):
    old_folder(safetensors_folder)
    path = safetensors_folder / "pytorch_model.bin"
    weights = torch.load(path)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    torch.save(weights, path)
    with pytest.raises(ValueError, match="its head is not tied"):
        read_weights(safetensors_folder)


def test_a_damaged_pickle_and_a_missing_part_are_named(safetensors_folder):
    in_parts(safetensors_folder)
    (safetensors_folder / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1\.safetensors missing, which model"):
        read_weights(safetensors_folder)
    (safetensors_folder / "model.safetensors.index.json").unlink()
    (safetensors_folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: damaged .*get it again"):
        read_weights(safetensors_folder)


def test_a_llama_is_refused_in_one_line(safetensors_folder):
    content = {"model_type": "llama", "vocab_size": 128256}
    (safetensors_folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="model_type is 'llama', but only GPT-2") as caught:
        read_start(safetensors_folder / "config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_llm_c_is_loaded_into_a_model_whose_shape_it_has(tmp_path, dtype):
    weights = made_weights()
    write_model(tmp_path / "model_00000010.bin", weights, CONFIG, dtype)
    model = GPT(CONFIG)
    load_start(model, tmp_path / "model_00000010.bin")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].to(dtype).float())
    other = GPT(GPTConfig(2, 2, 16, 64))
    with pytest.raises(ValueError, match=r"has positions 32; the run's settings say .* 64"):
        load_start(other, tmp_path / "model_00000010.bin")


def test_states_beside_a_model_of_llm_c_give_its_fp32_weights(tmp_path):
    path = tmp_path / "model_00000010.bin"
    write_model(path, PARTS[2], CONFIG, torch.bfloat16)
    write_states(path, 4, PARTS)
    _, weights = read_start(path)
    assert all(torch.equal(weights[name], PARTS[2][name]) for name in weights)


# ---- whole runs ---------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    return make_dataset(tmp_path / "data")


def train_from(start, tmp_path, data, name="run", **changes):
    """A run of the real command from this start."""
    settings = make_settings(tmp_path / f"{name}.json", **changes)
    folder = tmp_path / "train" / name
    command = [*train_command(settings, data, folder), "--init-from", str(start)]
    return folder, command


def run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_foreign_gpt_2_is_measured_finetuned_and_exported(
    tmp_path, data, safetensors_folder, reference
):
    start = safetensors_folder / "config.json"
    measured, command = train_from(start, tmp_path, data, "measured", max_steps=0, warmup_steps=0)
    done = run(command)
    assert done.returncode == 0, done.stderr
    export_model(measured / "done.json", tmp_path / "export" / "measured")
    again, info = load_export(tmp_path / "export" / "measured")
    assert (info["step"], info["tokens_seen"]) == (0, 0)
    wanted = read_weights(safetensors_folder)[1]
    assert all(torch.equal(p, wanted[name]) for name, p in again.named_parameters())
    tuned, command = train_from(start, tmp_path, data, "tuned", max_steps=20, val_every_steps=20)
    done = run(command)
    assert done.returncode == 0, done.stderr
    first, last = read_metrics(tuned / "metrics.jsonl")["val"]
    assert first["val_loss_nats"] == read_json(measured / "done.json")["val_loss_nats"]
    assert last["val_loss_nats"] < first["val_loss_nats"] - 0.02
    export_model(tuned / "done.json", tmp_path / "export" / "tuned")
    exported = load_export(tmp_path / "export" / "tuned")[0]
    assert not torch.equal(exported.wte.weight, again.wte.weight)
    frozen = read_json(tuned / "settings.json")["start"]
    assert frozen == {"path": str(start), "sha256": start_sha256(start)}


@pytest.mark.slow
def test_a_run_keeps_its_first_weights_and_needs_them_once(tmp_path, data, safetensors_folder):
    start = safetensors_folder / "config.json"
    folder, command = train_from(start, tmp_path, data)
    assert run(command).returncode == 0
    (folder / "done.json").unlink()
    shutil.rmtree(safetensors_folder)
    assert run(command).returncode == 0, "a run with a checkpoint does not read them again"
    shutil.rmtree(folder / "checkpoints")
    done = run(command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {safetensors_folder}: holds no weights")


def test_other_weights_in_the_same_place_are_refused(tmp_path, safetensors_folder, reference):
    start, folder = safetensors_folder / "config.json", tmp_path / "run"
    folder.mkdir()
    before = freeze_start(start, folder)
    (folder / "settings.json").write_text(json.dumps({"start": before}))
    (folder / "metrics.jsonl").touch()
    assert freeze_start(start, folder) == before
    weights = to_huggingface(made_weights(), CONFIG, torch.float32)
    save_file(weights, safetensors_folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds other weights .* than .* was started from"):
        freeze_start(start, folder)


@pytest.mark.slow
def test_a_run_starts_from_a_kept_step_of_another(tmp_path, data):
    settings = make_settings(tmp_path / "first.json")
    first = tmp_path / "train" / "first"
    assert train_here(settings, data, first).returncode == 0
    folder, command = train_from(
        first / "saved" / "8.json", tmp_path, data, "second", max_steps=0, warmup_steps=0
    )
    done = run(command)
    assert done.returncode == 0, done.stderr
    before, after = (
        load_model_weights(checkpoint_folder(*where)) for where in ((first, 8), (folder, 0))
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "master_weights": False}])
def test_a_checkpoint_of_llm_c_goes_on_at_its_step_with_its_optimizer(tmp_path, data, changes):
    """Our own state after 8 of 12 steps, written as llm.c does for 4 ranks, continues bitwise."""
    whole = tmp_path / "train" / "whole"
    settings = make_settings(tmp_path / "settings.json", **changes)
    assert train_here(settings, data, whole).returncode == 0
    parts = [{}, {}, {}]
    checkpoint = checkpoint_folder(whole, 8)
    names = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in names.items()}
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    for part, kind in zip(parts, ("exp_avg", "exp_avg_sq", "model"), strict=True):
        prefix = f"{kind}."
        part |= {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    model = tmp_path / "log" / "model_00000008.bin"
    write_model(model, parts[2], CONFIG, torch.bfloat16)
    write_states(model, 4, parts[:2] if changes else parts, shards=3, step=8)
    folder = tmp_path / "train" / "llmc"
    script = TRAIN_SCRIPT.with_name("import_llmc.py")
    options = ["--model", model, "--settings", settings, "--folder", folder]
    done = run([sys.executable, *map(str, [script, *options])])
    assert done.returncode == 0, done.stderr
    done = train_here(settings, data, folder)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 8 of 12" in done.stdout
    assert "unknown" not in done.stdout
    assert losses(folder) == losses(whole)[8:]
    with pytest.raises(ValueError, match="holds checkpoints already"):
        import_llmc(model, settings, folder)


# ---- the hub ------------------------------------------------------------------------------


def test_a_gpt_2_of_the_hub_is_fetched_with_its_configuration_last(
    tmp_path, monkeypatch, safetensors_folder
):
    asked = []

    def from_hub(repository, filename, revision, folder, **options):
        asked.append((repository, filename, revision, options["repo_type"]))
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(safetensors_folder / filename, folder)
        return folder / filename, "c0ffee"

    monkeypatch.setattr(pretrained.fetch, "fetch_file", from_hub)
    fetch_weights("openai-community/gpt2@v1", tmp_path / "weights")
    assert asked == [
        ("openai-community/gpt2", "config.json", "v1", "model"),
        ("openai-community/gpt2", "model.safetensors", "c0ffee", "model"),
    ]
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {
        "config.json", "model.safetensors", "source.json"
    }  # fmt: skip
    assert read_start(tmp_path / "weights" / "config.json")[0] == CONFIG
    with pytest.raises(ValueError, match="'gpt2' is no owner/name"):
        fetch_weights("gpt2", tmp_path)


def test_nothing_is_fetched_of_what_is_no_gpt_2(tmp_path, monkeypatch):
    def from_hub(repository, filename, revision, folder, **options):
        assert filename == "config.json"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / filename).write_text(json.dumps({"model_type": "llama"}))
        return folder / filename, "c0ffee"

    monkeypatch.setattr(pretrained.fetch, "fetch_file", from_hub)
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        fetch_weights("meta/llama", tmp_path / "weights")
    assert not (tmp_path / "weights" / "config.json").exists()
