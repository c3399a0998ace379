import itertools
import threading

import numpy as np
import pytest
import torch

from miniseries.data.shards import open_shard, write_shard
from miniseries.training.loader import LlmcOrder, Loader, WindowOrder, _LlmcProcess

T = 8
LLM_C = {"token_order": "llm.c", "llm_c_micro_batch": 1, "llm_c_processes": 2}


def make_loader(paths, rank=0, world_size=1, micro_batch=2, batch_windows=8, **changes):
    recipe = {"sequence_length": T, "total_batch_tokens": batch_windows * T, "seed": 1}
    recipe |= {"token_order": "shuffled", "overfit_batch": False} | changes
    return Loader(
        paths,
        recipe,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
    )


def global_batch(paths, step, world_size, micro_batch, batch_windows=8, **changes):
    """Inputs of one step in global order and its hash, put together from ranks and micro-steps."""
    loaders = [
        make_loader(paths, rank, world_size, micro_batch, batch_windows, **changes)
        for rank in range(world_size)
    ]
    parts, total = [], 0
    for micro_step in range(batch_windows // (world_size * micro_batch)):
        for loader in loaders:
            tokens, targets = loader.micro_batch_at(step, micro_step)
            parts.append(tokens)
            total += loader.hash_of(micro_step, tokens, targets).item()
    return torch.cat(parts), total % 2**64


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


@pytest.mark.parametrize("order", [{}, LLM_C, {"overfit_batch": True}])
@pytest.mark.parametrize(
    ("world_size", "micro_batch"), [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1)]
)
def test_every_split_reads_the_same_global_batch_in_the_same_order(
    shards, world_size, micro_batch, order
):
    for step in (0, 1, 7):
        expected = global_batch(shards, step, 1, 8, **order)
        ours = global_batch(shards, step, world_size, micro_batch, **order)
        torch.testing.assert_close(ours[0], expected[0])
        assert ours[1] == expected[1]


def test_the_hash_of_a_batch_differs_when_its_tokens_or_their_places_do(shards):
    hashes = {global_batch(shards, step, 1, 8)[1] for step in range(40)}
    assert len(hashes) == 40
    loader = make_loader(shards, micro_batch=8)
    tokens, targets = loader.micro_batch_at(0, 0)
    whole = loader.hash_of(0, tokens, targets)
    assert loader.hash_of(0, tokens.flip(0), targets.flip(0)) != whole
    changed = targets.clone()
    changed[3, 5] += 1
    assert loader.hash_of(0, tokens, changed) != whole


def test_overfitting_reads_the_first_batch_at_every_step_and_counts_it_as_all_there_is(shards):
    first = global_batch(shards, 0, 1, 2)
    for step in (0, 1, 50):
        ours = global_batch(shards, step, 2, 2, overfit_batch=True)
        assert ours[1] == first[1]
    assert make_loader(shards, overfit_batch=True).tokens_per_epoch == 8 * T


# ---- llm.c's order ------------------------------------------------------------------------


@pytest.fixture
def golden_shards(tmp_path):
    """The three shards on which llm.c's own loader was run: 82 tokens, 1000 (s + 1) + i."""
    paths = []
    for number in range(3):
        path = tmp_path / f"golden_{number}.bin"
        write_shard(path, 1000 * (number + 1) + np.arange(82))
        paths.append(path)
    return paths


# first tokens of the batches of B 2 and T 4 that llm.c's C code gave to each of two processes
GOLDEN = {
    0: "3048 3064 3000 3032 3016 2048 2032 2016 2064 2000 1016 1000 1064 1032 1048 "
    "2016 2032 2064 2048 2000",
    1: "3040 3072 3056 3024 3008 1072 1040 1024 1056 1008 2072 2056 2008 2040 2024 "
    "2040 2072 2008 2056 2024",
}


def llm_c_batches(paths, rank, count, shuffle=True):
    """Inputs of the first micro-batches of one process of llm.c, out of our global order."""
    order = LlmcOrder([82, 82, 82], 4, micro_batch=2, processes=2, shuffle=shuffle)
    for number in range(count):
        places = [order.locate(4 * number + 2 * rank + row) for row in range(2)]
        yield np.concatenate([open_shard(paths[s])[first : first + 5] for s, first in places])


@pytest.mark.parametrize("rank", [0, 1])
def test_llm_c_s_order_gives_the_batches_of_llm_c_s_own_code(golden_shards, rank):
    batches = list(llm_c_batches(golden_shards, rank, 20))
    assert " ".join(str(batch[0]) for batch in batches) == GOLDEN[rank]
    for batch in batches:  # B * T + 1 tokens in a row, divided into windows that share one
        assert batch.tolist() == [*range(batch[0], batch[0] + 5), *range(batch[4], batch[4] + 5)]


def test_llm_c_s_order_without_a_shuffle_reads_as_the_tokens_lie(golden_shards):
    batches = llm_c_batches(golden_shards, 1, 10, shuffle=False)
    golden = [1008, 1024, 1040, 1056, 1072, 2008, 2024, 2040, 2056, 2072]
    assert [batch[0] for batch in batches] == golden


@pytest.mark.parametrize(
    ("seed", "golden"), [(42, [1, 3, 9, 7, 6, 0, 8, 4, 5, 2]), (43, [2, 6, 9, 4, 0, 1, 5, 7, 3, 8])]
)
def test_permutations_are_llm_c_s(seed, golden):
    draws = np.frombuffer(np.random.RandomState(42).bytes(20), dtype="<u4")
    assert draws.tolist() == [1608637542, 3421126067, 4083286876, 787846414, 3143890026]
    # one shard: its list takes no draw, so the samples are the generator's first permutation
    process = _LlmcProcess([10], rank=seed - 42, shuffle=True)
    assert [process.locate(i)[1] for i in range(10)] == golden


def test_llm_c_s_order_can_start_anywhere_and_go_back(golden_shards):
    order = LlmcOrder([82, 98, 82], 4, micro_batch=2, processes=2)
    places = [order.locate(i) for i in range(200)]
    again = LlmcOrder([82, 98, 82], 4, micro_batch=2, processes=2)
    for index in (150, 7, 199, 64, 63, 0):
        assert again.locate(index) == places[index]
    assert order.windows_per_epoch == (5 + 6 + 5) * 4


def test_llm_c_s_order_refuses_a_shard_without_a_full_sample():
    with pytest.raises(ValueError, match=r"shard 2 of 2 holds 16 tokens, .* reads 17 at"):
        LlmcOrder([82, 16], 4, micro_batch=2, processes=2)


# ---- edges of shards ----------------------------------------------------------------------


def test_targets_are_the_tokens_that_follow(shards):
    tokens, targets = make_loader(shards).micro_batch_at(3, 1)
    torch.testing.assert_close(targets, tokens + 1)


def test_starting_at_a_later_step_reads_what_an_unbroken_run_reads(shards):
    unbroken = make_loader(shards)
    batches = [unbroken.micro_batch_at(step, m)[0] for step in range(4) for m in range(4)]
    resumed = make_loader(shards)
    torch.testing.assert_close(resumed.micro_batch_at(3, 2)[0], batches[14])


def test_the_next_micro_batch_is_read_in_the_background_and_each_one_once(shards):
    loader = make_loader(shards)
    read, asked = loader._read, []

    def noting(*key):
        asked.append((threading.current_thread().name.partition("_")[0], key))
        return read(*key)

    loader._read = noting
    keys = [(step, micro_step) for step in range(2) for micro_step in range(4)]
    for key in keys:
        loader.micro_batch_at(*key)
    loader._reader.shutdown()
    assert asked == [("loader", key) for key in [*keys, (2, 0)]]


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


def test_three_ranks_change_shard_together_and_use_no_token_twice(tmp_path):
    """Shards with room for the next window of rank 0 but not for that of rank 1."""
    paths, first = [], 0
    for number in range(2):
        size = 2 * (2 * T * 3) + 2 * T + 1
        path = tmp_path / f"odd_{number}.bin"
        write_shard(path, np.arange(first, first + size))
        paths.append(path)
        first += size
    loaders = [make_loader(paths, rank, 3, 2, batch_windows=6) for rank in range(3)]
    epoch = loaders[0].order.windows_per_epoch
    assert epoch == 2 * 14  # nothing of either shard is dropped: (size - 1) / T windows each
    rows = [row for step in range(5) for x in loaders for row in x.micro_batch_at(step, 0)[0]]
    firsts = [int(row[0]) for row in rows]
    assert len(set(firsts[:epoch])) == epoch and set(firsts[epoch:]) <= set(firsts[:epoch])
    shards = [first >= size for first in firsts[:epoch]]
    assert sum(a != b for a, b in itertools.pairwise(shards)) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_shard_of_one_batch_and_a_half_wraps_and_epochs_are_counted(tmp_path, world_size):
    path = tmp_path / "small.bin"
    write_shard(path, np.arange(12 * T + 1))
    loaders = [make_loader([path], rank, world_size, 2) for rank in range(world_size)]
    assert loaders[0].tokens_per_epoch == 12 * T
    seen = torch.cat([
        loader.micro_batch_at(step, m)[0][:, 0]
        for step in range(60) for m in range(4 // world_size) for loader in loaders
    ])  # fmt: skip
    assert seen.bincount()[::T].tolist() == [40] * 12  # 60 batches of 8 windows: 40 epochs of 12


def test_reading_at_random_steps_of_both_orders_is_reading_in_turn(shards):
    for order in ({}, LLM_C):
        in_turn = [global_batch(shards, step, 1, 8, **order)[1] for step in range(9)]
        loader = make_loader(shards, micro_batch=8, **order)
        for step in (8, 0, 5, 5, 2):
            tokens, targets = loader.micro_batch_at(step, 0)
            assert loader.hash_of(0, tokens, targets).item() % 2**64 == in_turn[step]
