"""Data from a hub that breaks: whole runs by the real rules and scripts, on small files."""

import os
import random
import signal
import subprocess
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import REPOSITORY, shard_bytes
from real_project import ROOT, RealProject, wait_until
from stand_ins import llmc_shards

from miniseries.metrics import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHARDS = {"source": "hub-shards", "repository": REPOSITORY, "prefix": "t", "num_shards": 3}
TEXT = {
    "source": "hub-text",
    "repository": REPOSITORY,
    "files": ["data/*.parquet"],
    "val_first_tokens": 500,
    "shard_tokens": 700,
}
TEXTS = [f"Story {i}: {'once upon a time ' * (i % 7)}the end." for i in range(300)]
SPLITS = {0: "val", 1: "train", 2: "train", 3: "train"}


@pytest.fixture
def project(tmp_path, hub):
    """A project with both kinds of dataset, `t` and `d`, and a hub that has their files."""
    project = RealProject(tmp_path / "project", ROOT / "tests/config/faults.yaml")
    project.configure({"datasets": {"t": SHARDS, "d": TEXT}})
    for number, split in SPLITS.items():
        hub.files[f"t_{split}_{number:06d}.bin"] = shard_bytes(50_000 - number)
    for number in range(3):
        table = pa.table({"id": range(100), "text": TEXTS[100 * number : 100 * number + 100]})
        pq.write_table(table, tmp_path / "part.parquet")
        hub.files[f"data/{number}.parquet"] = (tmp_path / "part.parquet").read_bytes()
    yield project
    project.end_all()


def check(project, hub):
    """Both datasets are whole and have the bytes they should, and nothing is left over."""
    for name, content in llmc_shards(TEXTS, 500, 700).items():
        assert project.path(f"data/d/{name}").read_bytes() == content, name
    for name in hub.files:
        if name.endswith(".bin"):
            assert project.path(f"data/t/{name}").read_bytes() == hub.files[name], name
    manifests = [read_json(project.path(f"data/{name}/manifest.json")) for name in "td"]
    assert len(manifests[0]["shards"]) == 4
    assert manifests[1]["num_documents"] == 300
    assert [file["path"] for file in manifests[1]["source"]["files"]] == sorted(
        name for name in hub.files if name.startswith("data/")
    )
    left = [path for path in project.path("data").rglob("*") if path.suffix in (".tmp", ".parquet")]
    assert not left and not list(project.path("data").rglob("*.incomplete"))
    assert "Nothing to be done" in project.succeed("data_t", "data_d")


def test_both_kinds_of_dataset_arrive_whole_over_a_network_that_breaks(project, hub):
    hub.faults |= {
        ("API", ""): [(503, {})],
        ("HEAD", "t_train_000001.bin"): [(429, {"Retry-After": "1"})],
        ("GET", "t_train_000001.bin"): ["cut"],
        ("GET", "t_train_000002.bin"): [(503, {})],
        ("GET", "t_train_000003.bin"): ["short"],
        ("GET", "t_val_000000.bin"): ["flip"],
        ("GET", "data/0.parquet"): ["flip"],
        ("GET", "data/1.parquet"): ["cut"],
        ("HEAD", "data/2.parquet"): [(503, {}), (429, {"Retry-After": "1"})],
    }
    text = project.succeed("data_t", "data_d", "verify_t", "verify_d")
    assert not any(hub.faults.values()), "every fault happened"
    assert "t: 4 of 4 files, 0.0 of 0.0 GB" in text
    assert "d: 3 of 3 files" in text
    check(project, hub)


def test_a_file_that_the_hub_lacks_or_has_wrong_is_named_and_the_rest_stays(project, hub):
    missing = hub.files.pop("t_train_000002.bin")
    text = project.fail("data_t", "--keep-going")
    assert f"{REPOSITORY}/t_train_000002.bin: the repository has no such file" in text
    assert "`num_shards`" in text
    hub.files["t_train_000002.bin"] = missing
    hub.always["GET", "data/1.parquet"] = "flip"
    text = project.fail("data_t", "data_d", "--keep-going")
    assert f"{REPOSITORY}/data/1.parquet: its hash is" in text and "twice" in text
    hub.always.clear()
    hub.sent.clear()
    project.succeed("data_t", "data_d")
    assert hub.sent == ["data/1.parquet"], "only what was unfinished"
    check(project, hub)


def test_a_disk_that_cannot_hold_the_data_is_refused_at_once(project, hub):
    folder = project.path("data")
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=95m", "none", folder]).returncode:
        pytest.skip("mounting a tmpfs is not allowed")
    try:
        text = project.fail("data_t")
        assert "needs 100,40" in text and "free" in text
        assert hub.sent == []
        subprocess.run(["mount", "-o", "remount,size=150m", folder], check=True)
        project.succeed("data_t", "data_d")
        check(project, hub)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_results_may_be_a_link_to_another_disk(project, hub, tmp_path):
    (tmp_path / "disk").mkdir()
    project.path("data").parent.mkdir(parents=True)
    project.path("data").symlink_to(tmp_path / "disk")
    project.succeed("data_t", "data_d", "verify_t", "verify_d")
    assert (tmp_path / "disk/t/manifest.json").exists()
    check(project, hub)


def test_killed_twenty_times_at_random_moments_the_same_command_finishes(project, hub):
    generator = random.Random(0)
    hub.delay_seconds = 0.2
    for _ in range(20):
        before = {path.name for path in project.path("data").glob("t/*.bin.json")}
        hub.sent.clear()
        process = project.start("data_t", "data_d")
        deadline = time.monotonic() + generator.uniform(1.0, 9.0)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        project.finish(process)
        assert not before & {f"{name}.json" for name in hub.sent}, "a finished file came again"
    project.succeed("data_t", "data_d", "verify_t", "verify_d")
    check(project, hub)


def test_a_second_command_while_another_fetches_does_no_harm(project, hub):
    hub.delay_seconds = 0.5
    first = project.start("data_t", "data_d")
    wait_until(lambda: len(hub.sent) > 1, first)
    second = project.start("data_t", "data_d")
    for process in (first, second):
        code, text = project.finish(process)
        assert code == 0, text
    hub.delay_seconds = 0.0
    assert sorted(hub.sent) == sorted(hub.files), "each file once"
    check(project, hub)


def test_more_files_of_text_keep_the_shards_that_stay_the_same(project, hub):
    project.configure({"datasets": {"d": {"num_files": 2}}})
    project.succeed("data_d")
    shards = sorted(project.path("data/d").glob("d_train_*.bin"))
    times = {path: path.stat().st_mtime_ns for path in shards}
    project.configure({"datasets": {"d": {"num_files": 3}}})
    project.succeed("data_d", "data_t")
    assert hub.sent.count("data/0.parquet") == 1
    assert all(path.stat().st_mtime_ns == times[path] for path in shards[:-1])
    check(project, hub)
