"""Which tokens a step reads: a function of the recipe and the step, never of the machine."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from miniseries.data.shards import VOCAB_SIZE, open_shard
from miniseries.training.bits import scramble

LLM_C_SEED = 42  # of process 0; process r has 42 + r (llm.c `dataloader.h`)


class Order(Protocol):
    """A global order of training windows; global batch k is W of them in a row, from k * W on.

    A window is T + 1 tokens inside one shard: T inputs and their targets.
    """

    sequence_length: int
    windows_per_epoch: int

    def locate(self, index: int) -> tuple[int, int]:
        """Shard number and first token of the window at global position `index`."""
        ...


class WindowOrder:
    """Our own order: each epoch permutes the shards and, in each shard, its windows.

    Consecutive windows share one token, so only a tail of fewer than T tokens of a shard is
    unused.

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
        """See `Order`."""
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


class _LlmcProcess:
    """The order in which one process of llm.c reads: (shard, sample) of its n-th micro-batch.

    Its generator goes on through shards and epochs, so an earlier place is reached from the start.
    """

    def __init__(self, samples_per_shard: list[int], rank: int, shuffle: bool) -> None:
        self.samples_per_shard, self.rank, self.shuffle = samples_per_shard, rank, shuffle
        self._restart()

    def _restart(self) -> None:
        # seeded with one number, NumPy's legacy generator is the plain mt19937 that llm.c has
        self._generator = np.random.RandomState(LLM_C_SEED + self.rank)
        self._shards = np.arange(len(self.samples_per_shard))
        self._place, self._first, self._samples = -1, 0, np.arange(0)
        self._open_next()

    def _permute(self, items: np.ndarray) -> None:
        if not self.shuffle or len(items) < 2:
            return
        draws = np.frombuffer(self._generator.bytes(4 * (len(items) - 1)), dtype="<u4")
        for draw, i in zip(draws.tolist(), range(len(items) - 1, 0, -1), strict=True):
            j = draw % (i + 1)
            items[i], items[j] = items[j], items[i]

    def _open_next(self) -> None:
        """The next shard, after the last one a new epoch; permutes as llm.c does at that point."""
        self._first += len(self._samples)
        self._place = (self._place + 1) % len(self._shards)
        if self._place == 0:
            self._permute(self._shards)  # epoch 2 permutes the order of epoch 1
        self._samples = np.arange(self.samples_per_shard[self._shards[self._place]])
        self._permute(self._samples)

    def locate(self, index: int) -> tuple[int, int]:
        """Shard and sample of micro-batch `index`, counted over all epochs."""
        if index < self._first:
            self._restart()
        while index >= self._first + len(self._samples):
            self._open_next()
        return int(self._shards[self._place]), int(self._samples[index - self._first])


class LlmcOrder:
    """The order of an llm.c run with `micro_batch` sequences on each of `processes` processes.

    llm.c reads samples of B * T * processes tokens, of which each process takes its part; each
    shuffles shards and samples by itself. The order is that of the run to be compared with, on any
    machine of ours.

    Args:
        shuffle: False reads shards and samples as they lie, as llm.c's `-a 1` does.

    Raises:
        ValueError: a shard holds no full sample; llm.c refuses it as well.
    """

    def __init__(
        self,
        num_tokens: list[int],
        sequence_length: int,
        micro_batch: int,
        processes: int,
        shuffle: bool = True,
    ) -> None:
        self.sequence_length, self.micro_batch = sequence_length, micro_batch
        self.rows = micro_batch * processes
        samples = [(n - 1) // (self.rows * sequence_length) for n in num_tokens]
        if min(samples) < 1:
            short = samples.index(min(samples))
            raise ValueError(
                f"training shard {short + 1} of {len(samples)} holds {num_tokens[short]} tokens, "
                f"but llm.c's order reads {self.rows * sequence_length + 1} at once; lower "
                "llm_c_micro_batch or llm_c_processes, or use `token_order: shuffled`"
            )
        self.windows_per_epoch = sum(samples) * self.rows
        self._processes = [_LlmcProcess(samples, rank, shuffle) for rank in range(processes)]

    def locate(self, index: int) -> tuple[int, int]:
        """See `Order`."""
        micro_batch, row = divmod(index, self.rows)
        shard, sample = self._processes[row // self.micro_batch].locate(micro_batch)
        return shard, (sample * self.rows + row) * self.sequence_length


def make_order(recipe: dict, num_tokens: list[int]) -> Order:
    """The order that a recipe asks for, over shards of so many tokens."""
    length = recipe["sequence_length"]
    if recipe["token_order"] == "llm.c":
        sizes = (recipe["llm_c_micro_batch"], recipe["llm_c_processes"])
        return LlmcOrder(num_tokens, length, *sizes, shuffle=not recipe["overfit_batch"])
    return WindowOrder(num_tokens, length, recipe["seed"])


class Loader:
    """Micro-batches of one process, read one ahead in the background.

    Args:
        paths: training shards in the manifest's order.
        recipe: of the run; `overfit_batch` makes every step read the first global batch.
        micro_batch: windows of one process in one micro-step.
    """

    def __init__(
        self,
        paths: list[Path],
        recipe: dict,
        *,
        micro_batch: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.paths = paths
        self.shards = [open_shard(path) for path in paths]
        self.order = make_order(recipe, [len(s) for s in self.shards])
        self.batch_windows = recipe["total_batch_tokens"] // recipe["sequence_length"]
        self.overfit = recipe["overfit_batch"]
        self.micro_batch = micro_batch
        self.rank, self.world_size, self.device = rank, world_size, device
        # one thread reads everything: an order remembers where it is
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._next: tuple[tuple[int, int], Future] | None = None

    @property
    def tokens_per_epoch(self) -> int:
        """Different tokens that there are to train on."""
        windows = self.order.windows_per_epoch
        windows = min(windows, self.batch_windows) if self.overfit else windows
        return windows * self.order.sequence_length

    def _first_row(self, micro_step: int) -> int:
        """Place in the global batch of this process's first window."""
        return (micro_step * self.world_size + self.rank) * self.micro_batch

    def _read(self, step: int, micro_step: int) -> torch.Tensor:
        start = self._first_row(micro_step)
        start += 0 if self.overfit else step * self.batch_windows
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
        if self._next is None or self._next[0] != key:
            self._next = (key, self._reader.submit(self._read, *key))
        tokens = self._next[1].result()
        last = (micro_step + 1) * self.world_size * self.micro_batch >= self.batch_windows
        following = (step + 1, 0) if last else (step, micro_step + 1)
        self._next = (following, self._reader.submit(self._read, *following))
        tokens = tokens.to(self.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def hash_of(self, micro_step: int, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Scalar int64; its sum over all micro-steps and processes identifies a global batch.

        Each token and its target count together with their place in the global batch, so the sum
        is the same for every split of one batch and differs when anything else does.
        """
        places = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        places = places + self._first_row(micro_step) * tokens.shape[1]
        return scramble((places << 32) + (tokens << 16) + targets).sum()
