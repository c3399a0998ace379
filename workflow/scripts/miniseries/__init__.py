"""The GPT-2 miniseries: data, training, export, scores and plots. Knows nothing of Snakemake."""

import os

# Threads that wait for each other sleep instead of spinning: on two busy cores a step of `tiny`
# takes a third of the time (LOG.md). OpenMP reads it once, so it must stand before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
