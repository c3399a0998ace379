"""Write questions as llm.c's hellaswag_val.bin; rule `write_eval_file`."""

import argparse
from pathlib import Path

from miniseries.data.questions import write_eval_file
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="hellaswag_val.bin")
    run_main(write_eval_file, **vars(parser.parse_args()))
