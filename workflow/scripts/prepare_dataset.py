"""Make one dataset: what is missing of its shards, questions, and at the end its manifest.

Rules `prepare_dataset`, `check_shards`, `list_shards`, and `pack_dataset` call it. An interrupted
call goes on.
"""

import argparse
import json
from pathlib import Path

from miniseries.data.prepare import prepare_dataset
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the dataset; begins the shards' names")
    parser.add_argument(
        "--dataset", type=json.loads, required=True, help="its entry in the configuration, JSON"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for shards and hellaswag.jsonl")
    parser.add_argument("--manifest", type=Path, required=True, help="written last")
    parser.add_argument(
        "--workers", dest="num_workers", type=int, help="processes that tokenize; default all cores"
    )
    run_main(prepare_dataset, **vars(parser.parse_args()))
