"""Do one step of a run twice and compare every bit: is it the hardware, or the batch?

Example: replay_step.py --folder results/train/tiny \
    --manifest results/data/builtin/manifest.json --step 60 --output replay.json
"""

import argparse
import os
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.training.launcher import launch_replay

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="the run's; is only read")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--step", type=int, required=True, help="0-based, as in metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="the verdict, JSON")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)  # by the launcher
    arguments = vars(parser.parse_args())
    if "RANK" in os.environ:
        from miniseries.training.replay import replay  # loads PyTorch

        run_main(replay, **arguments)
    else:
        del arguments["scratch"]  # the launcher makes it
        run_main(launch_replay, **arguments)
