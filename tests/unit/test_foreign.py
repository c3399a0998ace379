"""Token files of other tools: used in place or converted, and every bad one refused by name."""

import json
import struct

import numpy as np
import pytest

from miniseries.data import foreign
from miniseries.data.prepare import prepare_dataset
from miniseries.data.shards import load_manifest, open_shard, verify_shards

TOKENS = np.random.RandomState(0).randint(50_257, size=2_500).astype("<u2")


def llmc(path, tokens):
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    path.write_bytes(header + tokens.tobytes())


def nanogpt(path, tokens):
    path.write_bytes(tokens.tobytes())


def npy(path, tokens):
    np.save(path, tokens)


WRITERS = {"llmc": (llmc, ".bin"), "nanogpt": (nanogpt, ".bin"), "npy": (npy, ".npy")}


def write(folder, layout):
    """One validation and two training files; the dataset's entry."""
    folder.mkdir(exist_ok=True)
    writer, suffix = WRITERS[layout]
    pieces = {"val_0": TOKENS[:300], "train_1": TOKENS[300:1900], "train_2": TOKENS[1900:]}
    for name, tokens in pieces.items():
        writer(folder / f"{name}{suffix}", tokens)
    paths = {f"{split}_paths": [f"{folder}/{split}_*"] for split in ("train", "val")}
    return {"source": "shards", "format": layout, **paths}


def prepare(dataset, folder):
    prepare_dataset("mine", dataset, folder, folder / "manifest.json")
    return load_manifest(folder / "manifest.json")


@pytest.mark.parametrize("layout", list(WRITERS))
def test_files_of_each_tool_give_their_tokens_in_order(tmp_path, monkeypatch, layout):
    monkeypatch.setattr(foreign, "SHARD_TOKENS", 1_000)
    monkeypatch.setattr(foreign, "IDS_AT_ONCE", 77)
    manifest = prepare(write(tmp_path / "own", layout), tmp_path / "d")
    read = {
        split: np.concatenate([open_shard(p) for p in paths]).tolist()
        for split, paths in (("val", manifest.val_shards), ("train", manifest.train_shards))
    }
    assert read == {"val": TOKENS[:300].tolist(), "train": TOKENS[300:].tolist()}
    sizes = [len(open_shard(path)) for path in manifest.train_shards]
    in_place = layout == "llmc"
    assert sizes == ([1_600, 600] if in_place else [1_000, 1_000, 200])
    home = tmp_path / ("own" if in_place else "d")
    assert {path.parent for path in manifest.train_shards} == {home}
    assert verify_shards(manifest.path) == len(sizes) + 1


def test_every_bad_file_is_named_and_nothing_is_written(tmp_path):
    dataset = write(tmp_path / "own", "llmc")
    good = (tmp_path / "own/train_1.bin").read_bytes()
    bad = {
        "train_3": b"\0" * 2000,
        "train_4": good[:-1],
        "train_5": good[:8] + good[12:16] + good[12:],
    }
    bad["train_6"] = good[:-2] + struct.pack("<H", 50_300)
    for name, content in bad.items():
        (tmp_path / f"own/{name}.bin").write_bytes(content)
    (tmp_path / "own/train_7.bin").mkdir()
    with pytest.raises(ValueError, match="5 bad files") as caught:
        prepare(dataset, tmp_path / "d")
    message = str(caught.value)
    places = [message.index(f"train_{number}.bin: ") for number in (3, 4, 5, 6, 7)]
    assert places == sorted(places)
    assert "token 1599 (byte 4222) is 50300" in message
    assert not list((tmp_path / "d").glob("m*"))


@pytest.mark.parametrize(
    ("layout", "content", "message"),
    [
        ("nanogpt", b"\0\0\0", "3 bytes are no row of 16-bit ids"),
        ("nanogpt", struct.pack("<2H", 1, 50_300), r"token 1 \(byte 2\) is 50300"),
        ("nanogpt", struct.pack("<3i", 20240520, 1, 0) + bytes(1012), "has llm.c's header"),
        ("npy", b"no numpy", r"not a whole \.npy file"),
    ],
)
def test_a_bad_converted_file_is_named_with_its_place(tmp_path, layout, content, message):
    dataset = write(tmp_path / "own", layout)
    (tmp_path / f"own/train_9{WRITERS[layout][1]}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"train_9\.\w+: {message}"):
        prepare(dataset, tmp_path / "d")


@pytest.mark.parametrize("tokens", [TOKENS.reshape(2, -1), TOKENS.astype(np.int64), TOKENS[:0]])
def test_an_npy_of_another_kind_is_refused(tmp_path, tokens):
    dataset = write(tmp_path / "own", "npy")
    np.save(tmp_path / "own/train_9.npy", tokens)
    with pytest.raises(ValueError, match=r"train_9\.npy: holds .*; build-nanogpt's are"):
        prepare(dataset, tmp_path / "d")


def test_a_cut_npy_is_refused(tmp_path):
    dataset = write(tmp_path / "own", "npy")
    path = tmp_path / "own/train_2.npy"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"train_2\.npy: not a whole \.npy file"):
        prepare(dataset, tmp_path / "d")


def test_a_file_for_both_splits_or_none_is_refused(tmp_path):
    dataset = write(tmp_path / "own", "llmc")
    with pytest.raises(ValueError, match=r"val_0\.bin: in `train_paths` and in `val_paths`"):
        prepare(dataset | {"train_paths": [f"{tmp_path}/own/*"]}, tmp_path / "d")
    with pytest.raises(ValueError, match=r"no file matches '.*nothing\*'"):
        prepare(dataset | {"train_paths": [f"{tmp_path}/own/nothing*"]}, tmp_path / "d")


def test_the_manifest_tells_the_format_and_the_files(tmp_path):
    prepare(write(tmp_path / "own", "npy"), tmp_path / "d")
    source = json.loads((tmp_path / "d/manifest.json").read_text())["source"]
    assert source["format"] == "npy" and len(source["files"]) == 3


def test_files_in_the_dataset_s_own_folder_under_its_shards_names_are_never_deleted(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for name, tokens in (("val_000000", TOKENS[:300]), ("train_000001", TOKENS[300:])):
        llmc(folder / f"mine_{name}.bin", tokens)
    llmc(folder / "mine_train_000002.bin", TOKENS)  # not of this dataset, but the user's
    dataset = {"source": "shards", "train_paths": [f"{folder}/mine_train_000001.bin"]}
    prepare(dataset | {"val_paths": [f"{folder}/mine_val_*.bin"]}, folder)
    assert len(list(folder.glob("mine_*.bin"))) == 3


def test_files_to_convert_that_lie_where_shards_are_made_are_refused_and_left(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for name, tokens in (("val_000000", TOKENS[:300]), ("train_000001", TOKENS[300:])):
        nanogpt(folder / f"mine_{name}.bin", tokens)
    paths = {f"{split}_paths": [f"{folder}/mine_{split}_*.bin"] for split in ("train", "val")}
    before = {path.name: path.read_bytes() for path in folder.glob("mine_*")}
    with pytest.raises(ValueError, match=r"train_000001\.bin: lies where this dataset's shards"):
        prepare({"source": "shards", "format": "nanogpt", **paths}, folder)
    assert {path.name: path.read_bytes() for path in folder.glob("mine_*")} == before


def test_a_file_that_is_reached_by_two_ways_counts_once(tmp_path):
    dataset = write(tmp_path / "own", "llmc")
    (tmp_path / "own/train_latest.bin").symlink_to(tmp_path / "own/train_2.bin")
    dataset["train_paths"].append(f"{tmp_path}/own/../own/train_1.bin")
    assert prepare(dataset, tmp_path / "d").num_train_tokens == len(TOKENS) - 300


def test_an_npz_is_refused_by_name(tmp_path):
    dataset = write(tmp_path / "own", "npy")
    with (tmp_path / "own/train_2.npy").open("wb") as file:
        np.savez(file, TOKENS)
    with pytest.raises(ValueError, match=r"train_2\.npy: an \.npz, of several arrays"):
        prepare(dataset, tmp_path / "d")


def test_the_manifest_of_shards_used_in_place_is_there_while_a_second_command_looks_again(
    tmp_path, monkeypatch
):
    dataset = write(tmp_path / "own", "llmc")
    before = prepare(dataset, tmp_path / "d")
    describe, seen = foreign.describe_shard, []

    def looking(path, split):
        seen.append(load_manifest(before.path).fingerprint)
        return describe(path, split)

    monkeypatch.setattr(foreign, "describe_shard", looking)
    assert prepare(dataset, tmp_path / "d").fingerprint == before.fingerprint
    assert seen == 3 * [before.fingerprint]
