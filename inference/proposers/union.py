"""The union of several proposers' trees, merged by prefix into one (SpecInfer, 2305.09781).

The parts are asked in order, each for an equal share of the nodes that are left. Nodes that one part does not use go to the parts
after it. So the cheap and less reliable parts (a lookup) should come first, and the best one last.

Above temperature 0 only the last part may draw. The others give their likeliest guesses, as at temperature 0. This is exact. Each
drawn child of the last part is drawn from the q that it is verified with, whatever the other parts have guessed, and none is cut
afterwards; this is what its rule assumes. All other children are deterministic, which every rule allows: one is accepted when the
target's own draw falls on it. (Where a deterministic child has the token of a drawn sibling, the two are one node, verified as drawn.)

Shape suffixes: B = 1 sequence, N nodes, R = N + 1 rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.tree import Tree
from headstart.inference.proposers.base import Trie

GREEDY = SamplingParams()


class Union:
    """``parts``: the proposers in the order in which they are asked, the best one last. Raises UserError where there is none."""

    within: ClassVar = {"parts": [{"kind": "suffix"}, {"kind": "drafter"}]}

    def __init__(self, parts: Sequence[Proposer]) -> None:
        if not parts:
            raise UserError("proposer union: parts must name at least one proposer")
        self.parts = list(parts)
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))

    def start(self, context: Context, tokens: int) -> None:
        """All parts begin anew."""
        for part in self.parts:
            part.start(context, tokens)

    def absorb(self, roots: Roots) -> None:
        """All parts absorb the roots."""
        for part in self.parts:
            part.absorb(roots)

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """The merged tree. Under a chain policy: the last part's chain, which guesses of the other parts may continue."""
        if sampling.temperature > 0 and sampling.rule in ("block", "traversal") and policy.kind != "chain":
            raise UserError(f"proposer union: the rule {sampling.rule} cannot verify merged trees: take kind=chain, or rule=auto")
        branch = 1 if policy.kind == "chain" else policy.nodes
        *others, best = self.parts
        guesses = Trie(policy.nodes, branch)
        for i, part in enumerate(others):
            if share := (policy.nodes - len(guesses)) // (len(self.parts) - i):
                tree = part.propose(_at_most(policy, share), rng, GREEDY)
                _add(guesses, tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist())
        tree = best.propose(_at_most(policy, policy.nodes - len(guesses)), rng, sampling)
        union = Trie(policy.nodes, branch)
        for token, parent in zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True):
            union.append(parent, token)
        _add(union, guesses.tokens, guesses.parents)
        merged, more = union.tree(tree.tokens_BN.device), len(union) - len(tree)
        if tree.drawn_BN is not None and tree.q_BRV is not None:
            merged.drawn_BN, merged.q_BRV = F.pad(tree.drawn_BN, (0, more)), F.pad(tree.q_BRV, (0, 0, 0, more))
            # ``by_value`` keeps a tree that is only sometimes a chain from being verified as one: the rule must not depend on the draws.
            # A chain that the other parts may add to is such a tree too. It has one draw per row, like trees by value. The merged tree is
            # never ``planned``, because which other guesses find a place depends on what the last part drew.
            merged.draws, merged.by_value = tree.draws, tree.by_value or (tree.is_chain and policy.kind != "chain")
        return merged


def _at_most(policy: TreePolicy, nodes: int) -> TreePolicy:
    """The policy with at most ``nodes`` nodes; a chain keeps its length."""
    if policy.kind == "chain":
        return policy
    if policy.kind == "fixed":
        # Keep the chain of first guesses, then the others by level; so no path loses its parent. Sorted by level alone, the shallow paths
        # would be kept: such a tree has a smaller accepted length (EXPERIMENTS.md, 2026-11-26), and lookups could not guess deeper than it.
        return TreePolicy("fixed", paths=tuple(sorted(policy.paths, key=any)[:nodes]))
    return replace(policy, nodes=nodes)


def _add(trie: Trie, tokens: list[int], parents: list[int]) -> None:
    nodes: list[int | None] = []
    for token, parent in zip(tokens, parents, strict=True):
        behind = -1 if parent < 0 else nodes[parent]
        nodes.append(None if behind is None else trie.add(behind, token))
