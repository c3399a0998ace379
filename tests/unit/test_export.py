"""Exports: the same model to transformers, to our own reader, and to the scoring command."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import build_manifest, describe_shard, file_sha256, write_shard
from miniseries.evaluation import export
from miniseries.evaluation.card import measured_scores
from miniseries.evaluation.export import export_llmc, export_model, push_model
from miniseries.evaluation.huggingface import load_export
from miniseries.evaluation.llmc import read_model
from miniseries.model.gpt import GPT, GPTConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SCRIPTS = Path(export.__file__).parents[2]
CONFIG = GPTConfig(num_layers=2, num_heads=2, channels=16, sequence_length=32)
STEP = 10


def trained_model(seed=0):
    """Weights as after training: no bias is 0, no norm is 1, padding rows are 0."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if ".ln_" in f".{name}" else 0.0, 0.2)
        model.wte.weight[50257:] = 0
    return model


def make_run(folder, model, precision="fp32", step=STEP):
    """A run folder with settings, one checkpoint, and both kinds of marker."""
    recipe = {
        "dataset": "made",
        "num_layers": 2,
        "num_heads": 2,
        "channels": 16,
        "sequence_length": 32,
        "total_batch_tokens": 64,
        "precision": precision,
        "data": {"source": "files", "val_tokens": 640},
    }
    settings = {"run": "small", "recipe": recipe, "fingerprint": "f" * 64, "machine": {}}
    name = f"checkpoints/step-{step:08d}"
    weights = {f"model.{k}": v.detach() for k, v in model.named_parameters()}
    dcp.save(weights, checkpoint_id=folder / name, no_dist=True)
    marker = {"run": "small", "step": step, "checkpoint": name}
    (folder / "saved").mkdir(exist_ok=True)
    for path, content in [
        ("settings.json", settings),
        (f"{name}/trainer.json", {"step": step, "fingerprint": "f" * 64}),
        ("done.json", marker),
        (f"saved/{step}.json", marker),
    ]:
        (folder / path).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def model():
    return trained_model()


@pytest.fixture(scope="module")
def results(tmp_path_factory, model):
    """A run and its export, made once; tests get copies."""
    folder = tmp_path_factory.mktemp("results")
    run = make_run(folder / "train" / "small", model)
    export_model(run / "done.json", folder / "export" / "small")
    return folder


@pytest.fixture
def run(tmp_path, results):
    return shutil.copytree(results / "train" / "small", tmp_path / "train" / "small")


@pytest.fixture
def exported(tmp_path, results):
    return shutil.copytree(results / "export" / "small", tmp_path / "export" / "small")


def make_data(folder):
    """A manifest with 20 validation windows, and 5 questions."""
    entries = []
    for split, name in (("val", "made_val_000000.bin"), ("train", "made_train_000001.bin")):
        write_shard(folder / name, windows(30).numpy())
        entries.append(describe_shard(folder / name, split))
    content = build_manifest(folder, "made", entries, source={}, val_tokens=640)
    (folder / "manifest.json").write_text(json.dumps(content))
    item = {"activity_label": "Cats", "ctx_a": "The cat", "ctx_b": "then", "ctx": "The cat then"}
    endings = [["sat.", "ran off to the wall.", "is a bird of prey.", "met."]] * 5
    lines = [json.dumps({**item, "label": i % 4, "endings": e}) for i, e in enumerate(endings)]
    (folder / "hellaswag.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


def windows(count, seed=0):
    tokens = np.random.RandomState(seed).randint(0, 50257, count * 32 + 1)
    return torch.from_numpy(tokens)


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- what is written ----------------------------------------------------------------------


def test_transformers_computes_the_same_logits_and_loss(exported, model, offline):
    reference, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    assert reference.dtype == torch.float32
    assert reference.lm_head.weight is reference.transformer.wte.weight
    ids = windows(4)
    tokens, targets = ids[:-1].view(4, 32), ids[1:].view(4, 32)
    with torch.no_grad():
        logits = reference.eval()(tokens).logits
        torch.testing.assert_close(logits, model(tokens), rtol=1e-5, atol=1e-5)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, model(tokens, targets), rtol=0, atol=1e-5)


def test_the_export_has_50257_rows_and_no_second_head(exported):
    weights = load_file(exported / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (50257, 16)
    assert weights["transformer.h.1.mlp.c_fc.weight"].shape == (16, 64)  # (in, out)
    assert not [name for name in weights if "lm_head" in name]
    config = json.loads((exported / "config.json").read_text())
    assert (config["vocab_size"], config["n_positions"], config["n_ctx"]) == (50257, 32, 32)
    assert (config["bos_token_id"], config["eos_token_id"]) == (50256, 50256)


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world\n\n  indented\tdef f(x):\r\n    return x ** 2",
        "naïve café 中文 \N{GRINNING FACE} don't they'RE 3.14159",
        " leading and trailing . , ! blanks  ",
        "",
    ],
)
def test_the_tokenizer_is_that_of_the_training_data(exported, offline, text):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(text)["input_ids"]
    assert ids == gpt2_encoding().encode_ordinary(text)
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_knows_its_special_token_and_length(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("a<|endoftext|>")["input_ids"] == [64, 50256]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (50256, 50256)
    assert (len(tokenizer), tokenizer.model_max_length) == (50257, 32)


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("fp32", None, torch.float32),
        ("tf32", None, torch.float32),
        ("bf16", None, torch.bfloat16),
        ("fp8", None, torch.bfloat16),
        ("fp16", None, torch.float32),  # what its master weights are
        ("bf16", "float32", torch.float32),
    ],
)
def test_the_dtype_is_what_the_run_computed_in(tmp_path, model, precision, dtype, expected):
    run = make_run(tmp_path / "run", model, precision)
    export_model(run / "done.json", tmp_path / "out", dtype)
    loaded, info = load_export(tmp_path / "out")
    assert info["dtype"] == str(expected).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == expected
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(expected))


def test_any_saved_step_can_be_exported_by_its_marker(tmp_path, run):
    make_run(run, trained_model(seed=1), step=4)
    export_model(run / "saved" / "4.json", tmp_path / "small@4")
    loaded, info = load_export(tmp_path / "small@4")
    assert (info["run"], info["step"], info["tokens_seen"]) == ("small", 4, 256)
    assert torch.equal(loaded.wte.weight, trained_model(seed=1).wte.weight)


def test_the_card_names_recipe_data_scores_cost_and_commit(tmp_path, run):
    versions = {"commit": "abc1234", "torch": "2.13.0"}
    start = {"kind": "start", "step": 0, "world_size": 4, "gpu_name": "NVIDIA H200"}
    records = [start | {"versions": versions}]
    records += [{"kind": "train", "step": i, "step_time_ms": 1.8e6} for i in range(12)]
    records.append({"kind": "val", "step": 10, "val_loss_nats": 3.25})
    records.append({"kind": "hellaswag", "step": 10, "num_correct": 2957, "num_items": 10042})
    lines = [json.dumps(record) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines))
    export_model(run / "done.json", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    info = json.loads((tmp_path / "out" / "export.json").read_text())
    assert "# small after 10 steps" in card and "trained from scratch" in card
    assert "| total_batch_tokens | 64 |" in card and "| val_tokens | 640 |" in card
    assert "| validation loss | 3.2500 nats per token |" in card
    assert "| HellaSwag | 2957 of 10042 by mean loss per token |" in card
    # ten steps of half an hour on four devices; the later ones are not this checkpoint's
    assert "| device-hours of training steps | 20.00 |" in card
    assert "| 4 x NVIDIA H200 |" in card and "| abc1234 |" in card
    assert info["weights_sha256"] in card
    assert info["num_parameters"] == trained_model().num_parameters


def test_a_score_of_an_earlier_step_than_the_exported_one_says_so(tmp_path, run):
    records = [{"kind": "val", "step": s, "val_loss_nats": 9 - s / 2} for s in (4, 8)]
    records.append({"kind": "hellaswag", "step": 4, "num_correct": 2957, "num_items": 10042})
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    export_model(run / "done.json", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| validation loss | 5.0000 nats per token, at step 8 |" in card
    assert "| HellaSwag | 2957 of 10042 by mean loss per token, at step 4 |" in card


def test_the_card_s_rows_of_lm_eval_name_the_questions_and_have_their_errors():
    loss = {"val_loss_nats": 3.2, "perplexity": 24.5, "dataset": "made"}
    counts = dict.fromkeys(("acc", "acc_token_mean", "acc_characters"), 0.3)
    choices = {"questions": "made-up questions", "llmc": counts, "harness": counts}
    exact = {"exact_match_strict-match": 0.02, "exact_match_stderr_strict-match": 0.004}
    exact |= {"exact_match_flexible-extract": 0.03, "exact_match_stderr_flexible-extract": 0.005}
    right = {"shots": 0, "acc": 0.4, "acc_stderr": 0.01}
    tasks = {
        "gsm8k": {"shots": 5, "num_items": 1319, "data": "hub", **exact},
        "hellaswag": {"num_items": 200, "data": "local", **right},
        "arc_easy": {"num_items": 200, "data": "local", **right},
    }
    scores = measured_scores(loss, choices, tasks)
    assert scores["lm-eval gsm8k, 5 examples, exact_match_strict-match"] == "2.00 ± 0.40 %"
    assert scores["lm-eval gsm8k, 5 examples, exact_match_flexible-extract"] == "3.00 ± 0.50 %"
    assert scores["made-up questions, lm-eval hellaswag, 0 examples, acc"] == "40.00 ± 1.00 %"
    assert scores["lm-eval arc_easy, 0 examples, acc"] == "40.00 ± 1.00 %"
    for theirs in ({"num_items": 10042, "data": "local"}, {"num_items": 200, "data": "hub"}):
        scores = measured_scores(loss, choices, {"hellaswag": right | theirs})
        assert scores["lm-eval hellaswag, 0 examples, acc"] == "40.00 ± 1.00 %"


class FakeHub:
    """Notes what is uploaded."""

    commits: ClassVar[list] = []
    refusal = None

    def create_repo(self, repository, private, exist_ok):
        assert exist_ok
        if self.refusal:
            raise self.refusal
        self.commits.append([repository, private])

    def create_commit(self, repository, operations, commit_message):
        self.commits[-1] += [operations, commit_message]
        return type("Commit", (), {"oid": "c0ffee", "commit_url": "https://hub/c0ffee"})


def test_a_push_is_one_commit_with_the_scores_in_the_card(tmp_path, run, exported, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    sha256 = json.loads((exported / "export.json").read_text())["weights_sha256"]
    scores, counts = tmp_path / "scores", {"acc": 0.3, "acc_token_mean": 0.4}
    scores.mkdir()
    loss = {"val_loss_nats": 3.2, "val_loss_stderr": 0.01, "perplexity": 24.5, "dataset": "made"}
    (scores / "val_loss.json").write_text(json.dumps(loss | {"weights_sha256": sha256}))
    counts |= {"acc_characters": 0.5, "acc_token_mean_stderr": 0.005}
    choices = {"questions": "HellaSwag", "llmc": counts, "harness": counts}
    (scores / "hellaswag.json").write_text(json.dumps(choices))
    arguments = (run / "done.json", exported, scores, "me/small", tmp_path / "pushed.json", True)
    push_model(*arguments)
    ((repository, private, operations, message),) = FakeHub.commits
    assert (repository, private, message) == ("me/small", True, "small after 10 steps")
    files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
    card = files["README.md"].decode()
    assert "| validation loss on made | 3.2000 ± 0.0100 nats per token |" in card
    assert "| HellaSwag, llm.c's prompt, mean per token | 40.00 ± 0.50 % |" in card
    pushed = json.loads((tmp_path / "pushed.json").read_text())
    assert (pushed["commit"], pushed["weights_sha256"]) == ("c0ffee", sha256)
    FakeHub.refusal = OSError("401 Unauthorized\nmore lines")
    with pytest.raises(ValueError, match=r"me/small: not pushed \(401 Unauthorized\); check"):
        push_model(*arguments)
    (scores / "val_loss.json").write_text(json.dumps(loss | {"weights_sha256": "other"}))
    with pytest.raises(ValueError, match="scores of other weights than"):
        push_model(*arguments)


def test_an_export_that_fails_leaves_the_earlier_one_as_it_was(exported, run, monkeypatch):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}

    def fail(*_arguments):
        raise OSError("no space left")

    monkeypatch.setattr(export, "write_tokenizer", fail)
    with pytest.raises(OSError, match="no space left"):
        export_model(run / "done.json", exported, "bfloat16")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert {path.name for path in exported.parent.iterdir()} == {"small", ".small.lock"}


def test_two_exports_of_one_model_at_once_take_turns(tmp_path, run):
    out = tmp_path / "out"
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(export_model, run / "done.json", out) for _ in range(2)]
    assert [export.result() for export in both] == [None, None]
    assert load_export(out)[1]["step"] == 10
    assert not list(tmp_path.glob(".out.partial")) + list(tmp_path.glob(".out.old"))


def test_an_export_replaces_what_a_killed_one_and_an_older_one_left(exported, run):
    (exported / "stale.txt").write_text("old")
    (exported / "export.json").unlink()
    leftover = exported.parent / ".small.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    export_model(run / "done.json", exported)
    assert load_export(exported)[1]["step"] == STEP
    assert not (exported / "stale.txt").exists()
    assert {path.name for path in exported.parent.iterdir()} == {"small", ".small.lock"}


def test_an_export_replaces_the_folder_that_a_link_leads_to(tmp_path, run):
    (tmp_path / "disk" / "small").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "small")
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        export_model(run / "done.json", tmp_path / "link", dtype)
        assert load_export(tmp_path / "disk" / "small")[1]["dtype"] == dtype
    assert (tmp_path / "link").is_symlink()
    names = {path.name for path in (tmp_path / "disk").iterdir()}
    assert names == {"small", ".small.lock"}


def test_an_empty_folder_made_beforehand_is_filled(tmp_path, run):
    (tmp_path / "out").mkdir()
    export_model(run / "done.json", tmp_path / "out")
    assert {"config.json", "model.safetensors", "export.json"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_a_checkpoint_of_another_run_is_refused(tmp_path, run):
    state = run / "checkpoints" / "step-00000010" / "trainer.json"
    change_json(state, fingerprint="0" * 64)
    with pytest.raises(ValueError, match=r"its fingerprint is 000.*parts of two runs"):
        export_model(run / "done.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_last_checkpoint_that_is_not_as_it_was_is_never_exported(tmp_path, run):
    marker = json.loads((run / "done.json").read_text())
    files = sorted(path for path in (run / marker["checkpoint"]).iterdir())
    facts = {str(path.relative_to(run)): {"sha256": file_sha256(path)} for path in files}
    change_json(run / "done.json", files=facts)
    export_model(run / "done.json", tmp_path / "out")
    part = next(path for path in files if path.suffix == ".distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{part.name}: missing, or not as it was"):
        export_model(run / "done.json", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_weights_of_another_shape_than_the_recipe_are_refused(tmp_path, run):
    settings = json.loads((run / "settings.json").read_text())
    change_json(run / "settings.json", recipe=settings["recipe"] | {"num_layers": 3})
    with pytest.raises(ValueError, match=r"12 weights are not .* h\.2\.attn\.c_attn\.bias"):
        export_model(run / "done.json", tmp_path / "out")


def test_llm_c_s_files_are_the_checkpoint_s_and_come_back_bit_for_bit(tmp_path, data, run, model):
    export_llmc(run / "done.json", data / "manifest.json", tmp_path / "llmc")
    names = {path.name for path in (tmp_path / "llmc").iterdir()}
    assert names == {"model.bin", "model_bf16.bin", "gpt2_tokenizer.bin", "debug_state.bin"}
    for name, dtype in (("model.bin", torch.float32), ("model_bf16.bin", torch.bfloat16)):
        config, weights = read_model(tmp_path / "llmc" / name)
        assert config == CONFIG
        for key, parameter in model.named_parameters():
            assert torch.equal(weights[key], parameter.to(dtype))
    ids = np.frombuffer((tmp_path / "llmc/debug_state.bin").read_bytes(), "<i4", 256, 1024)
    assert np.array_equal(ids, np.concatenate([windows(30)[:128], windows(30)[1:129]]))


# ---- reading it back ----------------------------------------------------------------------


def test_reading_an_export_gives_back_every_bit(exported, model):
    loaded, info = load_export(exported)
    assert loaded.config == CONFIG
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    assert (info["run"], info["precision"], info["val_tokens"]) == ("small", "fp32", 640)


def test_a_folder_in_the_layout_of_openai_is_read_too(exported, model):
    path = exported / "model.safetensors"
    weights = {k.removeprefix("transformer."): v for k, v in load_file(path).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # the causal mask, no weight
    save_file(weights, path)
    (exported / "export.json").unlink()
    change_json(exported / "config.json", tie_word_embeddings=None)
    loaded, info = load_export(exported)
    assert torch.equal(loaded.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight)
    assert (info["run"], info["step"], info["dtype"]) == ("small", None, "float32")


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_a_damaged_description_of_an_export_is_named(exported, text):
    (exported / "export.json").write_text(text)
    with pytest.raises(ValueError, match=r"export\.json: .*; export the model again"):
        load_export(exported)


@pytest.mark.parametrize("with_info", [True, False])
def test_a_file_that_is_cut_short_is_refused(exported, with_info):
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    if not with_info:
        (exported / "export.json").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: .*(export the model|get it) again"):
        load_export(exported)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("vocab_size", 50304),
        ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6),
        ("tie_word_embeddings", False),
    ],
)
def test_what_is_not_gpt_2_is_refused(exported, key, value):
    change_json(exported / "config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"config\.json: {key} is {value!r}, but only GPT-2"):
        load_export(exported)


def test_a_configuration_that_does_not_fit_the_weights_is_refused(exported):
    change_json(exported / "config.json", n_positions=64)
    with pytest.raises(ValueError, match=r"wpe\.weight: expected \(64, 16\), found \(32, 16\)"):
        load_export(exported)
    change_json(exported / "config.json", n_layer=None)
    with pytest.raises(ValueError, match="no shape of a GPT-2"):
        load_export(exported)


def test_a_folder_without_weights_or_without_anything_is_refused(tmp_path, exported):
    (exported / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"holds no weights \(model\.safetensors, pytorch_model\.bin\)"
    ):
        load_export(exported)
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_export(tmp_path / "nothing")


# ---- the commands --------------------------------------------------------------------------


def command(script, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_the_commands_export_and_score(data, run):
    marker, folder = run / "done.json", data / "export" / "by-hand"
    done = command(
        "export_model.py", "--checkpoint-marker", marker, "--folder", folder, "--dtype", "bfloat16"
    )
    assert (done.returncode, done.stderr) == (0, "")
    outputs = ["--val-loss", data / "v.json", "--hellaswag", data / "h.json"]
    outputs += ["--items", data / "i.jsonl"]
    inputs = ["--manifest", data / "manifest.json", "--questions", data / "hellaswag.jsonl"]
    done = command("score_model.py", "--export", folder, *inputs, "--micro-batch", 4, *outputs)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((data / "v.json").read_text())["model"] == "by-hand"
    assert json.loads((data / "h.json").read_text())["num_items"] == 5


def test_the_export_command_tells_a_mistake_in_one_line(data):
    done = command("export_model.py", "--checkpoint-marker", data / "x.json", "--folder", "out")
    assert done.returncode == 1
    assert done.stderr == f"error: {data / 'x.json'}: no such file\n"
