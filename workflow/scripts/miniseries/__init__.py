"""The GPT-2 miniseries: data, training, export, scores and plots. Knows nothing of Snakemake."""

import os
from pathlib import Path

# Threads that wait for each other sleep instead of spinning: on two busy cores a step of `tiny`
# takes a third of the time (LOG.md). OpenMP reads it once, so it must stand before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What compilers made is kept with the results: a second start takes seconds instead of a minute.
# Every process of every command finds it here.
CACHE_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "QUACK_CACHE_DIR": "quack",
}
for _name, _folder in CACHE_FOLDERS.items():
    os.environ.setdefault(_name, str(Path("results/cache").absolute() / _folder))
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
