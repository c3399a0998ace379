"""Downloads against a local stand-in for the hub: broken, cut, and wrong answers."""

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniseries import fetch
from miniseries.fetch import assemble_manifest, fetch_file, fetch_questions, fetch_shard
from miniseries.shards import load_manifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tokens"
FAST = {"attempts": 4, "wait_seconds": 0.01}
DATASET = {"source": "hub-shards", "repository": REPOSITORY, "prefix": "t", "num_shards": 2}
SCRIPTS = Path(fetch.__file__).parent.parent


def shard_bytes(num_tokens, first=0):
    header = struct.pack("<3i", 20240520, 1, num_tokens).ljust(1024, b"\0")
    ids = range(first, first + num_tokens)
    return header + struct.pack(f"<{num_tokens}H", *ids)


class Hub(ThreadingHTTPServer):
    """Serves `files`; `faults` holds, per file, what to do wrong with each coming GET or HEAD.

    A fault is a status code with headers, "cut" (the connection ends at 60 %), or "flip" (one
    wrong byte).
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.requests = {}, {}, []

    def sent(self, method):
        """Ranges (None: the whole) that were asked for by this method."""
        return [asked for name, asked in self.requests if name == method]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def answer(self, method):
        prefix = f"/datasets/{REPOSITORY}/resolve/"
        name = self.path.removeprefix(prefix).partition("/")[2]
        self.server.requests.append((method, self.headers.get("Range")))
        content = self.server.files.get(name) if self.path.startswith(prefix) else None
        faults = self.server.faults.get((method, name), [])
        fault = faults.pop(0) if faults else None
        if content is None:
            return self.head(404, 0, {"X-Error-Code": "EntryNotFound"})
        if isinstance(fault, tuple):
            return self.head(fault[0], 0, fault[1])
        start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
        self.head(206 if start else 200, len(content) - start, self.about(content, start))
        if method == "HEAD":
            return None
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        end = int(len(content) * 0.6) if fault == "cut" else len(content)
        self.wfile.write(content[start:end])
        self.close_connection = True
        return None

    def about(self, content, start):
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "ETag": '"weak"',
            "Accept-Ranges": "bytes",
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return headers

    def head(self, status, length, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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


def test_a_shard_that_is_here_and_right_is_not_asked_for_again(hub, shard, tmp_path):
    fetched(shard, tmp_path / "d")
    num_requests = len(hub.requests)
    fetched(shard, tmp_path / "d")
    assert len(hub.requests) == num_requests
    (tmp_path / "d" / f"{shard[0]}.json").unlink()  # the user's own copy: compared, not fetched
    fetched(shard, tmp_path / "d")
    assert len(hub.sent("GET")) == 1


def test_a_damaged_shard_is_fetched_again(hub, shard, tmp_path):
    fetched(shard, tmp_path / "d")
    (tmp_path / "d" / shard[0]).write_bytes(shard[1][:-1000])
    fetched(shard, tmp_path / "d")
    assert len(hub.sent("GET")) == 2


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_an_unavailable_server_is_asked_again(hub, shard, tmp_path, method, capfd):
    hub.faults[method, shard[0]] = [(503, {}), (503, {})]
    fetched(shard, tmp_path / "d")
    assert "try 2 of 4" in capfd.readouterr().err


def test_a_server_that_asks_for_a_pause_gets_it(hub, shard, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(fetch.time, "sleep", waits.append)
    hub.faults["HEAD", shard[0]] = [
        (429, {"Retry-After": "7"}),
        (429, {"ratelimit": '"api";r=0;t=55'}),
    ]
    fetched(shard, tmp_path / "d")
    assert 7 <= waits[0] <= 9 and 55 <= waits[1] <= 70


def test_a_cut_connection_goes_on_where_it_stopped(hub, tmp_path):
    name = "t_train_000001.bin"
    hub.files[name] = shard_bytes(50_000)[:8] + struct.pack("<i", 10_000_000) + bytes(20_001_012)
    hub.faults["GET", name] = ["cut"]  # after 12 MB; huggingface_hub keeps whole pieces of 10 MiB
    fetched((name, hub.files[name]), tmp_path / "d")
    assert hub.sent("GET") == [None, "bytes=10485760-"]


def test_a_wrong_byte_is_noticed_and_the_file_fetched_once_more(hub, shard, tmp_path):
    hub.faults["GET", shard[0]] = ["flip"]
    fetched(shard, tmp_path / "d")
    assert len(hub.sent("GET")) == 2


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
    assert hub.sent("GET") == []


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
    command += ["--shard", "t_train_000001.bin", "--folder", tmp_path]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: someone/tokens/t_train_000001.bin: not here")
    assert "HF_HUB_OFFLINE" in result.stderr and result.stderr.count("\n") == 1


def test_names_of_shards_are_those_of_llmc_or_as_configured():
    assert fetch.shard_files(DATASET) == [
        ("t_val_000000.bin", "val"),
        ("t_train_000001.bin", "train"),
        ("t_train_000002.bin", "train"),
    ]
    own = {"num_shards": 1, "val_shards": ["v.bin"], "train_shard_pattern": "s{:03d}.bin"}
    assert fetch.shard_files(own) == [("v.bin", "val"), ("s001.bin", "train")]


def test_manifest_of_fetched_shards_lists_them_and_the_commit(hub, tmp_path):
    names = [name for name, _ in fetch.shard_files(DATASET)]
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


def test_validation_shard_is_the_same_for_any_number_of_training_shards(tmp_path):
    for name, _ in fetch.shard_files(DATASET):
        (tmp_path / name).write_bytes(shard_bytes(100))  # the user's own copies: no note yet
    for num_shards in (1, 2):
        dataset = DATASET | {"num_shards": num_shards}
        assemble_manifest("fw", dataset, tmp_path, tmp_path / "manifest.json")
        manifest = load_manifest(tmp_path / "manifest.json")
        assert [path.name for path in manifest.val_shards] == ["t_val_000000.bin"]
        assert len(manifest.train_shards) == num_shards
        assert manifest.val_shards[0] not in manifest.train_shards


def test_manifest_names_each_missing_or_changed_shard(tmp_path):
    for name, _ in fetch.shard_files(DATASET):
        (tmp_path / name).write_bytes(shard_bytes(100))
    assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json")
    (tmp_path / "t_val_000000.bin").unlink()
    (tmp_path / "t_train_000002.bin").write_bytes(shard_bytes(99))
    with pytest.raises(ValueError, match="2 bad files") as caught:
        assemble_manifest("fw", DATASET, tmp_path, tmp_path / "manifest.json")
    assert "t_val_000000.bin: No such file" in str(caught.value)
    assert "t_train_000002.bin: 99 tokens, but 100 when it was fetched" in str(caught.value)


QUESTION = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts pulling."],
    "label": 3,
}


def test_questions_come_from_the_hubs_parquet_with_the_label_as_a_number(hub, tmp_path):
    row = QUESTION | {"label": "3", "source_id": "activitynet~v_-JhWjGDPHMY", "split": "val"}
    pq.write_table(pa.Table.from_pylist([row] * 2), tmp_path / "q.parquet")
    hub.files[fetch.HELLASWAG_FILE] = (tmp_path / "q.parquet").read_bytes()
    output = tmp_path / "h" / "hellaswag.jsonl"
    fetch_questions(REPOSITORY, output, "main", **FAST)
    assert [json.loads(line) for line in output.read_text().splitlines()] == [QUESTION] * 2
    assert [path.name for path in output.parent.iterdir() if path.is_file()] == ["hellaswag.jsonl"]


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


def test_a_file_in_a_folder_of_the_repository_gets_its_last_name(hub, tmp_path):
    hub.files["deep/er/a.txt"] = b"content"
    path, commit = fetch_file(REPOSITORY, "deep/er/a.txt", "main", tmp_path, **FAST)
    assert path == tmp_path / "a.txt" and path.read_bytes() == b"content" and commit == COMMIT
