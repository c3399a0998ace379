"""Measure a run's training step on this device, in processes of its own; writes a JSON result."""

import argparse
import json
from pathlib import Path
from typing import Any

from miniseries.metrics import read_json, run_main
from miniseries.speed.rows import row_of_settings, run_row


def given_row(text: str) -> dict[str, Any]:
    """A row as JSON text, or as a file that holds it."""
    return json.loads(text) if text.startswith("{") else read_json(Path(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--settings", type=Path, help="settings of the run, JSON")
    what.add_argument("--row", help="a row of the bench, JSON: file or text; for the workflow")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument("--output", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--steps", type=int, default=12, help="timed steps; two more warm up")
    parser.add_argument("--profile", type=Path, help="folder for a trace and the top kernels")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # of the measuring process
    arguments = vars(parser.parse_args())
    settings, row, started = (arguments.pop(name) for name in ("settings", "row", "started"))
    row = given_row(row) if row else row_of_settings(read_json(settings))
    if started is None:
        run_main(run_row, row=row, **arguments)
    else:
        from miniseries.speed.bench import measure  # loads PyTorch

        run_main(measure, row=row, started=started, **arguments)
