"""Score an exported model on MMLU or WikiText; rule `score_task` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.scores import TASKS, score_task
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="Hugging Face GPT-2 folder")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="the task's questions or text")
    parser.add_argument("--micro-batch", type=int, required=True, help="rows in a forward call")
    parser.add_argument("--output", type=Path, required=True, help="written, JSON")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one"
    )
    run_main(score_task, **vars(parser.parse_args()))
