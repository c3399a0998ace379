r"""Go on with a checkpoint of llm.c as a run of ours; by hand, before `snakemake train_<run>`.

Example: import_llmc.py --model log124M/model_00010000.bin --settings results/settings/124m.json \
             --folder results/train/124m
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.training.pretrained import import_llmc

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="model_*.bin, with its state_*.bin beside it"
    )
    parser.add_argument("--settings", type=Path, required=True, help="the run's settings, JSON")
    parser.add_argument("--folder", type=Path, required=True, help="of the run")
    run_main(import_llmc, **vars(parser.parse_args()))
