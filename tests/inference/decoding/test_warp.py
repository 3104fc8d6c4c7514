"""The target's distribution is that of transformers, sequence by sequence, whatever they are batched with."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding.sampling import WARM, LogitsWarper, SamplingParams, heat_of
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import seen_rows
from tests.inference.decoding.test_tree import parent_lists
from tests.inference.decoding.toys import side_by_side, transformers_law

R, V = 40, 17
HOWS = [
    SamplingParams(1.0),
    SamplingParams(),
    SamplingParams(0.6, top_k=3),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(0.7, top_k=1),
    SamplingParams(1.0, top_k=99, top_p=0.5),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(1.0, top_p=1e-9),  # in fp32, 1 - top_p is 1
    SamplingParams(1.0, min_p=0.2),
    SamplingParams(0.9, min_p=0.99),
    SamplingParams(0.8, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(2.0, top_k=5, top_p=0.3, repetition_penalty=0.7),
    SamplingParams(0.0, repetition_penalty=1.8),
    SamplingParams(0.0, top_k=2, top_p=0.1, min_p=0.5),  # filters say nothing at temperature 0
]


def scores(seed: int) -> tuple[Tensor, list[list[int]], Tensor]:
    """Logits [R, V], and what each row has seen: lists, and a mask [R, V]."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(R, V, generator=g) * 2
    logits[10:20] = logits[10:20].round()  # ties
    logits[20:25, ::3] = -torch.inf  # tokens that cannot be said
    seen = [torch.randint(V, (1 + r % 9,), generator=g).tolist() for r in range(R)]
    return logits, seen, torch.tensor([[v in row for v in range(V)] for row in seen])


@pytest.mark.parametrize("how", HOWS)
def test_the_targets_distribution_is_transformers(how: SamplingParams) -> None:
    logits, seen, mask = scores(0)
    expected, found = transformers_law(logits, how, seen), LogitsWarper.of([how]).target(logits[None], mask[None])[0]
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    double = LogitsWarper.of([how]).target(logits[None].double(), mask[None])[0]
    torch.testing.assert_close(double, transformers_law(logits.double(), how, seen), rtol=0, atol=1e-14)
    assert LogitsWarper.of([how]).target(logits[None].bfloat16(), mask[None]).dtype == torch.float32
    if how.repetition_penalty == 1 and how.temperature > 0:  # the drafter's knows no penalty
        torch.testing.assert_close(LogitsWarper.of([how]).drafter(logits[None])[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(len(HOWS)), 2)))
def test_two_sequences_side_by_side_are_as_alone_to_the_bit(pair: tuple[int, int]) -> None:
    check_batch([HOWS[i] for i in pair])


def test_all_settings_side_by_side() -> None:
    check_batch(HOWS)


def check_batch(hows: list[SamplingParams]) -> None:
    rows = [scores(seed) for seed in range(len(hows))]
    logits_BRV, seen_BRV = (torch.stack([row[i] for row in rows]) for i in (0, 2))
    both = LogitsWarper.of(hows)
    p_BRV, q_BRV, s_BRV = both.target(logits_BRV, seen_BRV), both.drafter(logits_BRV), both.scores(logits_BRV, seen_BRV)
    for b, how in enumerate(hows):
        alone, own = LogitsWarper.of([how]), slice(b, b + 1)
        assert torch.equal(p_BRV[own], alone.target(logits_BRV[own], seen_BRV[own]))
        assert torch.equal(s_BRV[own], alone.scores(logits_BRV[own], seen_BRV[own]))
        assert torch.equal(q_BRV[own], alone.drafter(logits_BRV[own]))
        assert torch.equal(p_BRV[b] > 0, transformers_law(*rows[b][:1], how, rows[b][1]) > 0)


def test_a_warp_knows_what_it_can_leave_out() -> None:
    warp = LogitsWarper.of([SamplingParams(0.0, top_k=5, top_p=0.5, min_p=0.5), SamplingParams(1.0, top_k=3)])
    assert (warp.sampled, warp.greedy, warp.top_k, warp.top_p, warp.min_p, warp.penalty) == (
        True,
        True,
        4,
        False,
        False,
        False,
    )  # top_k rounded up
    assert warp.heat == 2 and [heat_of(x) for x in (0.0, 0.01, WARM - 0.01, WARM, 2.0)] == [0, 1, 1, 2, 2]


def test_a_token_on_the_bound_of_min_p_is_kept() -> None:
    logits, how = torch.tensor([[0.0, -math.log(2), -math.log(2), -1.0]], dtype=torch.float64), SamplingParams(0.5, min_p=0.25)
    found = LogitsWarper.of([how]).target(logits[None])[0]
    assert torch.equal(found > 0, transformers_law(logits, how, [[0]]) > 0) and (found > 0).tolist() == [[True, True, True, False]]


def test_a_token_on_the_bound_of_top_p_is_dropped() -> None:
    logits, how = torch.zeros(1, 4, dtype=torch.float64), SamplingParams(0.5, top_p=0.5)  # probabilities of exactly a quarter
    found = LogitsWarper.of([how]).target(logits[None])[0]
    assert int((found > 0).sum()) == int((transformers_law(logits, how, [[0]]) > 0).sum()) == 2


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-46, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature: float) -> None:
    """Also one that fp32 rounds to 0, alone and beside a greedy sequence."""
    logits = torch.randn(2, R, V, generator=torch.Generator().manual_seed(0)) * 30
    for dtype in (torch.float32, torch.float64):
        for hows in ([SamplingParams(temperature)] * 2, [SamplingParams(temperature), SamplingParams()]):
            p = LogitsWarper.of(hows).target(logits.to(dtype))
            assert torch.equal(p, torch.nn.functional.one_hot(logits.argmax(-1), V).to(dtype))


@settings(max_examples=100, deadline=None)
@given(st.lists(parent_lists(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_what_a_row_has_seen_equals_a_naive_loop(batch: list[list[int]], random: Any) -> None:
    tokens = [[random.randrange(V) for _ in parents] for parents in batch]
    before = [[random.randrange(V) for _ in range(3)] for _ in batch]
    root_B = torch.tensor([random.randrange(V) for _ in batch])
    tree = side_by_side([Tree.of(t, parents) for t, parents in zip(tokens, batch, strict=True)])
    found = seen_rows(torch.tensor([[v in row for v in range(V)] for row in before]), root_B, tree)
    assert found.shape == (len(batch), len(tree) + 1, V)
    for b, parents in enumerate(batch):
        for row in range(len(parents) + 1):
            seen, node = {*before[b], int(root_B[b])}, row - 1
            while node >= 0:
                seen.add(tokens[b][node])
                node = parents[node]
            assert set(found[b, row].nonzero()[:, 0].tolist()) == seen


@pytest.mark.parametrize("times", [127, 128, 256, 500])
def test_a_token_that_a_path_repeats_many_times_was_seen(times: int) -> None:
    tree = Tree.of([1] * times, range(-1, times - 1))
    found = seen_rows(torch.zeros(1, V, dtype=torch.bool), torch.tensor([0]), tree)
    assert found[0, 1:, :2].all() and found[0, 0].nonzero().tolist() == [[0]] and not found[..., 2:].any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"temperature": float("nan")},
        {"min_tokens": -1},
        {"rule": "nucleus"},
    ],
)
def test_wrong_sampling_is_one_clear_line(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=name) as e:
        replace(SamplingParams(), **wrong)
    assert "\n" not in str(e.value)
