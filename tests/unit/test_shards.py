"""Token shards: bytes as in llm.c, and every bad shard refused by name."""

import contextlib
import errno
import hashlib
import json
import struct
import time
import types
from pathlib import Path

import numpy as np
import pytest

from miniseries.data.shards import (
    build_manifest,
    check_ids,
    describe_shard,
    load_manifest,
    open_shard,
    read_header,
    remove_other_shards,
    verify_shards,
    write_shard,
)


def make_dataset(folder, num_train=2, **options):
    """Shards of 10 tokens each and their manifest."""
    paths = [("val", folder / "d_val_000000.bin")]
    paths += [("train", folder / f"d_train_{i:06d}.bin") for i in range(1, num_train + 1)]
    for number, (_, path) in enumerate(paths):
        write_shard(path, np.arange(10) + 10 * number)
    entries = [describe_shard(path, split) for split, path in paths]
    content = build_manifest(folder, "d", entries, source={}, **options)
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder / "manifest.json"


def test_shard_has_the_bytes_of_llmc(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([50256, 1, 258]))
    header = struct.pack("<3i", 20240520, 1, 3) + bytes(1024 - 12)
    assert (tmp_path / "a.bin").read_bytes() == header + b"\x50\xc4\x01\x00\x02\x01"
    assert read_header(tmp_path / "a.bin") == 3
    assert open_shard(tmp_path / "a.bin").tolist() == [50256, 1, 258]


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_id_beyond_16_bits_is_refused_by_number_and_leaves_no_shard(tmp_path, dtype):
    with pytest.raises(ValueError, match="token id 65536 does not fit the shard's 16 bits"):
        write_shard(tmp_path / "a.bin", np.array([1, 65536, 2], dtype=dtype))
    chunks = iter([np.array([1]), np.array([65536], dtype=dtype)])
    with pytest.raises(ValueError, match=r"a\.bin: token id 65536"):
        write_shard(tmp_path / "a.bin", chunks, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[-1], [], [0.5], [[1, 2]]])
def test_what_is_no_flat_list_of_ids_is_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"a\.bin"):
        write_shard(tmp_path / "a.bin", np.array(tokens))
    assert list(tmp_path.iterdir()) == []


def test_each_kind_of_bad_shard_is_named_with_the_remedy(tmp_path):
    good = tmp_path / "good.bin"
    write_shard(good, np.arange(1000))
    content = good.read_bytes()
    bad = {
        "cut.bin": (content[:-1000], "3024 bytes, but it has 2024"),
        "count.bin": (content[:8] + struct.pack("<i", 999) + content[12:], "says 999 tokens"),
        "zero.bin": (content[:8] + struct.pack("<i", 0) + content[12:1024], "says 0 tokens"),
        "page.bin": (b"<html>" * 300, "no GPT-2 token shard"),
        "short.bin": (content[:100], "100 bytes, shorter than"),
    }
    for name, (damaged, message) in bad.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}.*{message}.*delete it") as caught:
            read_header(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"absent\.bin: No such file"):
        read_header(tmp_path / "absent.bin")


def test_manifest_tells_splits_and_counts(tmp_path):
    manifest = load_manifest(make_dataset(tmp_path, val_tokens=7))
    assert [path.name for path in manifest.val_shards] == ["d_val_000000.bin"]
    assert [path.name for path in manifest.train_shards] == [
        "d_train_000001.bin",
        "d_train_000002.bin",
    ]
    assert (manifest.num_train_tokens, manifest.num_val_tokens) == (20, 10)
    assert (manifest.dataset, manifest.val_tokens) == ("d", 7)


def test_every_bad_shard_of_a_manifest_is_named_and_no_good_one(tmp_path):
    path = make_dataset(tmp_path, num_train=4)
    (tmp_path / "d_train_000001.bin").unlink()
    with (tmp_path / "d_train_000003.bin").open("ab") as file:
        file.write(b"\0\0")
    write_shard(tmp_path / "d_train_000004.bin", np.arange(11))
    with pytest.raises(ValueError, match="3 bad files") as caught:
        load_manifest(path)
    message = str(caught.value)
    assert "d_train_000001.bin: No such file" in message
    assert "d_train_000003.bin: its header says 10 tokens" in message
    assert "d_train_000004.bin: 11 tokens, its manifest says 10" in message
    assert "d_train_000002" not in message and "d_val" not in message


def test_a_damaged_manifest_is_named(tmp_path):
    path = make_dataset(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json: not a dataset's manifest"):
        load_manifest(path)
    path.write_text('{"dataset": "d", "shards": [3]}')
    for read in (load_manifest, verify_shards):
        with pytest.raises(ValueError, match=r"manifest\.json: not a dataset's manifest"):
            read(path)
    path.write_text(path.read_text()[:-1])
    with pytest.raises(ValueError, match=r"manifest\.json"):
        load_manifest(path)


def test_a_thousand_shards_are_checked_in_under_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)  # the making of them is not the point
    path = make_dataset(tmp_path, num_train=1001)
    start = time.perf_counter()
    assert len(load_manifest(path).train_shards) == 1001
    assert time.perf_counter() - start < 1


def test_fingerprint_follows_content_and_validation_length_only(tmp_path):
    first = load_manifest(make_dataset(tmp_path)).fingerprint
    assert load_manifest(make_dataset(tmp_path, num_documents=3)).fingerprint == first
    assert load_manifest(make_dataset(tmp_path, val_tokens=5)).fingerprint != first
    write_shard(tmp_path / "d_val_000000.bin", np.arange(10) + 1)
    entries = [describe_shard(tmp_path / "d_val_000000.bin", "val")]
    entries += [describe_shard(tmp_path / f"d_train_00000{i}.bin", "train") for i in (1, 2)]
    assert build_manifest(tmp_path, "d", entries, source={})["fingerprint"] != first


def test_a_dataset_without_training_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="d: no train shard"):
        make_dataset(tmp_path, num_train=0)


def test_verification_names_the_shard_with_a_flipped_bit(tmp_path):
    path = make_dataset(tmp_path)
    assert verify_shards(path) == 3
    shard = tmp_path / "d_train_000002.bin"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    load_manifest(path)  # header and size are right
    with pytest.raises(ValueError, match=r"d_train_000002\.bin: its sha256"):
        verify_shards(path)


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([1, 2, 50300, 50301]))
    with pytest.raises(ValueError, match=r"a\.bin: token 2 \(byte 1028\) is 50300"):
        check_ids(tmp_path / "a.bin", open_shard(tmp_path / "a.bin"))


def test_only_this_datasets_surplus_shards_and_leftovers_are_removed(tmp_path):
    names = ["d_train_000001.bin", "d_train_000002.bin", "e_train_000002.bin", "notes.txt", "x.tmp"]
    for name in names:
        (tmp_path / name).write_text("")
    remove_other_shards(tmp_path, "d", [tmp_path / "d_train_000001.bin"])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["d_train_000001.bin", "e_train_000002.bin", "notes.txt"]


def test_a_shard_in_pieces_is_the_same_file_and_its_hash_is_told(tmp_path):
    tokens = np.arange(1000)
    digest = write_shard(tmp_path / "a.bin", iter([tokens[:7], tokens[7:7], tokens[7:]]), 1000)
    write_shard(tmp_path / "b.bin", tokens)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="other than the 9 tokens"):
        write_shard(tmp_path / "c.bin", iter([tokens]), 9)
    assert not list(tmp_path.glob("c.bin*"))


def test_a_folder_a_loop_and_a_shard_over_2_gib_are_named(tmp_path):
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "loop.bin").symlink_to(tmp_path / "loop.bin")
    with (tmp_path / "huge.bin").open("wb") as file:  # sparse, takes no disk
        file.write(struct.pack("<3i", 20240520, 1, 1_100_000_000))
        file.truncate(1024 + 2 * 1_100_000_000)
    for name, message in [
        ("folder.bin", "a folder or device"),
        ("loop.bin", "Too many levels of symbolic links"),
        ("huge.bin", "2200001024 bytes, a shard has to stay under 2 GiB"),
    ]:
        with pytest.raises(ValueError, match=rf"{name}: {message}"):
            read_header(tmp_path / name)


def test_verification_names_every_kind_of_bad_shard_and_touches_nothing(tmp_path):
    path = make_dataset(tmp_path, num_train=7)
    name = "d_train_{:06d}.bin".format
    good = (tmp_path / name(1)).read_bytes()
    bad = {1: b"\0" * 4 + good[4:], 2: good[:8] + struct.pack("<i", 9) + good[12:], 3: good[:-3]}
    bad[4] = good[:-2] + struct.pack("<H", 50300)
    for number, content in bad.items():
        (tmp_path / name(number)).write_bytes(content)
    (tmp_path / name(5)).unlink()
    (tmp_path / name(5)).mkdir()
    (tmp_path / name(6)).unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="6 bad files") as caught:
        verify_shards(path, num_threads=3)
    lines = str(caught.value).splitlines()[1:]
    for number, message in enumerate(
        ["starts with 0, 1", "says 9 tokens", "has 1041 bytes", r"token 9 (byte 1042) is 50300"]
        + ["a folder", "No such file"],
        1,
    ):
        assert name(number) in lines[number - 1] and message in lines[number - 1]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_shards_elsewhere_are_found_though_the_data_folder_is_a_link(tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "data").symlink_to(tmp_path / "disk" / "deep")
    folder = tmp_path / "project" / "data" / "d"
    elsewhere = tmp_path / "elsewhere.bin"
    write_shard(elsewhere, np.arange(5))
    write_shard(folder / "val.bin", np.arange(5))
    entries = [describe_shard(elsewhere, "train"), describe_shard(folder / "val.bin", "val")]
    content = build_manifest(folder, "d", entries, source={})
    (folder / "manifest.json").write_text(json.dumps(content))
    assert [shard["path"] for shard in content["shards"]] == [str(elsewhere), "val.bin"]
    assert load_manifest(folder / "manifest.json").num_train_tokens == 5


def test_a_shard_that_cannot_be_opened_is_not_said_to_be_bad(tmp_path, monkeypatch):
    path = make_dataset(tmp_path).parent / "any.bin"
    path.write_bytes(b"x")

    def refusing(*_arguments, **_more):
        raise OSError(errno.EMFILE, "Too many open files")

    unreadable = contextlib.nullcontext(types.SimpleNamespace(read=refusing))
    for opening in (refusing, lambda *_arguments: unreadable):
        monkeypatch.setattr(Path, "open", opening)
        with pytest.raises(ValueError, match=r"any\.bin: Too many open files; mend .*nothing was"):
            read_header(path)
