"""The training engine: batches, optimizer, processes, checkpoints, the loop."""
