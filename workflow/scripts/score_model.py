"""Validation loss and HellaSwag of an exported model; rule `score` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.scores import score_export
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="Hugging Face GPT-2 folder")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--questions", type=Path, required=True, help="HellaSwag, JSON lines")
    parser.add_argument("--micro-batch", type=int, required=True, help="rows in a forward call")
    parser.add_argument(
        "--val-loss", dest="val_loss_json", type=Path, required=True, help="written, JSON"
    )
    parser.add_argument(
        "--hellaswag", dest="hellaswag_json", type=Path, required=True, help="written, JSON"
    )
    parser.add_argument(
        "--items",
        dest="items_jsonl",
        type=Path,
        required=True,
        help="written: the loss of every candidate, JSON lines",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one"
    )
    run_main(score_export, **vars(parser.parse_args()))
