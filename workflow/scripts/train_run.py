"""Train one run; after any interruption the same command goes on from its newest checkpoint.

Started by hand or by rule `train` it claims the folder and starts one process a GPU; under
torchrun it is one of those processes.
"""

import argparse
import os
from pathlib import Path

from miniseries.launcher import launch
from miniseries.metrics import die_with_parent, run_main
from miniseries.trainer import train

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, help="the run's settings, JSON")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--questions", type=Path, help="HellaSwag-shaped questions, JSON lines")
    parser.add_argument(
        "--folder", type=Path, required=True, help="checkpoints and logs; resumed from"
    )
    parser.add_argument(
        "--done", type=Path, required=True, help="written last, once all steps are done"
    )
    arguments = vars(parser.parse_args())
    settings = arguments.pop("settings")
    if "RANK" in os.environ:
        die_with_parent()
        run_main(train, **arguments)
    elif settings is None:
        parser.error("--settings is required")
    else:
        run_main(launch, settings=settings, **arguments)
