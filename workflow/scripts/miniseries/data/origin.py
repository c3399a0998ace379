"""What a dataset that is made here was made of: whether its entry, or files, have changed."""

from pathlib import Path
from typing import Any

from miniseries.data.corpus import find_files
from miniseries.data.foreign import find_token_files
from miniseries.metrics import read_json, write_json

NOTE = "entry.json"  # beside the manifest; no output of a rule, so Snakemake never deletes it


def describe_files(dataset: dict[str, Any]) -> dict[str, int]:
    """Number, bytes, and newest time (ns) of the files of one's own, 0 where there are none.

    Raises:
        ValueError: a glob without a match, an unknown kind of file.
    """
    paths: list[Path | str] = []
    for key in ("paths", "val_paths", "train_paths"):
        find = find_files if dataset["source"] == "files" else find_token_files
        paths += find(dataset[key]) if dataset.get(key) else []
    stats = [Path(path).stat() for path in paths]
    return {
        "num_files": len(stats),
        "num_bytes": sum(stat.st_size for stat in stats),
        "newest_ns": max((stat.st_mtime_ns for stat in stats), default=0),
    }


def write_note(folder: Path, dataset: dict[str, Any], files: dict[str, int]) -> None:
    """Say of which entry and which files the manifest in the folder was made, and keep a copy."""
    manifest = read_json(folder / "manifest.json")
    write_json(folder / NOTE, {"entry": dataset, "files": files, "manifest": manifest})


def read_note(folder: Path) -> dict[str, Any]:
    """What `write_note` wrote, {} if nothing; "manifest" came later than the rest."""
    return read_json(folder / NOTE) if (folder / NOTE).exists() else {}


def check_origin(name: str, dataset: dict[str, Any], folder: Path, runs: Path) -> str:
    """Refuse an entry that would take a good dataset away; nothing is known before it is made.

    Snakemake deletes the manifest before the job that makes it anew, so this is asked beforehand.

    Args:
        name: of the dataset.
        dataset: its entry in the configuration, of whatever source by now.
        folder: of the dataset.
        runs: folder of the runs.

    Returns:
        A warning, if the files are others by now; empty if all is as it was.

    Raises:
        ValueError: the entry has changed, and its paths lead nowhere, or runs need the old tokens.
    """
    is_there = (folder / "manifest.json").exists()
    made = read_note(folder)
    if not made:
        return ""
    changed = sorted(
        key for key in {*made["entry"], *dataset} if made["entry"].get(key) != dataset.get(key)
    )
    try:
        files = describe_files(dataset)
    except (ValueError, OSError) as error:
        if not changed:
            return ""  # text may go once its tokens are there
        if is_there:
            raise ValueError(f"dataset {name}: {error}. Nothing in {folder} was touched") from None
    if not changed:
        is_same = files == made["files"] or not is_there
        return "" if is_same else _warning(name, made["files"], files)
    users = find_users(name, folder, runs)
    if users:
        raise ValueError(
            f"dataset {name}: with other {', '.join(changed)} it would be made again, over the "
            f"tokens of run {', '.join(users)}. Nothing in {folder} was touched. Put the old "
            "values back, or give the new ones a dataset of another name"
        )
    return ""


def _warning(name: str, before: dict[str, int], after: dict[str, int]) -> str:
    then, now = (f"{x['num_files']} ({x['num_bytes']:,} bytes)" for x in (before, after))
    how = f"{then} then, {now} now" if then != now else "newer ones"
    return (
        f"dataset {name}: its files have changed since it was made: {how}. It stays as it is; "
        "give the new text a dataset of another name"
    )


def find_users(name: str, folder: Path, runs: Path) -> list[str]:
    """Names of the runs that were started on the tokens in a dataset's folder.

    Snakemake may have deleted the manifest: its copy counts. Before there were copies all runs on
    the dataset do.
    """
    made = read_note(folder)
    manifest = made.get("manifest")
    if not manifest and (folder / "manifest.json").exists():
        manifest = read_json(folder / "manifest.json")
    if not made and not manifest:
        return []
    frozen = {file.parent.name: read_json(file) for file in sorted(runs.glob("*/settings.json"))}
    if manifest:
        found = {run: settings.get("data_fingerprint") for run, settings in frozen.items()}
        return [run for run in found if found[run] == manifest["fingerprint"]]
    found = {run: settings.get("recipe", {}).get("dataset") for run, settings in frozen.items()}
    return [run for run in found if found[run] == name]
