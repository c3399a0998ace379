"""Write the settings of one run to a file; rule `write_settings` starts this."""

import argparse
import json
from pathlib import Path

from miniseries.metrics import run_main, write_json


def write_settings(settings: str, output: Path) -> None:
    """Write settings, given as JSON text, indented."""
    write_json(output, json.loads(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True, help="settings of the run, JSON text")
    parser.add_argument("--output", type=Path, required=True, help="written: the same, indented")
    run_main(write_settings, **vars(parser.parse_args()))
