"""Block drafters whose layers have a sliding window, against loops in float64, and against themselves: training, decoding, all at once.

Shapes: [D] a row, [T, D] rows.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.unroll import unroll
from headstart.heads.visibility import BlockSees, CausalSees, ChainSees, LaterSees, MaskSees, Sees
from tests.drafters import fresh, make, random_tokens, roots_of
from tests.heads.test_blocks import EXACT, Loops
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
BLOCK, WINDOW = 4, 6
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", dict()),
    ("dflash", dict(window_layers=[1], window_slides=False)),
    ("dflash", dict(window_layers=[0], window_causal=False)),
    ("dspark", dict(window_slides=False)),
    ("dspark", dict(window_causal=False, window_slides=False, draft_vocab=[1, 5, 9])),
    ("jetspec", dict(window_layers=[1])),
    ("domino", dict(window_layers=[0])),
    ("xpress", dict(window_layers=[1])),
    ("lilicorr", dict(window_layers=[1])),
    ("dflash2", dict(window_causal=False, window_slides=False)),
]
EACH = pytest.mark.parametrize(("name", "changes"), CASES)


def windowed(name: str, changes: dict[str, Any]) -> Any:
    return make(name, TARGET(), layers=2, block=BLOCK, window=WINDOW, **changes)


def slots_of(drafter: Any, state: Tensor) -> Tensor:
    """[.., slots that guess, D]."""
    return state[..., : drafter.max_depth * 32].unflatten(-1, (-1, 32))


@torch.no_grad()
@EACH
@pytest.mark.parametrize("t", [0, 5, 12])
def test_a_windowed_block_is_its_definition(name: str, changes: dict[str, Any], t: int) -> None:
    """Its anchor lies at t + 1, slot k at t + 1 + k."""
    drafter, tokens = windowed(name, changes), random_tokens(16, seed=3)
    roots = roots_of(TARGET(), drafter, torch.tensor([tokens]))
    loops = Loops(drafter, TARGET())
    loops.w = {key: value.double() for key, value in loops.w.items()}
    loops.embed = loops.embed.double()  # type: ignore[assignment]

    def seen(layer: int, k: int) -> tuple[int, int]:
        if layer not in changes.get("window_layers", [0, 1]):
            return 0, k + 1 if name == "jetspec" else BLOCK
        first = [p for p in range(t + 1) if ((t + 1 + k) - p < WINDOW if changes.get("window_slides", True) else (t + 1) - p <= WINDOW)]
        return min(first, default=t + 1), k + 1 if name == "jetspec" or changes.get("window_causal", True) else BLOCK

    states = torch.cat([roots.states[tap][0] for tap in drafter.taps], dim=-1).double()
    expected = loops.dflash(states, tokens[t + 1], t, BLOCK, seen=seen)[drafter.first_slot :]
    found = slots_of(drafter, unroll(drafter, roots, None, 1)[0].state[0, t])
    torch.testing.assert_close(found.double(), expected, **EXACT)


@torch.no_grad()
@EACH
def test_what_is_trained_is_what_is_decoded(name: str, changes: dict[str, Any]) -> None:
    """Two documents in a row; each read alone, in pieces, and both at once behind what each has already."""
    drafter, lengths = windowed(name, changes), (17, 13)
    tokens = [random_tokens(n, seed=n) for n in lengths]
    packed = torch.tensor([tokens[0] + tokens[1]])
    positions = torch.tensor([[*range(17), *range(13)]])
    documents = (torch.arange(30) >= 17).long()[None]
    alone = [roots_of(TARGET(), drafter, torch.tensor([each])) for each in tokens]
    states = {tap: torch.cat([roots.states[tap] for roots in alone], dim=1) for tap in drafter.taps}
    roots = Roots(packed, torch.cat([r.chosen_BT for r in alone], dim=1), states, positions)
    trained = unroll(drafter, roots, documents, 1)[0].state[0]
    for one, start in zip(alone, (0, 17), strict=True):
        memory = Memory()
        drafter.begin(one[:5], memory, CausalSees(5, 5), torch.tensor([[4]]))
        drafter.begin(one[5:8], memory, CausalSees(3, 8), torch.tensor([[2]]))
        found = drafter.begin(one[8:11], memory, MaskSees(torch.ones(3, 11, dtype=torch.bool).tril(8)[None]), torch.tensor([[2, 0]]))
        torch.testing.assert_close(found.state[0], trained[[start + 10, start + 8]], **EXACT)
        found = drafter.begin(one[11:12], memory, CausalSees(1, 12))
        torch.testing.assert_close(found.state[0, 0], trained[start + 11], **EXACT)


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [3, 5, 11, 12, 14, 15, 30])  # the first root is seen by all slots, or just not
@pytest.mark.parametrize("kind", ["chain", "mask", "later", "last"])
def test_who_sees_whom_counted_by_hand(kind: str, window: int, causal: bool, slides: bool) -> None:
    """Where each root is last seen: a row of two documents, trees of several sequences of different lengths, one sequence's end."""
    slots, M = 3, 12
    rules: dict[str, tuple[Sees, list[list[int]], list[list[range]]]] = {  # the rule, the roots asked, and what those see
        "chain": (ChainSees((torch.arange(M) >= 7).long()[None]), [[6, 2, 11]], [[range(7), range(3), range(7, 12)]]),
        "later": (LaterSees([7, 2], 3), [[2, 0], [1, 2]], [[range(10), range(8)], [range(4), range(5)]]),
        "mask": (MaskSees(torch.arange(M) <= torch.tensor([[[9]], [[3]]])), [[0], [0]], [[range(10)], [range(4)]]),
        "last": (MaskSees(), [[0]], [[range(M)]]),
    }
    roots, ask, seen = rules[kind]
    sees = BlockSees(roots, torch.tensor(ask), slots, causal, window, slides)
    rows = len(ask[0]) * slots
    mask = sees.dense(rows, M + rows, "cpu")
    if mask is None:
        assert kind == "last" and not causal and window >= M + (slots if slides else 0)
        return
    for b, each in enumerate(seen):
        for a, own in enumerate(each):
            for k in range(slots):
                reach = [p for p in own if (own[-1] + 1 + k - p < window if slides else own[-1] + 1 - p <= window)]
                block = [M + a * slots + j for j in range(slots) if j <= k or not causal]
                assert mask[b, 0, a * slots + k].nonzero()[:, 0].tolist() == reach + block, (b, a, k)


def test_what_cannot_be_is_refused() -> None:
    for wrong, message in [
        (dict(window_layers=[0]), r"head\.window_layers=\[0\] needs head\.window"),
        (dict(window=3), r"head\.window=3 must be at least head\.block=4"),
        (dict(window=8, window_layers=[]), r"head\.window_layers=\[\] must ascend within 0\.\.1"),
        (dict(window=8, window_layers=[1, 0]), "must ascend"),
        (dict(window=8, window_layers=[2]), "must ascend"),
        (dict(window=8, window_layers=[-1, 1]), "must ascend"),
    ]:
        with pytest.raises(UserError, match=message):
            fresh("dflash", TARGET().shape, layers=2, block=4, **wrong)
    with pytest.raises(UserError, match="has no setting 'window_causal'"):
        fresh("jetspec", TARGET().shape, window=16, window_causal=False)
