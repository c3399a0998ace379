"""Write the table of all runs from what lies under the results folder; rule `summary` starts this.

Example: write_summary.py --results results --runs tiny 124m --output results/summary.tsv
Reads settings/, train/, evaluate/ and export/ of each run; what is missing is an empty cell.
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.summary import write_summary

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="the results folder")
    parser.add_argument("--runs", nargs="*", default=[], help="names of the runs, one row each")
    parser.add_argument("--output", type=Path, required=True, help="tab-separated table")
    parser.add_argument(
        "--smoothing", type=float, default=0.95, help="weight of the past in the mean loss, 0 to 1"
    )
    run_main(write_summary, **vars(parser.parse_args()))
