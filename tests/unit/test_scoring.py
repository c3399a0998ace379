"""Validation loss and HellaSwag: known answers, and the same ones however the work is split."""

import json
import math
import os
import socket
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from miniseries.data.encode import gpt2_encoding
from miniseries.data.shards import Manifest, write_shard
from miniseries.evaluation import scoring
from miniseries.evaluation.choices import (
    Candidate,
    Question,
    clean_text,
    encode_mmlu,
    encode_questions,
    question_set,
    read_rows,
    right_answers,
)
from miniseries.evaluation.scoring import (
    choice_scores,
    validation_loss,
    validation_windows,
)
from miniseries.model.gpt import GPT, GPTConfig, draw_weights, init_weights
from miniseries.training.distributed import shard_model, start_world

torch.set_num_threads(1)

CPU = torch.device("cpu")
T = 16
CONFIG = GPTConfig(1, 2, 16, T)
ITEM = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "label": 3,
    "endings": [
        "is using wrap to wrap a pair of skis.",
        "is ripping level tiles off.",
        "is holding a rubik's cube.",
        "starts pulling up roofing on a roof.",
    ],
}


class TargetModel(torch.nn.Module):
    """Stands in for a model: the loss of a position is its target's id / 1000, known by hand."""

    def __init__(self, length=T):
        super().__init__()
        self.config = types.SimpleNamespace(sequence_length=length)
        self.shapes = []

    def forward(self, tokens, targets, reduction):
        assert reduction == "none"
        assert tokens.shape == targets.shape
        self.shapes.append(tuple(tokens.shape))
        return targets.clamp(min=0).float() / 1000


def make_manifest(folder, shards, val_tokens=10**9):
    paths = []
    for number, tokens in enumerate(shards):
        paths.append(folder / f"made_val_{number:06d}.bin")
        write_shard(paths[-1], np.asarray(tokens))
    return Manifest(folder / "manifest.json", "made", [], paths, val_tokens, 0, 0, "")


def random_shards(seed=0, sizes=(203, 90)):
    generator = np.random.RandomState(seed)
    return [generator.randint(0, 50257, size) for size in sizes]


def tiny_model(seed=5):
    model = GPT(CONFIG)
    init_weights(model, draw_weights(CONFIG, seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)  # so that losses differ from one token to the next
    return model


def write_questions(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def made_items(count):
    """Questions whose texts differ in length; no two alike."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds", "over"]
    items = []
    for i in range(count):
        endings = [" ".join(words[(i + k) % 7 : (i + k) % 7 + 2 + k]) + f" {i}." for k in range(4)]
        context = " ".join(words[i % 5 : i % 5 + 4])
        extra = {"ctx": context, "ctx_a": context, "ctx_b": "", "label": i % 4, "endings": endings}
        items.append({**ITEM, **extra})
    return items


def simulated_ranks(function, world_size, monkeypatch):
    """Run all ranks one after the other; the sum over ranks goes to the last one."""
    parts = []

    def all_reduce(tensor):
        parts.append(tensor.clone())
        tensor.copy_(sum(parts))

    monkeypatch.setattr(scoring.dist, "all_reduce", all_reduce)
    results = [function(rank, world_size) for rank in range(world_size)]
    return results[-1]


# ---- validation ---------------------------------------------------------------------------


def test_every_full_window_counts_once_and_the_rest_of_a_shard_is_dropped():
    # 33 tokens: two windows of 16 targets; 16 tokens: none, as the last target is missing
    assert validation_windows([33, 16, 18], 16, 10**9) == [(0, 0), (0, 16), (2, 0)]
    assert validation_windows([33, 16, 18], 16, 47) == [(0, 0), (0, 16)]


def test_too_few_validation_tokens_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"needs 17 tokens in one shard.*\[16\].*use more text"):
        validation_windows([16], 16, 10**9)
    with pytest.raises(ValueError, match="val_tokens is 15"):
        validation_windows([100], 16, 15)


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_the_validation_loss_is_the_mean_over_the_targets_read(tmp_path, micro_batch):
    shards = random_shards()
    model = TargetModel()
    scores = validation_loss(
        model, make_manifest(tmp_path, shards), micro_batch=micro_batch, device=CPU
    )
    targets = np.concatenate([shards[0][1 : 1 + 12 * T], shards[1][1 : 1 + 5 * T]]) / 1000
    assert scores["num_tokens"] == 17 * T
    assert scores["val_loss_nats"] == pytest.approx(targets.mean(), rel=1e-6)
    windows = targets.reshape(17, T).mean(axis=1)
    assert scores["val_loss_stderr"] == pytest.approx(windows.std(ddof=1) / 17**0.5, rel=1e-5)
    assert set(model.shapes) == {(micro_batch, T)}


def test_validation_stops_at_val_tokens(tmp_path):
    shards = random_shards()
    manifest = make_manifest(tmp_path, shards, val_tokens=5 * T + 3)
    scores = validation_loss(TargetModel(), manifest, micro_batch=2, device=CPU)
    assert scores["num_tokens"] == 5 * T
    assert scores["val_loss_nats"] == pytest.approx(shards[0][1 : 1 + 5 * T].mean() / 1000)


def test_a_single_window_has_no_standard_error(tmp_path):
    manifest = make_manifest(tmp_path, [np.arange(T + 1)])
    scores = validation_loss(TargetModel(), manifest, micro_batch=2, device=CPU)
    assert scores["val_loss_stderr"] is None


def test_a_token_id_outside_the_vocabulary_is_named_with_file_and_place(tmp_path):
    tokens = np.arange(60)
    tokens[37] = 50300
    with pytest.raises(ValueError, match=r"made_val_000000.bin: token 37 has id 50300"):
        validation_loss(TargetModel(), make_manifest(tmp_path, [tokens]), micro_batch=2, device=CPU)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_make_equally_many_calls_and_agree_with_one_rank(tmp_path, monkeypatch, world_size):
    manifest = make_manifest(tmp_path, random_shards())
    alone = validation_loss(TargetModel(), manifest, micro_batch=2, device=CPU)
    models = [TargetModel() for _ in range(world_size)]
    together = simulated_ranks(
        lambda rank, size: validation_loss(
            models[rank], manifest, micro_batch=2, device=CPU, rank=rank, world_size=size
        ),
        world_size,
        monkeypatch,
    )
    assert together == alone
    assert {tuple(model.shapes) for model in models} == {tuple(models[0].shapes)}


def test_the_validation_loss_of_a_real_model_is_plain_cross_entropy(tmp_path):
    model = tiny_model()
    shard = random_shards(sizes=(6 * T + 1,))[0]
    scores = validation_loss(model, make_manifest(tmp_path, [shard]), micro_batch=4, device=CPU)
    tokens = torch.from_numpy(shard[:-1]).view(6, T)
    with torch.no_grad():
        logits = model(tokens).flatten(0, 1)
    expected = F.cross_entropy(logits.double(), torch.from_numpy(shard[1:])).item()
    assert scores["val_loss_nats"] == pytest.approx(expected, abs=1e-5)


# ---- HellaSwag: texts ---------------------------------------------------------------------


def test_llm_c_takes_context_and_ending_as_they_are(tmp_path):
    encoding = gpt2_encoding()
    item = {**ITEM, "ctx": "[header] How to. [title] Do it", "endings": ["a b [step]", *"xyz"]}
    question = encode_questions(write_questions(tmp_path / "q.jsonl", [item]), encoding)[0]
    first = question.candidates["llmc"][0]
    assert question.label == 3
    assert encoding.decode(first.tokens) == "[header] How to. [title] Do it a b [step]"
    assert first.tokens[-first.num_ending :] == encoding.encode_ordinary(" a b [step]")


def test_the_harness_prefixes_the_activity_and_removes_the_marks_in_brackets(tmp_path):
    encoding = gpt2_encoding()
    item = {**ITEM, "ctx_a": "[header] How to tie. [title] Do it.", "ctx_b": "then You"}
    item["endings"] = ["pull [substeps] hard.", "b", "c", "d"]
    path = write_questions(tmp_path / "q.jsonl", [item])
    question = encode_questions(path, encoding, ["harness"])[0]
    first = question.candidates["harness"][0]
    ending = encoding.decode(first.tokens[-first.num_ending :])
    context = encoding.decode(first.tokens[: -first.num_ending])
    # only the text as a whole is stripped, and pairs of blanks become one, once
    assert context == "Roof shingle removal:  How to tie.. Do it. Then you".replace("  ", " ")
    assert ending == " pull hard."
    assert first.num_characters == len("pull hard.")


def test_blanks_left_by_the_clean_up_belong_to_the_ending_as_in_the_harness(tmp_path):
    encoding = gpt2_encoding()
    item = {**ITEM, "ctx_a": "Wash it. [step]", "ctx_b": ""}
    path = write_questions(tmp_path / "q.jsonl", [item])
    first = encode_questions(path, encoding, ["harness"])[0].candidates["harness"][1]
    assert encoding.decode(first.tokens).startswith("Roof shingle removal: Wash it.  is ripping")
    ending = encoding.decode(first.tokens[-first.num_ending :])
    assert ending == "  is ripping level tiles off."


def test_clean_text_follows_the_harness():
    assert clean_text(" a [title] b [step] c ") == "a. b c"
    assert clean_text("[x] y") == " y"


def test_an_empty_context_starts_at_the_document_mark(tmp_path):
    path = write_questions(tmp_path / "q.jsonl", [{**ITEM, "ctx": ""}])
    first = encode_questions(path, gpt2_encoding())[0].candidates["llmc"][0]
    assert first.tokens[0] == 50256
    assert first.num_ending == len(first.tokens) - 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no question"),
        (json.dumps({"ctx": "a"}), "line 2 is no question .*ctx_a"),
        (json.dumps({**ITEM, "endings": ["a", "b"]}), "line 2 needs 4 endings"),
        (json.dumps({**ITEM, "label": ""}), "line 2 is no question"),
        (json.dumps({**ITEM, "label": 4}), "line 2 needs 4 endings and a label 0 to 3"),
        (json.dumps({**ITEM, "endings": [1, 2, 3, 4]}), "line 2 holds something other than text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "hellaswag.jsonl"
    path.write_text(json.dumps(ITEM) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"hellaswag.jsonl: {message}"):
        encode_questions(path, gpt2_encoding())


def test_an_empty_file_has_no_questions(tmp_path):
    (tmp_path / "q.jsonl").touch()
    assert encode_questions(tmp_path / "q.jsonl", gpt2_encoding()) == []


def test_the_number_of_questions_says_whose_they_are():
    assert question_set(10042) == "HellaSwag"
    assert question_set(200) == "made-up questions"
    assert question_set(0) is question_set(None) is None


def mmlu_line(**changes):
    content = {"question": "Two plus two?", "choices": ["1", "2", "3", 4], "answer": 3}
    return json.dumps(content | {"subject": "sums"} | changes)


def test_mmlu_is_asked_as_llm_c_asks_it(tmp_path):
    (tmp_path / "mmlu.jsonl").write_text(mmlu_line() + "\n" + mmlu_line(answer=0) + "\n")
    encoding = gpt2_encoding()
    first, second = encode_mmlu(tmp_path / "mmlu.jsonl", encoding)
    assert (first.label, second.label) == (3, 0)
    last = first.candidates["mmlu"][3]
    assert encoding.decode(last.tokens) == "Question: Two plus two?\n\nAnswer: 4"
    assert encoding.decode(last.tokens[-last.num_ending :]) == " 4"


def test_a_raw_line_separator_within_a_text_ends_no_line(tmp_path):
    texts = [f"one{mark}two" for mark in "\u2028\u2029\x85"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "rows.jsonl").write_bytes("\r\n".join([*lines, ""]).encode())
    assert [row["text"] for row in read_rows(tmp_path / "rows.jsonl")] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (mmlu_line(choices=["1"]), "line 2 needs 4 choices and an answer from 0 to 3"),
        (mmlu_line(answer=4), "line 2 needs 4 choices"),
        ("{}", "line 2 is no question of MMLU"),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_line_of_mmlu_is_named(tmp_path, line, message):
    (tmp_path / "mmlu.jsonl").write_text(mmlu_line() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"mmlu.jsonl: {message}"):
        encode_mmlu(tmp_path / "mmlu.jsonl", gpt2_encoding())


# ---- HellaSwag: scores --------------------------------------------------------------------


def made_question(label, endings, characters=(1, 1, 1, 1), prompt="llmc"):
    """A question with a context of one token; endings are given as the ids of their tokens."""
    candidates = [
        Candidate([7, *ids], len(ids), count)
        for ids, count in zip(endings, characters, strict=True)
    ]
    return Question(label, {prompt: candidates})


def choices(scores, divisor=None):
    """The candidate with the smallest loss of each item."""
    items = scores["items"]
    losses = [np.array(i["nats"]) / (np.array(i[divisor]) if divisor else 1) for i in items]
    return [int(four.argmin()) for four in losses]


def test_sum_and_mean_over_tokens_choose_differently():
    # losses in thousandths; sums 30, 25, 40, 41: second; means 30, 25, 20, 20.5: third
    endings = [[30], [25], [10, 30], [11, 30]]
    questions = [made_question(2, endings), made_question(1, endings), made_question(2, endings)]
    scores = choice_scores(TargetModel(), questions, micro_batch=2, device=CPU, with_items=True)
    assert choices(scores, "num_tokens") == [2, 2, 2]
    assert (scores["num_items"], scores["num_correct"], scores["num_truncated"]) == (3, 2, 0)
    assert scores["acc"] == pytest.approx(1 / 3)
    assert scores["acc_token_mean"] == pytest.approx(2 / 3)
    assert scores["acc_token_mean_stderr"] == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))


def test_the_harness_divides_by_characters():
    question = made_question(3, [[30], [25], [40], [44]], (1, 1, 2, 3), prompt="harness")
    scores = choice_scores(
        TargetModel(), [question], "harness", micro_batch=8, device=CPU, with_items=True
    )
    assert choices(scores, "num_characters") == [3]
    assert choices(scores) == [1]
    assert (scores["acc"], scores["acc_characters"], scores["acc_stderr"]) == (0.0, 1.0, None)
    assert right_answers(scores["items"], "acc_characters").tolist() == [True]
    assert right_answers(scores["items"], "acc").tolist() == [False]


def test_among_equal_candidates_the_first_wins():
    question = made_question(1, [[9, 9], [5], [5], [5, 5]])
    scores = choice_scores(TargetModel(), [question], micro_batch=3, device=CPU)
    assert scores["num_correct"] == 1


def test_a_context_that_does_not_fit_loses_its_start_and_is_counted():
    fits = Candidate([1] * T + [2], 1, 1)  # T + 1 tokens are T inputs
    long = Candidate([9] * 3 + [1] * T + [2], 1, 1)
    longer_ending = Candidate([5] * (3 * T), 3 * T - 1, 1)
    model = TargetModel()
    questions = [
        Question(0, {"llmc": [fits, fits, longer_ending, fits]}),
        Question(1, {"llmc": [long, fits, long, long]}),
        Question(0, {"llmc": [fits] * 4}),
    ]
    scores = choice_scores(model, questions, micro_batch=4, device=CPU, with_items=True)
    assert scores["num_truncated"] == 2
    assert choices(scores, "num_tokens") == [
        0,
        0,
        0,
    ]  # an ending cut to T tokens has the mean of those
    assert set(model.shapes) == {(4, T)}


def test_short_rows_share_shorter_shapes_and_the_memory_of_long_ones():
    model = TargetModel(length=1024)
    endings = [[1] * 70, [2], [3], [4]]
    choice_scores(model, [made_question(0, endings)] * 9, micro_batch=2, device=CPU)
    assert set(model.shapes) == {(32, 64), (16, 128)}
    model.shapes.clear()
    endings = [[1] * n for n in (64, 65, 128, 129)]
    choice_scores(model, [made_question(0, endings)], micro_batch=1, device=CPU)
    assert model.shapes == [(16, 64), (8, 128), (5, 192)], "no longer than the longest row"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_every_split_of_the_questions_gives_the_same_scores(monkeypatch, world_size, micro_batch):
    generator = np.random.RandomState(1)
    questions = [
        made_question(i % 4, [generator.randint(0, 900, n).tolist() for n in (1, 2, 4, 5)])
        for i in range(10)
    ]
    alone = choice_scores(TargetModel(), questions, micro_batch=3, device=CPU, with_items=True)
    models = [TargetModel() for _ in range(world_size)]
    together = simulated_ranks(
        lambda rank, size: choice_scores(
            models[rank],
            questions,
            micro_batch=micro_batch,
            device=CPU,
            rank=rank,
            world_size=size,
            with_items=True,
        ),
        world_size,
        monkeypatch,
    )
    assert together == alone
    assert {tuple(model.shapes) for model in models} == {tuple(models[0].shapes)}


@pytest.mark.parametrize("prompt", ["llmc", "harness"])
def test_padded_batches_agree_with_one_plain_pass_for_each_candidate(tmp_path, prompt):
    model = tiny_model()
    path = write_questions(tmp_path / "q.jsonl", made_items(6))
    questions = encode_questions(path, gpt2_encoding(), [prompt])
    scores = choice_scores(model, questions, prompt, micro_batch=5, device=CPU, with_items=True)
    predictions, num_truncated = [], 0
    for question in questions:
        losses = []
        num_truncated += any(len(c.tokens) > T + 1 for c in question.candidates[prompt])
        for candidate in question.candidates[prompt]:
            ids = torch.tensor(candidate.tokens[-(T + 1) :])
            with torch.no_grad():
                log_probabilities = model(ids[None, :-1])[0].double().log_softmax(dim=1)
            each = log_probabilities[torch.arange(len(ids) - 1), ids[1:]][-candidate.num_ending :]
            divisor = len(each) if prompt == "llmc" else candidate.num_characters
            losses.append(-each.sum().item() / divisor)
        predictions.append(losses.index(min(losses)))
    assert choices(scores, "num_tokens" if prompt == "llmc" else "num_characters") == predictions
    assert scores["num_truncated"] == num_truncated
    assert len(set(predictions)) > 1


# ---- real processes -----------------------------------------------------------------------


def score_in_a_group(rank, port, world_size, folder, questions, results):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    world = start_world()
    model = tiny_model()
    shard_model(model, world, "fp32")
    names = {id(p) for p in model.parameters()}
    manifest = make_manifest(folder / f"rank{rank}", random_shards())
    shared = {"device": world.device, "rank": rank, "world_size": world_size}
    loss = validation_loss(model, manifest, micro_batch=2, **shared)
    items = encode_questions(questions, gpt2_encoding())
    scores = choice_scores(model, items, micro_batch=3, with_items=True, **shared)
    # the optimizer holds these very tensors: scoring must leave the sharded ones in place
    assert {id(p) for p in model.parameters()} == names
    (results / f"{rank}.json").write_text(json.dumps([loss, scores]))
    torch.distributed.destroy_process_group()


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_with_a_sharded_model_agree_with_one(tmp_path, free_port):
    questions = write_questions(tmp_path / "q.jsonl", made_items(5))
    arguments = (free_port, 2, tmp_path, questions, tmp_path)
    torch.multiprocessing.spawn(score_in_a_group, arguments, nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    manifest = make_manifest(tmp_path, random_shards())
    loss = validation_loss(tiny_model(), manifest, micro_batch=5, device=CPU)
    items = encode_questions(questions, gpt2_encoding())
    scores = choice_scores(tiny_model(), items, micro_batch=4, device=CPU, with_items=True)
    assert first[0]["val_loss_nats"] == pytest.approx(loss["val_loss_nats"], abs=1e-6)
    assert first[0]["num_tokens"] == loss["num_tokens"]
    assert first[1] == scores
