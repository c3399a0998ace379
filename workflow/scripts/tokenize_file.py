"""Fetch one file of a `hub-text` dataset and tokenize it; rule `tokenize_file`.

Writes its tokens and a note to `.streams` in the dataset's folder, deletes the file, and prints how
far the dataset is.
"""

import argparse
import json
from pathlib import Path

from miniseries.data.prepare import tokenize_file
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the dataset")
    parser.add_argument(
        "--dataset", type=json.loads, required=True, help="its entry in the configuration, JSON"
    )
    parser.add_argument("--number", type=int, required=True, help="of the file in files.json")
    parser.add_argument("--folder", type=Path, required=True, help="of the dataset")
    parser.add_argument("--done", type=Path, required=True, help="written last, JSON")
    run_main(tokenize_file, **vars(parser.parse_args()))
