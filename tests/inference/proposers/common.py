"""What the tests of the proposers share: a lookup that knows the answer, draft models that are nearly the target, a watched cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headstart.heads.base import Drafter, Roots
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.ngram import Ngram
from tests.drafters import fresh
from tests.inference.decoding.trees import validate

FULL = ("llama", "qwen3", "mixtral")  # architectures of draft models: full attention


class Knowing(Ngram):
    """A lookup that has read other texts before the prompt."""

    def __init__(self, *texts: Sequence[int], **settings: Any) -> None:
        self.known = texts
        super().__init__(**settings)

    def start(self, context: Context, tokens: int) -> None:
        super().start(context, tokens)
        for text in self.known:
            self.extend([0, *text])


def lm_of(target: Target, noise: float, seed: int = 0) -> Drafter:
    """A language model as drafter: the target's own weights and some noise."""
    config = {**target.config.to_diff_dict(), "model_type": target.config.model_type}
    drafter = fresh("draft_lm", target.shape, config=config)
    drafter.attach(target.ends)
    drafter.lm.load_state_dict(target.model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.lm.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=generator) if p.ndim > 1 else 0
    return drafter.eval()


def roots_of_text(text: Sequence[int], first: int, stop: int) -> Roots:
    """Positions first..stop-1 of a text as roots, without states."""
    tokens_1T = torch.tensor([text])
    return Roots(tokens_1T[:, first:stop], tokens_1T[:, first + 1 : stop + 1], {}, torch.arange(first, stop)[None])


class Watched:
    """Asserts that proposing leaves the target and its cache as they were."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.taps = proposer, proposer.taps
        self.trees: list[Tree] = []

    def start(self, context: Context, tokens: int) -> None:
        self.context = context
        self.proposer.start(context, tokens)

    def _same(self, run: Any) -> Any:
        memory, length = self.context.memory, self.context.length
        held = {layer: pairs[0] for layer, pairs in memory.layers.items()}
        before, used = {layer: (k[:, :, :length].clone(), v[:, :, :length].clone()) for layer, (k, v) in held.items()}, dict(memory.used)
        result = run()
        assert self.context.length == length and self.context.memory is memory and memory.used == used
        for layer, (k, v) in before.items():
            assert memory.layers[layer][0] is held[layer]
            assert torch.equal(held[layer][0][:, :, :length], k) and torch.equal(held[layer][1][:, :, :length], v)
        assert not [m for m in self.context.target.model.modules() if "forward" in m.__dict__]
        return result

    def absorb(self, roots: Roots) -> None:
        self._same(lambda: self.proposer.absorb(roots))

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        tree = self._same(lambda: self.proposer.propose(policy, rng, sampling))
        validate(tree, self.context.target.shape.vocab_size)
        assert len(tree) <= policy.nodes and (not len(tree) or int(tree.depths_BN.max()) <= policy.depth)
        self.trees.append(tree)
        return tree
