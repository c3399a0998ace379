"""Download a GPT-2 of the Hugging Face hub; rule `fetch_weights` calls this."""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.training.pretrained import fetch_weights

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="owner/name or owner/name@revision")
    parser.add_argument("--folder", type=Path, required=True, help="made: config.json and weights")
    run_main(fetch_weights, **vars(parser.parse_args()))
