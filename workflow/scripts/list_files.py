"""List the files that a `hub-text` dataset takes from its repository; rule `list_files`.

Writes path, bytes, and hash of each, and the commit that they are taken from.
"""

import argparse
import json
from pathlib import Path

from miniseries.data.fetch import list_files
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", type=json.loads, required=True, help="its entry in the configuration, JSON"
    )
    parser.add_argument("--output", type=Path, required=True, help="files.json")
    run_main(list_files, **vars(parser.parse_args()))
