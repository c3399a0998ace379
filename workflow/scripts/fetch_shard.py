"""Fetch one token shard of a `hub-shards` dataset and check its sha256; rule `fetch_shard`.

Writes `<shard>` and, beside it, `<shard>.json` (tokens, bytes, sha256, commit), and prints how far
the dataset is.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from miniseries.data.hub_shards import fetch_shard, shard_progress
from miniseries.metrics import run_main


def main(name: str, folder: Path, num_files: int, **options: Any) -> None:
    """Fetch, then print the progress of the dataset."""
    fetch_shard(folder=folder, num_files=num_files, **options)
    print(shard_progress(name, folder, num_files), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the dataset, for the progress")
    parser.add_argument(
        "--dataset", type=json.loads, required=True, help="its entry in the configuration, JSON"
    )
    parser.add_argument(
        "--shard", dest="filename", required=True, help="file name of the shard in the repository"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the shard and its note")
    parser.add_argument("--num-files", type=int, default=1, help="shards of the dataset")
    run_main(main, **vars(parser.parse_args()))
