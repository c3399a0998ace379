"""One thread a process: tests run side by side, and threads that wait for each other crawl."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
