"""Write the table of all runs from what lies under the results folder; rule `write_summary`.

Example: write_summary.py --results results --table summary.tsv --json summary.json \\
             --baselines baselines.tsv --crossovers crossovers.md
Reads settings/, train/, evaluate/ and export/ of each run; what is missing is an empty cell.
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.reporting.summary import write_summary

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="the results folder")
    parser.add_argument("--table", type=Path, required=True, help="written, tab-separated")
    parser.add_argument(
        "--json", dest="json_table", type=Path, required=True, help="written: the same as JSON"
    )
    parser.add_argument(
        "--baselines", type=Path, required=True, help="written: published figures and our own"
    )
    parser.add_argument(
        "--crossovers", type=Path, required=True, help="written: where runs pass GPT-2, Markdown"
    )
    parser.add_argument(
        "--smoothing", type=float, default=0.95, help="weight of the past in the mean loss, 0 to 1"
    )
    run_main(write_summary, **vars(parser.parse_args()))
