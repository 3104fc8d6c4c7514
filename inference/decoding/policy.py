"""The shapes that trees of draft tokens may have: a chain, a tree fixed beforehand, or a tree that follows the drafter's probabilities."""

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
CHAINS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)  # depths of an auto policy's chains
REACHED, BESIDE = 0.65, 0.5  # assumed by ``caterpillar``: acceptance rate of a first child; a further sibling's, relative to the one before
MOST_READS = 512  # nodes that a drafter may read in one round; its memory has as many spare rows


@dataclass(frozen=True)
class TreePolicy:
    """The shape of a tree. ``kind`` is one of these; the settings that each kind uses stand in parentheses:

    ``chain`` (depth): one guess after the other. ``fixed`` (paths): the same tree every time. ``dynamic`` (depth, nodes, branch, expand,
    least): the ``expand`` best nodes of each level are expanded (2406.16858). ``best_first`` (depth, nodes, branch, least): every node
    that can still be among the ``nodes`` best is expanded. ``auto`` (depth, nodes, branch, expand, least): chosen anew every round, either
    a chain or a tree. The tree is the dynamic tree of these settings, or where ``fixes_tree`` says so a ``caterpillar`` of this depth,
    nodes and branch.

    ``paths`` are child ranks from the root row (2401.10774): (0,) is the likeliest first guess, (0, 1) the second likeliest after it.
    ``nodes`` is the most that a dynamic or best-first tree keeps; for chains and fixed trees the other settings follow from the
    shape. ``expand``: None stands for as many as ``branch``. ``least``: a node whose path is less probable than this is not expanded, so
    that the tree stays shallow and drafting cheap where the drafter is unsure. Raises UserError naming a wrong value.
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

        given: Any = self.paths  # may come from a settings file, as anything
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
            fix(nodes=self.depth, branch=1, expand=1, least=0.0)
        if self.kind == "fixed":
            known = {(), *self.paths}
            for path in self.paths:
                if not path or min(path) < 0 or path[:-1] not in known or (path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known):
                    raise UserError(f"tree policy: path {list(path)} must follow its parent and its elder sibling in paths")
            if len(known) != len(self.paths) + 1:
                raise UserError("tree policy: a path stands twice in paths")
            branch = 1 + max(p[-1] for p in self.paths)
            fix(depth=len(self.paths[-1]), nodes=len(self.paths), branch=branch, expand=branch, least=0.0)
        if self.reads > MOST_READS:
            raise UserError(f"tree policy: the drafter would read {self.reads} nodes a round, {MOST_READS} at most: lower depth or expand")

    def __str__(self) -> str:
        if self.kind == "chain":
            return f"chain of {self.depth}"
        return f"{'a chain or tree' if self.kind == 'auto' else self.kind}, {self.nodes} nodes, depth {self.depth}"

    def check(self, rule: str) -> str:
        """The rule that verifies trees of this policy above temperature 0: ``rule``, with ``auto`` resolved. Raises UserError where that
        rule cannot verify such trees.
        """
        rule = rule_of(rule, self)
        if RULES[rule].chain_only and not self.is_chain and self.kind != "auto":
            raise UserError(f"the rule {rule} verifies chains: use a chain, or the rule top_plus_one")
        if RULES[rule].chain_only and self.kind == "auto" and self.nodes > 1:
            raise UserError(f"the rule {rule} verifies chains: with kind auto set nodes=1 (no trees), or take the rule auto")
        if RULES[rule].draw != "top_plus_one" and not self.planned:
            raise UserError(f"the rule {rule} needs a tree fixed beforehand: use kind fixed, or the rule auto or top_plus_one")
        return rule

    def own_shape(self, rule: str, heat: int) -> TreePolicy:
        """The shape that an auto policy's settings describe, regardless of its cost: a dynamic tree or a caterpillar (``fixes_tree``), or a
        chain where ``rule`` or ``nodes`` allows no tree. Any other policy is returned as it is.
        """
        if self.kind != "auto":
            return self
        if self.nodes < 2 or RULES[rule_of(rule, self)].chain_only:
            return TreePolicy("chain", depth=self.depth)
        fixed = fixes_tree(rule, heat)
        return caterpillar(self.depth, self.nodes, self.branch) if fixed else replace(self, kind="dynamic")

    def at_most(self, depth: int) -> TreePolicy:
        """This policy, cut to at most ``depth`` >= 1 levels."""
        if depth >= self.depth:
            return self
        if self.kind == "fixed":
            return TreePolicy("fixed", paths=tuple(p for p in self.paths if len(p) <= depth))
        return replace(self, depth=depth)

    @property
    def is_chain(self) -> bool:
        """Whether every tree is a chain: by its kind, or because the fixed paths form one."""
        return self.planned and self.nodes == self.depth

    @property
    def planned(self) -> bool:
        """Whether the nodes to expand and to keep are known before drafting: chains and fixed trees."""
        return self.kind in ("chain", "fixed")

    @property
    def by_value(self) -> bool:
        """Whether nodes are selected by value, as ``Tree.by_value`` says of the trees."""
        return not self.planned

    @property
    def reads(self) -> int:
        """The most nodes that the drafter reads in one round. Its memory needs as many rows besides those of the roots."""
        if self.kind == "fixed":
            return len({p[:-1] for p in self.paths} - {()})
        return (self.expand or self.branch) * (self.depth - 1)


def by_level(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Sort key of paths: shorter paths first, so that every node comes after its parent."""
    return len(path), path


def fixes_tree(rule: str, heat: int) -> bool:
    """Whether an auto policy's tree is a ``caterpillar`` instead of a dynamic tree. It is at warm temperatures (``heat`` 2, see
    ``sampling.heat_of``), under a rule that draws all children of a tree of fixed shape. ``top_plus_one`` draws one child per row of any
    tree: under it, dynamic trees have a larger accepted length at every temperature (docs/results.md).
    """
    return heat == 2 and rule != "top_plus_one"


def costs_as(rule: str, heat: int) -> int:
    """The lowest heat at which an auto policy has the same shapes and its rounds do the same work. Both heats share one measurement."""
    return min(heat, 1 + fixes_tree(rule, heat))


def caterpillar(depth: int, nodes: int, branch: int) -> TreePolicy:
    """A fixed tree: a chain of ``depth`` guesses, and the other nodes as siblings of these guesses, at most ``branch`` children per row.

    At warm temperatures it has a larger accepted length than a dynamic tree of as many nodes: all its children are drawn, and since its
    shape does not depend on them, the rule ``traversal`` can verify it from its leaves (EXPERIMENTS.md, 2026-11-26). A child of rank r at
    depth d + 1 has the value REACHED^d BESIDE^r, and the best are taken. Where no siblings fit (``nodes`` at most ``depth``, or ``branch``
    1), the result is a chain.
    """
    depth = min(depth, nodes)
    all_beside = [(*(0,) * d, r) for d in range(depth) for r in range(1, branch)]
    beside = sorted(all_beside, key=lambda path: (-(REACHED ** (len(path) - 1)) * BESIDE ** path[-1], path))[: nodes - depth]
    chain = [(0,) * d for d in range(1, depth + 1)]
    return TreePolicy("fixed", paths=tuple(chain + beside)) if beside else TreePolicy("chain", depth=depth)


def shapes_of(policy: TreePolicy, rule: str, heat: int) -> list[TreePolicy]:
    """The shapes of an auto policy: chains up to its depth, and a tree in two sizes (dynamic, or a caterpillar: ``fixes_tree``) where its
    nodes and depth allow one. Of another policy: itself.
    """
    if policy.kind != "auto":
        return [policy]
    chains = [TreePolicy("chain", depth=d) for d in CHAINS if d <= policy.depth]
    if policy.nodes < 2 or policy.depth < 2:
        return chains
    depths = dict.fromkeys(min(d, policy.depth) for d in (3, policy.depth))
    if fixes_tree(rule, heat):
        trees = (caterpillar(d, max(round(policy.nodes * d / policy.depth), 2), policy.branch) for d in depths)
        return list(dict.fromkeys([*chains, *trees]))
    return [*chains, *(replace(policy, kind="dynamic").at_most(d) for d in depths)]


AUTO = TreePolicy("auto", depth=8, nodes=15, branch=4, expand=2, least=0.1)  # the default, as in conf/decode/auto.yaml


def fit_depth(policy: TreePolicy, drafter: Drafter) -> TreePolicy:
    """The policy, no deeper than the drafter can guess."""
    return policy if drafter.max_depth is None else policy.at_most(drafter.max_depth)


class Plan(NamedTuple):
    """Which nodes a chain or a fixed tree expands and keeps, as tensors of E expanded rows a level, K children each and N kept nodes."""

    expand: list[Tensor]  # per level, the children that are expanded next, as indices into [E, K] flattened
    branches: list[int]  # per level, K: the most children that one row has
    widths: list[Tensor]  # per level, how many children each expanded row has, [E, 1]
    kept_N: Tensor  # the kept children, as indices into the pool of all children of all levels
    origin_N: Tensor  # the expanded row that each node is a child of, counted over all levels
    parents_N: Tensor
    depths_N: Tensor
    rows_1RR: Tensor  # see ``Tree.rows``


@functools.cache  # captured graphs read these tensors, so they must stay where they are
def plan_of(policy: TreePolicy, device: torch.device) -> Plan:
    """The plan of a chain or a fixed tree on a device, made once."""
    with torch.inference_mode(False):
        return _made(policy, device)


def _made(policy: TreePolicy, device: torch.device) -> Plan:
    paths = policy.paths or tuple((0,) * d for d in range(1, policy.depth + 1))
    rows = sorted({p[:-1] for p in paths}, key=by_level)  # the rows that are expanded, the root row first
    index = {row: i for i, row in enumerate(rows)}
    node = {path: i for i, path in enumerate(paths)}
    levels = [[row for row in rows if len(row) == d] for d in range(policy.depth)]
    branches = [1 + max(p[-1] for p in paths if len(p) == d) for d in range(1, policy.depth + 1)]
    # where each expanded row's children begin in the pool of all levels
    first, pool = dict[tuple[int, ...], int](), 0
    for row in rows:
        first[row], pool = pool, pool + branches[len(row)]
    start = [first[level[0]] for level in levels]

    def tensor(x: list[int]) -> Tensor:
        return torch.tensor(x, device=device)

    parents = [node.get(p[:-1], -1) for p in paths]
    return Plan(
        [tensor([first[row[:-1]] - start[d] + row[-1] for row in level]) for d, level in enumerate(levels[1:])],
        branches,
        [tensor([sum(p[:-1] == row for p in paths) for row in level])[:, None] for level in levels],
        tensor([first[p[:-1]] + p[-1] for p in paths]),
        tensor([index[p[:-1]] for p in paths]),
        tensor(parents),
        tensor([len(p) for p in paths]),
        Tree.of([0] * len(paths), parents, device).rows(),
    )
