"""Gather the measured rows of the bench: a JSON file for each device, and a table."""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.speed.tables import collect

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="measured rows, JSON")
    parser.add_argument("--folder", type=Path, required=True, help="gets <device>.json")
    parser.add_argument("--output", type=Path, required=True, help="the table, Markdown")
    run_main(collect, **vars(parser.parse_args()))
