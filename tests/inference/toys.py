"""A toy drafter and target over a tiny vocabulary, and a Chance that walks all outcomes instead of drawing one.

A prefix of tokens has an index as in a heap: the empty one 0, and prefix + (x,) is ``index * V + x + 1``. Drafter and
target are tables by that index, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from heads.base import Draft, Drafter, Roots, TargetShape, Unembedding
from inference.propose import Drafting
from inference.tree import Tree
from inference.verify import Chance

ROOTS = 3


def shape(vocab_size: int) -> TargetShape:
    return TargetShape("toy", 4, 1, 1, 1, 4, 4, vocab_size, 64, 1e-6, {}, "float64")


def heap_size(vocab_size: int, depth: int) -> int:
    return sum(vocab_size**d for d in range(depth + 1))


class ToyDrafter(Drafter):
    """Its hidden state is its logits, its state the index of the prefix. It checks what it sees and is told."""

    def __init__(self, logits_PV: Tensor, vocab_size: int, ids_V: Tensor | None = None) -> None:
        super().__init__(shape(vocab_size))
        self.logits_PV, self.ids_V, self.steps = logits_PV, ids_V, []

    def _remember(self, index_BN: Tensor, memory: Any, sees: Any) -> None:
        rows = index_BN[:, None, :, None].double()
        seen = torch.cat([k for k, _ in memory.write(0, rows, rows)], dim=2)[0, 0, :, 0].tolist()
        mask = sees.dense(index_BN.shape[1], len(seen))
        mask = torch.ones(index_BN.shape[1], len(seen), dtype=torch.bool) if mask is None else mask[0, 0]
        assert mask.shape == (index_BN.shape[1], len(seen))
        for index, row in zip(index_BN[0].tolist(), mask.tolist(), strict=True):
            if index < 0:
                continue
            lineage = []
            while index > 0:
                lineage.insert(0, index)
                index = (index - 1) // self.shape.vocab_size
            assert [s for s, m in zip(seen, row, strict=True) if m] == [-1.0] * ROOTS + lineage, "roots, ancestors, itself"

    def begin(self, roots: Roots, memory: Any, sees: Any, ask: Tensor | None = None) -> Draft:
        self._remember(torch.full_like(roots.read_BT, -1), memory, sees)
        assert ask is not None and ask.tolist() == [roots.read_BT.shape[1] - 1]
        return Draft(self.logits_PV[:1][None], torch.zeros(1, 1, 1, dtype=torch.int64))

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Any, sees: Any) -> Draft:
        assert parent.state_BNH is not None
        index_BN = parent.state_BNH[..., 0] * self.shape.vocab_size + tokens_BN + 1
        self._remember(index_BN, memory, sees)
        assert (positions_BN == ROOTS - 1 + depth - 1).all() and positions_BN.shape == tokens_BN.shape
        self.steps.append((depth, tokens_BN.shape[1]))
        return Draft(self.logits_PV[index_BN], index_BN[..., None])

    def unembedding(self, depth: int) -> Unembedding:
        return Unembedding(torch.eye(self.logits_PV.shape[1], dtype=torch.float64), self.ids_V)


def drafting(drafter: ToyDrafter) -> Drafting:
    """A proposer that has absorbed ROOTS roots, in two pieces."""
    proposer = Drafting(drafter)
    proposer.start(16)
    tokens = torch.zeros(1, ROOTS, dtype=torch.int64)
    roots = Roots(tokens, tokens, {}, torch.arange(ROOTS)[None])
    proposer.absorb(roots[: ROOTS - 1])
    proposer.absorb(roots[ROOTS - 1 :])
    return proposer


def row_index(tree: Tree, vocab_size: int) -> list[int]:
    """The index of each row's prefix."""
    index = [0]
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents_N.tolist(), strict=True):
        index.append(index[parent + 1] * vocab_size + token + 1)
    return index


class Script(Chance):
    """Takes prescribed outcomes, the first possible one where the script ends; keeps the probability of all of it."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.options, self.weight = script, [], 1.0

    def _take(self, outcomes: list[Any], probs: list[float]) -> Any:
        if len(outcomes) == 1:
            return outcomes[0]
        i = len(self.options)
        if i == len(self.script):
            self.script.append(0)
        self.options.append(len(outcomes))
        self.weight *= probs[self.script[i]]
        return outcomes[self.script[i]]

    def flip(self, p: float) -> bool:
        if p <= 0 or p >= 1:
            return p >= 1
        return self._take([True, False], [p, 1 - p])

    def draw(self, probs_V: Tensor) -> int:
        probs = (probs_V / probs_V.sum()).tolist()
        outcomes = [x for x, p in enumerate(probs) if p > 0] or [0]
        return self._take(outcomes, [probs[x] for x in outcomes])

    def draws(self, probs_RV: Tensor, count: int = 1) -> Tensor:
        return torch.tensor([[self.draw(row) for _ in range(count)] for row in probs_RV])


def outcomes(run: Callable[[Chance], Any]) -> Iterator[tuple[float, Any]]:
    """Every outcome of ``run`` with its probability."""
    script: list[int] = []
    while True:
        chance = Script(script)
        result = run(chance)
        yield chance.weight, result
        while script and script[-1] + 1 == chance.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1
