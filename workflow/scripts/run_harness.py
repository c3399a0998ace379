"""Score an exported model with lm-evaluation-harness; rules `harness` and `leaderboard`."""

import argparse
from pathlib import Path

from miniseries.evaluation.harness import run_harness
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="Hugging Face GPT-2 folder")
    parser.add_argument(
        "--tasks", nargs="+", required=True, help="lm-eval's names; hellaswag@10: with 10 examples"
    )
    parser.add_argument("--batch-size", type=int, required=True, help="rows in a forward call")
    parser.add_argument("--questions", type=Path, help="for hellaswag without examples, JSON lines")
    parser.add_argument(
        "--task-data", type=Path, help="folder with {task}/{split}.jsonl or .parquet: no network"
    )
    parser.add_argument("--limit", type=int, help="questions of each task, for a trial")
    parser.add_argument("--output", type=Path, required=True, help="written, JSON")
    parser.add_argument(
        "--items", dest="items_jsonl", type=Path, required=True, help="written, JSON lines"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one"
    )
    run_main(run_harness, **vars(parser.parse_args()))
