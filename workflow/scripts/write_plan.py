"""Predict what runs take before they are paid for: memory, micro-batch, hours, dollars, disk."""

import argparse
import json
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.speed.planning import write_plan

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=json.loads, required=True, help="settings of runs, a list")
    parser.add_argument("--gpus", type=int, nargs="+", required=True, help="numbers of GPUs")
    parser.add_argument("--prices", type=json.loads, required=True, help="$ an hour by GPU, null")
    parser.add_argument("--output", type=Path, required=True, help="the plan, Markdown")
    run_main(write_plan, **vars(parser.parse_args()))
