"""Write a checkpoint as a Hugging Face GPT-2 folder; rule `export` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.export import export_model
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
    parser.add_argument("--folder", type=Path, required=True, help="made or replaced as a whole")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="of the weights; without it what the run computed in",
    )
    run_main(export_model, **vars(parser.parse_args()))
