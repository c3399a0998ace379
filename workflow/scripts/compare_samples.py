"""Show the texts of several models side by side; rule `compare_samples` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.sampling import compare_samples
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=Path, nargs="+", required=True, help="samples, JSON")
    parser.add_argument("--output", type=Path, required=True, help="written, HTML")
    run_main(compare_samples, **vars(parser.parse_args()))
