"""Proposers: what has been verified becomes a tree of guesses.

A drafter becomes a proposer through a tree policy. Growth goes level by level: every row that is expanded gets
``branch`` children, and the ones that are expanded next are read by the drafter in one step. The pool of all children
of all levels is then cut to the tree. Chains and fixed trees know beforehand what they expand and keep; the dynamic
tree (2406.16858) takes the best by value, the product of draft probabilities along the path.

Above temperature 0 the last child of a row is drawn, and its value is the mass it was drawn from, never its own
probability: then whether it is kept does not depend on which token was drawn. (A node ranks before its descendants,
and a node whose existence depends on a drawn token ranks behind that token, so the token can change only what stands
behind it.) It is verified with the distribution at drawing time, whichever siblings were kept.

Shape suffixes: E expanded rows of one level, K children of each, V vocabulary, P pool, N nodes kept, M drafter memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Draft, Drafter, Roots
from heads.errors import UserError
from heads.layers import MaskSees, Slots, causal
from inference.tree import Tree
from inference.verify import RULES, Chance, Sampling, warp

MOST_READS = 512  # nodes a drafter reads in one round: spare rows of its memory


@dataclass(frozen=True)
class TreePolicy:
    """The shape of a tree: ``chain`` (depth), ``fixed`` (paths), or ``dynamic`` (depth, nodes, branch, expand, least).

    ``paths`` are child ranks from the root row (2401.10774): (0,) is the best first guess, (0, 1) the second best after it.
    ``nodes`` is the most a dynamic tree keeps; for the other kinds nodes, branch and depth follow from the shape.
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

        fix(paths=tuple(sorted((tuple(p) for p in self.paths), key=_by_level)))
        if self.expand is None:
            fix(expand=self.branch)
        if not 0 <= self.least < 1:
            raise UserError(f"tree policy: least must be a probability below 1, found {self.least!r}")
        for name in ("depth", "nodes", "branch", "expand"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UserError(f"tree policy: {name} must be a whole number of at least 1, found {getattr(self, name)!r}")
        if self.kind not in ("chain", "fixed", "dynamic"):
            raise UserError(f"tree policy: kind must be chain, fixed or dynamic, found {self.kind!r}")
        if bool(self.paths) != (self.kind == "fixed"):
            raise UserError("tree policy: paths are needed for kind fixed, and for no other")
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

    def check(self, rule: str) -> None:
        """Raises UserError if trees of this policy cannot be verified by ``rule`` above temperature 0."""
        if RULES[rule].chain_only and self.kind != "chain":
            raise UserError(f"the rule {rule} verifies chains: use a chain, or the rule top_plus_one")
        if RULES[rule].draw != "top_plus_one" and self.kind == "dynamic":
            raise UserError(f"the rule {rule} needs a tree whose shape is fixed beforehand: use kind fixed, or the rule top_plus_one")

    def at_most(self, depth: int) -> TreePolicy:
        """The same, no deeper than ``depth`` >= 1."""
        if depth >= self.depth:
            return self
        if self.kind == "fixed":
            return TreePolicy("fixed", paths=tuple(p for p in self.paths if len(p) <= depth))
        return replace(self, depth=depth)

    @property
    def reads(self) -> int:
        """Nodes the drafter reads in one round at most: rows of its memory beside the roots."""
        if self.kind == "fixed":
            return len({p[:-1] for p in self.paths} - {()})
        return (self.expand or self.branch) * (self.depth - 1)


def _by_level(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


class Proposer(Protocol):
    """Whatever guesses: a drafter under a tree policy, or something without training. Batch 1."""

    taps: tuple[int, ...]  # target layers whose states the roots must carry

    def start(self, tokens: int) -> None:
        """Forget everything: a new sequence of at most so many tokens."""

    def absorb(self, roots: Roots) -> None:
        """Take in newly verified positions, oldest first."""

    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        """Guesses of what follows the last root; above temperature 0 drawn as ``sampling.rule`` verifies them."""


class Drafting:
    """A drafter as proposer, with its memory of one sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.memory = Slots(0)
        self.draft: Draft | None = None

    def start(self, tokens: int) -> None:
        # One row per token (a drafter may also read the first, which no root chose). Buffers are kept where they suffice.
        if self.memory.capacity < tokens + MOST_READS:
            self.memory = Slots(tokens + MOST_READS)
        self.memory.rewind(0)
        self.draft = None

    @torch.no_grad()
    def absorb(self, roots: Roots) -> None:
        rows, device = roots.read_BT.shape[1], roots.read_BT.device
        sees = causal(rows, self.memory.rows() + rows, device)
        self.draft = self.drafter.begin(roots, self.memory, sees, ask=torch.tensor([rows - 1], device=device))
        self.position_BN = roots.positions_BT[:, -1:]

    @torch.no_grad()
    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        if sampling.temperature > 0:
            policy.check(sampling.rule)
        if self.draft is None:
            raise RuntimeError("absorb verified positions before proposing")
        draft, roots, device = self.draft, self.memory.rows(), self.draft.hidden_BNH.device
        plan = None if policy.kind == "dynamic" else _plan(policy, device)
        value_E: Tensor | None = torch.zeros(1, device=device) if plan is None else None  # log
        mask_EM: Tensor | None = None  # None: a row sees all there is
        levels: list[Level] = []
        expanded = [torch.full((1,), -1, device=device)]  # per level the rows that got children: indices into the pool, -1 the root row
        for depth in range(1, policy.depth + 1):
            if sampling.temperature == 0:
                level = self._best(draft, depth, policy.branch, value_E)
            else:
                logits_EV = self._logits(draft, depth, policy.branch, spread=True)
                width_E1 = None if plan is None else plan.widths[depth - 1]
                q_EV = warp(logits_EV, sampling.temperature, sampling.top_k, sampling.top_p)
                level = draw_children(q_EV, policy.branch, chance, RULES[sampling.rule].draw, width_E1, value_E)
            levels.append(level)
            if depth == policy.depth:
                break
            if plan is not None:
                best = plan.expand[depth - 1]
            else:
                assert level.values_EK is not None
                ranked = level.values_EK.view(-1).sort(descending=True, stable=True)
                best, value_E = ranked.indices[: policy.expand], ranked.values[: policy.expand]
                if policy.least > 0:
                    likely = int((value_E >= log(policy.least)).sum())
                    if not likely:
                        break
                    best, value_E = best[:likely], value_E[:likely]
            parent_E, E = best // policy.branch, best.shape[0]
            mask_EM = _deeper(mask_EM, parent_E, self.memory.rows())
            expanded.append(best + sum(x.tokens_EK.numel() for x in levels[:-1]))
            tokens_BE = level.tokens_EK.view(1, -1)[:, best]
            positions_BE = (self.position_BN + depth).expand(1, E)
            draft = self.drafter.step(depth + 1, tokens_BE, draft.at(parent_E[None]), positions_BE, self.memory, MaskSees(mask_EM))
        self.memory.rewind(roots)
        return _cut(policy, plan, levels, expanded)

    def _logits(self, draft: Draft, depth: int, branch: int, spread: bool) -> Tensor:
        """[E, V] in fp32 (fp64 if given), over the drafter's own vocabulary or spread over the target's."""
        unembedding = self.drafter.unembedding(depth)
        logits_BEV = unembedding.logits(draft.hidden_BNH)
        if branch > logits_BEV.shape[-1]:
            raise UserError(f"tree policy: {branch} children of one row, but the drafter knows {logits_BEV.shape[-1]} tokens")
        if spread:
            logits_BEV = unembedding.to_target(logits_BEV, self.drafter.shape.vocab_size)
        return logits_BEV[0].to(torch.promote_types(logits_BEV.dtype, torch.float32))

    def _best(self, draft: Draft, depth: int, branch: int, value_E: Tensor | None) -> Level:
        """Temperature 0: the likeliest tokens of each row."""
        logits_EV = self._logits(draft, depth, branch, spread=False)
        if value_E is None:  # logarithms are needed only where paths compete
            top = logits_EV.topk(branch)
            values_EK = None
        else:
            top = logits_EV.log_softmax(-1).topk(branch)
            values_EK = value_E[:, None] + top.values
        ids_V = self.drafter.unembedding(depth).ids_V
        return Level(top.indices if ids_V is None else ids_V[top.indices], values_EK)


class Level(NamedTuple):
    """Children of the rows expanded at one level."""

    tokens_EK: Tensor
    values_EK: Tensor | None = None  # log of the product of probabilities, of a drawn child: of the masses it was drawn from
    drawn_EK: Tensor | None = None
    q_EV: Tensor | None = None


def draw_children(
    q_EV: Tensor, branch: int, chance: Chance, draw: str, width_E1: Tensor | None = None, value_E: Tensor | None = None
) -> Level:
    """Temperature > 0: children of rows with draft distribution q, as ``draw`` says (see ``verify.RULES``).

    ``width_E1``: children a row really has, where fewer than ``branch``; what stands behind them is not used.
    Where q is exhausted there is nothing to draw: that child stands undrawn, as a deterministic one, which is always
    exact, with value -inf.
    """
    if draw == "with_replacement":
        tokens_EK = chance.draws(q_EV, branch)
        return Level(tokens_EK, None, torch.ones_like(tokens_EK, dtype=torch.bool), q_EV)
    if draw == "without_replacement":
        left_EV, columns, drawn = q_EV, [], []
        for _ in range(branch):
            drawn.append(left_EV.sum(-1, keepdim=True) > 0)
            columns.append(chance.draws(left_EV))
            left_EV = left_EV.scatter(-1, columns[-1], 0.0)
        return Level(torch.cat(columns, 1), None, torch.cat(drawn, 1), q_EV)
    top = q_EV.topk(branch)
    rank_K = torch.arange(branch, device=q_EV.device)
    last = branch - 1 if width_E1 is None else width_E1 - 1
    rest_EV = q_EV.scatter(-1, top.indices, top.values.masked_fill(rank_K < last, 0.0))  # q without the deterministic tokens
    mass_E1 = rest_EV.sum(-1, keepdim=True)
    drawn_EK = (rank_K == last) & (mass_E1 > 0)
    tokens_EK = torch.where(drawn_EK, chance.draws(rest_EV), top.indices)
    rest_EV = rest_EV / torch.where(mass_E1 > 0, mass_E1, 1.0)
    if value_E is None:
        return Level(tokens_EK, None, drawn_EK, rest_EV)
    mass_EK = torch.where(rank_K == last, mass_E1, top.values).clamp_(max=1)  # above 1 by rounding a child would outrank its parent
    return Level(tokens_EK, value_E[:, None] + mass_EK.log(), drawn_EK, rest_EV)


def _deeper(mask_EM: Tensor | None, parent_E: Tensor, memory: int) -> Tensor | None:
    """A newly read row sees what its parent row sees, and itself."""
    E = parent_E.shape[0]
    if mask_EM is None:
        if E == 1:
            return None
        mask_EM = torch.ones(1, memory, dtype=torch.bool, device=parent_E.device)
    return torch.cat([mask_EM[parent_E], torch.eye(E, dtype=torch.bool, device=parent_E.device)], dim=1)


def _cut(policy: TreePolicy, plan: Plan | None, levels: list[Level], expanded: list[Tensor]) -> Tree:
    """The tree out of the pool: as planned, or the best by value. Equal values in the order of the pool."""
    tokens_P = torch.cat([x.tokens_EK.view(-1) for x in levels])
    if plan is not None:
        kept_N, origin_N, parents_N, depths_N = plan.kept_N, plan.origin_N, plan.parents_N, plan.depths_N
    else:
        values_P = torch.cat([x.values_EK.view(-1) for x in levels])  # type: ignore[union-attr]
        best = values_P.sort(descending=True, stable=True)
        kept_N = best.indices[: policy.nodes]
        if levels[0].drawn_EK is not None:  # top-k and top-p leave tokens that the drafter never says
            kept_N = kept_N[best.values[: policy.nodes] > -torch.inf]
        kept_N = kept_N.sort().values
        origin_N = kept_N // policy.branch  # the expanded row each was drawn from
        parent_pool_N = torch.cat(expanded)[origin_N]
        parents_N = torch.searchsorted(F.pad(kept_N, (1, 0), value=-1), parent_pool_N) - 1
        sizes = [x.shape[0] for x in expanded]
        depths_N = torch.tensor([d for d, size in enumerate(sizes, 1) for _ in range(size)], device=kept_N.device)[origin_N]
    if levels[0].drawn_EK is None:
        return Tree(tokens_P[kept_N], parents_N, depths_N)
    drawn_N = torch.cat([x.drawn_EK.view(-1) for x in levels])[kept_N]  # type: ignore[union-attr]
    q_XV = torch.cat([x.q_EV for x in levels])  # type: ignore[misc]
    q_RV = q_XV.new_zeros(kept_N.shape[0] + 1, q_XV.shape[1])
    q_RV[parents_N[drawn_N] + 1] = q_XV[origin_N[drawn_N]]  # a row whose drawn child is cut has drawn nothing
    return Tree(tokens_P[kept_N], parents_N, depths_N, drawn_N, q_RV)


class Plan(NamedTuple):
    """What a chain or a fixed tree expands and keeps."""

    expand: list[Tensor]  # per level, the children that are expanded next: indices into [E, K]
    widths: list[Tensor]  # per level, the children each expanded row has, [E, 1]
    kept_N: Tensor  # indices into the pool
    origin_N: Tensor  # the expanded row each node comes from
    parents_N: Tensor
    depths_N: Tensor


@lru_cache(maxsize=16)
def _plan(policy: TreePolicy, device: torch.device) -> Plan:
    paths, K = policy.paths or tuple((0,) * d for d in range(1, policy.depth + 1)), policy.branch
    rows = sorted({p[:-1] for p in paths}, key=_by_level)  # the rows that are expanded, the root row first
    index = {row: i for i, row in enumerate(rows)}
    node = {path: i for i, path in enumerate(paths)}
    levels = [[row for row in rows if len(row) == d] for d in range(policy.depth)]
    start = [index[level[0]] for level in levels]

    def tensor(x: list[int]) -> Tensor:
        return torch.tensor(x, device=device)

    return Plan(
        [tensor([(index[row[:-1]] - start[d]) * K + row[-1] for row in level]) for d, level in enumerate(levels[1:])],
        [tensor([sum(p[:-1] == row for p in paths) for row in level])[:, None] for level in levels],
        tensor([index[p[:-1]] * K + p[-1] for p in paths]),
        tensor([index[p[:-1]] for p in paths]),
        tensor([node.get(p[:-1], -1) for p in paths]),
        tensor([len(p) for p in paths]),
    )
