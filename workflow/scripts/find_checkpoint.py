"""Mark a step's checkpoint as complete, or name the steps that there are; rule `find_checkpoint`.

Example: find_checkpoint.py --folder results/train/tiny --run tiny --step 50 \
    --marker results/train/tiny/saved/50.json
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main, write_json


def find_checkpoint(folder: Path, run: str, step: int, marker: Path) -> None:
    """Write the marker that the trainer writes with each checkpoint.

    Raises:
        ValueError: the run keeps no checkpoint of this step; names those it keeps.
    """
    checkpoint = f"checkpoints/step-{step:08d}"
    if not (folder / checkpoint / "trainer.json").exists():
        names = (path.parent.name for path in folder.glob("checkpoints/step-*/trainer.json"))
        numbers = (name.removeprefix("step-") for name in names)  # others were put aside
        steps = ", ".join(map(str, sorted(int(n) for n in numbers if n.isdecimal()))) or "none"
        raise ValueError(
            f"{folder} keeps no checkpoint of step {step}; it keeps: {steps}. Steps listed under "
            "`export_steps:` of a run before it is trained are always kept"
        )
    write_json(marker, {"run": run, "step": step, "checkpoint": checkpoint})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.add_argument("--marker", type=Path, required=True, help="written: saved/{step}.json")
    run_main(find_checkpoint, **vars(parser.parse_args()))
