"""Which tokens a step reads: a function of the seed and the step, never of the machine."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from miniseries.shards import VOCAB_SIZE, open_shard


class WindowOrder:
    """The one global order of training windows.

    A window is T + 1 tokens inside one shard: T inputs and their targets; consecutive windows
    share one token, so only a tail of fewer than T tokens of a shard is unused. Each epoch
    permutes the shards and, in each shard, its windows. Global batch k is windows
    k * W to (k + 1) * W - 1 for W = total_batch_tokens / T, on 1 or 512 processes alike.

    Raises:
        ValueError: no shard holds a single window.
    """

    def __init__(self, num_tokens: list[int], sequence_length: int, seed: int) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows_per_shard = [max(0, (n - 1) // sequence_length) for n in num_tokens]
        self.windows_per_epoch = sum(self.windows_per_shard)
        if self.windows_per_epoch == 0:
            raise ValueError(
                f"no training shard holds {sequence_length + 1} tokens, which one window of "
                f"sequence_length {sequence_length} needs; use more text or a shorter one"
            )
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def _permutation(self, size: int, *key: int) -> np.ndarray:
        # RandomState's streams are frozen for ever by NumPy's policy (NEP 19); Generator's are not
        return np.random.RandomState([self.seed, *key]).permutation(size)

    def _shards_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Shards in the order of this epoch, and the number of windows before the end of each."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._permutation(len(self.windows_per_shard), epoch)
            self._epoch = (epoch, order, np.cumsum(np.array(self.windows_per_shard)[order]))
        return self._epoch[1:]

    def locate(self, index: int) -> tuple[int, int]:
        """Shard number and first token of the window at global position `index`."""
        epoch, offset = divmod(index, self.windows_per_epoch)
        order, ends = self._shards_of_epoch(epoch)
        place = int(np.searchsorted(ends, offset, side="right"))
        shard = int(order[place])
        if (epoch, shard) not in self._windows:
            if len(self._windows) >= 2:  # a batch lies in few shards; a permutation takes 0.8 MB
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, shard] = self._permutation(
                self.windows_per_shard[shard], epoch, shard
            )
        before = int(ends[place]) - self.windows_per_shard[shard]
        return shard, int(self._windows[epoch, shard][offset - before]) * self.sequence_length


class Loader:
    """Micro-batches of one process, read one ahead in the background.

    Args:
        paths: training shards in the manifest's order.
        batch_windows: windows in a global batch, over all processes and micro-steps.
        micro_batch: windows of one process in one micro-step.
    """

    def __init__(
        self,
        paths: list[Path],
        *,
        sequence_length: int,
        seed: int,
        batch_windows: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.paths = paths
        self.shards = [open_shard(path) for path in paths]
        self.order = WindowOrder([len(s) for s in self.shards], sequence_length, seed)
        self.batch_windows, self.micro_batch = batch_windows, micro_batch
        self.rank, self.world_size, self.device = rank, world_size, device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._next: tuple[tuple[int, int], Future] | None = None

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens that one epoch trains on."""
        return self.order.windows_per_epoch * self.order.sequence_length

    def _read(self, step: int, micro_step: int) -> torch.Tensor:
        start = step * self.batch_windows
        start += (micro_step * self.world_size + self.rank) * self.micro_batch
        length = self.order.sequence_length
        rows = np.empty((self.micro_batch, length + 1), dtype=np.int64)
        for row in range(self.micro_batch):
            shard, first = self.order.locate(start + row)
            window = self.shards[shard][first : first + length + 1]
            if window.max() >= VOCAB_SIZE:
                position = first + int(window.argmax())
                raise ValueError(
                    f"{self.paths[shard]}: token {position} has id {window.max()}, but GPT-2 has "
                    f"{VOCAB_SIZE}; the shard is damaged or made with another tokenizer"
                )
            rows[row] = window
        tokens = torch.from_numpy(rows)
        return tokens.pin_memory() if self.device.type == "cuda" else tokens

    def micro_batch_at(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (micro_batch, T) int64 on the device.

        Raises:
            ValueError: a token id that GPT-2 does not have; names shard and position.
        """
        key = (step, micro_step)
        if self._next is not None and self._next[0] == key:
            tokens = self._next[1].result()
        else:
            tokens = self._read(*key)
        last = (micro_step + 1) * self.world_size * self.micro_batch >= self.batch_windows
        following = (step + 1, 0) if last else (step, micro_step + 1)
        self._next = (following, self._reader.submit(self._read, *following))
        tokens = tokens.to(self.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]
