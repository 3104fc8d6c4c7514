"""Proposers: what has been verified becomes a tree of guesses.

A drafter becomes a proposer through a tree policy. Growth goes level by level: every row that is expanded gets
``branch`` children, and the ones that are expanded next are read by the drafter in one step. The pool of all children
of all levels is then cut to the tree. Chains and fixed trees know beforehand what they expand and keep; the dynamic
tree (2406.16858) takes the best by value, the product of draft probabilities along the path.

Above temperature 0 the last child of a row is drawn, and its value is the mass it was drawn from, never its own
probability: then whether it is kept does not depend on which token was drawn. (A node ranks before its descendants,
and a node whose existence depends on a drawn token ranks behind that token, so the token can change only what stands
behind it.) It is verified with the distribution at drawing time, whichever siblings were kept.

Everything is tensor operations over all sequences at once and of fixed shape, with no loop over nodes. ``hasty`` growth, for
one sequence on a device that answers at once, looks at the values and leaves out what cannot matter: the tree is the same.

Shape suffixes: B sequences, E expanded rows of one level, K children of each, V vocabulary, P pool, N nodes kept, X nodes read so
far.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import Draft, Drafter, Roots
from heads.errors import UserError
from heads.memory import Memory, Slots
from heads.visibility import causal
from inference.chance import SLOTS, VERIFYING, Chance
from inference.sampling import Sampling, Warp, wide
from inference.target import Context
from inference.tree import NO_NODE, Tree
from inference.verify import RULES, rule_of

KINDS = ("auto", "chain", "fixed", "dynamic", "best_first")
MOST_READS = 512  # nodes a drafter reads in one round: spare rows of its memory


@dataclass(frozen=True)
class TreePolicy:
    """The shape of a tree: ``chain`` (depth), ``fixed`` (paths), ``dynamic`` (depth, nodes, branch, expand, least), or
    ``best_first`` (depth, nodes, branch, least): every node that can still be among the best is expanded, best first. ``auto``: chosen
    round by round (inference/auto.py) among chains and the dynamic tree of these settings.

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
        fix(paths=tuple(sorted((tuple(p) for p in self.paths), key=_by_level)))
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


def _by_level(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


AUTO = TreePolicy("auto", depth=8, nodes=15, branch=4, expand=2, least=0.1)  # where nobody asks for another: conf/decode/auto.yaml


def fit_depth(policy: TreePolicy, drafter: Drafter) -> TreePolicy:
    """The policy, no deeper than the drafter can guess."""
    return policy if drafter.max_depth is None else policy.at_most(drafter.max_depth)


class Proposer(Protocol):
    """Whatever guesses for one sequence: a drafter under a tree policy, or something without training."""

    taps: tuple[int, ...]  # target layers whose states the roots must carry

    def start(self, context: Context, tokens: int) -> None:
        """Forget everything: a new sequence of at most so many tokens, which the target reads in ``context``."""

    def absorb(self, roots: Roots) -> None:
        """Take in newly verified positions, oldest first."""

    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        """Guesses of what follows the last root; above temperature 0 drawn as ``sampling.rule`` verifies them."""


class Drafting:
    """A drafter as proposer, with its memory of one sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.memory = Slots(dtype=drafter.memory_dtype)
        self.draft: Draft | None = None

    def start(self, context: Context | None, tokens: int) -> None:
        self.memory.reserve(
            tokens + MOST_READS
        )  # one row each (a drafter may also read the first, which no root chose), and a round's nodes
        self.memory.rewind(0)
        self.draft = None

    @torch.inference_mode()
    def absorb(self, roots: Roots) -> None:
        rows, device = roots.read_BT.shape[1], roots.read_BT.device
        sees = causal(rows, self.memory.rows() + rows, device)
        self.draft = self.drafter.begin(roots, self.memory, sees, ask=torch.tensor([[rows - 1]], device=device))
        self.position_B1 = roots.positions_BT[:, -1:]

    @torch.inference_mode()
    def propose(self, policy: TreePolicy, chance: Chance, sampling: Sampling) -> Tree:
        rule = policy.check(sampling.rule) if sampling.temperature > 0 else "top_plus_one"
        if self.draft is None:
            raise RuntimeError("absorb verified positions before proposing")
        policy = policy.at_most(self.drafter.max_depth or policy.depth)
        roots = self.memory.rows()
        warp = Warp.of([sampling], self.draft.hidden_BNH.device)
        tree = grow(self.drafter, self.draft, self.position_B1, self.memory, policy, warp, rule, chance, hasty=True)
        self.memory.rewind(roots)
        return tree


@torch.inference_mode()
def grow(
    drafter: Drafter,
    draft: Draft,
    position_B1: Tensor,
    memory: Memory,
    policy: TreePolicy,
    warp: Warp,
    rule: str,
    chance: Chance,
    hasty: bool = False,
) -> Tree:
    """The trees of all sequences from their drafts of depth 1 ([B, 1, ..]), whose roots stand at ``position_B1``."""
    if policy.kind == "chain":
        return _grow_chain(drafter, draft, position_B1, memory, policy.depth, warp, rule, chance)
    B, device = position_B1.shape[0], position_B1.device
    plan = _plan(policy, device) if policy.planned else None
    value_BE: Tensor | None = torch.zeros(B, 1, device=device) if plan is None else None  # log
    own_BEX: Tensor | None = None  # who sees whom among the nodes that the drafter has read
    levels: list[Level] = []
    expanded = [torch.full((B, 1), -1, device=device)]  # per level the rows that got children: indices into the pool, -1 the root row
    pool, likeliest_BN = 0, None
    for depth in range(1, policy.depth + 1):
        if not warp.sampled:
            level = _best(drafter, draft, depth, policy.branch, value_BE)
        else:
            logits_BEV = _logits(drafter, draft, depth, policy.branch, spread=True)
            width_E1 = None if plan is None else plan.widths[depth - 1]
            level = draw_children(warp, logits_BEV, policy.branch, chance, depth, RULES[rule].draw, width_E1, value_BE)
        levels.append(level)
        if depth == policy.depth:
            break
        if plan is not None:
            best_BE = plan.expand[depth - 1].expand(B, -1)
        else:
            assert level.values_BEK is not None
            ranked = level.values_BEK.flatten(1).sort(dim=1, descending=True, stable=True)
            best_BE, value_BE = ranked.indices[:, : policy.expand], ranked.values[:, : policy.expand]
            # A node that is not among the best now has no place in the tree, nor has anything below it.
            so_far = ranked.values if likeliest_BN is None else torch.cat([likeliest_BN, ranked.values], 1)
            likeliest_BN = so_far.topk(min(policy.nodes, so_far.shape[1])).values
            idle_BE = (value_BE < likeliest_BN[:, -1:]) | (value_BE == -torch.inf)
            if policy.least > 0:
                idle_BE = idle_BE | (value_BE < log(policy.least))
            value_BE = value_BE.masked_fill(idle_BE, -torch.inf)
            if hasty:
                most = int((~idle_BE).sum(1).max())  # the values descend: the idle ones stand last
                if not most:
                    break
                best_BE, value_BE = best_BE[:, :most], value_BE[:, :most]
        parent_BE = best_BE // policy.branch
        own_BEX = _deeper(own_BEX, parent_BE)
        expanded.append(best_BE + pool)
        pool += level.tokens_BEK[0].numel()
        tokens_BE = level.tokens_BEK.flatten(1).gather(1, best_BE)
        positions_BE = (position_B1 + depth).expand_as(tokens_BE)
        sees = memory.sees_nodes(own_BEX, chain=own_BEX.shape[2] == depth)  # one node a level
        draft = drafter.step(depth + 1, tokens_BE, draft.at(parent_BE), positions_BE, memory, sees)
    return _cut(policy, plan, levels, expanded, RULES[rule].draw, hasty)


def _grow_chain(
    drafter: Drafter, draft: Draft, position_B1: Tensor, memory: Memory, depth: int, warp: Warp, rule: str, chance: Chance
) -> Tree:
    """One guess after the other: what ``grow`` comes to where every row has one child."""
    tokens, drawn, q = list[Tensor](), list[Tensor](), list[Tensor]()
    if warp.sampled:
        chance.prepare([*(SLOTS * d for d in range(1, depth + 1)), *range(VERIFYING, VERIFYING + depth + 1)])
    for d in range(1, depth + 1):
        if not warp.sampled:
            tokens.append(_best(drafter, draft, d, 1, None).tokens_BEK[:, 0])
        else:
            level = draw_children(warp, _logits(drafter, draft, d, 1, spread=True), 1, chance, d, RULES[rule].draw)
            tokens.append(level.tokens_BEK[:, 0])
            drawn.append(level.drawn_BEK[:, 0])  # type: ignore[index]
            q.append(level.q_BEV)  # type: ignore[arg-type]
        if d < depth:
            sees = memory.sees_nodes(_own_chain(d, position_B1.shape[0], position_B1.device), chain=True)
            draft = drafter.step(d + 1, tokens[-1], draft, position_B1 + d, memory, sees)
    plan, B = _plan(TreePolicy("chain", depth=depth), position_B1.device), position_B1.shape[0]
    tree = Tree(torch.cat(tokens, 1), plan.parents_N.expand(B, -1), plan.depths_N.expand(B, -1), depth)
    tree._rows_BRR = plan.rows_1RR.expand(B, -1, -1)
    if warp.sampled:
        tree.drawn_BN, tree.all_drawn = torch.cat(drawn, 1), not warp.greedy
        tree.q_BRV = torch.cat([*q, torch.zeros_like(q[0])], 1)
        if warp.greedy:  # a row that drew nothing has drawn from nothing
            tree.q_BRV = tree.q_BRV * F.pad(tree.drawn_BN, (0, 1))[..., None]
        tree.draws = 1
    return tree


@functools.lru_cache(maxsize=1024)  # captured graphs point at them
def _own_chain(depth: int, batch: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(batch, 1, depth, dtype=torch.bool, device=device)


def _logits(drafter: Drafter, draft: Draft, depth: int, branch: int, spread: bool) -> Tensor:
    """[B, E, V] in fp32 (fp64 if given), over the drafter's own vocabulary or spread over the target's."""
    unembedding = drafter.unembedding(depth)
    logits_BEV = unembedding.logits(draft.hidden_BNH)
    if branch > logits_BEV.shape[-1]:
        raise UserError(f"tree policy: {branch} children of one row, but the drafter knows {logits_BEV.shape[-1]} tokens")
    if spread:
        logits_BEV = unembedding.to_target(logits_BEV, drafter.shape.vocab_size)
    return wide(logits_BEV)


class Level(NamedTuple):
    """Children of the rows expanded at one level."""

    tokens_BEK: Tensor
    values_BEK: Tensor | None = None  # log of the product of probabilities, of a drawn child: of the masses it was drawn from
    drawn_BEK: Tensor | None = None
    q_BEV: Tensor | None = None


def _best(drafter: Drafter, draft: Draft, depth: int, branch: int, value_BE: Tensor | None) -> Level:
    """Temperature 0: the likeliest tokens of each row."""
    logits_BEV = _logits(drafter, draft, depth, branch, spread=False)
    if branch == 1 and value_BE is None:
        ids_V, best_BE1 = drafter.unembedding(depth).ids_V, logits_BEV.argmax(-1, keepdim=True)  # cheaper than topk
        return Level(best_BE1 if ids_V is None else ids_V[best_BE1])
    top, values_BEK = logits_BEV.topk(branch), None
    if value_BE is not None:  # logarithms are needed only where paths compete
        values_BEK = value_BE[..., None] + (top.values - logits_BEV.logsumexp(-1, keepdim=True))
    ids_V = drafter.unembedding(depth).ids_V
    return Level(top.indices if ids_V is None else ids_V[top.indices], values_BEK)


def draw_children(
    warp: Warp,
    logits_BEV: Tensor,
    branch: int,
    chance: Chance,
    depth: int,
    draw: str,
    width_E1: Tensor | None = None,
    value_BE: Tensor | None = None,
) -> Level:
    """Temperature > 0: children of rows with these draft logits, as ``draw`` says (see ``verify.RULES``).

    ``width_E1``: children a row really has, where fewer than ``branch``; what stands behind them is not used.
    Where q is exhausted there is nothing to draw: that child stands undrawn, as a deterministic one, which is always
    exact, with value -inf. A sequence that is greedy among sampled ones gets its likeliest tokens.
    """
    q_BEV, slot = warp.drafter(logits_BEV), SLOTS * depth
    warm_B11 = (warp.temperature_B > 0)[:, None, None]
    if branch == 1 and value_BE is None:  # nothing but what is drawn
        drawn_BE1 = chance.draws(q_BEV, slot)
        tokens_BE1 = torch.where(warm_B11, drawn_BE1, q_BEV.argmax(-1, keepdim=True)) if warp.greedy else drawn_BE1
        return Level(tokens_BE1, None, warm_B11.expand_as(tokens_BE1), q_BEV)
    top = q_BEV.topk(branch)
    if draw == "with_replacement":
        tokens_BEK = torch.where(warm_B11, chance.draws(q_BEV, slot, branch), top.indices)
        return Level(tokens_BEK, None, warm_B11.expand_as(tokens_BEK), q_BEV)
    if draw == "without_replacement":
        left_BEV, columns, drawn = q_BEV, [], []
        for k in range(branch):
            drawn.append(left_BEV.sum(-1, keepdim=True) > 0)
            columns.append(chance.draws(left_BEV, slot + k))
            left_BEV = left_BEV.scatter(-1, columns[-1], 0.0)
        tokens_BEK = torch.where(warm_B11, torch.cat(columns, -1), top.indices)
        return Level(tokens_BEK, None, torch.cat(drawn, -1) & warm_B11, q_BEV)
    rank_K = torch.arange(branch, device=q_BEV.device)
    last = branch - 1 if width_E1 is None else width_E1 - 1
    # q without the deterministic tokens
    rest_BEV = q_BEV.scatter(-1, top.indices, top.values.masked_fill(rank_K < last, 0.0))
    mass_BE1 = rest_BEV.sum(-1, keepdim=True)
    drawn_BEK = (rank_K == last) & (mass_BE1 > 0) & warm_B11
    tokens_BEK = torch.where(drawn_BEK, chance.draws(rest_BEV, slot), top.indices)
    rest_BEV = rest_BEV / torch.where(mass_BE1 > 0, mass_BE1, 1.0)
    if value_BE is None:
        return Level(tokens_BEK, None, drawn_BEK, rest_BEV)
    # clamped: above 1 by rounding a child would outrank its parent
    mass_BEK = torch.where((rank_K == last) & warm_B11, mass_BE1, top.values).clamp_(max=1)
    return Level(tokens_BEK, value_BE[..., None] + mass_BEK.log(), drawn_BEK, rest_BEV)


def _deeper(own_BEX: Tensor | None, parent_BE: Tensor) -> Tensor:
    """A newly read row sees the nodes that its parent row sees, and itself."""
    B, E = parent_BE.shape
    itself_BEE = torch.eye(E, dtype=torch.bool, device=parent_BE.device).expand(B, E, E)
    if own_BEX is None:
        return itself_BEE
    return torch.cat([own_BEX.gather(1, parent_BE[..., None].expand(-1, -1, own_BEX.shape[2])), itself_BEE], dim=2)


def _cut(policy: TreePolicy, plan: Plan | None, levels: list[Level], expanded: list[Tensor], draw: str, hasty: bool) -> Tree:
    """The trees out of the pools: as planned, or the best by value. Equal values in the order of the pool."""
    tokens_BP = torch.cat([x.tokens_BEK.flatten(1) for x in levels], 1)
    B, device = tokens_BP.shape[0], tokens_BP.device
    if plan is not None:
        kept_BN, origin_BN, parents_BN, depths_BN = (x.expand(B, -1) for x in (plan.kept_N, plan.origin_N, plan.parents_N, plan.depths_N))
    else:
        values_BP = torch.cat([x.values_BEK.flatten(1) for x in levels], 1)  # type: ignore[union-attr]
        best = values_BP.sort(dim=1, descending=True, stable=True)
        # -inf: below rows that were not expanded, or tokens that the drafter never says. They go behind the others.
        P = values_BP.shape[1]
        kept_BN = torch.where(best.values > -torch.inf, best.indices, P)[:, : policy.nodes].sort(dim=1).values
        here_BN = kept_BN < P
        if hasty and levels[0].drawn_BEK is not None:
            kept_BN = kept_BN[:, : int(here_BN.sum(1).max())]
            here_BN = here_BN[:, : kept_BN.shape[1]]
        kept_BN = kept_BN.clamp(max=P - 1)
        origin_BN = kept_BN // policy.branch  # the expanded row each was drawn from
        above_BN = torch.cat(expanded, 1).gather(1, origin_BN)  # its parent, in the pool
        place_BN = torch.where(here_BN, kept_BN, P)  # ascending
        parents_BN = torch.searchsorted(F.pad(place_BN, (1, 0), value=-1), above_BN) - 1
        parents_BN = torch.where(here_BN, parents_BN, NO_NODE)
        depths_X = torch.cat([torch.full((x.shape[1],), d, device=device) for d, x in enumerate(expanded, 1)])
        depths_BN = torch.where(here_BN, depths_X[origin_BN], 0)
    tokens_BN = tokens_BP.gather(1, kept_BN)
    if levels[0].drawn_BEK is None:
        tree = Tree(tokens_BN, parents_BN, depths_BN, len(levels))
        tree._rows_BRR = None if plan is None else plan.rows_1RR.expand(B, -1, -1)
        return tree
    drawn_BN = torch.cat([x.drawn_BEK.flatten(1) for x in levels], 1).gather(1, kept_BN)  # type: ignore[union-attr]
    drawn_BN = drawn_BN & (parents_BN != NO_NODE)
    q_BXV = torch.cat([x.q_BEV for x in levels], 1)  # type: ignore[misc]
    # The distribution of each row from which a child that is kept was drawn: a row whose drawn child is cut has drawn nothing.
    row_BN = torch.where(drawn_BN, parents_BN + 1, kept_BN.shape[1] + 1)
    source_BR = torch.full_like(row_BN, -1)
    source_BR = F.pad(source_BR, (0, 2), value=-1).scatter_(1, row_BN, origin_BN)[:, :-1]
    b_B1 = torch.arange(B, device=device)[:, None]
    q_BRV = q_BXV[b_B1, source_BR.clamp(min=0)] * (source_BR >= 0)[..., None]
    return Tree(tokens_BN, parents_BN, depths_BN, len(levels), drawn_BN, q_BRV, 1 if draw == "top_plus_one" else policy.branch)


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
def _plan(policy: TreePolicy, device: torch.device) -> Plan:
    with torch.inference_mode(False):
        return _made_plan(policy, device)


def _made_plan(policy: TreePolicy, device: torch.device) -> Plan:
    paths, K = policy.paths or tuple((0,) * d for d in range(1, policy.depth + 1)), policy.branch
    rows = sorted({p[:-1] for p in paths}, key=_by_level)  # the rows that are expanded, the root row first
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
