"""Run the project's reference on this machine's GPUs: speed, stop and resume, scores, export.

Takes minutes; writes reference.json, a table, logs, and figures to one folder. A second call with
the same options goes on with the legs that are missing.
"""

import argparse
from pathlib import Path

from miniseries.metrics import run_main
from miniseries.speed.reference import run_reference

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs; all visible ones if not given")
    parser.add_argument("--large", default="1558m", help="run that is stopped and resumed")
    parser.add_argument("--large-steps", type=int, default=60, help="of the run, 16 or more")
    parser.add_argument("--micro-batch", type=int, help="of the large run, if not its own")
    parser.add_argument("--second-precision", default="fp8", help="of the large run, once more")
    parser.add_argument("--second-steps", type=int, default=30, help="of that")
    parser.add_argument("--small", default="124m", help="run that is only timed")
    parser.add_argument("--small-steps", type=int, default=100, help="of that")
    parser.add_argument("--dataset", default="builtin-large", help="what all of them train on")
    parser.add_argument(
        "--budget-seconds", type=float, default=500, help="a leg at work is then ended, in 35 s"
    )
    legs = "of data, large, stopped, resumed, halved, small, profile, fp8, export"
    parser.add_argument("--legs", nargs="+", help=legs)
    parser.add_argument(
        "--configfile", type=Path, nargs="*", default=[], help="laid over config/config.yaml"
    )
    folder = Path("results/reference")
    parser.add_argument("--output", type=Path, default=folder, help="folder for all results")
    run_main(run_reference, **vars(parser.parse_args()))
