"""Random numbers by hashing: they repeat, they differ, and they have the right law. All bounds hold for these fixed seeds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headstart.inference.decoding.counter_rng import SLOTS, VERIFYING, CounterRNG, _mix, _mixed

COUNT = 1 << 16


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations above its mean the chi-square statistic lies."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@functools.cache
def streams() -> dict[str, Tensor]:
    """2^16 numbers each, along every way in which they are used."""
    positions = torch.arange(COUNT)
    return {
        "positions": CounterRNG(torch.zeros_like(positions), positions).uniform(3),
        "seeds": CounterRNG(positions, torch.full_like(positions, 11)).uniform(VERIFYING),
        "slots": torch.cat([CounterRNG.of(5, 7).uniform(slot) for slot in range(0, COUNT, 16)]),
        "row": CounterRNG.of(1, 2).uniform(SLOTS, COUNT)[0],
        "negative seeds": CounterRNG(-positions, positions).uniform(VERIFYING + 1),
    }


@pytest.mark.parametrize("name", streams())
def test_numbers_are_uniform(name: str) -> None:
    u = streams()[name]
    n = len(u)
    assert u.dtype == torch.float64 and bool((u >= 0).all()) and bool((u < 1).all())
    assert len(u.unique()) == n
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5 and abs(u.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    for shift in (0, 8, 40):  # high bits and low ones
        counts = ((u * 2.0**shift) % 1 * 64).long().bincount(minlength=64)
        assert abs(chi_square(counts.double(), torch.full((64,), n / 64))) < 5
    pairs = (u[0::2] * 16).long() * 16 + (u[1::2] * 16).long()  # neighbours
    assert abs(chi_square(pairs.bincount(minlength=256).double(), torch.full((256,), n / 512))) < 5


def test_numbers_repeat_and_belong_to_seed_position_and_slot() -> None:
    found = {
        (seed, position, slot, i): u
        for seed in (0, 1, 2, -1, 2**62)
        for position in (0, 1, 2, 1000)
        for slot in (0, 1, SLOTS, VERIFYING, VERIFYING + SLOTS * 500 + 7)
        for i, u in enumerate(CounterRNG.of(seed, position).uniform(slot, 2, 3).flatten().tolist())
    }
    assert len(set(found.values())) == len(found) == 600
    seeds, positions = zip(*{key[:2] for key in found}, strict=True)
    batch = CounterRNG(torch.tensor(seeds), torch.tensor(positions)).uniform(SLOTS, 2, 3).flatten(1).tolist()
    assert batch == [[found[s, p, SLOTS, i] for i in range(6)] for s, p in zip(seeds, positions, strict=True)]
    # the first of a longer row are those of a shorter one: growth that looks expands fewer rows
    assert torch.equal(CounterRNG.of(1, 1).uniform(5, 4, 3)[:, :2], CounterRNG.of(1, 1).uniform(5, 2, 3))


def test_the_hash_is_the_finalizer_of_splitmix64() -> None:
    """Against the first numbers of that generator from the seed 1234567, as published. Its state grows by the golden ratio times 2^64."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(5)]
    assert [_mixed(state) for state in states] == known
    signed = torch.tensor([state - 2**64 * (state >= 2**63) for state in states])
    assert [number % 2**64 for number in _mix(signed).tolist()] == known


@pytest.mark.parametrize("slots", [range(VERIFYING, VERIFYING + 5), [SLOTS * d for d in range(1, 6)]])
def test_a_number_is_the_same_whether_it_was_prepared_or_not(slots: Sequence[int]) -> None:
    seeds, positions = torch.tensor([3, 7]), torch.tensor([5, 12])
    prepared, fresh = (CounterRNG(seeds, positions) for _ in range(2))
    prepared.prepare(slots)
    for slot in slots:
        assert torch.equal(prepared.uniform(slot), fresh.uniform(slot)) and prepared.uniform(slot).shape == (2,)
        assert torch.equal(prepared.uniform(slot, 1, 1), fresh.uniform(slot, 1, 1))
        assert torch.equal(prepared.uniform(slot, 2, 3), fresh.uniform(slot, 2, 3))  # several numbers of the slot, not the first one again
    assert [*prepared.ready] == [*slots]


def test_a_flip_of_one_sequence_is_that_of_many() -> None:
    alone, many = CounterRNG.of(7, 12), CounterRNG(torch.tensor([3, 7]), torch.tensor([5, 12]))
    assert alone.host is not None and many.host is None
    for slot in range(40):
        p = slot / 40 + 0.01
        assert alone.flip_alone(p, slot) == bool(many.flip(torch.tensor([p, p], dtype=torch.float64), slot)[1])
    elsewhere = CounterRNG(torch.tensor([7]), 12)  # as on a GPU
    assert [elsewhere.flip_alone(0.5, slot) for slot in range(40)] == [alone.flip_alone(0.5, slot) for slot in range(40)]


def test_draws_have_the_law_they_are_given() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.2, 0.0, 0.3, 0.0], [4.0, 1.0, 1.0, 1.0, 0.5, 0.5]])  # rows need not sum to 1
    drawn = CounterRNG.of(3, 9).draws(weights[None], 1, COUNT)
    assert drawn.shape == (1, 2, COUNT) and drawn.dtype == torch.int64
    for row, w in zip(drawn[0], weights, strict=True):
        counts, expected = row.bincount(minlength=6).double(), w.double() / w.sum() * COUNT
        assert not counts[w == 0].any()
        assert abs(chi_square(counts[w > 0], expected[w > 0])) < 5
    positions = torch.arange(COUNT)
    rng = CounterRNG(torch.full_like(positions, 8), positions)
    one_each = rng.draws(weights[1].expand(COUNT, 1, 6), VERIFYING)[:, 0, 0]
    assert abs(chi_square(one_each.bincount(minlength=6).double(), weights[1].double() / 8 * COUNT)) < 5
    for p in (0.0, 0.3, 1.0, 1.5):
        assert abs(rng.flip(torch.full((COUNT,), p), 4).double().mean() - min(p, 1.0)) < 4 * (max(p * (1 - p), 0.0) / COUNT) ** 0.5 + 1e-12


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-52])
def test_a_token_of_probability_0_is_never_drawn(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the least and the greatest number there is."""
    monkeypatch.setattr(CounterRNG, "uniform", lambda self, slot, *shape: torch.full((1, *shape), u, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for size in (3, 50, 150_000):
        for scale in (1e-30, 1.0, 3.0):
            p = torch.rand(1, 8, size, generator=generator) * scale
            p[..., 0], p[..., -1] = 0.0, 0.0
            p = p.masked_fill(torch.rand(p.shape, generator=generator) < 0.3, 0.0)
            p[:, 0] = 0.0
            p[:, 0, 1] = scale
            p = p[:, p[0].sum(-1) > 0]
            drawn = CounterRNG.of().draws(p, 0)
            assert bool((p.gather(2, drawn) > 0).all())
            present = p[0] > 0
            ends = present.int().argmax(-1) if u == 0 else size - 1 - present.flip(-1).int().argmax(-1)
            assert u == 0 or size > 50 or torch.equal(drawn[0, :, 0], ends)
            assert u > 0 or torch.equal(drawn[0, :, 0], ends)
    assert bool(CounterRNG.of().flip(torch.tensor([1.0]), 0)) and not bool(CounterRNG.of().flip(torch.tensor([0.0]), 0))


@pytest.mark.parametrize("token", [0, 1, 2, 77_777, 150_000])
def test_no_token_of_a_large_vocabulary_is_lost_to_rounding(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a likely token, a sum in fp32 would not grow. Here every sum is exact in fp64."""
    least, p = 2.0**-30, torch.full((1, 1, 150_001), 2.0**-30)
    p[..., 0] = 1.0
    u = (1 + (token - 0.5) * least) / (1 + 150_000 * least)  # in the middle of the token's share
    monkeypatch.setattr(CounterRNG, "uniform", lambda self, slot, *shape: torch.full((1, *shape), u, dtype=torch.float64))
    assert CounterRNG.of().draws(p, 0).tolist() == [[[token]]]


def test_a_row_of_zeros_gives_some_token_of_the_vocabulary() -> None:
    assert bool((CounterRNG.of().draws(torch.zeros(1, 3, 5), 0, 4) < 5).all())
