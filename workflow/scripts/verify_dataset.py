"""Read every byte of a dataset: headers, sizes, ids, and sha256; names each bad shard."""

import argparse
from pathlib import Path

from miniseries.data.shards import verify_shards
from miniseries.metrics import num_cores, run_main


def verify_dataset(manifest: Path) -> None:
    """Print that all shards are good, or raise with the bad ones' names."""
    print(f"{manifest}: {verify_shards(manifest, num_cores())} shards, all good")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="of the dataset, JSON")
    run_main(verify_dataset, **vars(parser.parse_args()))
