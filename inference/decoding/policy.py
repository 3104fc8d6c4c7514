"""The shapes that trees of guesses may have: a chain, a tree fixed beforehand, one that follows the drafter's own probabilities."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.counter_rng import SLOTS
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import RULES, rule_of

KINDS = ("auto", "chain", "fixed", "dynamic", "best_first")
MOST_READS = 512  # nodes a drafter reads in one round: spare rows of its memory


@dataclass(frozen=True)
class TreePolicy:
    """The shape of a tree: ``chain`` (depth), ``fixed`` (paths), ``dynamic`` (depth, nodes, branch, expand, least), or
    ``best_first`` (depth, nodes, branch, least): every node that can still be among the best is expanded, best first. ``auto``: chosen
    round by round (inference/decoding/auto.py) among chains and the dynamic tree of these settings.

    ``paths`` are child ranks from the root row (2401.10774): (0,) is the best first guess, (0, 1) the second best after it.
    ``nodes`` is the most these two keep; for the other kinds nodes, branch and depth follow from the shape.
    ``expand``: nodes expanded at each level of a dynamic tree; as many as ``branch`` if None. ``least``: a node whose path is less
    probable than this is not expanded: where the drafter is in doubt, the tree stays shallow and the drafting cheap.
    """

    kind: str = "dynamic"
    depth: int = 5
    nodes: int = 16
    branch: int = 4
    expand: int | None = None
    least: float = 0.0
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        def fix(**values: object) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        given: Any = self.paths  # of settings, maybe
        if not all(isinstance(p, list | tuple) and all(isinstance(rank, int) for rank in p) for p in given):
            raise UserError(f"tree policy: paths must be lists of child ranks, like [[0], [1], [0, 0]], found {self.paths!r}")
        fix(paths=tuple(sorted((tuple(p) for p in self.paths), key=by_level)))
        if self.expand is None:
            fix(expand=self.branch)
        if not 0 <= self.least < 1:
            raise UserError(f"tree policy: least must be a probability below 1, found {self.least!r}")
        for name in ("depth", "nodes", "branch", "expand"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UserError(f"tree policy: {name} must be a whole number of at least 1, found {getattr(self, name)!r}")
        if self.branch >= SLOTS:
            raise UserError(f"tree policy: branch must be below {SLOTS}, found {self.branch}")
        if self.kind not in KINDS:
            raise UserError(f"tree policy: kind must be {', '.join(KINDS)}, found {self.kind!r}")
        if bool(self.paths) != (self.kind == "fixed"):
            raise UserError("tree policy: paths are needed for kind fixed, and for no other")
        if self.kind == "best_first":
            fix(expand=self.nodes)
        if self.kind == "chain":
            fix(nodes=self.depth, branch=1, expand=1)
        if self.kind == "fixed":
            known = {(), *self.paths}
            for path in self.paths:
                if not path or min(path) < 0 or path[:-1] not in known or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known):
                    raise UserError(f"tree policy: path {list(path)} must follow its parent and its elder sibling in paths")
            if len(known) != len(self.paths) + 1:
                raise UserError("tree policy: a path stands twice in paths")
            branch = 1 + max(p[-1] for p in self.paths)
            fix(depth=len(self.paths[-1]), nodes=len(self.paths), branch=branch, expand=branch)
        if self.reads > MOST_READS:
            raise UserError(f"tree policy: the drafter would read {self.reads} nodes a round, {MOST_READS} at most: lower depth or expand")

    def __str__(self) -> str:
        if self.kind == "chain":
            return f"chain of {self.depth}"
        return f"{'a chain or tree' if self.kind == 'auto' else self.kind}, {self.nodes} nodes, depth {self.depth}"

    def check(self, rule: str) -> str:
        """The rule by which trees of this policy are verified above temperature 0. Raises UserError if they cannot be by ``rule``."""
        rule = rule_of(rule, self.kind == "chain")
        if RULES[rule].chain_only and self.kind not in ("chain", "auto"):
            raise UserError(f"the rule {rule} verifies chains: use a chain, or the rule top_plus_one")
        if RULES[rule].chain_only and self.kind == "auto" and self.nodes > 1:
            raise UserError(f"the rule {rule} verifies chains: with kind auto set nodes=1 (no trees), or take the rule auto")
        if RULES[rule].draw != "top_plus_one" and not self.planned:
            raise UserError(f"the rule {rule} needs a tree whose shape is fixed beforehand: use kind fixed, or the rule top_plus_one")
        return rule

    def own_shape(self, rule: str) -> TreePolicy:
        """Of an auto policy the tree of these settings (a chain, where ``rule`` or the nodes allow no tree), whatever it costs; of any
        other policy itself.
        """
        if self.kind != "auto":
            return self
        chain = self.nodes < 2 or RULES[rule_of(rule, chain=False)].chain_only
        return TreePolicy("chain", depth=self.depth) if chain else replace(self, kind="dynamic")

    def at_most(self, depth: int) -> TreePolicy:
        """The same, no deeper than ``depth`` >= 1."""
        if depth >= self.depth:
            return self
        if self.kind == "fixed":
            return TreePolicy("fixed", paths=tuple(p for p in self.paths if len(p) <= depth))
        return replace(self, depth=depth)

    @property
    def planned(self) -> bool:
        """Chains and fixed trees: what is expanded and kept is known beforehand."""
        return self.kind in ("chain", "fixed")

    @property
    def reads(self) -> int:
        """Nodes the drafter reads in one round at most: rows of its memory beside the roots."""
        if self.kind == "fixed":
            return len({p[:-1] for p in self.paths} - {()})
        return (self.expand or self.branch) * (self.depth - 1)


def by_level(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The order of paths: shorter ones first, so that every node comes behind its parent."""
    return len(path), path


AUTO = TreePolicy("auto", depth=8, nodes=15, branch=4, expand=2, least=0.1)  # where nobody asks for another: conf/decode/auto.yaml


def fit_depth(policy: TreePolicy, drafter: Drafter) -> TreePolicy:
    """The policy, no deeper than the drafter can guess."""
    return policy if drafter.max_depth is None else policy.at_most(drafter.max_depth)


class Plan(NamedTuple):
    """What a chain or a fixed tree expands and keeps."""

    expand: list[Tensor]  # per level, the children that are expanded next: indices into [E, K]
    widths: list[Tensor]  # per level, the children each expanded row has, [E, 1]
    kept_N: Tensor  # indices into the pool
    origin_N: Tensor  # the expanded row each node comes from
    parents_N: Tensor
    depths_N: Tensor
    rows_1RR: Tensor  # who sees whom


@functools.cache  # captured graphs point at what it holds
def plan_of(policy: TreePolicy, device: torch.device) -> Plan:
    """The policy's fixed tensors on a device, made once."""
    with torch.inference_mode(False):
        return _made(policy, device)


def _made(policy: TreePolicy, device: torch.device) -> Plan:
    paths, K = policy.paths or tuple((0,) * d for d in range(1, policy.depth + 1)), policy.branch
    rows = sorted({p[:-1] for p in paths}, key=by_level)  # the rows that are expanded, the root row first
    index = {row: i for i, row in enumerate(rows)}
    node = {path: i for i, path in enumerate(paths)}
    levels = [[row for row in rows if len(row) == d] for d in range(policy.depth)]
    start = [index[level[0]] for level in levels]

    def tensor(x: list[int]) -> Tensor:
        return torch.tensor(x, device=device)

    parents = [node.get(p[:-1], -1) for p in paths]
    return Plan(
        [tensor([(index[row[:-1]] - start[d]) * K + row[-1] for row in level]) for d, level in enumerate(levels[1:])],
        [tensor([sum(p[:-1] == row for p in paths) for row in level])[:, None] for level in levels],
        tensor([index[p[:-1]] * K + p[-1] for p in paths]),
        tensor([index[p[:-1]] for p in paths]),
        tensor(parents),
        tensor([len(p) for p in paths]),
        Tree.of([0] * len(paths), parents, device).rows(),
    )
