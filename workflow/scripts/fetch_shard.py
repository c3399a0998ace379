"""Fetch one token shard of a `hub-shards` dataset and check its sha256; rule `fetch_shard`.

Writes `<shard>` and, beside it, `<shard>.json` (tokens, bytes, sha256, commit).
"""

import argparse
import json
from pathlib import Path

from miniseries.fetch import fetch_shard
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", type=json.loads, required=True, help="its entry in the configuration, JSON"
    )
    parser.add_argument(
        "--shard", dest="filename", required=True, help="file name of the shard in the repository"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the shard and its note")
    run_main(fetch_shard, **vars(parser.parse_args()))
