"""Copies of the whole project with its real scripts, in which `snakemake` runs as users type it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from miniseries.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 300  # the machine may be busy with other things
# Python imports this at its start: each script of the project notes its name
NOTE = """import sys
for word in sys.orig_argv[1:]:
    if "workflow/scripts/" in word:
        with open({path!r}, "a") as file:
            print(word, file=file)
"""


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, key by key."""
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if nested else value
    return merged


def wait_until(condition: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Look every 20 ms; fails if the process ends or too much time passes before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process is None or process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class RealProject:
    """One copy of the project, in a folder of its own.

    Args:
        folder: made; it must not exist yet.
        overlay: laid over config/config.yaml; commands then take one core. None changes nothing.
    """

    def __init__(self, folder: Path, overlay: Path | None = None) -> None:
        self.folder = folder
        if folder.exists():
            return
        ignore = shutil.ignore_patterns("__pycache__")
        for name in ("benchmarks", "config", "profiles", "workflow", "tests/config"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        shutil.copy2(ROOT / "Snakefile", folder)
        if overlay is not None:
            self.overlay(overlay)
            # tests run side by side, and threads that wait for each other cost time
            self.edit("profiles/default/config.yaml", "cores: all", "cores: 1")

    def copy_to(self, folder: Path) -> "RealProject":
        """The same project elsewhere, results and Snakemake's notes included."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return RealProject(folder)

    # ---- files --------------------------------------------------------------------------

    def configure(self, changes: dict[str, Any]) -> None:
        """Change the project's config.yaml."""
        file = self.folder / "config/config.yaml"
        merged = merge(yaml.safe_load(file.read_text()), changes)
        file.write_text(yaml.safe_dump(merged, sort_keys=False))

    def overlay(self, file: Path) -> None:
        """Lay a configuration over the project's, as --configfile does."""
        self.configure(yaml.safe_load(file.read_text()))

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that a file of the project holds."""
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    def write(self, name: str, text: str) -> None:
        """Write a file of the project."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def path(self, name: str) -> Path:
        """A file below results/."""
        return self.folder / "results" / name

    def train_steps(self, run: str = "tiny") -> list[int]:
        """Steps in the run's metrics as a plot draws them."""
        records = read_metrics(self.path(f"train/{run}/metrics.jsonl"))
        return [record["step"] for record in records.get("train", [])]

    def losses(self, run: str = "tiny") -> list[tuple[int, float, float]]:
        """Step, loss, and gradient norm of each step, exactly."""
        records = read_metrics(self.path(f"train/{run}/metrics.jsonl"))["train"]
        return [(r["step"], r["train_loss_nats"], r["grad_norm"]) for r in records]

    def checkpoints(self, run: str = "tiny") -> list[int]:
        """Steps of the complete checkpoints."""
        found = self.path(f"train/{run}/checkpoints").glob("step-????????")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def snapshot(self, *names: str) -> dict[Path, int]:
        """Every file below these folders of results/, with its time."""
        files = [path for name in names for path in self.path(name).rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}

    # ---- commands -----------------------------------------------------------------------

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen:
        """`snakemake` with these arguments, leader of a process group of its own."""
        watch = self.folder / "watch"
        watch.mkdir(exist_ok=True)
        screen = watch / f"{len(list(watch.glob('*.txt')))}.txt"
        (watch / "sitecustomize.py").write_text(NOTE.format(path=str(watch / "scripts")))
        environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(watch)}
        environment |= more.pop("env", {})
        output = {"stdout": screen.open("wb"), "stderr": subprocess.STDOUT} | more
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **output,
        )
        process.screen = screen
        return process

    def finish(self, process: subprocess.Popen) -> tuple[int, str]:
        """Exit code and everything the command said."""
        code = process.wait(timeout=2 * PATIENCE_SECONDS)
        return code, process.screen.read_text(errors="replace")

    def run(self, *arguments: str, **more: Any) -> tuple[int, str]:
        """Start a command and wait for it."""
        return self.finish(self.start(*arguments, **more))

    def succeed(self, *arguments: str, **more: Any) -> str:
        """Text of a command that must end well."""
        code, text = self.run(*arguments, **more)
        assert code == 0, text
        return text

    def fail(self, *arguments: str, **more: Any) -> str:
        """Text of a command that must be refused or fail, and not with a traceback of ours."""
        code, text = self.run(*arguments, **more)
        assert code != 0, text
        assert "Traceback" not in text, text
        return text

    def jobs(self, *arguments: str) -> dict[str, int]:
        """Job table of a dry run, without the total; {} if nothing is to be done."""
        text = self.succeed("--dry-run", *arguments)
        table = re.search(r"^Job stats:\n.*\n-.*\n((?:\S+ +\d+\n)*)", text, re.MULTILINE)
        if table is None:
            assert "Nothing to be done" in text, text
            return {}
        rows = dict(line.split() for line in table[1].splitlines())
        return {rule: int(count) for rule, count in rows.items() if rule != "total"}

    def scripts_started(self) -> set[str]:
        """Names of the scripts that commands of this project have started so far."""
        return {Path(word).stem for word in (self.folder / "watch/scripts").read_text().split()}

    # ---- processes ----------------------------------------------------------------------

    def processes(self, word: str = "") -> list[int]:
        """Ids of all processes at work in this folder whose command line holds the word."""
        found = []
        for process in psutil.process_iter():
            try:
                at_work = process.status() != psutil.STATUS_ZOMBIE
                if at_work and Path(process.cwd()) == self.folder:
                    found += [process.pid] if word in " ".join(process.cmdline()) else []
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return sorted(found)

    def trainer(self, run: str = "tiny") -> int:
        """Id of the process that has claimed the run's folder, as the README says."""
        return int(self.path(f"train/{run}/lock").read_text())

    def start_training(self, step: int, *arguments: str, run: str = "tiny") -> subprocess.Popen:
        """Start a command and wait until the run has done this step."""
        process = self.start(*(arguments or [f"train_{run}"]))
        wait_until(lambda: self.train_steps(run)[-1:] >= [step], process)
        return process

    def interrupt(self, process: subprocess.Popen) -> tuple[int, str]:
        """What Ctrl-C does: INT to every process of the command."""
        os.killpg(process.pid, signal.SIGINT)
        return self.finish(process)

    def end_all(self) -> None:
        """Kill whatever a test has left at work in this folder."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


class Terminal:
    """A terminal with `snakemake` in the foreground, as when a user types it."""

    def __init__(self, project: RealProject, *arguments: str) -> None:
        self.project, self.text, self.is_open = project, "", True
        self.keyboard, inside = pty.openpty()
        termios.tcsetwinsize(inside, (40, 160))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=project.folder,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # what a terminal says when its last program has ended
            while self.is_open:
                if select.select([self.keyboard], [], [], 0.1)[0]:
                    self.text += os.read(self.keyboard, 65536).decode(errors="replace")

    def wait_for_step(self, step: int, run: str = "tiny") -> None:
        """Return once the run has done this step."""
        wait_until(lambda: self.project.train_steps(run)[-1:] >= [step], self.process)

    def press_ctrl_c(self) -> None:
        """INT to all that runs in the foreground."""
        os.write(self.keyboard, b"\x03")

    def hang_up(self) -> None:
        """The connection is lost: HUP to all that runs in it, and nobody reads any more."""
        self.is_open = False
        self.reader.join()
        os.close(self.keyboard)
