import numpy as np
import pytest
import torch

from miniseries.loader import Loader, WindowOrder
from miniseries.shards import write_shard

T = 8


def make_loader(paths, rank=0, world_size=1, micro_batch=2, batch_windows=8, seed=1):
    return Loader(
        paths,
        sequence_length=T,
        seed=seed,
        batch_windows=batch_windows,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
    )


def global_batch(paths, step, world_size, micro_batch, batch_windows=8):
    """The inputs of one step in global order, put together from all ranks and micro-steps."""
    loaders = [
        make_loader(paths, rank, world_size, micro_batch, batch_windows)
        for rank in range(world_size)
    ]
    micro_steps = batch_windows // (world_size * micro_batch)
    parts = [loader.micro_batch_at(step, m)[0] for m in range(micro_steps) for loader in loaders]
    return torch.cat(parts)


@pytest.fixture
def shards(tmp_path):
    """Three shards whose tokens are all different: 41, 25 and 33 tokens."""
    paths, first = [], 0
    for number, size in enumerate((41, 25, 33)):
        path = tmp_path / f"made_train_{number + 1:06d}.bin"
        write_shard(path, np.arange(first, first + size))
        paths.append(path)
        first += size
    return paths


def test_each_window_is_read_once_an_epoch_and_no_tail_of_t_tokens_is_lost(shards):
    order = WindowOrder([41, 25, 33], T, seed=1)
    assert order.windows_per_epoch == 5 + 3 + 4
    seen = [order.locate(i) for i in range(order.windows_per_epoch)]
    assert sorted(seen) == sorted(
        [(0, 8 * i) for i in range(5)]
        + [(1, 8 * i) for i in range(3)]
        + [(2, 8 * i) for i in range(4)]
    )


def test_epochs_have_different_orders_and_the_seed_alone_decides_them():
    first = [WindowOrder([41, 25, 33], T, seed=1).locate(i) for i in range(24)]
    again = [WindowOrder([41, 25, 33], T, seed=1).locate(i) for i in range(24)]
    other = [WindowOrder([41, 25, 33], T, seed=2).locate(i) for i in range(24)]
    assert first == again
    assert first != other
    assert first[:12] != first[12:]
    assert sorted(first[:12]) == sorted(first[12:])


def test_the_order_is_the_same_on_every_machine_for_ever():
    order = WindowOrder([41, 25, 33], T, seed=42)
    # computed once with NumPy 2.4.6; the legacy generator's streams never change (NEP 19)
    golden = [(0, 0), (0, 24), (0, 8), (0, 32), (0, 16), (1, 8)]
    assert [order.locate(i) for i in range(6)] == golden


@pytest.mark.parametrize(
    ("world_size", "micro_batch"), [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1)]
)
def test_every_split_reads_the_same_global_batch_in_the_same_order(shards, world_size, micro_batch):
    for step in (0, 1, 7):
        expected = global_batch(shards, step, 1, 8)
        torch.testing.assert_close(global_batch(shards, step, world_size, micro_batch), expected)


def test_targets_are_the_tokens_that_follow(shards):
    tokens, targets = make_loader(shards).micro_batch_at(3, 1)
    torch.testing.assert_close(targets, tokens + 1)


def test_starting_at_a_later_step_reads_what_an_unbroken_run_reads(shards):
    unbroken = make_loader(shards)
    batches = [unbroken.micro_batch_at(step, m)[0] for step in range(4) for m in range(4)]
    resumed = make_loader(shards)
    torch.testing.assert_close(resumed.micro_batch_at(3, 2)[0], batches[14])


def test_a_shard_of_less_than_one_window_is_passed_over_and_small_data_wraps(tmp_path):
    small, useful = tmp_path / "small.bin", tmp_path / "useful.bin"
    write_shard(small, np.arange(T))
    write_shard(useful, np.arange(100, 100 + T + 1))
    loader = make_loader([small, useful])
    assert loader.order.windows_per_epoch == 1
    tokens, _ = loader.micro_batch_at(50, 3)
    torch.testing.assert_close(tokens, torch.arange(100, 100 + T).repeat(2, 1))


@pytest.mark.parametrize("size", [8 * 3, 8 * 3 + 1, 8 * 3 + 2])
def test_shards_of_exactly_a_batch_one_more_or_one_less_do_not_crash(tmp_path, size):
    path = tmp_path / "exact.bin"
    write_shard(path, np.arange(size))
    loader = make_loader([path])
    assert loader.order.windows_per_epoch == (size - 1) // 8
    for step in range(5):
        assert loader.micro_batch_at(step, 0)[0].shape == (2, T)


def test_no_window_at_all_is_refused_with_the_number_needed(tmp_path):
    path = tmp_path / "short.bin"
    write_shard(path, np.arange(T))
    with pytest.raises(ValueError, match="no training shard holds 9 tokens"):
        make_loader([path])


def test_an_id_that_gpt2_does_not_have_is_named_with_file_and_position(tmp_path):
    path = tmp_path / "bad.bin"
    tokens = np.arange(T + 1)
    tokens[5] = 50300
    write_shard(path, tokens)
    with pytest.raises(ValueError, match=r"bad\.bin: token 5 has id 50300"):
        make_loader([path]).micro_batch_at(0, 0)
