"""Draw several runs in one figure; rule `plot_series` starts this.

Example: plot_series.py --title "GPT-2 miniseries" --runs 124m 350m \
    --metrics results/train/124m/metrics.jsonl results/train/350m/metrics.jsonl \
    --settings results/settings/124m.json results/settings/350m.json \
    --output results/plots/miniseries.png results/plots/miniseries.svg
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.reporting.canvas import add_style_arguments
from miniseries.reporting.plots import plot_series

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--title", required=True, help="title of the figure")
    parser.add_argument("--runs", nargs="*", default=[], help="names of the runs")
    parser.add_argument(
        "--metrics", type=Path, nargs="*", default=[], help="metrics.jsonl of each; may be missing"
    )
    parser.add_argument(
        "--settings", type=Path, nargs="*", default=[], help="settings JSON of each run"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="label the runs with the settings they differ in"
    )
    parser.add_argument(
        "--output", type=Path, nargs="+", required=True, help="figure, .png and .svg"
    )
    add_style_arguments(parser)
    run_main(plot_series, **vars(parser.parse_args()))
