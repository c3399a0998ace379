"""The whole reference run on the CPU: every leg by the project's own commands, two processes."""

import subprocess
import sys

import pytest
from real_project import ROOT, RealProject

from miniseries.metrics import read_json

CONFIG = "tests/config/reference.yaml"
MET = {
    "tiny: m, v, master of each process",
    "stopped, resumed: token ids",
    "stopped, resumed: losses",
    "resumed on half the GPUs: token ids",
    "resumed on half the GPUs: losses",
    "processes left behind",
    "lines of NCCL's watchdog",
}


@pytest.fixture
def project(tmp_path):
    project = RealProject(tmp_path / "project")
    project.edit("profiles/default/config.yaml", "cores: all", "cores: 1")
    yield project
    project.end_all()


def run_reference(project, *options):
    command = [sys.executable, "workflow/scripts/run_reference.py", "--gpus", "2"]
    command += ["--large", "tiny", "--small", "small", "--large-steps", "24"]
    command += ["--second-precision", "bf16", "--second-steps", "5", "--small-steps", "5"]
    command += ["--dataset", "builtin", "--configfile", str(ROOT / CONFIG), *options]
    result = subprocess.run(
        command, cwd=project.folder, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


def read_legs(project):
    legs = read_json(project.path("reference/reference.json"))["legs"]
    return {name: leg["state"] for name, leg in legs.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_leg_runs_on_two_processes_and_a_second_call_does_the_missing_ones(project):
    code, text = run_reference(project, "--legs", "data", "large")
    assert code == 0, text
    states = read_legs(project)
    assert states.pop("data") == states.pop("large") == "done"
    assert set(states.values()) == {"not run"}
    code, text = run_reference(project, "--budget-seconds", "1500")
    assert code == 0, text
    result = read_json(project.path("reference/reference.json"))
    legs = result["legs"]
    assert {leg["state"] for leg in legs.values()} == {"done"}
    assert legs["large"]["hellaswag"]["num_items"] == 20
    assert legs["large"]["world_size"] == 2
    assert [part["processes"] for part in legs["resumed"]["compared"]] == [2, 2]
    assert [part["processes"] for part in legs["halved"]["compared"]] == [1]
    assert legs["halved"]["compared"][0]["num_steps"] >= 5
    assert 0 < legs["profile"]["exposed_share"] < 1
    assert legs["bf16"]["largest_loss_difference"] > 0  # that of a single step may be 0 by chance
    assert 0 <= legs["bf16"]["last_loss_difference"] <= legs["bf16"]["largest_loss_difference"]
    verdicts = {verdict["aim"]: verdict["verdict"] for verdict in result["verdicts"]}
    assert {aim: verdicts[aim] for aim in MET} == dict.fromkeys(MET, "met")
    assert verdicts["tiny: speed against one GPU"] == "not run"
    rows = read_json(project.path("reference/cpu.json"))["rows"]
    assert [(row["work"], row["precision"], row["processes"]) for row in rows] == [
        ("tiny", "fp32", 2),
        ("tiny", "bf16", 2),
        ("small", "fp32", 2),
    ]
    assert project.path("export/reference-tiny/model.safetensors").exists()
    assert {"reference.md", "reference-tiny.png", "reference-tiny.metrics.jsonl", "large.txt"} <= {
        path.name for path in project.path("reference").iterdir()
    }
    assert project.processes() == []
