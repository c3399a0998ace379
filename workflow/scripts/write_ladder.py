"""Write the measured rungs of the ladder as a table and as a bar chart."""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.reporting.canvas import add_style_arguments
from miniseries.speed.tables import write_ladder

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="measured rungs, JSON")
    parser.add_argument("--output", type=Path, required=True, help="the table, Markdown")
    parser.add_argument("--figures", type=Path, nargs="+", required=True, help=".png, .svg")
    add_style_arguments(parser)
    run_main(write_ladder, **vars(parser.parse_args()))
