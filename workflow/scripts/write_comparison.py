"""Set measured speeds beside those of llm.c and PyTorch, as a table or in the README."""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.speed.comparison import write_comparison

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measured", type=Path, nargs="*", required=True, help="files <device>.json of the bench"
    )
    parser.add_argument("--output", type=Path, help="the table, Markdown")
    parser.add_argument("--readme", type=Path, help="gets its own table between two marks")
    run_main(write_comparison, **vars(parser.parse_args()))
