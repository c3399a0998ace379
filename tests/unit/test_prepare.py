"""Datasets from text to manifest: any number of workers, interruptions, and the scripts."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from miniseries import metrics
from miniseries.data import corpus, prepare
from miniseries.data.corpus import is_validation
from miniseries.data.encode import gpt2_encoding
from miniseries.data.prepare import prepare_dataset
from miniseries.data.shards import load_manifest, open_shard

SCRIPTS = Path(prepare.__file__).parents[2]


def write_lines(path, texts):
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return {"source": "files", "paths": [str(path)]}


def make(folder, dataset, **options):
    """Prepare; the dataset's files by name, without notes and locks."""
    prepare_dataset("d", dataset, folder, folder / "manifest.json", **options)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def texts_of(paths):
    text = gpt2_encoding().decode(np.concatenate([open_shard(p) for p in paths]).tolist())
    return text.split("<|endoftext|>")[1:]


TEXTS = [f"Here is document number {i}. This is its sentence {i}, the end." for i in range(200)]


def test_every_document_is_there_once_and_held_out_ones_are_not_trained_on(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", [*TEXTS, *TEXTS[:20]])
    make(tmp_path, dataset | {"shard_tokens": 1000})
    manifest = load_manifest(tmp_path / "manifest.json")
    for paths in (manifest.train_shards, manifest.val_shards):
        assert all(len(open_shard(path)) == 1000 for path in paths[:-1])
    every = [*TEXTS, *TEXTS[:20]]
    held_out = [
        text for text in every if is_validation(hashlib.sha256(text.encode()).digest(), 0.1)
    ]
    assert texts_of(manifest.val_shards) == held_out
    assert texts_of(manifest.train_shards) == [t for t in every if t not in set(held_out)]
    assert len(manifest.train_shards) > 2
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["num_documents"] == 220
    questions = (tmp_path / "hellaswag.jsonl").read_text().splitlines()
    assert len(questions) == content["source"]["num_questions"] > 0
    assert all(json.loads(question)["ctx"] in "".join(held_out) for question in questions)


@pytest.mark.parametrize("num_workers", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(corpus, "PART_BYTES", 1_500)
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"shard_tokens": 500}
    alone, together = (make(tmp_path / str(n), dataset, num_workers=n) for n in (1, num_workers))
    assert len(list((tmp_path / "1/.streams").glob("*.json"))) > 8
    assert alone == together and len(alone) > 8


def test_a_second_run_gives_the_same_bytes_and_clears_what_a_killed_one_left(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    folder = tmp_path / "data"
    first = make(folder, dataset)
    (folder / "d_train_000001.bin.tmp").write_bytes(b"torn")
    (folder / "d_train_000009.bin").write_bytes(b"of a longer version")
    assert make(folder, dataset) == first
    assert set(make(folder, dataset | {"shard_tokens": 100})) > set(first)
    assert make(folder, dataset) == first


def test_a_shard_that_is_gone_or_cut_is_made_again_with_the_manifest(tmp_path):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"shard_tokens": 1000}
    first = make(tmp_path / "d", dataset)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "d").glob("*.bin")}
    gone, cut, *others = sorted(times)
    gone.unlink()
    cut.write_bytes(b"cut")
    (tmp_path / "d/manifest.json").unlink()
    assert make(tmp_path / "d", dataset) == first
    assert all(path.stat().st_mtime_ns == times[path] for path in others)


def test_each_part_is_tokenized_once(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 3_000)
    numbers = []
    write = prepare.streams.read_part
    monkeypatch.setattr(
        prepare.streams, "read_part", lambda part, *more: numbers.append(part) or write(part, *more)
    )
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"shard_tokens": 500}
    make(tmp_path / "d", dataset, num_workers=1)
    assert len(numbers) == len(set(numbers)) > 4


def test_text_that_changes_while_it_is_tokenized_makes_no_dataset(tmp_path, monkeypatch):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"shard_tokens": 500}
    pack = prepare.streams.pack_shards

    def changing(*arguments):
        entries = pack(*arguments)
        write_lines(tmp_path / "a.jsonl", TEXTS[1:])
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(prepare.streams, "pack_shards", changing)
        with pytest.raises(ValueError, match=r"changed while it was tokenized: .*a\.jsonl"):
            make(tmp_path / "d", dataset, num_workers=1)
    assert not (tmp_path / "d/manifest.json").exists()
    assert make(tmp_path / "d", dataset, num_workers=1) == make(tmp_path / "e", dataset)


def test_text_that_grows_between_planning_and_the_first_look_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 3_000)
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS[1:]) | {"shard_tokens": 500}
    identify, is_short = prepare.streams.identify, [True]

    def growing(*arguments):
        if is_short:
            write_lines(tmp_path / "a.jsonl", TEXTS)
            is_short.clear()
        return identify(*arguments)

    monkeypatch.setattr(prepare.streams, "identify", growing)
    with pytest.raises(ValueError, match="its files changed while they were tokenized"):
        make(tmp_path / "d", dataset, num_workers=1)
    assert make(tmp_path / "d", dataset, num_workers=1) == make(tmp_path / "e", dataset)


def test_a_killed_tokenizing_process_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 3_000)
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare.Text, "_task", lambda *_: (os._exit, 9))
    with pytest.raises(ValueError, match="a process that tokenizes was killed, most likely since"):
        make(tmp_path / "d", dataset, num_workers=2)


def test_a_stream_that_a_crash_cut_off_is_made_again(tmp_path, monkeypatch):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS) | {"shard_tokens": 500}
    expected = make(tmp_path / "d", dataset)
    with monkeypatch.context() as patch:
        patch.setattr(prepare.streams, "pack_shards", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(tmp_path / "e", dataset)
    streams = list((tmp_path / "e").rglob("*.tokens"))
    assert streams
    for path in streams:
        path.write_bytes(b"")
    assert make(tmp_path / "e", dataset) == expected


def test_a_second_command_waits_for_the_first_and_says_so(tmp_path, monkeypatch, capsys):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "d").mkdir()
    monkeypatch.setattr(metrics, "SECONDS_BETWEEN_WAITING_LINES", 0.1)
    said = ""
    with ThreadPoolExecutor(1) as pool:
        with metrics.locked(tmp_path / "d/.lock"):
            second = pool.submit(make, tmp_path / "d", dataset)
            while "waiting for another process, which holds" not in said:
                time.sleep(0.05)
                said += capsys.readouterr().err
            assert f"{tmp_path}/d/.lock" in said and not second.done()
        assert "manifest.json" in second.result()


def test_files_of_the_hub_have_each_a_folder_of_their_own():
    files = [{"path": path, "split": None} for path in ("en/x/p.jsonl", "en_x/p.jsonl")]
    parts = [prepare._remote_part(Path("d"), n, file) for n, file in enumerate(files)]
    assert parts[0].pieces[0].path != parts[1].pieces[0].path


def test_a_failed_run_leaves_no_manifest(tmp_path, monkeypatch):
    dataset = write_lines(tmp_path / "a.jsonl", TEXTS)
    make(tmp_path, dataset)
    monkeypatch.setattr(prepare, "build_manifest", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, dataset)
    assert not (tmp_path / "manifest.json").exists()


def test_a_bad_file_ends_all_workers_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PART_BYTES", 10)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_bytes(b"fine text" if number != 3 else b"caf\xe9 noir")
    dataset = {"source": "files", "paths": [f"{tmp_path}/*.txt"]}
    with pytest.raises(ValueError, match=r"3\.txt: not UTF-8"):
        make(tmp_path / "d", dataset, num_workers=2)


def test_a_text_that_cannot_be_split_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("one document only")
    dataset = {"source": "files", "paths": [str(tmp_path / "*.txt")]}
    with pytest.raises(ValueError, match=r"none of its 1 documents fell into the val split.*blank"):
        make(tmp_path, dataset)


def test_too_small_a_disk_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_000)
    usage = prepare.shutil._ntuple_diskusage(10**9, 10**9, 5000)
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"dataset d needs 100,500,000 bytes in .* has 5,000 free"):
        make(tmp_path / "d", {"source": "files", "paths": [f"{tmp_path}/a.txt"]})


def command_for(name, dataset, folder):
    command = [sys.executable, SCRIPTS / "prepare_dataset.py", "--name", name, "--workers", "2"]
    command += ["--dataset", json.dumps(dataset), "--folder", folder]
    return [*command, "--manifest", folder / "manifest.json"]


def test_builtin_dataset_has_about_600_thousand_tokens_and_questions(tmp_path):
    folder = tmp_path / "data"
    dataset = {"source": "builtin", "val_tokens": 16384}
    subprocess.run(command_for("builtin", dataset, folder), check=True)
    manifest = load_manifest(folder / "manifest.json")
    assert 400_000 < manifest.num_train_tokens + manifest.num_val_tokens < 900_000
    assert 0.03 < manifest.num_val_tokens / manifest.num_train_tokens < 0.25
    assert manifest.val_tokens == 16384
    assert len((folder / "hellaswag.jsonl").read_text().splitlines()) >= 150


def test_verify_script_names_the_bad_shard_and_exits_with_1(tmp_path):
    make(tmp_path, write_lines(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)]))
    command = [sys.executable, SCRIPTS / "verify_dataset.py", "--manifest"]
    command += [tmp_path / "manifest.json"]
    good = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 shards, all good" in good.stdout
    shard = tmp_path / "d_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    bad = subprocess.run(command, capture_output=True, text=True)
    assert bad.returncode == 1 and bad.stderr.startswith("error: ")
    assert "d_train_000001.bin" in bad.stderr and "Traceback" not in bad.stderr


@pytest.mark.slow
def test_a_killed_run_leaves_no_worker_and_the_same_command_finishes(tmp_path):
    for number in range(4):
        lines = [json.dumps({"text": f"{number} {i} " + "word " * 300}) for i in range(60_000)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    dataset = {"source": "files", "paths": [f"{tmp_path}/*.jsonl"]}
    folder = tmp_path / "d"
    process = subprocess.Popen(command_for("d", dataset, folder), start_new_session=True)
    while not list(folder.glob(".streams/*.tmp.tokens")):
        time.sleep(0.01)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while workers := [p for p in psutil.pids() if session_of(p) == process.pid]:
        assert time.monotonic() < deadline, f"workers live on: {workers}"
        time.sleep(0.05)
    subprocess.run(command_for("d", dataset, folder), check=True)
    assert load_manifest(folder / "manifest.json").num_train_tokens > 60_000_000


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 60 kB, and a function that makes the disk larger."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "none", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed")
    grow = ["mount", "-o", "remount,size=10m", folder]
    yield folder, lambda: subprocess.run(grow, check=True)
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_nothing_and_the_same_call_goes_on(tmp_path, small_disk, monkeypatch):
    folder, grow = small_disk
    monkeypatch.setattr(prepare.fetch, "SPARE_BYTES", 0)
    monkeypatch.setattr(prepare, "TOKEN_BYTES", {False: 0, True: 0})
    texts = [f"{i} {text}" for i in range(10) for text in TEXTS]
    dataset = write_lines(tmp_path / "a.jsonl", texts) | {"shard_tokens": 5_000}
    with pytest.raises(OSError, match="No space left on device"):
        make(folder, dataset)
    assert not (folder / "manifest.json").exists() and not list(folder.rglob("*.tmp*"))
    grow()
    assert make(folder, dataset) == make(tmp_path / "large", dataset)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_flat_in_the_size_of_the_text(tmp_path):
    free = prepare.shutil.disk_usage(tmp_path).free
    if free < 4e9:
        pytest.skip(f"needs 4 GB of disk, {free / 1e9:.0f} GB are free")
    with (tmp_path / "a.jsonl").open("w") as file:  # words that are one token each: quick
        for number in range(1_600):
            file.write(f'{{"text": "{number}{" telecommunications" * 50_000}"}}\n{{"text": "a"}}\n')
    assert (tmp_path / "a.jsonl").stat().st_size > 1.5e9
    dataset = {"source": "files", "paths": [f"{tmp_path}/a.jsonl"], "num_questions": 0}
    process = psutil.Popen(command_for("d", dataset, tmp_path / "d"))
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process))
        time.sleep(0.1)
    (tmp_path / "a.jsonl").unlink()
    content = json.loads((tmp_path / "d/manifest.json").read_text())
    shutil.rmtree(tmp_path / "d")
    print(f"{peak / 1e6:.0f} MB in all processes")
    assert process.wait() == 0 and content["num_documents"] == 3_200
    assert content["num_train_tokens"] + content["num_val_tokens"] > 79_000_000
    assert 100e6 < peak < 1e9


def memory_of(process):
    """Bytes in memory of a process and of those that it started."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for member in [process, *process.children(recursive=True)]:
            total += member.memory_info().rss
    return total


@pytest.mark.skipif("TINYSHAKESPEARE" not in os.environ, reason="TINYSHAKESPEARE names no text")
def test_tinyshakespeare_has_llm_c_s_token_counts(tmp_path):
    dataset = {"source": "files", "paths": [os.environ["TINYSHAKESPEARE"]]}
    make(tmp_path, dataset | {"split": "blank_lines", "val_first_tokens": 32_768})
    manifest = load_manifest(tmp_path / "manifest.json")
    assert (manifest.num_val_tokens, manifest.num_train_tokens) == (32_768, 305_260)
