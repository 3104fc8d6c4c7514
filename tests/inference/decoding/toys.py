"""A toy drafter and target over a tiny vocabulary, and a ``CounterRNG`` that goes through all outcomes instead of drawing one.

Prefixes of tokens are numbered as in a heap: the empty prefix has index 0, and prefix + (x,) has ``index * V + x + 1``. Drafter and
target are tables by that index, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.heads.base import Draft, Drafter, Roots, TargetShape
from headstart.heads.memory import Memory
from headstart.heads.unembedding import Unembedding
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.growth import grow
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.tree import NO_NODE, Tree
from headstart.inference.decoding.verify import rule_of

ROOTS = 3


def shape(vocab_size: int) -> TargetShape:
    return TargetShape("toy", 4, 1, 1, 1, 4, 4, vocab_size, 64, 1e-6, {}, "float64")


def heap_size(vocab_size: int, depth: int) -> int:
    return sum(vocab_size**d for d in range(depth + 1))


class ToyDrafter(Drafter):
    """Its hidden vector is its logits, its state is the index of the prefix. It checks which rows it sees and what it is given. It has
    one table of logits, or one for each sequence of a batch.
    """

    def __init__(self, logits: Tensor, vocab_size: int, ids_V: Tensor | None = None) -> None:
        super().__init__(shape(vocab_size))
        self.logits_BPV, self.ids_V, self.steps = logits if logits.dim() == 3 else logits[None], ids_V, []

    def _remember(self, index_BN: Tensor, memory: Any, sees: Any) -> None:
        rows = index_BN[:, None, :, None].double()
        seen_BM = torch.cat([k for k, _ in memory.write(0, rows, rows)], dim=2)[:, 0, :, 0]
        wanted = (*index_BN.shape, seen_BM.shape[1])
        mask = sees.dense(*wanted[1:], "cpu")
        assert mask is None or mask.shape in ((wanted[0], 1, *wanted[1:]), (1, 1, *wanted[1:]))
        mask_BNM = torch.ones(wanted, dtype=torch.bool) if mask is None else mask[:, 0].expand(wanted)
        for seen, *sequence in zip(seen_BM.tolist(), index_BN.tolist(), mask_BNM.tolist(), strict=True):
            for index, row in zip(*sequence, strict=True):
                if index < 0:
                    continue
                lineage = []
                while index > 0:
                    lineage.insert(0, index)
                    index = (index - 1) // self.shape.vocab_size
                assert [s for s, m in zip(seen, row, strict=True) if m] == [-1.0] * ROOTS + lineage, "roots, ancestors, itself"

    def begin(self, roots: Roots, memory: Any, sees: Any, ask: Tensor | None = None) -> Draft:
        self._remember(torch.full_like(roots.read_BT, -1), memory, sees)
        B, T = roots.read_BT.shape
        assert ask is not None and ask.tolist() == [[T - 1]] * B
        return Draft(self.logits_BPV[:, :1], torch.zeros(B, 1, 1, dtype=torch.int64))

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Any, sees: Any) -> Draft:
        assert parent.state_BNH is not None
        index_BN = parent.state_BNH[..., 0] * self.shape.vocab_size + tokens_BN + 1
        self._remember(index_BN, memory, sees)
        assert positions_BN.tolist() == [[ROOTS - 1 + depth - 1] * tokens_BN.shape[1]] * len(tokens_BN)
        self.steps.append((depth, tokens_BN.shape[1]))
        return Draft(self.logits_BPV[torch.arange(len(index_BN))[:, None], index_BN], index_BN[..., None])

    def unembedding(self, depth: int) -> Unembedding:
        return Unembedding(torch.eye(self.logits_BPV.shape[-1], dtype=torch.float64), self.ids_V)


def roots(batch: int = 1) -> Roots:
    tokens = torch.zeros(batch, ROOTS, dtype=torch.int64)
    return Roots(tokens, tokens, {}, torch.arange(ROOTS).expand(batch, -1))


def drafting(drafter: ToyDrafter) -> Drafting:
    """A proposer that has absorbed ROOTS roots, in two pieces."""
    proposer = Drafting(drafter)
    proposer.start(None, 16)
    proposer.absorb(roots()[: ROOTS - 1])
    proposer.absorb(roots()[ROOTS - 1 :])
    return proposer


def grower(drafter: ToyDrafter) -> Callable[[TreePolicy, Sequence[SamplingParams], CounterRNG, bool], Tree]:
    """``grow`` after ROOTS roots, for a batch with one sampling per sequence. It can be called any number of times."""
    B, memory = len(drafter.logits_BPV), Memory()
    draft = drafter.begin(roots(B), memory, CausalSees(ROOTS, ROOTS), ask=torch.full((B, 1), ROOTS - 1))

    def run(policy: TreePolicy, samplings: Sequence[SamplingParams], rng: CounterRNG, hasty: bool) -> Tree:
        warp, position_B1 = LogitsWarper.of(samplings), torch.full((B, 1), ROOTS - 1)
        tree = grow(drafter, draft, position_B1, memory, policy, warp, rule_of(samplings[0].rule, policy), rng, hasty)
        memory.rewind(ROOTS)
        return tree

    return run


def side_by_side(trees: Sequence[Tree]) -> Tree:
    """Trees of one sequence each as one batch. Smaller ones end in places without a node."""
    N, vocab = max(map(len, trees)), max([0, *(t.q_BRV.shape[-1] for t in trees if t.q_BRV is not None)])

    def stack(rows: list[Tensor], places: int, nothing: int) -> Tensor:
        out = torch.full((len(rows), places, *rows[0].shape[2:]), nothing, dtype=rows[0].dtype)
        for b, row in enumerate(rows):
            out[b, : row.shape[1]] = row[0]
        return out

    tokens, parents, depths = ([getattr(t, name) for t in trees] for name in ("tokens_BN", "parents_BN", "depths_BN"))
    fields: list[Any] = [stack(tokens, N, 0), stack(parents, N, NO_NODE), stack(depths, N, 0), max(t.depth for t in trees)]
    if vocab:
        drawn = [torch.zeros_like(t.tokens_BN, dtype=torch.bool) if t.drawn_BN is None else t.drawn_BN for t in trees]
        q = [torch.zeros(1, len(t) + 1, vocab, dtype=torch.float64) if t.q_BRV is None else t.q_BRV for t in trees]
        fields += [stack(drawn, N, 0), stack(q, N + 1, 0), max(t.draws for t in trees)]
    return Tree(*fields)


def prefixes(tree: Tree, b: int = 0) -> list[tuple[int, ...]]:
    """The path of each node of sequence b, in tokens; places without a node must stand last and are left out."""
    out: list[tuple[int, ...]] = []
    parents = tree.parents_BN[b].tolist()
    nodes = len(parents) - parents.count(NO_NODE)
    assert NO_NODE not in parents[:nodes]
    for token, parent in zip(tree.tokens_BN[b, :nodes].tolist(), parents[:nodes], strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


def row_index(tree: Tree, vocab_size: int) -> list[int]:
    """The index of each row's prefix (of a place without a node: 0)."""
    index = [0]
    for token, parent in zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True):
        index.append(0 if parent == NO_NODE else index[parent + 1] * vocab_size + token + 1)
    return index


def transformers_law(logits_XV: Tensor, sampling: SamplingParams, seen: Sequence[Sequence[int]]) -> Tensor:
    """The distribution of each row after the tokens that it has ``seen``, by transformers' processors in generate's order."""
    longest = max(map(len, seen), default=0)
    ids_XT = torch.tensor([[*tokens, *tokens[:1] * (longest - len(tokens))] for tokens in seen])  # repeated tokens count once
    steps: list[Any] = []
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        scores = LogitsProcessorList(steps)(ids_XT, logits_XV)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(steps)(ids_XT, logits_XV).softmax(-1)


class Script(CounterRNG):
    """Takes the outcomes that ``script`` prescribes, and the first possible one after its end. ``weight``: the probability of all of them.
    For one sequence. A certain result is not an outcome. No slot may be used twice.
    """

    def __init__(self, script: list[int]) -> None:
        self.script, self.options, self.weight, self.slots = script, [], 1.0, set()
        self.key_B = torch.zeros(1, dtype=torch.int64)

    def prepare(self, slots: Sequence[int]) -> None:
        pass

    def _take(self, outcomes: list[Any], probs: list[float]) -> Any:
        if len(outcomes) == 1:
            return outcomes[0]
        i = len(self.options)
        if i == len(self.script):
            self.script.append(0)
        self.options.append(len(outcomes))
        self.weight *= probs[self.script[i]]
        return outcomes[self.script[i]]

    def _use(self, slot: int) -> None:
        assert slot not in self.slots, "two uses of one random number"
        self.slots.add(slot)

    def flip(self, p_B: Tensor, slot: int) -> Tensor:
        self._use(slot)
        (p,) = p_B.tolist()
        return torch.tensor([self._take([True, False], [p, 1 - p]) if 0 < p < 1 else p >= 1])

    def draws(self, probs_BXV: Tensor, slot: int, count: int = 1) -> Tensor:
        self._use(slot)
        assert len(probs_BXV) == 1 and bool((probs_BXV >= 0).all())
        return torch.tensor([[[self._draw(row) for _ in range(count)] for row in probs_BXV[0].tolist()]])

    def _draw(self, probs: list[float]) -> int:
        outcomes = [x for x, p in enumerate(probs) if p > 0] or [0]  # a row of zeros: any token, it has no meaning
        return self._take(outcomes, [probs[x] / sum(probs) for x in outcomes] if sum(probs) else [1.0])


def outcomes(run: Callable[[CounterRNG], Any]) -> Iterator[tuple[float, Any]]:
    """Every outcome of ``run`` with its probability."""
    script: list[int] = []
    while True:
        rng = Script(script)
        result = run(rng)
        yield rng.weight, result
        while script and script[-1] + 1 == rng.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1
