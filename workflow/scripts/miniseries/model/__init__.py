"""GPT-2, and the formulas that it is computed with on a CPU and on a GPU."""
