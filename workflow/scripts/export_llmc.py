"""Write a checkpoint as files that llm.c reads; rule `write_llmc` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.export import export_llmc
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint-marker",
        dest="marker",
        type=Path,
        required=True,
        help="done.json or saved/{step}.json of a run's folder",
    )
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--folder", type=Path, required=True, help="made or replaced as a whole")
    run_main(export_llmc, **vars(parser.parse_args()))
