"""Let an exported model continue prompts; rule `write_samples` calls this."""

import argparse
from pathlib import Path

from miniseries.evaluation.sampling import write_samples
from miniseries.metrics import run_main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="Hugging Face GPT-2 folder")
    parser.add_argument("--prompts", required=True, help='JSON list of texts; "" starts a document')
    parser.add_argument("--num-samples", type=int, required=True, help="texts for each prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, required=True, help="length of a text, at most"
    )
    parser.add_argument(
        "--top-k", type=int, required=True, help="likeliest tokens to draw from; 0: all"
    )
    parser.add_argument("--temperature", type=float, required=True, help="0: always the likeliest")
    parser.add_argument("--seed", type=int, required=True, help="same seed, same texts")
    parser.add_argument(
        "--prompts-file", type=Path, help="in place of --prompts: .json, or text with blank lines"
    )
    parser.add_argument("--output", type=Path, required=True, help="written: Markdown")
    parser.add_argument(
        "--json", dest="json_output", type=Path, required=True, help="written: the same as JSON"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: a GPU if there is one"
    )
    run_main(write_samples, **vars(parser.parse_args()))
