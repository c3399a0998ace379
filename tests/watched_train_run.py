"""`train_run.py` that writes down after each step how much memory and compiled code there is."""

import json
import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

if os.environ.get("RANK") == "0" and "--find-micro-batch" not in sys.argv:
    import torch
    from torch._dynamo.utils import counters

    from miniseries.training.journal import Journal

    step = Journal.step

    def watched(self, report):
        line = {"step": report.step + 1, "reserved_bytes": torch.cuda.memory_reserved()}
        line["graphs"] = counters["stats"]["unique_graphs"]
        with (self.folder / "watched.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return step(self, report)

    Journal.step = watched

exec(compile((SCRIPTS / "train_run.py").read_text(), "train_run.py", "exec"))
