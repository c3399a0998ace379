"""Train one run; after any interruption the same command goes on from its newest checkpoint.

Started by hand or by rule `train` it claims the folder and starts one process a GPU; under
torchrun it is one of those processes.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load Ctrl-C is no traceback

import argparse  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

from miniseries.metrics import run_main  # noqa: E402
from miniseries.training.launcher import launch  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, help="the run's settings, JSON")
    parser.add_argument("--manifest", type=Path, required=True, help="token shards, JSON")
    parser.add_argument(
        "--questions", type=Path, nargs="?", help="HellaSwag-shaped questions, JSON lines, if any"
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="checkpoints and logs; resumed from"
    )
    parser.add_argument(
        "--init-from",
        type=Path,
        help="weights to start from: config.json of a Hugging Face folder, model_*.bin of llm.c, "
        "or done.json or saved/{step}.json of another run",
    )
    parser.add_argument(
        "--done", type=Path, required=True, help="written last, once all steps are done"
    )
    parser.add_argument("--find-micro-batch", type=int, help=argparse.SUPPRESS)  # by the launcher
    arguments = vars(parser.parse_args())
    settings, processes = arguments.pop("settings"), arguments.pop("find_micro_batch")
    if "RANK" in os.environ and processes:
        from miniseries.training.trial import find_micro_batch  # loads PyTorch

        run_main(find_micro_batch, folder=arguments["folder"], processes=processes)
    elif "RANK" in os.environ:
        gc.disable()  # until the first step is done; see Trainer
        from miniseries.training.worker import train  # loads PyTorch

        del arguments["init_from"]  # the launcher noted it in settings.json
        run_main(train, **arguments)
    elif settings is None:
        parser.error("--settings is required")
    else:
        run_main(launch, settings=settings, **arguments)
