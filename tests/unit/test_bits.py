import torch

from miniseries.training.bits import scramble


def test_scrambled_numbers_are_those_of_splitmix64():
    # outputs 1 to 3 of SplitMix64 seeded with 1234567, whose state grows by the golden gamma:
    # 6457827717110365317, 3203168211198807973, 9817491932198370423 (its reference program)
    states = [(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in (1, 2, 3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [x % 2**64 for x in scramble(signed).tolist()] == expected


def test_neighbours_have_nothing_in_common():
    bits = scramble(torch.arange(20_000))
    for place in range(64):
        share = ((bits >> place) & 1).double().mean().item()
        assert abs(share - 0.5) < 0.02, place
    assert len(bits.unique()) == 20_000
