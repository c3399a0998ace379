"""Downloads against a local stand-in for the hub: broken, cut, and wrong answers."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hub import COMMIT, FAST, REPOSITORY, shard_bytes
from huggingface_hub import constants

from miniseries.data import fetch
from miniseries.data.fetch import fetch_file, list_files
from miniseries.data.hub_shards import assemble_manifest, fetch_shard, shard_files
from miniseries.data.shards import load_manifest

DATASET = {"source": "hub-shards", "repository": REPOSITORY, "prefix": "t", "num_shards": 2}
SCRIPTS = Path(fetch.__file__).parents[2]


@pytest.fixture
def shard(hub):
    """A shard of 200 KB on the hub; its name and content."""
    hub.files["t_train_000001.bin"] = shard_bytes(50_000)
    return "t_train_000001.bin", hub.files["t_train_000001.bin"]


def fetched(shard, folder):
    """Fetch, then check that the shard is right and nothing else but its note is there."""
    name, content = shard
    fetch_shard(DATASET, name, folder, **FAST)
    assert (folder / name).read_bytes() == content
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {name, f"{name}.json"}
    return json.loads((folder / f"{name}.json").read_text())


def test_a_good_shard_is_noted_with_tokens_bytes_hash_and_commit(shard, tmp_path):
    note = fetched(shard, tmp_path / "d")
    assert note == {
        "num_tokens": 50_000,
        "num_bytes": 101_024,
        "sha256": hashlib.sha256(shard[1]).hexdigest(),
        "commit": COMMIT,
    }


def test_a_note_of_a_shard_is_not_on_the_disk_before_the_shard_is(shard, tmp_path, monkeypatch):
    events, sync, replace = [], os.fsync, Path.replace

    def synced(handle):
        events.append(("sync", os.fstat(handle).st_size))
        sync(handle)

    def renamed(path, target):
        events.append(("rename", Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    fetched(shard, tmp_path / "d")
    named = [event for event in events if event in (("sync", 101_024), ("rename", shard[0]))]
    assert named == [("sync", 101_024), ("rename", shard[0])]
    assert events.index(named[1]) < events.index(("rename", f"{shard[0]}.json"))


def test_a_shard_that_is_here_and_right_is_not_asked_for_again(hub, shard, tmp_path):
    fetched(shard, tmp_path / "d")
    num_requests = len(hub.requests)
    fetched(shard, tmp_path / "d")
    assert len(hub.requests) == num_requests
    (tmp_path / "d" / f"{shard[0]}.json").unlink()  # the user's own copy: compared, not fetched
    fetched(shard, tmp_path / "d")
    assert len(hub.asked("GET")) == 1


def test_a_damaged_shard_is_fetched_again(hub, shard, tmp_path):
    fetched(shard, tmp_path / "d")
    (tmp_path / "d" / shard[0]).write_bytes(shard[1][:-1000])
    fetched(shard, tmp_path / "d")
    assert len(hub.asked("GET")) == 2


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_an_unavailable_server_is_asked_again(hub, shard, tmp_path, method, capfd):
    hub.faults[method, shard[0]] = [(503, {}), (503, {})]
    fetched(shard, tmp_path / "d")
    said = f"cannot fetch {REPOSITORY}/{shard[0]}, trying again in 0 s (2 of 4): Server error"
    assert said in capfd.readouterr().err


def test_a_server_that_asks_for_a_pause_gets_it(hub, shard, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(fetch.time, "sleep", waits.append)
    hub.faults["HEAD", shard[0]] = [
        (429, {"Retry-After": "7"}),
        (429, {"ratelimit": '"api";r=0;t=55'}),
        (429, {"Retry-After": "100000"}),  # a day: no job waits that long
    ]
    fetched(shard, tmp_path / "d")
    assert 7 <= waits[0] <= 9 and 55 <= waits[1] <= 70 and 900 <= waits[2] <= 1125


def test_a_cut_connection_goes_on_where_it_stopped(hub, tmp_path):
    name = "t_train_000001.bin"
    hub.files[name] = shard_bytes(50_000)[:8] + struct.pack("<i", 10_000_000) + bytes(20_001_012)
    hub.faults["GET", name] = ["cut"]  # after 12 MB; huggingface_hub keeps whole pieces of 10 MiB
    fetched((name, hub.files[name]), tmp_path / "d")
    assert hub.asked("GET") == [None, "bytes=10485760-"]


def test_a_wrong_byte_is_noticed_and_the_file_fetched_once_more(hub, shard, tmp_path):
    hub.faults["GET", shard[0]] = ["flip"]
    fetched(shard, tmp_path / "d")
    assert len(hub.asked("GET")) == 2


def test_a_file_that_is_wrong_twice_is_refused_and_not_kept(hub, shard, tmp_path):
    hub.faults["GET", shard[0]] = ["flip", "flip"]
    with pytest.raises(ValueError, match=r"t_train_000001\.bin: its hash is .* twice"):
        fetched(shard, tmp_path)
    assert not list(tmp_path.glob("*.bin*"))


def test_a_file_of_the_repository_that_is_no_shard_is_refused(hub, shard, tmp_path):
    hub.files[shard[0]] = b"<html>no such shard</html>" * 100
    with pytest.raises(ValueError, match="no GPT-2 token shard"):
        fetched(shard, tmp_path)
    assert not list(tmp_path.glob("*.bin*"))


def test_leftovers_of_a_killed_download_are_cleared(shard, tmp_path):
    left = tmp_path / "d" / ".fetch" / shard[0] / ".cache" / "x.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"torn")
    fetched(shard, tmp_path / "d")
    assert not list((tmp_path / "d").rglob("*.incomplete"))


def test_a_server_that_stays_broken_ends_with_the_file_and_the_reason(hub, shard, tmp_path):
    hub.faults["HEAD", shard[0]] = [(500, {})] * 10
    with pytest.raises(OSError, match=r"t_train_000001\.bin: failed 4 times.*500"):
        fetched(shard, tmp_path)


def test_a_missing_file_is_not_asked_for_twice(hub, tmp_path):
    with pytest.raises(ValueError, match=r"t_train_000009\.bin: the repository has no such file"):
        fetch_shard(DATASET, "t_train_000009.bin", tmp_path, **FAST)
    assert len(hub.requests) == 1


def test_too_little_disk_is_refused_before_the_download(hub, shard, tmp_path, monkeypatch):
    usage = fetch.shutil._ntuple_diskusage(10**9, 10**9, 5000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"needs 100,101,024 bytes in .*, which has 5,000 free"):
        fetched(shard, tmp_path)
    assert hub.asked("GET") == []


def test_a_full_disk_is_not_tried_again():
    def fill():
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = []
    with pytest.raises(ValueError, match="free the disk"):
        fetch._retry(fill, "f", attempts=5, wait_seconds=0)
    assert calls == [1]


def test_signatures_in_addresses_are_not_shown():
    def refuse():
        raise OSError("cannot open https://cdn.example/file?Signature=secret now")

    with pytest.raises(OSError, match=r"open https://cdn\.example/file now;"):
        fetch._retry(refuse, "f", attempts=1, wait_seconds=0)


def test_small_files_are_compared_by_gits_hash(tmp_path):
    (tmp_path / "a").write_bytes(b"hello\n")  # git hash-object gives ce013625...
    remote = fetch.RemoteFile(COMMIT, 6, "ce013625030ba8dba906f756967f9e9ca394464a")
    assert fetch._mismatch(tmp_path / "a", remote) == ""
    (tmp_path / "a").write_bytes(b"hallo\n")
    assert "its hash is" in fetch._mismatch(tmp_path / "a", remote)


def test_offline_script_names_the_file_and_the_variable(tmp_path):
    command = [sys.executable, SCRIPTS / "fetch_shard.py", "--dataset", json.dumps(DATASET)]
    command += ["--name", "t", "--shard", "t_train_000001.bin", "--folder", tmp_path]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: someone/tokens/t_train_000001.bin: not here")
    assert "HF_HUB_OFFLINE" in result.stderr and result.stderr.count("\n") == 1


def test_names_of_shards_are_those_of_llmc_with_the_datasets_prefix():
    assert shard_files(DATASET) == [
        ("t_val_000000.bin", "val"),
        ("t_train_000001.bin", "train"),
        ("t_train_000002.bin", "train"),
    ]
    assert shard_files({"num_shards": 1})[0] == ("edu_fineweb_val_000000.bin", "val")


def test_manifest_of_fetched_shards_lists_them_and_the_commit(hub, tmp_path):
    names = [name for name, _ in shard_files(DATASET)]
    for number, name in enumerate(names):
        hub.files[name] = shard_bytes(100 + number)
        fetch_shard(DATASET, name, tmp_path, **FAST)
    assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json")
    manifest = load_manifest(tmp_path / "manifest.json")
    assert [path.name for path in manifest.val_shards + manifest.train_shards] == names
    assert (manifest.num_val_tokens, manifest.num_train_tokens) == (100, 203)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["source"]["commits"] == [COMMIT]
    assert content["shards"][1]["sha256"] == hashlib.sha256(hub.files[names[1]]).hexdigest()
    assert not (tmp_path / ".fetch").exists()


def put_own_copies(folder, monkeypatch):
    """Shards that the user has already, and no network."""
    for name, _ in shard_files(DATASET):
        (folder / name).write_bytes(shard_bytes(100))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_validation_shard_is_the_same_for_any_number_of_training_shards(tmp_path, monkeypatch):
    put_own_copies(tmp_path, monkeypatch)
    for num_shards in (1, 2):
        dataset = DATASET | {"num_shards": num_shards}
        assemble_manifest("fw", dataset, tmp_path, tmp_path / "manifest.json")
        manifest = load_manifest(tmp_path / "manifest.json")
        assert [path.name for path in manifest.val_shards] == ["t_val_000000.bin"]
        assert len(manifest.train_shards) == num_shards
        assert manifest.val_shards[0] not in manifest.train_shards


def test_own_copies_are_taken_offline_if_their_ids_are_right(tmp_path, monkeypatch):
    put_own_copies(tmp_path, monkeypatch)
    (tmp_path / "t_train_000002.bin").write_bytes(shard_bytes(10, first=50_250))
    with pytest.raises(ValueError, match=r"t_train_000002\.bin: token 7 \(byte 1038\) is 50257"):
        assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json")


def test_manifest_fetches_what_is_missing_and_names_what_changed(hub, tmp_path):
    for name, _ in shard_files(DATASET):
        hub.files[name] = shard_bytes(100)
    assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json", **FAST)
    assert len(hub.asked("GET")) == 3
    (tmp_path / "t_val_000000.bin").unlink()
    assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json", **FAST)
    assert hub.sent[3:] == ["t_val_000000.bin"]
    (tmp_path / "t_train_000001.bin").write_bytes(b"damaged")
    (tmp_path / "t_train_000002.bin").write_bytes(shard_bytes(99))
    with pytest.raises(ValueError, match="2 bad files") as caught:
        assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json", **FAST)
    assert "t_train_000001.bin: 7 bytes" in str(caught.value)
    assert "t_train_000002.bin: 99 tokens, but 100 when it was fetched" in str(caught.value)


def test_all_files_to_come_must_fit_on_the_disk(hub, shard, tmp_path, monkeypatch):
    usage = fetch.shutil._ntuple_diskusage(10**9, 10**9, 5000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"needs 101,010,240 bytes in .*, which has 5,000 free"):
        fetch_shard(DATASET, shard[0], tmp_path, num_files=10, **FAST)


TEXTS = {
    "source": "hub-text",
    "repository": REPOSITORY,
    "revision": "main",
    "files": ["sample/*.parquet"],
}


def listed(hub, folder, **changes):
    list_files(TEXTS | changes, folder / "files.json", **FAST)
    return json.loads((folder / "files.json").read_text())


def test_files_are_listed_by_name_with_sizes_hashes_and_commit(hub, tmp_path):
    for name in ("sample/b.parquet", "sample/a.parquet", "sample/deep/c.parquet", "other.parquet"):
        hub.files[name] = name.encode()
    found = listed(hub, tmp_path, files=["sample/?.parquet"])
    assert found["commit"] == COMMIT
    assert found["files"] == [
        {
            "path": name,
            "split": None,
            "num_bytes": 16,
            "sha256": hashlib.sha256(name.encode()).hexdigest(),
        }
        for name in ("sample/a.parquet", "sample/b.parquet")
    ]


def test_held_out_files_come_first_and_a_prefix_leaves_them(hub, tmp_path):
    for name in ("data/train-0", "data/train-1", "data/train-2", "data/val-0"):
        hub.files[name] = b"x"
    found = listed(hub, tmp_path, files=["data/*"], val_files=["data/val-*"], num_files=2)
    taken = [(file["path"], file["split"]) for file in found["files"]]
    assert taken == [("data/val-0", "val"), ("data/train-0", "train"), ("data/train-1", "train")]


def test_a_list_is_asked_for_again_and_an_empty_one_is_refused(hub, tmp_path):
    hub.files["sample/a.parquet"] = b"x"
    hub.faults["API", ""] = [(503, {}), (429, {"Retry-After": "0"})]
    assert len(listed(hub, tmp_path)["files"]) == 1
    with pytest.raises(ValueError, match=r"no file of it matches nothing/\*; check `files`"):
        listed(hub, tmp_path, files=["nothing/*"])


def test_a_list_that_was_lost_to_a_wrong_setting_comes_back_without_the_network(hub, tmp_path):
    hub.files["sample/a.parquet"] = b"x"
    before = listed(hub, tmp_path)
    (tmp_path / "files.json").unlink()  # as Snakemake does before a job
    with pytest.raises(ValueError, match="no file of it matches"):
        listed(hub, tmp_path, files=["nothing/*"])
    hub.always["API", ""] = (503, {})
    assert listed(hub, tmp_path) == before
    with pytest.raises(OSError, match="failed 4 times"):
        listed(hub, tmp_path, num_files=1)


def test_progress_tells_bytes_pace_and_time_left(monkeypatch):
    monkeypatch.setattr(fetch.time, "time", lambda: 1000.0)
    done = [(900.0, 2 * 10**8), (950.0, 2 * 10**8), (1000.0, 2 * 10**8), (10.0, 2 * 10**8)]
    text = fetch.describe_progress("d", done, 10, 2 * 10**9)
    assert text == "d: 4 of 10 files, 0.8 of 2.0 GB, 4 MB/s, 5 min left"
    assert fetch.describe_progress("d", done[:1], 1, 2 * 10**8) == "d: 1 of 1 files, 0.2 of 0.2 GB"
    assert fetch.describe_progress("d", [], 3, 0) == "d: 0 of 3 files, 0.0 of 0.0 GB"
    empty = [(time, 0) for time, _ in done]
    assert fetch.describe_progress("d", empty, 10, 0).startswith(f"d: {len(done)} of 10 files")


def test_a_file_in_a_folder_of_the_repository_gets_its_last_name(hub, tmp_path):
    hub.files["deep/er/a.txt"] = b"content"
    path, commit = fetch_file(REPOSITORY, "deep/er/a.txt", "main", tmp_path, **FAST)
    assert path == tmp_path / "a.txt" and path.read_bytes() == b"content" and commit == COMMIT
