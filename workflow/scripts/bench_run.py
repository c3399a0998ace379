"""Measure a run's training step on this device, in processes of its own; writes a JSON result."""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from miniseries.metrics import read_json, run_main
from miniseries.speed.rows import row_of_settings, run_row


def bench(settings: Path | None, row: str | None, started: float | None, **arguments: Any) -> None:
    """Measure a run's settings, or a row as JSON text or as a file that holds it.

    Args:
        started: when this process began, if it is the one that measures.
    """
    if settings:
        found = row_of_settings(read_json(settings))
    else:
        found = json.loads(row) if row.startswith("{") else read_json(Path(row))
    if started is None:
        return run_row(found, **arguments)
    gc.disable()  # as a run does
    from miniseries.speed.bench import measure  # loads PyTorch

    return measure(found, started=started, **arguments)


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
    run_main(bench, **vars(parser.parse_args()))
