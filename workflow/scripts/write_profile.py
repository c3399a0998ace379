"""Write what the profiled rows of the bench spend their time on."""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.speed.tables import write_profile

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="measured rows, JSON")
    parser.add_argument("--output", type=Path, required=True, help="the tables, Markdown")
    run_main(write_profile, **vars(parser.parse_args()))
