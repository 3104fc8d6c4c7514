"""A drafter that lives on another device than the target: one of several GPUs, or the CPU."""

from __future__ import annotations

from torch import Tensor

from heads.base import Drafter, Roots
from heads.prepack import prepack_beside
from inference.propose import Drafting, TreePolicy
from inference.target import Target
from inference.tree import Tree
from inference.verify import Chance, Sampling


class Elsewhere(Drafting):
    """Verified states go to the drafter, its trees come back; it has copies of the target's embedding and head beside it."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        super().__init__(drafter)
        weight = next(drafter.parameters())
        self.device, self.dtype, self.home = weight.device, weight.dtype, target.device
        drafter.attach(target.ends_on(self.device, self.dtype))
        prepack_beside(drafter.ends.head_VD)  # a copy of ours

    def absorb(self, roots: Roots) -> None:
        states = {tap: x.to(device=self.device, dtype=self.dtype) for tap, x in roots.states.items()}
        read_BT, chosen_BT, positions_BT = (x.to(self.device) for x in (roots.read_BT, roots.chosen_BT, roots.positions_BT))
        super().absorb(Roots(read_BT, chosen_BT, states, positions_BT))

    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        chance = Chance(chance.seeds_B.to(self.device), chance.positions_B.to(self.device))
        tree = super().propose(policy, chance, sampling)

        def back(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(self.home)

        tokens_BN, parents_BN, depths_BN = (x.to(self.home) for x in (tree.tokens_BN, tree.parents_BN, tree.depths_BN))
        return Tree(tokens_BN, parents_BN, depths_BN, tree.depth, back(tree.drawn_BN), back(tree.q_BRV), tree.draws)
