"""A copy of the project whose steps are stand-ins: the real rules, at the cost of a file each."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT_SCRIPTS = {"write_settings.py", "find_checkpoint.py"}
# Takes the place of each other script: writes every file that the command line names as output.
STAND_IN = """
import json, sys
from pathlib import Path

name, options, key = Path(sys.argv[0]).stem, {}, None
for word in sys.argv[1:]:
    if word.startswith("--"):
        key = word
        options[key] = []
    else:
        options[key].append(word)
with open("calls.txt", "a") as calls:
    calls.write(" ".join([name, *sys.argv[1:]]) + "\\n")


def write(path, content="{}"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


if name == "train_run":
    folder = Path(options["--folder"][0])
    settings = json.loads(Path(options["--settings"][0]).read_text())
    steps = settings["machine"]["export_steps"] + [settings["recipe"]["max_steps"]]
    write(folder / "metrics.jsonl", json.dumps({"kind": "start", "step": 0}))
    manifest = json.loads(Path(options["--manifest"][0]).read_text())
    settings["data_fingerprint"] = manifest["fingerprint"]
    write(folder / "settings.json", json.dumps(settings))
    for step in steps:
        checkpoint = f"checkpoints/step-{step:08d}"
        write(folder / checkpoint / "trainer.json")
        write(folder / f"saved/{step}.json", json.dumps({"checkpoint": checkpoint}))
    if Path("fail_training").exists():
        write(folder / "train.log", "step 7/9\\nstopped at step 7; the same command goes on\\n")
        sys.exit("error: told to fail")
if name == "prepare_dataset":
    write(options["--manifest"][0], json.dumps({"fingerprint": "of the data"}))
    write(Path(options["--folder"][0]) / "hellaswag.jsonl")
    from miniseries.data.origin import describe_files, write_note

    entry = json.loads(options["--dataset"][0])
    try:
        write_note(Path(options["--folder"][0]), entry, describe_files(entry))
    except (KeyError, ValueError):
        pass  # no dataset of one's own, or one whose files are not in the copy
if name == "fetch_shard":
    write(Path(options["--folder"][0]) / options["--shard"][0])
    write(Path(options["--folder"][0]) / (options["--shard"][0] + ".json"))
if name == "export_model":
    for file in ("model.safetensors", "config.json", "export.json"):
        write(Path(options["--folder"][0]) / file)
if name == "fetch_weights":
    for file in ("config.json", "model.safetensors"):
        write(Path(options["--folder"][0]) / file)
if name == "export_llmc":
    for file in ("model", "model_bf16", "gpt2_tokenizer", "debug_state"):
        write(Path(options["--folder"][0]) / f"{file}.bin")
content = json.dumps({"files": ["first", "second"]} if name == "list_files" else {})
OUTPUTS = "--output --speed --done --val-loss --hellaswag --items --table --json --baselines"
for key in [*OUTPUTS.split(), "--crossovers"]:
    for path in options.get(key, []):
        write(path, content)
"""


@pytest.fixture(name="script_calls")
def script_calls_fixture() -> list[tuple[str, set[str]]]:
    """What the rules start."""
    return script_calls()


def script_calls() -> list[tuple[str, set[str]]]:
    """(script, its options) of each command in the rules."""
    rules = "".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk")))
    calls = re.findall(r'workflow/scripts/(\w+\.py)(.*?)"""', rules, re.DOTALL)
    return [(script, set(re.findall(r"--[a-z-]+", words))) for script, words in calls]


class Project:
    """One copy of the project and what `snakemake` says in it."""

    root = ROOT

    def __init__(self, folder: Path, is_new: bool = True) -> None:
        self.folder = folder
        if is_new:
            self._copy_project()

    def _copy_project(self) -> None:
        for name in ("Snakefile", "config", "profiles", "workflow", "tests/config"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, self.folder / name)
        for script in {script for script, _ in script_calls()} - KEPT_SCRIPTS:
            (self.folder / "workflow/scripts" / script).write_text(STAND_IN)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`snakemake` with these arguments, nothing else; output and errors in one text."""
        return subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=self.folder,
            env={**os.environ, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )

    def succeed(self, *arguments: str) -> str:
        """Text of a run that must end well."""
        result = self.run(*arguments)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def jobs(self, *arguments: str) -> dict[str, int]:
        """The job table of a dry run, without the target; {} if nothing is to be done."""
        text = self.succeed("--dry-run", *arguments)
        table = re.search(r"^Job stats:\n.*\n-.*\n((?:\S+ +\d+\n)*)", text, re.MULTILINE)
        if table is None:
            assert "Nothing to be done" in text, text
            return {}
        rows = dict(line.split() for line in table[1].splitlines())
        return {rule: int(count) for rule, count in rows.items() if rule != "total"}

    def fail(self, *arguments: str) -> str:
        """Text of a dry run that must be refused."""
        result = self.run("--dry-run", *arguments)
        assert result.returncode != 0, result.stdout
        return result.stdout

    @property
    def calls(self) -> list[str]:
        """Scripts started so far, in their order."""
        lines = (self.folder / "calls.txt").read_text().splitlines()
        return [line.split()[0] for line in lines]

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace a text that a file holds."""
        text = (self.folder / path).read_text()
        assert old in text
        (self.folder / path).write_text(text.replace(old, new))

    def write(self, path: str, content: str | dict) -> Path:
        """Write a file below the project."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which the default target is complete; not to be changed."""
    project = Project(tmp_path_factory.mktemp("finished"))
    project.succeed()
    return project.folder


@pytest.fixture
def finished_project(finished: Path, tmp_path: Path) -> Project:
    """A complete project for one test."""
    return Project(shutil.copytree(finished, tmp_path / "project"), is_new=False)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fresh copy of the project for one test."""
    return Project(tmp_path)
