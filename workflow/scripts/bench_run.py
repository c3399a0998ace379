"""Measure a run's training step on this device; writes a JSON result."""

import time

started = time.time()

import argparse  # noqa: E402
from pathlib import Path  # noqa: E402

from miniseries.bench import bench  # noqa: E402
from miniseries.metrics import run_main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="settings of the run, JSON")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--output", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--steps", type=int, default=12, help="timed steps; two more warm up")
    parser.add_argument("--profiled-steps", type=int, default=0, help="for the breakdown")
    run_main(bench, **vars(parser.parse_args()), started=started)
