"""Drafting and verification never wait for the device: nothing they do depends on the value of a tensor on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.heads.base import Draft
from headstart.heads.memory import Memory
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.growth import grow
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import RULES, greedy, seen_rows
from tests.inference.decoding.test_verify import CASES, pair
from tests.inference.decoding.toys import ROOTS, ToyDrafter, roots, row_index
from tests.inference.decoding.waiting import waits


class Blind(ToyDrafter):
    """A toy that does not check what it sees: checking would wait."""

    def _remember(self, index_BN: torch.Tensor, memory: Any, sees: Any) -> None:
        rows = index_BN[:, None, :, None].double()
        memory.write(0, rows, rows)
        sees.dense(index_BN.shape[1], memory.rows(), "cpu")

    def step(self, depth: int, *args: Any) -> Any:
        tokens_BN, parent = args[:2]
        index_BN = parent.state_BNH[..., 0] * self.shape.vocab_size + tokens_BN + 1
        self._remember(index_BN, *args[3:])
        rows = self.logits_BPV.flatten(0, 1).index_select(0, index_BN.flatten()).view(*index_BN.shape, -1)
        return type(parent)(rows, index_BN[..., None])

    def draft(self, memory: Memory) -> Draft:
        return self.begin(roots(), memory, CausalSees(ROOTS, ROOTS), ask=torch.tensor([[ROOTS - 1]]))


def blind(kind: str) -> tuple[Any, Blind]:
    world = pair(kind, 1, 4, 3)
    return world, Blind(world.drafter.logits_BPV, 4, world.drafter.ids_V)


@pytest.mark.parametrize("kind", ["random", "trimmed"])
@pytest.mark.parametrize("how", [SamplingParams(repetition_penalty=1.2), SamplingParams(0.8, 3, 0.9, 0.01, 1.2)])
@pytest.mark.parametrize(("rule", "policy"), CASES)
def test_a_round_never_waits(rule: str, policy: TreePolicy, how: SamplingParams, kind: str) -> None:
    (world, drafter), memory, rule = blind(kind), Memory(), policy.check(rule)
    warp, rng, position_11 = LogitsWarper.of([how]), CounterRNG(*torch.tensor([[3], [0]])), torch.tensor([[ROOTS - 1]])
    seen_1V, root_1, draft = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([1]), drafter.draft(memory)
    arguments = (drafter, draft, position_11, memory, policy, warp, rule, rng)
    grow(*arguments)  # a plan is made once
    memory.rewind(ROOTS)
    with waits() as found:
        tree = grow(*arguments)
    assert found == [], "drafting"
    logits_BRV, plain = world.target_PV[row_index(tree, 4)][None], Tree(tree.tokens_BN, tree.parents_BN, tree.depths_BN, tree.depth)
    with waits() as found:
        p_BRV = warp.target(logits_BRV, seen_rows(seen_1V, root_1, tree))
        greedy(tree, logits_BRV.argmax(-1))
        RULES[rule].verify(tree, p_BRV, rng, False)
        RULES[rule].verify(plain, p_BRV, rng, False)
    assert found == [], "verification"


def test_waiting_is_seen() -> None:
    x = torch.arange(4)
    ways = [lambda: x[0].item(), lambda: bool(x.any()), lambda: x[x > 1], lambda: x.tolist(), lambda: x.nonzero(), lambda: int(x.max())]
    ways += [lambda: x.cpu(), lambda: x.to("meta"), lambda: 3 in x, lambda: [0, 1, 2][x[1]], lambda: x.masked_select(x > 1)]
    ways += [lambda: torch.tensor([1, 2]), lambda: torch.equal(x, x), lambda: x.numpy(), lambda: x.clone().index_put_((x > 1,), x[0])]
    for way in ways:
        with waits() as found:
            way()
        assert found
    drafter, memory = blind("random")[1], Memory()
    draft, policy = drafter.draft(memory), TreePolicy(depth=3, nodes=4, branch=2)
    with waits() as found:
        grow(
            drafter,
            draft,
            torch.tensor([[ROOTS - 1]]),
            memory,
            policy,
            LogitsWarper.of([SamplingParams()]),
            "token",
            CounterRNG.of(),
            hasty=True,
        )
    assert {"_local_scalar_dense", "item"} & {*found}  # growth that looks does wait
