"""Token streams and shards: llm.c's layout, byte for byte, whatever is interrupted or changed."""

import json
import time

import numpy as np
import pytest
from stand_ins import llmc_shards

from miniseries.data import streams
from miniseries.data.corpus import Document, Findings, plan_parts
from miniseries.data.encode import gpt2_encoding
from miniseries.data.streams import Segment, encode_documents, identify, plan_shards, tokenize_part


def write_lines(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return {"source": "files", "paths": [str(path)]}


class Work:
    """A dataset's parts, tokenized and packed in one process."""

    def __init__(self, folder, dataset):
        self.folder, self.dataset, self.streams = folder, dataset, folder / "streams"
        self.parts = plan_parts(dataset)
        self.identities = [identify(part, dataset) for part in self.parts]
        self.tokenized = []

    def tokenize(self, number):
        self.tokenized.append(number)
        about = (number, self.dataset, self.streams, self.identities[number])
        return tokenize_part(self.parts[number], *about)

    def pack(self):
        """Shards by name."""
        counts = [self.tokenize(number)["num_tokens"] for number in range(len(self.parts))]
        plans = plan_shards("d", counts, self.dataset)
        entries = streams.pack_shards(
            plans, self.folder, self.streams, self.identities, self.tokenize
        )
        names = [entry["path"].rpartition("/")[2] for entry in entries]
        return {name: (self.folder / name).read_bytes() for name in names}


TEXTS = [f"Document {i} says: {'la ' * (i % 17)}<|endoftext|> é" for i in range(120)]


@pytest.mark.parametrize(("val_tokens", "shard_tokens"), [(100, 100), (64, 300), (300, 64)])
def test_shards_are_those_of_llm_c_byte_for_byte(tmp_path, val_tokens, shard_tokens):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    dataset |= {"val_first_tokens": val_tokens, "shard_tokens": shard_tokens}
    shards = Work(tmp_path, dataset).pack()
    assert shards == llmc_shards(TEXTS, val_tokens, shard_tokens)
    assert len(shards) > 5


def test_a_prefix_of_the_shards_is_the_same_shards(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    dataset |= {"val_first_tokens": 100, "shard_tokens": 100, "num_shards": 3}
    every = llmc_shards(TEXTS, 100, 100)
    assert Work(tmp_path, dataset).pack() == dict(list(every.items())[:4])


def test_streams_go_once_their_tokens_are_in_shards_and_come_again_where_needed(tmp_path):
    for number in range(4):
        write_lines(tmp_path / f"{number}.jsonl", TEXTS[30 * number : 30 * number + 30])
    dataset = {"source": "files", "paths": [f"{tmp_path}/*.jsonl"], "val_first_tokens": 200}
    dataset["shard_tokens"] = 150
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.np, "fromfile", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_parts_of_one_file_each(tmp_path, dataset).pack()
    assert not list(tmp_path.glob("*.bin*"))
    work = make_parts_of_one_file_each(tmp_path, dataset)
    shards = work.pack()
    assert shards == llmc_shards(TEXTS, 200, 150)
    assert not list((tmp_path / "streams").glob("*.tokens"))
    lost = sorted(shards)[-2]
    (tmp_path / lost).unlink()
    again = make_parts_of_one_file_each(tmp_path, dataset)
    counts = [
        streams.read_note(work.streams, n, i)["num_tokens"] for n, i in enumerate(again.identities)
    ]
    plans = plan_shards("d", counts, dataset)
    missing = streams.shards_to_write(plans, tmp_path, work.streams, again.identities)
    assert [plan.name for plan in missing] == [lost]
    streams.pack_shards(plans, tmp_path, work.streams, again.identities, again.tokenize)
    assert (tmp_path / lost).read_bytes() == shards[lost]
    assert set(again.tokenized) == {segment.part for segment in missing[0].segments} != {0, 1, 2, 3}


def make_parts_of_one_file_each(folder, dataset):
    work = Work(folder, dataset)
    (part,) = work.parts
    work.parts = [part._replace(pieces=(piece,)) for piece in part.pieces]
    work.identities = [identify(part, dataset) for part in work.parts]
    return work


def test_a_changed_text_or_option_is_tokenized_again_and_nothing_else(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    first = Work(tmp_path, dataset)
    assert first.identities == Work(tmp_path, dataset | {"shard_tokens": 50}).identities
    for option in ({"min_doc_tokens": 9}, {"val_fraction": 0.2}, {"val_first_tokens": 9}):
        assert first.identities != Work(tmp_path, dataset | option).identities
    write_lines(tmp_path / "a.jsonl", TEXTS[:-1])
    assert first.identities != Work(tmp_path, dataset).identities


def test_a_shard_made_again_with_other_tokens_is_noticed(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"val_first_tokens": 100}
    work = Work(tmp_path, dataset)
    work.pack()
    record = json.loads((work.streams / "packed.json").read_text())
    record["d_val_000000.bin"]["sha256"] = "0" * 64
    (work.streams / "packed.json").write_text(json.dumps(record))
    (tmp_path / "d_val_000000.bin").unlink()
    for _ in range(2):  # whoever repeats the command does not get it past
        with pytest.raises(ValueError, match=r"d_val_000000\.bin: made again of the same text"):
            work.pack()


def test_held_out_documents_are_those_of_their_hash_or_file(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    write_lines(tmp_path / "b.jsonl", ["held out", "this too"])
    (tmp_path / "1").mkdir()
    shards = Work(tmp_path / "1", dataset | {"val_paths": [f"{tmp_path}/b.jsonl"]}).pack()
    encode = gpt2_encoding().encode_ordinary
    expected = [50256, *encode("held out"), 50256, *encode("this too")]
    assert np.frombuffer(shards["d_val_000000.bin"][1024:], "<u2").tolist() == expected


def test_short_documents_are_left_out_and_counted(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", ["Hello world", "Hello", "Hello world Hello"])
    work = Work(tmp_path, dataset | {"min_doc_tokens": 2, "val_first_tokens": 3})
    shards = work.pack()
    assert [len(content) for content in shards.values()] == [1024 + 2 * 3, 1024 + 2 * 4]
    findings = work.tokenize(0)["findings"]
    assert (findings["num_documents"], findings["num_short"]) == (2, 1)


def test_a_document_that_cannot_be_encoded_is_counted_named_and_left_out(monkeypatch):
    class Panic(BaseException):
        """What Rust libraries raise; no Exception."""

    def encode(texts):
        if "bad" in texts:
            raise Panic("stack overflow")
        return np.array([1] * len(texts), np.uint16), np.ones(len(texts), np.int64)

    monkeypatch.setattr(streams, "encode_texts", encode)
    findings = Findings()
    texts = {"one": "good", "two": "bad", "three": "good"}
    batch = [Document(name, text, b"") for name, text in texts.items()]
    left, ids, counts = encode_documents(batch, findings)
    assert [document.name for document in left] == ["one", "three"]
    assert ids.tolist() == counts.tolist() == [1, 1]
    assert findings.bad == ["two: cannot be tokenized (stack overflow)"]


def test_a_vocabulary_that_cannot_be_read_is_no_fault_of_the_documents(tmp_path, monkeypatch):
    work = Work(tmp_path, write_lines(tmp_path / "a.jsonl", TEXTS))

    def unreadable():
        raise ValueError("GPT-2's vocabulary file vocab.bpe is missing")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "gpt2_encoding", unreadable)
        with pytest.raises(ValueError, match=r"vocab\.bpe is missing"):
            work.pack()
    assert work.tokenize(0)["findings"]["num_documents"] == len(TEXTS)


def test_batches_do_not_change_the_tokens(tmp_path, monkeypatch):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"val_first_tokens": 100}
    expected = Work(tmp_path, dataset).pack()
    monkeypatch.setattr(streams, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(streams, "CHARACTERS_AT_ONCE", 100)
    monkeypatch.setattr(streams, "TOKENS_AT_ONCE", 11)
    (tmp_path / "2").mkdir()
    assert Work(tmp_path / "2", dataset).pack() == expected


def test_nasty_documents_are_encoded_fast_and_decode_back(tmp_path):
    texts = [sign * 1_000_000 for sign in "^a"] + ["x" * 5_000_000, "a\0b", "lone \ud800", "b\r\n"]
    texts += [f"x{sign * 1_000_000}" for sign in " \n"] + ["<|endoftext|>", "'" * 100_000]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    dataset = {"source": "files", "paths": [f"{tmp_path}/a.jsonl"], "val_first_tokens": 1}
    start = time.perf_counter()
    shards = Work(tmp_path, dataset).pack()
    assert time.perf_counter() - start < 60
    tokens = np.frombuffer(b"".join(content[1024:] for content in shards.values()), "<u2")
    documents = [
        part[1:].tolist() for part in np.split(tokens, np.flatnonzero(tokens == 50256))[1:]
    ]
    expected = [text.replace("\ud800", "\ufffd") for text in texts]
    assert [gpt2_encoding().decode(ids) for ids in documents] == expected


def test_shards_are_cut_across_parts_and_the_last_holds_the_remainder():
    plans = plan_shards("d", [{"val": 3, "train": 5}, {"val": 0, "train": 6}], {"shard_tokens": 4})
    assert [(plan.name, plan.num_tokens, plan.segments) for plan in plans] == [
        ("d_val_000000.bin", 3, (Segment(0, "val", 0, 3),)),
        ("d_train_000001.bin", 4, (Segment(0, "train", 0, 4),)),
        ("d_train_000002.bin", 4, (Segment(0, "train", 4, 5), Segment(1, "train", 0, 3))),
        ("d_train_000003.bin", 3, (Segment(1, "train", 3, 6),)),
    ]
    exact = plan_shards("d", [{"val": 4, "train": 8}], {"shard_tokens": 4})
    assert [plan.num_tokens for plan in exact] == [4, 4, 4]
