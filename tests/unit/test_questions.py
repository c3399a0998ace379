"""Questions: made from held-out text, HellaSwag's own, and llm.c's file of them."""

import json
import random
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import FAST, REPOSITORY

from miniseries.data import questions
from miniseries.data.encode import gpt2_encoding
from miniseries.data.questions import (
    HELLASWAG_FILE,
    Passage,
    fetch_questions,
    find_passages,
    make_questions,
    questions_from_shards,
    slice_passages,
    write_eval_file,
)
from miniseries.data.shards import write_shard


def test_passages_are_whole_sentences_and_code_is_left_out():
    text = (
        "The first sentence has seven words here. The second one is a bit\nlonger than that. "
        "Too short. Now comes one that stands alone.\n\n"
        "    for x in {1, 2}: print(x | y)\n\n"
        "Here is another block of text. It has two whole sentences in it."
    )
    assert list(find_passages("n", text)) == [
        Passage(
            "n",
            "The first sentence has seven words here.",
            "The second one is a bit longer than that.",
        ),
        Passage("n", "Here is another block of text.", "It has two whole sentences in it."),
    ]


def test_questions_hold_the_true_ending_at_the_label_and_others_from_elsewhere():
    passages = [
        Passage(f"d{i // 2}", f"Context number {i}.", f"This is ending {i:03d}.") for i in range(90)
    ]
    true = {passage.context: passage for passage in passages}
    source = {passage.ending: passage.name for passage in passages}
    questions = make_questions(passages, num_questions=50)
    assert len(questions) == 50
    assert [question["ind"] for question in questions] == list(range(50))
    assert {question["label"] for question in questions} == {0, 1, 2, 3}
    for question in questions:
        passage = true[question["ctx"]]
        endings, label = question["endings"], question["label"]
        assert endings[label] == passage.ending
        assert len(set(endings)) == 4
        others = [source[ending] for i, ending in enumerate(endings) if i != label]
        assert passage.name not in others
        assert not any(ending.startswith(" ") for ending in endings)
        assert question["ctx_a"] == question["ctx"] and question["ctx_b"] == ""
        assert question["activity_label"] == passage.name
    assert make_questions(passages, 50) == questions
    assert make_questions(passages, 50, seed=1) != questions


def test_wrong_endings_are_about_as_long_as_the_true_one():
    generator = random.Random(0)
    passages = [
        Passage(f"d{i}", f"Context {i}.", f"{i:04d}" + "x" * generator.randrange(300))
        for i in range(2000)
    ]
    for question in make_questions(passages, 100):
        lengths = [len(ending) for ending in question["endings"]]
        assert max(lengths) - min(lengths) < 20


def test_text_without_prose_still_gives_questions():
    generator = random.Random(0)
    code = "".join(generator.choice("abcdef=()\n ") for _ in range(3000))
    passages = list(slice_passages("code", code))
    assert len(passages) > 10 and make_questions(passages, 5)[4]["ind"] == 4
    assert make_questions([], 5) == []


QUESTION = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts pulling."],
    "label": 3,
}


def test_a_line_of_questions_ends_where_its_file_says(tmp_path):
    question = QUESTION | {"ctx": "one\u2028two"}
    (tmp_path / "q.jsonl").write_text(json.dumps(question, ensure_ascii=False) + "\n")
    fetch_questions(str(tmp_path / "q.jsonl"), tmp_path / "hellaswag.jsonl")
    assert json.loads((tmp_path / "hellaswag.jsonl").read_text()) == question


def test_questions_come_from_the_hubs_parquet_with_the_label_as_a_number(hub, tmp_path):
    row = QUESTION | {"label": "3", "source_id": "activitynet~v_-JhWjGDPHMY", "split": "val"}
    pq.write_table(pa.Table.from_pylist([row] * 2), tmp_path / "q.parquet")
    hub.files[HELLASWAG_FILE] = (tmp_path / "q.parquet").read_bytes()
    output = tmp_path / "h" / "hellaswag.jsonl"
    fetch_questions(REPOSITORY, output, "main", **FAST)
    assert [json.loads(line) for line in output.read_text().splitlines()] == [QUESTION] * 2
    assert [path.name for path in output.parent.iterdir() if path.is_file()] == ["hellaswag.jsonl"]
    output.unlink()  # as Snakemake does before a job
    with pytest.raises(ValueError, match="no such file"):
        hub.files.clear()
        fetch_questions("someone/else", output, "main", **FAST)
    fetch_questions(REPOSITORY, output, "main", **FAST)
    assert json.loads(output.read_text().splitlines()[0]) == QUESTION, "as it was answered before"


def test_questions_can_be_a_local_file_and_a_bad_one_is_named(tmp_path):
    local, output = tmp_path / "val.jsonl", tmp_path / "hellaswag.jsonl"
    local.write_text(json.dumps(QUESTION) + "\n")
    fetch_questions(str(local), output)
    assert json.loads(output.read_text()) == QUESTION
    for wrong in ({"label": 4}, {"endings": ["one"]}, {"label": ""}, {"ctx": None}):
        local.write_text(json.dumps(QUESTION) + "\n" + json.dumps(QUESTION | wrong))
        with pytest.raises(ValueError, match=r"val\.jsonl, question 1: "):
            fetch_questions(str(local), output)
    assert json.loads(output.read_text()) == QUESTION


def test_documents_of_validation_shards_are_asked_about_across_their_borders(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "TOKENS_AT_ONCE", 7)
    texts = [
        f"The {word} one has a first sentence here. Then comes its second sentence, {word}."
        for word in ("red", "green", "blue", "grey", "pink")
    ]
    encode = gpt2_encoding().encode_ordinary
    ids = [15496, 995]  # the end of a document that is not held out
    for text in texts:
        ids += [50256, *encode(text)]
    write_shard(tmp_path / "a.bin", np.array(ids[:40]))
    write_shard(tmp_path / "b.bin", np.array(ids[40:]))
    shards = [tmp_path / "a.bin", tmp_path / "b.bin"]
    assert list(questions._documents(shards)) == texts
    made = questions_from_shards(shards, 3)
    assert len(made) == 3 and {"ctx_a", "ctx", "label", "endings"} < set(made[0])
    assert all(question["ctx"] in " ".join(texts) for question in made)
    assert questions_from_shards(shards, 0) == []


def read_eval_file(path):
    """llm.c's reader, as formats.md describes the file: header, then (label, context, endings)."""
    content = path.read_bytes()
    magic, version, count, longest = struct.unpack_from("<4i", content)
    assert (magic, version) == (20240522, 1) and content[16:1024] == bytes(1008)
    words = np.frombuffer(content, "<u2", offset=1024).tolist()
    examples, place, sizes = [], 0, []
    for number in range(count):
        start, size, index, label, num_endings = words[place : place + 5]
        assert (start, index, num_endings) == (65535, number, 4)
        parts, at = [], place + 5
        for _ in range(5):
            parts.append(words[at + 1 : at + 1 + words[at]])
            at += 1 + words[at]
        assert size == 2 * (at - place)
        sizes.append(size)
        examples.append((label, parts[0], parts[1:]))
        place = at
    assert place == len(words) and longest == max(sizes)
    return examples


def test_eval_file_has_llm_c_s_layout(tmp_path):
    rows = [QUESTION, QUESTION | {"label": 0, "ctx": "Naïve <|endoftext|>", "ind": 7}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_eval_file(tmp_path / "q.jsonl", tmp_path / "hellaswag_val.bin")
    decode = gpt2_encoding().decode
    examples = read_eval_file(tmp_path / "hellaswag_val.bin")
    assert [label for label, _, _ in examples] == [3, 0]
    assert [decode(context) for _, context, _ in examples] == [row["ctx"] for row in rows]
    expected = [" " + ending for ending in QUESTION["endings"]]
    assert [decode(ending) for ending in examples[0][2]] == expected


def test_questions_that_the_eval_file_cannot_hold_are_refused(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION | {"ctx": "a b " * 20_000}))
    with pytest.raises(ValueError, match=r"question 0: .* bytes, the format holds 65535"):
        write_eval_file(tmp_path / "q.jsonl", tmp_path / "a.bin")
    (tmp_path / "q.jsonl").write_text((json.dumps(QUESTION) + "\n") * 65_536)
    with pytest.raises(ValueError, match="holds 65535 examples, not 65536"):
        write_eval_file(tmp_path / "q.jsonl", tmp_path / "a.bin")
    (tmp_path / "q.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no row"):
        write_eval_file(tmp_path / "q.jsonl", tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()
