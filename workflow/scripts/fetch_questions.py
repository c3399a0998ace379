"""Write HellaSwag's validation questions as one JSON line each; rule `fetch_questions`."""

import argparse
from pathlib import Path

from miniseries.data.questions import HELLASWAG_REPOSITORY, HELLASWAG_REVISION, fetch_questions
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--source",
        default=HELLASWAG_REPOSITORY,
        help="repository on the hub, or a local .jsonl or .parquet file (default: %(default)s)",
    )
    parser.add_argument(
        "--revision",
        default=HELLASWAG_REVISION,
        help="branch, tag, or commit of the repository (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, help="hellaswag.jsonl")
    run_main(fetch_questions, **vars(parser.parse_args()))
