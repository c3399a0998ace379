"""What a dataset was made of: changed files are told of, entries that would lose it are refused."""

import json

import pytest

from miniseries.data import corpus
from miniseries.data.origin import check_origin
from miniseries.data.prepare import prepare_dataset


@pytest.fixture
def made(tmp_path):
    """A small dataset, and a question about an entry for it."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"This is text {number}. It has two sentences.")
    entry = {"source": "files", "paths": [str(tmp_path / "*.txt")]}
    folder = tmp_path / "d"
    prepare_dataset("d", entry, folder, folder / "manifest.json", 1)
    return folder, entry, lambda **changes: check_origin("d", entry | changes, folder, tmp_path)


def test_files_as_they_were_need_no_word_and_others_are_told_of(made):
    folder, _, ask = made
    assert ask() == ""
    (folder.parent / "0.txt").write_text("Longer than before: this one is another text by now.")
    assert "40 (" in ask() and "give the new text a dataset of another name" in ask()
    for file in folder.parent.glob("*.txt"):
        file.unlink()
    assert ask() == "", "text may go once its tokens are there"


def test_entry_whose_paths_lead_nowhere_is_refused_while_there_is_something_to_lose(made):
    folder, _, ask = made
    with pytest.raises(ValueError, match=r"no file matches 'txets/.*Nothing in .* was touched"):
        ask(paths=["txets/*"])
    (folder / "manifest.json").unlink()
    assert ask(paths=["txets/*"]) == ""


def test_entry_that_would_write_over_the_tokens_of_a_run_is_refused(made):
    folder, _, ask = made
    assert ask(val_fraction=0.2) == ""
    fingerprint = json.loads((folder / "manifest.json").read_text())["fingerprint"]
    (folder.parent / "run").mkdir()
    frozen = folder.parent / "run/settings.json"
    frozen.write_text(json.dumps({"data_fingerprint": fingerprint}))
    with pytest.raises(ValueError, match=r"other val_fraction .* tokens of run run"):
        ask(val_fraction=0.2)
    with pytest.raises(ValueError, match=r"other .*source.* tokens of run run"):
        ask(source="builtin", paths=[])
    assert ask() == ""
    (folder / "manifest.json").unlink()
    for paths in ([], ["txets/*"]):
        with pytest.raises(ValueError, match=r"other paths .* tokens of run run"):
            ask(paths=paths)


def test_the_prose_that_comes_with_python_is_guarded_alike(tmp_path, monkeypatch):
    texts = [(str(n), f"This is text {n}. It has two sentences, too.") for n in range(40)]
    monkeypatch.setattr(corpus, "builtin_documents", lambda with_packages: iter(texts))
    entry = {"source": "builtin", "val_fraction": 0.1}
    folder = tmp_path / "d"
    prepare_dataset("d", entry, folder, folder / "manifest.json", 1)
    fingerprint = json.loads((folder / "manifest.json").read_text())["fingerprint"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.json").write_text(json.dumps({"data_fingerprint": fingerprint}))
    with pytest.raises(ValueError, match=r"other val_fraction .* tokens of run run"):
        check_origin("d", entry | {"val_fraction": 0.2}, folder, tmp_path)
    assert check_origin("d", entry, folder, tmp_path) == ""


@pytest.mark.parametrize(
    "change", [{"paths": ["txets/*"]}, {"text_key": "x", "paths": ["*.jsonl"]}]
)
def test_dataset_stays_whole_when_it_cannot_be_made_again(made, monkeypatch, change):
    folder, entry, _ = made
    monkeypatch.chdir(folder.parent)
    (folder.parent / "bad.jsonl").write_text(json.dumps({"text": "no x"}) + "\n")
    before = {path.name: path.read_bytes() for path in folder.glob("[!.]*")}
    with pytest.raises(ValueError):
        prepare_dataset("d", entry | change, folder, folder / "manifest.json", 1)
    assert {path.name: path.read_bytes() for path in folder.glob("[!.]*")} == before


class TestTokensOfARun:
    """Nothing is written over tokens that a run was trained on, whatever has gone beside them."""

    @pytest.fixture
    def trained(self, tmp_path):
        """Dataset `d` of 40 files with a run on it, and what makes it again."""
        for number in range(40):
            (tmp_path / f"{number}.txt").write_text(f"This is text {number}. It has two sentences.")
        entry = {"source": "files", "paths": [str(tmp_path / "*.txt")], "shard_tokens": 200}
        folder = tmp_path / "data/d"

        def make():
            # as Snakemake does before the job
            for name in ("manifest.json", "hellaswag.jsonl"):
                (folder / name).unlink(missing_ok=True)
            prepare_dataset("d", entry, folder, folder / "manifest.json", 1)

        make()
        fingerprint = json.loads((folder / "manifest.json").read_text())["fingerprint"]
        (tmp_path / "train/run").mkdir(parents=True)
        settings = {"recipe": {"dataset": "d"}, "data_fingerprint": fingerprint}
        (tmp_path / "train/run/settings.json").write_text(json.dumps(settings))
        return folder, make

    @staticmethod
    def content(folder):
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.name[0] != "."}

    @pytest.mark.parametrize("change", ["nothing", "other text", "no text"])
    def test_manifest_and_questions_come_back_as_they_were(self, trained, change):
        folder, make = trained
        before = self.content(folder)
        times = {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
        assert len(times) > 2
        for file in folder.parents[1].glob("*.txt"):
            if change == "other text":
                file.write_text("Other words, many of them, in a longer text. " * 3)
            if change == "no text":
                file.unlink()
        make()
        assert self.content(folder) == before
        assert {path: path.stat().st_mtime_ns for path in folder.glob("*.bin")} == times

    @pytest.mark.parametrize("has_copy", [True, False])  # of the manifest, which came later
    def test_other_text_is_refused_where_shards_are_missing(self, trained, has_copy):
        folder, make = trained
        before = self.content(folder)
        gone = folder / "d_train_000001.bin"
        if not has_copy:
            note = json.loads((folder / "entry.json").read_text())
            del note["manifest"]
            (folder / "entry.json").write_text(json.dumps(note))
        gone.unlink()
        make()
        assert self.content(folder) == before, "of the same text it is made again"
        text = folder.parents[1] / "0.txt"
        text.write_text("Other words, many of them, in a longer text. " * 3)
        gone.unlink()
        del before[gone.name], before["manifest.json"], before["hellaswag.jsonl"]
        with pytest.raises(ValueError, match=r"^dataset d: shards that run run was .*missing"):
            make()
        assert self.content(folder) == before

    def test_other_text_is_taken_once_the_run_is_gone(self, trained):
        folder, make = trained
        before = self.content(folder)
        (folder.parents[1] / "0.txt").write_text("Other words, many of them, in a longer text. ")
        (folder.parents[1] / "train/run/settings.json").unlink()
        make()
        assert self.content(folder)["manifest.json"] != before["manifest.json"]
