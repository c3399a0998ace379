"""Scores of exports: those of the training loop, and the same however the work is split."""

import json
import math
import os
import socket

import numpy as np
import pytest
import torch
from test_export import CONFIG, make_data, make_run, trained_model

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import load_manifest, open_shard
from miniseries.evaluation.card import measured_scores
from miniseries.evaluation.choices import encode_questions, right_answers
from miniseries.evaluation.export import export_model
from miniseries.evaluation.scores import (
    score_export,
    score_task,
    strided_rows,
    token_bytes,
    validation_bytes,
)
from miniseries.evaluation.scoring import choice_scores, validation_loss
from miniseries.metrics import read_json
from miniseries.model.gpt import GPT
from miniseries.training.distributed import shard_model, start_world

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return trained_model()


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path)


@pytest.fixture
def run_folder(tmp_path, model):
    return make_run(tmp_path / "train" / "small", model)


@pytest.fixture
def exported(tmp_path, run_folder):
    export_model(run_folder / "done.json", tmp_path / "export" / "small")
    return tmp_path / "export" / "small"


def score(data, folder, **options):
    scores = data / "scores"
    outputs = scores / "val_loss.json", scores / "hellaswag.json", scores / "items.jsonl"
    inputs = data / "manifest.json", data / "hellaswag.jsonl"
    score_export(folder, *inputs, 4, *outputs, **options)
    lines = outputs[2].read_text().splitlines()
    return *map(read_json, outputs[:2]), [json.loads(line) for line in lines]


def test_scores_after_training_are_those_of_the_training_loop(data, exported, model, capsys):
    val_loss, hellaswag, _ = score(data, exported, device="cpu")
    found, correct = val_loss["val_loss_nats"], hellaswag["llmc"]["num_correct"]
    said = f"small: val loss {found:.4f} (640 tokens), made-up questions {correct}/5 = "
    assert capsys.readouterr().out == f"{said}{correct / 5:.4f}\n"
    manifest = load_manifest(data / "manifest.json")
    inside = validation_loss(model, manifest, micro_batch=7, device=CPU)
    assert val_loss["val_loss_nats"] == pytest.approx(inside["val_loss_nats"], abs=1e-6)
    assert val_loss["perplexity"] == pytest.approx(np.exp(inside["val_loss_nats"]), rel=1e-5)
    identity = {key: val_loss[key] for key in ("model", "run", "step", "dataset", "dtype")}
    assert identity == {
        "model": "small", "run": "small", "step": 10, "dataset": "made", "dtype": "float32"
    }  # fmt: skip
    assert val_loss["num_tokens"] == 640
    assert (hellaswag["questions"], hellaswag["questions_of"]) == ("made-up questions", "made")
    assert hellaswag["num_items"] == 5
    questions = encode_questions(data / "hellaswag.jsonl", gpt2_encoding(), ["harness"])
    found = choice_scores(model, questions, "harness", micro_batch=2, device=CPU)
    for key in ("acc", "acc_token_mean", "acc_characters"):
        assert hellaswag["harness"][key] == found[key]
        assert hellaswag["harness"][f"{key}_stderr"] == found[f"{key}_stderr"]
        assert key in hellaswag["llmc"]
    assert hellaswag["weights_sha256"] == val_loss["weights_sha256"]


def test_a_text_that_gave_no_question_still_has_a_validation_loss(data, exported):
    (data / "hellaswag.jsonl").write_text("")
    val_loss, hellaswag, items = score(data, exported, device="cpu")
    assert val_loss["num_tokens"] == 640
    assert (hellaswag["questions"], hellaswag["num_items"], items) == (None, 0, [])
    assert next(iter(measured_scores(val_loss, hellaswag, {}))) == "validation loss on made"


def test_the_log_of_items_holds_what_every_score_is_counted_from(data, exported):
    _, hellaswag, items = score(data, exported, device="cpu")
    assert [line["item"] for line in items] == list(range(5))
    for prompt in ("llmc", "harness"):
        of_prompt = [line[prompt] for line in items]
        assert [entry["label"] for entry in of_prompt] == [i % 4 for i in range(5)]
        for way in ("acc", "acc_token_mean", "acc_characters"):
            assert right_answers(of_prompt, way).mean() == hellaswag[prompt][way]


def test_bits_per_byte_counts_the_bytes_of_the_text(data, exported):
    val_loss, _, _ = score(data, exported, device="cpu")
    shard = open_shard(load_manifest(data / "manifest.json").val_shards[0])
    encoding = gpt2_encoding()
    ids = [int(i) for i in shard[1:641] if i != 50256]
    num_bytes = sum(len(encoding.decode_single_token_bytes(i)) for i in ids)
    assert validation_bytes(load_manifest(data / "manifest.json"), 32) == num_bytes
    wanted = val_loss["val_loss_nats"] * 640 / math.log(2) / num_bytes
    assert val_loss["bits_per_byte"] == pytest.approx(wanted)
    assert token_bytes()[encoding.encode_ordinary(" é")].sum() == 3


def test_a_bf16_export_scores_nearly_as_the_fp32_one(data, tmp_path, run_folder, exported):
    export_model(run_folder / "done.json", tmp_path / "small-bf16", "bfloat16")
    precise, rounded = score(data, exported)[0], score(data, tmp_path / "small-bf16")[0]
    assert rounded["dtype"] == "bfloat16"
    assert rounded["val_loss_nats"] == pytest.approx(precise["val_loss_nats"], abs=0.02)
    assert rounded["val_loss_nats"] != precise["val_loss_nats"]


def test_spoilt_weights_get_no_score(data, tmp_path):
    broken = trained_model()
    with torch.no_grad():
        broken.ln_f.weight[0] = float("nan")
    export_model(make_run(tmp_path / "broken", broken) / "done.json", tmp_path / "out")
    with pytest.raises(ValueError, match="its validation loss is nan; the weights are spoilt"):
        score(data, tmp_path / "out")
    assert not (data / "scores").exists()


# ---- further tasks ------------------------------------------------------------------------


def test_strided_rows_score_each_token_once_with_half_a_context():
    tokens = np.arange(100)
    rows = strided_rows(tokens, 8)
    scored = [ids[len(ids) - count :] for ids, count in rows]
    assert np.concatenate(scored).tolist() == list(range(1, 100))
    assert (len(rows[0][0]), rows[0][1]) == (9, 8)
    assert all(len(ids) == 9 for ids, _ in rows)
    assert {count for _, count in rows[1:-1]} == {4}
    assert [len(ids) for ids, _ in strided_rows(np.arange(3), 8)] == [3]


def test_the_perplexity_of_a_text_is_counted_by_token_word_and_byte(
    tmp_path, exported, model, capsys
):
    text = " = Robert =\n\n" + "Robert is an English film , television and theatre actor . \n" * 5
    (tmp_path / "text.txt").write_text(text)
    score_task(exported, "wikitext", tmp_path / "text.txt", 2, tmp_path / "out.json", "cpu")
    found = read_json(tmp_path / "out.json")
    tokens = torch.tensor(gpt2_encoding().encode_ordinary(text))
    total = 0.0
    for ids, count in strided_rows(tokens.numpy(), 32):
        row = torch.from_numpy(ids)
        with torch.no_grad():
            losses = model(row[None, :-1], row[None, 1:], reduction="none")[0]
        total += losses[-count:].double().sum().item()
    assert (found["num_tokens"], found["num_words"]) == (len(tokens) - 1, len(text.split()))
    assert found["token_perplexity"] == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(total / len(text.split())), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text), rel=1e-5)
    assert found["model"] == "small" and len(found["weights_sha256"]) == 64
    said = f"word_perplexity {found['word_perplexity']:.4f} ({found['num_words']} words)"
    assert capsys.readouterr().out == f"small: wikitext {said}\n"


def test_mmlu_has_the_same_three_counts(tmp_path, exported):
    line = {"question": "Two and two?", "choices": ["1", "22", "3 of", "four of them"], "answer": 3}
    lines = [json.dumps(line | {"answer": i % 4}) + "\n" for i in range(8)]
    (tmp_path / "mmlu.jsonl").write_text("".join(lines))
    score_task(exported, "mmlu", tmp_path / "mmlu.jsonl", 2, tmp_path / "out.json", "cpu")
    found = read_json(tmp_path / "out.json")
    assert (found["num_items"], found["task"], found["data"]) == (8, "mmlu", "mmlu.jsonl")
    # the same four choices eight times: each way to count is right twice
    assert [found[w] for w in ("acc", "acc_token_mean", "acc_characters")] == [0.25] * 3


# ---- the same numbers for any split -------------------------------------------------------


def made_questions(path, count=60):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "over", "there", "again"]
    random, lines = np.random.RandomState(0), []
    for i in range(count):
        context = " ".join(random.choice(words, random.randint(3, 30)))
        endings = [" ".join(random.choice(words, random.randint(2, 12))) for _ in range(4)]
        texts = {"ctx": context, "ctx_a": context, "ctx_b": "", "activity_label": "Cats"}
        lines.append(json.dumps(texts | {"label": i % 4, "endings": endings}))
    path.write_text("\n".join(lines) + "\n")
    return path


def all_scores(model, folder, **split):
    """Validation loss and both prompts' counts, in one dictionary."""
    scores = {"loss": validation_loss(model, load_manifest(folder / "manifest.json"), **split)}
    questions = encode_questions(folder / "q.jsonl", gpt2_encoding(), ["llmc", "harness"])
    for prompt in ("llmc", "harness"):
        found = choice_scores(model, questions, prompt, **split)
        scores |= {f"{prompt} {way}": found[way] for way in found if way.startswith("acc")}
    return scores


def score_as_rank(rank, port, world_size, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    world = start_world()
    model = trained_model()
    shard_model(model, world, "fp32")
    split = {"micro_batch": 4, "device": world.device, "rank": rank, "world_size": world_size}
    (folder / f"{world_size}-{rank}.json").write_text(
        json.dumps(all_scores(model, folder, **split))
    )
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_batch_ranks_and_compilation_do_not_change_a_score(data, model):
    made_questions(data / "q.jsonl")
    alone = all_scores(model, data, micro_batch=4, device=CPU)
    counts = {key: value for key, value in alone.items() if key != "loss"}
    found = [all_scores(model, data, micro_batch=size, device=CPU) for size in (1, 16, 64)]
    compiled = GPT(CONFIG)
    compiled.load_state_dict(model.state_dict())
    for block in compiled.h:
        block.compile(dynamic=False, backend="aot_eager")
    found.append(all_scores(compiled, data, micro_batch=4, device=CPU))
    for world_size in (2, 3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.spawn(score_as_rank, (port, world_size, data), nprocs=world_size)
        ranks = [read_json(data / f"{world_size}-{rank}.json") for rank in range(world_size)]
        assert all(scores == ranks[0] for scores in ranks)
        found.append(ranks[0])
    for scores in found:
        assert {key: value for key, value in scores.items() if key != "loss"} == counts
        assert scores["loss"]["val_loss_nats"] == pytest.approx(
            alone["loss"]["val_loss_nats"], abs=1e-5
        )


@pytest.mark.slow
def test_bf16_scores_differ_by_at_most_three_items_from_one_batch_size_to_another(data, model):
    made_questions(data / "q.jsonl", count=200)
    rounded = GPT(CONFIG)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16)
    first, *others = (
        all_scores(rounded, data, micro_batch=size, device=CPU) for size in (1, 4, 16, 64)
    )
    precise = all_scores(model, data, micro_batch=4, device=CPU)
    for scores in others:
        for key in first:
            if key.endswith(("acc", "acc_token_mean", "acc_characters")):
                assert abs(scores[key] - first[key]) * 200 <= 3.001, key
    # rounding the weights stays within the error bar of the score
    for key in ("llmc acc_token_mean", "harness acc_characters"):
        assert abs(first[key] - precise[key]) < first[f"{key}_stderr"]
    assert first["loss"]["val_loss_nats"] == pytest.approx(
        precise["loss"]["val_loss_nats"], abs=precise["loss"]["val_loss_stderr"]
    )
