"""Whole runs on the CPU: every script, started by the rules, on data as small as will do."""

import base64
import json
import re
import subprocess
import sys
from pydoc_data.topics import topics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from real_project import ROOT, RealProject

from miniseries.data.questions import HELLASWAG_FILE
from miniseries.data.shards import write_shard
from miniseries.evaluation.huggingface import load_export
from miniseries.metrics import read_json, read_metrics
from miniseries.model.gpt import GPT
from miniseries.training.checkpoint import checkpoint_folder, load_model_weights

CONFIGS = ROOT / "tests/config"
# What the issue promises of the default command
PROMISED = [
    "data/builtin/manifest.json",
    *(f"train/tiny/{name}" for name in ("done.json", "metrics.jsonl", "main.log")),
    *(f"train/tiny/{name}" for name in ("settings.json", "checkpoints")),
    *(f"export/tiny/{name}" for name in ("config.json", "model.safetensors")),
    *(f"evaluate/tiny/{name}" for name in ("val_loss.json", "hellaswag.json")),
    *(f"plots/{name}.png" for name in ("tiny", "miniseries")),
    *("samples/tiny.md", "summary.tsv", "report.html"),
]
# Scripts that each test starts through the rules; together they are all that there are
SCRIPTS = {
    "default": "prepare_dataset write_settings train_run export_model score_model write_samples "
    "plot_run plot_series write_summary render_page",
    "own text": "find_checkpoint export_llmc",
    "hub": "fetch_shard fetch_questions verify_dataset write_eval_file",
    "hub text": "list_files tokenize_file",
    "hub model": "fetch_weights score_task run_harness",
    "measured": "bench_run collect_bench write_profile write_ladder write_plan write_comparison",
    "by hand": "bench_data",
    # against a stand-in for the hub's client in test_export.py; as a command in test_pretrained.py
    # and test_reference_run.py
    "elsewhere": "push_model import_llmc compare_samples sample replay_step run_reference",
}


@pytest.fixture
def make_project(tmp_path):
    """A function that copies the project, its configuration overlaid with files of tests/config."""
    made = []

    def make(*overlays):
        made.append(RealProject(tmp_path / "project", *overlays[:1]))
        for overlay in overlays[1:]:
            made[-1].overlay(overlay)
        return made[-1]

    yield make
    for project in made:
        project.end_all()


def test_the_whole_runs_start_every_script():
    started = " ".join(SCRIPTS.values()).split()
    assert set(started) == {path.stem for path in (ROOT / "workflow/scripts").glob("*.py")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_command_goes_from_data_to_report(make_project):
    project = make_project()
    project.succeed("--cores", "all", "--report", "results/report.html", "--report-after-run")
    assert [name for name in PROMISED if not project.path(name).exists()] == []
    assert set(SCRIPTS["default"].split()) <= project.scripts_started()
    check_losses_and_time(project)
    check_export(project)
    check_report(project)
    assert "Nothing to be done" in project.succeed("--cores", "all")
    assert project.jobs("plots") == {}


def check_losses_and_time(project):
    records = read_metrics(project.path("train/tiny/metrics.jsonl"))
    assert records["val"][0]["val_loss_nats"] == pytest.approx(10.82, abs=0.15)
    last = records["val"][-1]["val_loss_nats"]
    assert last < 6.3
    scores = read_json(project.path("evaluate/tiny/val_loss.json"))
    assert scores["val_loss_nats"] == pytest.approx(last, abs=1e-4)
    questions = read_json(project.path("evaluate/tiny/hellaswag.json"))
    in_loop = records["hellaswag"][-1]["acc_norm_token_mean"]
    assert questions["llmc"]["acc_token_mean"] == pytest.approx(in_loop, abs=0.011)  # 2 of 200
    # README's minutes on a laptop, however busy this machine is: what there is to compute, and how
    # much of the time is spent on something else
    tokens = records["train"][-1]["tokens_seen"]
    assert 6 * records["start"][0]["num_parameters"] * tokens < 1e13
    in_steps = sum(record["step_time_ms"] for record in records["train"]) / 1e3
    assert read_json(project.path("train/tiny/done.json"))["wall_seconds"] < 2 * in_steps


def check_export(project):
    """transformers, our model of the checkpoint, and our model of the export agree."""
    transformers = pytest.importorskip("transformers")
    folder = project.path("export/tiny")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert reference.dtype == torch.float32  # what `tiny` computes in
    ours, info = load_export(folder)
    assert info["step"] == 200
    before = GPT(ours.config)
    weights = load_model_weights(checkpoint_folder(project.path("train/tiny"), 200))
    before.load_state_dict(weights)
    tokens = torch.randint(50257, (4, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = reference.eval()(tokens).logits
        for model in (before, ours):
            torch.testing.assert_close(model(tokens), wanted, rtol=0, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]


def check_report(project):
    """All results are inside the file, with captions, and it loads nothing from elsewhere."""
    text = project.path("report.html").read_text()
    results = json.loads(re.search(r"var results = (\{.*?\});\n", text)[1])
    for name in ("tiny", "tiny.speed", "miniseries"):
        image = decode(results[f"results/plots/{name}.png"])
        assert image == project.path(f"plots/{name}.png").read_bytes()
    pages = {kind: f"results/pages/tiny.{kind}.html" for kind in ("scores", "samples", "settings")}
    pages["summary"] = "results/pages/summary.html"
    content = {kind: decode(results[name]).decode() for kind, name in pages.items()}
    loss = read_json(project.path("evaluate/tiny/val_loss.json"))["val_loss_nats"]
    assert str(loss) in content["scores"] and "made-up questions" in content["scores"]
    assert "herd of unicorns" in content["samples"]
    assert "recipe.learning_rate" in content["settings"]
    assert "val_loss_nats" in content["summary"]
    assert all(len(entry["caption"]) > 50 for entry in results.values())
    categories = json.loads(re.search(r"var categories = (\{.*?\});\n", text)[1])
    assert set(categories) == {"Training", "Comparisons", "Scores", "Samples", "Settings"}
    for page in [text, *content.values()]:
        assert not re.search(
            r"<(script|link|img|iframe)\b[^>]*\b(src|href)=[\"']?(https?:)?//", page
        )
        assert not re.search(r"@import|url\([\"']?(https?:)?//", page)


def decode(entry):
    """Content of a file of the report."""
    assert entry["data_uri"].startswith("data:")
    return base64.b64decode(entry["data_uri"].partition("base64,")[2])


@pytest.mark.slow
def test_the_series_of_stand_ins_goes_to_the_joint_figure_and_the_table(make_project):
    project = make_project(CONFIGS / "series.yaml")
    project.succeed("miniseries")
    sizes = {"124m", "350m", "774m", "1558m"}
    for model in [*sizes, "124m@3"]:
        assert read_json(project.path(f"evaluate/{model}/val_loss.json"))["model"] == model
    assert read_json(project.path("evaluate/124m@3/val_loss.json"))["step"] == 3
    for name in [*sizes, "miniseries"]:
        assert project.path(f"plots/{name}.png").stat().st_size > 10_000
        assert project.path(f"plots/{name}.svg").exists()
    header, *rows = project.path("summary.tsv").read_text().splitlines()
    assert {row.split("\t")[0] for row in rows} == sizes
    losses = [row.split("\t")[header.split("\t").index("val_loss_nats")] for row in rows]
    assert len(rows) == len(sizes) + 1  # one more for the step of 124m that is kept
    assert len(set(losses)) == len(rows) and all(9 < float(loss) < 11 for loss in losses)
    assert project.jobs("miniseries") == project.jobs("plots") == {}


@pytest.fixture
def own_text(make_project):
    project = make_project(CONFIGS / "faults.yaml", CONFIGS / "own_text.yaml")
    articles = list(topics.values())[:40]
    blocks = {block.strip() for text in articles[:20] for block in re.split(r"\n\s*\n", text)}
    project.write("texts/a.txt", "\n\n".join(sorted(blocks - {""})))
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in articles[20:]]
    project.write("texts/b.jsonl", "".join(lines))
    project.num_documents = len(blocks - {""}) + 20
    return project


@pytest.mark.slow
def test_a_sweep_on_own_text_goes_to_its_figure_and_steps_are_exported(own_text):
    own_text.succeed("train_own-rates")
    rates = ["own-rates-learning_rate-0.001", "own-rates-learning_rate-0.003"]
    first, second = (own_text.losses(run) for run in rates)
    assert first[0] == second[0] and first[-1] != second[-1] and len(first) == 4
    assert own_text.path("plots/own-rates.png").stat().st_size > 10_000
    assert own_text.jobs("train_own-rates") == {}
    manifest = read_json(own_text.path("data/own/manifest.json"))
    assert manifest["num_documents"] == own_text.num_documents
    own_text.configure({"runs": {"own": {"export_steps": [2], "keep_checkpoints": 1}}})
    step = [f"results/{name}" for name in ("export/own@2/config.json", "samples/own@2.md")]
    own_text.succeed(*step, "results/llmc/own@2/model.bin", "evaluate_own")
    early, late = (
        read_json(own_text.path(f"evaluate/{model}/val_loss.json")) for model in ("own@2", "own")
    )
    assert (early["step"], late["step"]) == (2, 4)
    assert early["weights_sha256"] != late["weights_sha256"]
    text = own_text.fail("results/export/own@3/config.json")
    assert "keeps no checkpoint of step 3; it keeps: 2, 4" in text
    assert set(SCRIPTS["own text"].split()) <= own_text.scripts_started()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(own_text):
    own_text.configure({"runs": {"two": {"extends": "own", "gpus": 2}}})
    text = own_text.succeed("train_own", "train_two")
    assert "num_processes=2" in text
    for ours, expected in zip(own_text.losses("two"), own_text.losses("own"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    settings, manifest = own_text.path("settings/own.json"), own_text.path("data/own/manifest.json")
    command = [sys.executable, "workflow/scripts/bench_run.py", "--steps", "4"]
    command += ["--settings", settings, "--manifest", manifest, "--output", "bench.json"]
    subprocess.run(command, cwd=own_text.folder, check=True, timeout=300)
    assert read_json(own_text.folder / "bench.json")["tokens_per_second"]["median"] > 0


@pytest.mark.slow
def test_bench_profile_ladder_plan_and_comparison_run_on_a_cpu(make_project):
    project = make_project(CONFIGS / "faults.yaml")
    bench = {"dataset": "builtin", "steps": 2, "rows": [{"run": "tiny", "profile": True}]}
    project.configure({"bench": bench, "ladder": {"dataset": "builtin", "steps": 2}})
    project.succeed("bench", "profile", "ladder", "plan", "compare")
    assert set(SCRIPTS["measured"].split()) <= project.scripts_started()
    (row,) = project.path("bench/rows").glob("*.json")
    assert read_json(row)["tokens_per_second"]["median"] > 0
    assert "| tiny |" in project.path("bench/bench.md").read_text()
    assert "fp32" in project.path("ladder/ladder.md").read_text()
    assert project.path("plots/ladder.png").stat().st_size > 10_000
    assert "1558m" in project.path("plan.md").read_text()


@pytest.fixture
def data_hub(hub, tmp_path):
    """A hub with three shards and HellaSwag's questions."""
    for name in ("val_000000", "train_000001", "train_000002"):
        tokens = np.random.RandomState(0).randint(500, size=3000)
        write_shard(tmp_path / "shard.bin", tokens)
        hub.files[f"edu_fineweb_{name}.bin"] = (tmp_path / "shard.bin").read_bytes()
    question = {"ind": 1, "activity_label": "Roofs", "ctx_a": "A man sits.", "ctx_b": "he"}
    question |= {"ctx": "A man sits. he", "endings": ["is.", "rips.", "holds.", "starts."]}
    pq.write_table(pa.Table.from_pylist([question | {"label": "3"}] * 4), tmp_path / "q.parquet")
    hub.files[HELLASWAG_FILE] = (tmp_path / "q.parquet").read_bytes()
    return hub


@pytest.mark.slow
def test_shards_of_the_hub_are_fetched_trained_on_and_verified(make_project, data_hub):
    dataset = "fineweb-edu-100b-first100"
    project = make_project(CONFIGS / "faults.yaml")
    project.configure({"runs": {"tiny": {"dataset": dataset, "max_steps": 5}}})
    change = {"repository": "someone/tokens", "num_shards": 2, "val_tokens": 512}
    project.configure({"datasets": {dataset: change}})
    questions = "results/data/hellaswag/hellaswag_val.bin"
    project.succeed("evaluate_tiny", f"verify_{dataset}", questions)
    assert set(SCRIPTS["hub"].split()) <= project.scripts_started()
    assert sorted(data_hub.sent) == sorted(data_hub.files)
    assert read_json(project.path("evaluate/tiny/hellaswag.json"))["num_items"] == 4
    shard = project.path(f"data/{dataset}/edu_fineweb_train_000002.bin")
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    text = project.fail(f"verify_{dataset}")
    assert f"{shard.name}: its sha256 is not the manifest's; put a good copy" in text
    shard.unlink()
    (shard.parent / "manifest.json").unlink()
    project.succeed(f"verify_{dataset}")
    assert shard.read_bytes() == good
    assert data_hub.sent.count(shard.name) == 2 and len(data_hub.sent) == 5
    assert "train" not in project.jobs("train_tiny")


@pytest.mark.slow
def test_a_gpt_2_of_the_hub_is_measured_by_every_task(make_project, hub, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64)
    theirs = transformers.GPT2LMHeadModel(shape)
    theirs.save_pretrained(tmp_path / "gpt2")
    for name in ("config.json", "model.safetensors"):
        hub.models[name] = (tmp_path / "gpt2" / name).read_bytes()
    project = make_project(CONFIGS / "faults.yaml")
    run = {"extends": "tiny", "init_from": "someone/gpt2", "max_steps": 0, "warmup_steps": 0}
    project.configure({"runs": {"theirs": run}})
    project.write("wikitext.txt", " = Robert = \n Robert is an English film actor . \n" * 20)
    project.configure({"evaluation": {"data": {"wikitext": "wikitext.txt"}}})
    project.succeed("evaluate_theirs", "harness_theirs")
    assert set(SCRIPTS["hub model"].split()) <= project.scripts_started()
    ours, info = load_export(project.path("export/theirs"))
    assert (info["step"], info["run"]) == (0, "theirs")
    assert torch.equal(ours.wpe.weight, theirs.transformer.wpe.weight)
    scores = read_json(project.path("evaluate/theirs/hellaswag.json"))
    lm_eval = read_json(project.path("evaluate/theirs/harness.json"))
    assert lm_eval["tasks"]["hellaswag"]["acc"] == scores["harness"]["acc"]
    assert lm_eval["weights_sha256"] == scores["weights_sha256"] == info["weights_sha256"]
    assert read_json(project.path("evaluate/theirs/wikitext.json"))["word_perplexity"] > 1
    project.succeed("plots")
    rows = read_json(project.path("summary.json"))
    row = next(row for row in rows if row["model"] == "theirs")
    assert row["lm_eval_hellaswag_0_shots_acc"] == round(scores["harness"]["acc"], 6)
    assert (row["questions"], row["step"], row["init_from"]) == (
        "made-up questions", 0, "someone/gpt2"
    )  # fmt: skip
    assert "Nothing to be done" in project.succeed("evaluate_theirs", "harness_theirs")
