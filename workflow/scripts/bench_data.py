"""Measure the way from files of text to shards against tiktoken alone, in one run.

By hand: python workflow/scripts/bench_data.py --paths 'texts/*.jsonl' --output speed.json
"""

import argparse
from pathlib import Path

from miniseries.data.prepare import measure_speed
from miniseries.metrics import num_cores, run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--paths", nargs="+", required=True, help="globs of .jsonl, .parquet, or .txt files"
    )
    parser.add_argument("--text-key", default="text", help="key or column (default: %(default)s)")
    parser.add_argument(
        "--workers", dest="num_workers", type=int, default=num_cores(), help="default: all cores"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    run_main(measure_speed, **vars(parser.parse_args()))
