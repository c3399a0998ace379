"""Upload an export to the Hugging Face hub; rule `upload_model`. HF_TOKEN must allow writing.

Example: push_model.py --checkpoint-marker results/train/124m/done.json \\
             --export results/export/124m --evaluation results/evaluate/124m \\
             --repository me/124m --output pushed.json
"""

import argparse
from pathlib import Path

from miniseries.evaluation.export import push_model
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint-marker",
        dest="marker",
        type=Path,
        required=True,
        help="done.json or saved/{step}.json of the run",
    )
    parser.add_argument("--export", type=Path, required=True, help="folder to upload")
    parser.add_argument("--evaluation", type=Path, required=True, help="its scores, for the card")
    parser.add_argument("--repository", required=True, help="owner/name on the hub")
    parser.add_argument("--private", action="store_true", help="if the repository is made")
    parser.add_argument("--output", type=Path, required=True, help="written: the commit, JSON")
    run_main(push_model, **vars(parser.parse_args()))
