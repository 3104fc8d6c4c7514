"""A drafter on another device than the target: another GPU, or the CPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.prepack import prepack_beside
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree


class Elsewhere:
    """Proposes by a drafter on another device: copies verified states to the drafter's device, and its trees back to the target's. The
    drafter gets copies of the target's embedding and output head on its device.

    Not a subclass of ``Drafting``, because callers assume that the drafter of a ``Drafting`` is on the target's device.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.inner, self.taps = Drafting(drafter), drafter.taps
        weight = next(drafter.parameters())
        self.device, self.dtype, self.home = weight.device, weight.dtype, target.device
        drafter.attach(target.ends_on(self.device, self.dtype))
        prepack_beside(drafter.ends.head_VD)  # the drafter's copy, not the target's

    def start(self, context: Context, tokens: int) -> None:
        self.inner.start(context, tokens)

    def absorb(self, roots: Roots) -> None:
        self.inner.absorb(roots.to(self.dtype, self.device))

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        return tree_on(self.inner.propose(policy, rng_on(rng, self.device), sampling), self.home)


def rng_on(rng: CounterRNG, device: torch.device) -> CounterRNG:
    at = rng.positions_B
    return CounterRNG(rng.seeds_B.to(device), at if isinstance(at, int) else at.to(device))


def tree_on(tree: Tree, device: torch.device) -> Tree:
    whole: dict[str, Any] = {each.name: getattr(tree, each.name) for each in fields(tree) if each.init}
    whole |= {name: x.to(device) for name, x in whole.items() if isinstance(x, Tensor)}
    return Tree(**whole)
