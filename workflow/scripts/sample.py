"""Let an exported model continue what you type; by hand.

Example: sample.py results/export/124m --prompt "Once upon a time"
"""

import argparse
from pathlib import Path

from miniseries.evaluation.sampling import talk
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, help="Hugging Face GPT-2 folder")
    parser.add_argument("--prompt", help="without it every line that you type is one")
    parser.add_argument("--num-samples", type=int, default=1, help="texts for a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="length of a text")
    parser.add_argument("--top-k", type=int, default=50, help="likeliest tokens; 0: all")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest")
    parser.add_argument("--seed", type=int, default=42, help="same seed, same texts")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    run_main(talk, **vars(parser.parse_args()))
