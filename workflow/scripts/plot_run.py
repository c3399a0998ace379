"""Draw one run from its log as far as it has come; rule `plot_run` starts this.

Example: plot_run.py --run tiny --metrics results/train/tiny/metrics.jsonl \
    --settings results/settings/tiny.json --output results/plots/tiny.png results/plots/tiny.svg \
    --speed results/plots/tiny.speed.png results/plots/tiny.speed.svg
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.reporting.canvas import add_style_arguments
from miniseries.reporting.plots import plot_run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.jsonl; may be missing")
    parser.add_argument("--settings", type=Path, help="settings of the run, JSON")
    parser.add_argument(
        "--output", type=Path, nargs="+", required=True, help="loss and HellaSwag, .png and .svg"
    )
    parser.add_argument(
        "--speed", type=Path, nargs="*", default=[], help="speed and gradients, .png and .svg"
    )
    add_style_arguments(parser)
    run_main(plot_run, **vars(parser.parse_args()))
