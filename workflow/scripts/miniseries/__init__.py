"""The GPT-2 miniseries: data, training, export, scores and plots. Knows nothing of Snakemake."""

import os
from pathlib import Path

# Threads that wait for each other sleep instead of spinning: on two busy cores a step of `tiny`
# takes a third of the time (LOG.md). OpenMP reads it once, so it must stand before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What torch.compile and Triton made is kept with the results: a second start takes seconds
# instead of a minute. Every process of every command finds it here.
for _name, _folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
    os.environ.setdefault(_name, str(Path("results/cache").absolute() / _folder))
