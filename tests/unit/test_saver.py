"""How a checkpoint is written: from one copy, by several threads, and how it is taken away."""

import errno
import os
import threading
import time

import pytest
import torch
from stand_ins import make_dataset, make_settings

from miniseries.data.shards import load_manifest
from miniseries.training import checkpoint, trainer
from miniseries.training.checkpoint import (
    checkpoint_folder,
    forget,
    load_model_weights,
    num_writers,
    saved_steps,
)
from miniseries.training.distributed import start_world
from miniseries.training.launcher import freeze


@pytest.fixture
def run(tmp_path):
    """A trainer that has not begun; its weights of every type that there is."""
    manifest = make_dataset(tmp_path / "data")
    settings = make_settings(tmp_path / "in.json", precision="bf16", master_weights=False)
    settings = freeze(settings, manifest, tmp_path / "run")
    yield trainer.Trainer(settings, load_manifest(manifest), None, tmp_path / "run", start_world())
    torch.distributed.destroy_process_group()


def test_a_save_holds_one_copy_of_the_state_and_writes_it_as_it_was_then(run, monkeypatch):
    cloned = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda tensor, **more: cloned.append(tensor) or clone(tensor, **more)
    )
    expected = run.model.wte.weight.to_local().float()
    run.save(1)
    with torch.no_grad():
        run.model.wte.weight.to_local().zero_()  # training goes on
    run.wait_for_save()
    assert not cloned
    weights = load_model_weights(checkpoint_folder(run.folder, 1))
    assert torch.equal(weights["wte.weight"], expected) and expected.abs().max() > 0
    places = run.saver.host_copy.result().places.values()
    begin = min(place.data_ptr() for place in places)
    end = max(place.data_ptr() + place.nbytes for place in places)
    assert end - begin < 1.01 * sum(place.nbytes for place in places), "one block"


def test_as_many_threads_write_as_cores_are_there_within_bounds(run):
    found = [num_writers(*pair) for pair in ((2, 1), (6, 1), (16, 1), (32, 2), (128, 8), (40, 8))]
    assert found == [4, 6, 8, 8, 8, 5]
    run.save(1)
    run.wait_for_save()
    files = list(checkpoint_folder(run.folder, 1).glob("*.distcp"))
    assert len(files) == num_writers(checkpoint.num_cores(), 1)


@pytest.mark.parametrize("full", ["saver", "_write_files_from_queue"])
def test_a_checkpoint_of_which_any_thread_cannot_write_its_part_is_none(
    run, monkeypatch, capsys, full
):
    fsync = os.fsync

    def failing(handle):
        here = threading.current_thread().name
        if "saver" in here:
            time.sleep(0.5)  # meanwhile the others take the other files
        if full in here:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    run.save(1)
    with pytest.raises(OSError, match=r"could not be written .* No space left on device; older"):
        run.wait_for_save()
    assert not saved_steps(run.folder) and not list(run.folder.glob("checkpoints/*"))
    assert "Traceback" not in capsys.readouterr().err


def test_an_old_checkpoint_that_somebody_still_reads_ends_no_run(run, monkeypatch):
    run.save(1)
    run.wait_for_save()

    def busy(path, **_more):
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        forget(run.folder, 1)
    assert saved_steps(run.folder) == []
    checkpoint.clean_up(run.folder)
    assert not list(run.folder.glob("checkpoints/*"))


def test_a_kill_before_the_marker_leaves_it_to_the_next_start(run):
    run.save(1)
    run.wait_for_save()
    marker = run.folder / "saved/1.json"
    content = marker.read_text()
    marker.unlink()
    checkpoint.clean_up(run.folder)
    assert marker.read_text() == content


def test_a_kill_while_a_checkpoint_is_deleted_leaves_none_that_looks_whole(run, monkeypatch):
    run.save(1)
    run.wait_for_save()

    def killed(folder, **_more):
        if folder.exists():
            next(folder.glob("*.distcp")).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        forget(run.folder, 1)
    assert saved_steps(run.folder) == []
    monkeypatch.undo()
    checkpoint.clean_up(run.folder)
    assert list((run.folder / "checkpoints").iterdir()) == []
