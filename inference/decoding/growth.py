"""How a drafter's guesses grow into trees, for many sequences at once.

A tree grows level by level. Every expanded row gets ``branch`` children. The drafter then reads, in one step, those children that are
expanded next. All children of all levels form the pool, from which the tree's nodes are selected at the end. Chains and fixed trees
determine beforehand which nodes are expanded and kept. The dynamic tree (2406.16858) takes the nodes of the highest value: the product of
draft probabilities along the node's path (sharpened at temperature 0: see ``sampling.SHARPER``).

Above temperature 0 the last child of a row is drawn (rule ``top_plus_one``; the other rules for trees draw all children). The value of a
drawn child uses the total mass that it was drawn from, never the probability of its token. So whether the child is kept does not depend
on which token was drawn; the token changes only the nodes below it. The child is verified against the distribution it was drawn from,
whichever of its siblings were kept.

Everything is tensor operations of fixed shape over all sequences at once, with no loop over nodes. ``hasty`` growth, for one sequence,
reads values from the device to skip rows that need not be expanded: faster on a CPU, and the tree is the same.

Shape suffixes: B sequences, E expanded rows of one level, K children of each, V vocabulary, P pool, N nodes kept, X nodes read so
far.
"""

from __future__ import annotations

import functools
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import Draft, Drafter
from headstart.heads.errors import UserError
from headstart.heads.kernels.launch import DTYPES, MOST_TOKENS, takes
from headstart.heads.memory import Memory
from headstart.inference.decoding.counter_rng import SLOTS, VERIFYING, CounterRNG
from headstart.inference.decoding.policy import Plan, TreePolicy, plan_of
from headstart.inference.decoding.sampling import SHARPER, LogitsWarper, wide
from headstart.inference.decoding.tree import NO_NODE, Tree
from headstart.inference.decoding.verify import RULES


@torch.inference_mode()
def grow(
    drafter: Drafter,
    draft: Draft,
    position_B1: Tensor,
    memory: Memory,
    policy: TreePolicy,
    warp: LogitsWarper,
    rule: str,
    rng: CounterRNG,
    hasty: bool = False,
) -> Tree:
    """Grow the trees of all sequences from their drafts of depth 1 ([B, 1, ..]). ``position_B1``: the positions of their last roots."""
    if policy.kind == "chain":
        return _grow_chain(drafter, draft, position_B1, memory, policy.depth, warp, rule, rng)
    B, device = position_B1.shape[0], position_B1.device
    plan = plan_of(policy, device) if policy.planned else None
    value_BE: Tensor | None = torch.zeros(B, 1, device=device) if plan is None else None  # log of the values
    own_BEX: Tensor | None = None  # for each row of the last step, which of the nodes read so far it sees
    levels: list[Level] = []
    expanded = [torch.full((B, 1), -1, device=device)]  # per level, the rows that got children, as indices into the pool; -1: the root row
    pool, likeliest_BN = 0, None
    for depth in range(1, policy.depth + 1):
        branch = policy.branch if plan is None else plan.branches[depth - 1]
        if not warp.sampled:
            level = _best(drafter, draft, depth, branch, value_BE)
        else:
            logits_BEV = _logits(drafter, draft, depth, branch, spread=True)
            width_E1 = None if plan is None else plan.widths[depth - 1]
            level = draw_children(warp, logits_BEV, branch, rng, depth, RULES[rule].draw, width_E1, value_BE)
        levels.append(level)
        if depth == policy.depth:
            break
        if plan is not None:
            best_BE = plan.expand[depth - 1].expand(B, -1)
        else:
            assert level.values_BEK is not None
            ranked = level.values_BEK.flatten(1).sort(dim=1, descending=True, stable=True)
            best_BE, value_BE = ranked.indices[:, : policy.expand], ranked.values[:, : policy.expand]
            if policy.least > 0:
                value_BE = value_BE.masked_fill(value_BE < log(policy.least), -torch.inf)
            if hasty:
                # A node that is not among the best so far gets no place in the tree, nor does any node below it.
                so_far = ranked.values if likeliest_BN is None else torch.cat([likeliest_BN, ranked.values], 1)
                likeliest_BN = so_far.topk(min(policy.nodes, so_far.shape[1])).values
                busy_BE = (value_BE >= likeliest_BN[:, -1:]) & (value_BE > -torch.inf)
                most = int(busy_BE.sum(1).max())  # the values descend, so rows that need not be expanded stand last
                if not most:
                    break
                best_BE, value_BE = best_BE[:, :most], value_BE[:, :most]
        rng.expand(level.tokens_BEK, best_BE)
        parent_BE = best_BE // branch
        own_BEX = _deeper(own_BEX, parent_BE)
        expanded.append(best_BE + pool)
        pool += level.tokens_BEK[0].numel()
        tokens_BE = level.tokens_BEK.flatten(1).gather(1, best_BE)
        positions_BE = (position_B1 + depth).expand_as(tokens_BE)
        sees = memory.sees_nodes(own_BEX, chain=own_BEX.shape[2] == depth)  # as many nodes as levels: one node a level
        draft = drafter.step(depth + 1, tokens_BE, draft.at(parent_BE), positions_BE, memory, sees)
    return _cut(policy, plan, levels, expanded, RULES[rule].draw, hasty)


def _grow_chain(
    drafter: Drafter, draft: Draft, position_B1: Tensor, memory: Memory, depth: int, warp: LogitsWarper, rule: str, rng: CounterRNG
) -> Tree:
    """``grow`` for chains, where every row has one child: the same result in fewer operations."""
    tokens, drawn, q, no_row_B1 = list[Tensor](), list[Tensor](), list[Tensor](), torch.zeros_like(position_B1)
    if warp.sampled:
        rng.prepare([*(SLOTS * d for d in range(1, depth + 1)), *range(VERIFYING, VERIFYING + depth + 1)])
    for d in range(1, depth + 1):
        if not warp.sampled:
            tokens.append(_best(drafter, draft, d, 1, None).tokens_BEK[:, 0])
        else:
            level = draw_children(warp, _logits(drafter, draft, d, 1, spread=True), 1, rng, d, RULES[rule].draw)
            tokens.append(level.tokens_BEK[:, 0])
            drawn.append(level.drawn_BEK[:, 0])  # type: ignore[index]
            q.append(level.q_BEV)  # type: ignore[arg-type]
            rng.expand(level.tokens_BEK, no_row_B1)
        if d < depth:
            sees = memory.sees_nodes(_own_chain(d, position_B1.shape[0], position_B1.device), chain=True)
            draft = drafter.step(d + 1, tokens[-1], draft, position_B1 + d, memory, sees)
    plan, B = plan_of(TreePolicy("chain", depth=depth), position_B1.device), position_B1.shape[0]
    tree = Tree(torch.cat(tokens, 1), plan.parents_N.expand(B, -1), plan.depths_N.expand(B, -1), depth)
    tree._rows_BRR = plan.rows_1RR.expand(B, -1, -1)
    if warp.sampled:
        tree.drawn_BN = torch.cat(drawn, 1)
        tree.q_BRV = torch.cat([*q, torch.zeros_like(q[0])], 1)
        if warp.greedy:  # q is zero at rows of greedy sequences, which draw nothing
            tree.q_BRV = tree.q_BRV * F.pad(tree.drawn_BN, (0, 1))[..., None]
    return tree


@functools.lru_cache(maxsize=1024)  # captured graphs read these tensors
def _own_chain(depth: int, batch: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(batch, 1, depth, dtype=torch.bool, device=device)


def _logits(drafter: Drafter, draft: Draft, depth: int, branch: int, spread: bool) -> Tensor:
    """The draft's logits [B, E, V] over the drafter's own vocabulary, or with ``spread`` over the target's, in fp32 or fp64.

    Raises UserError where there are fewer tokens than ``branch``.
    """
    unembedding = drafter.unembedding(depth)
    logits_BEV = unembedding.logits(draft.hidden_BNH)
    if branch > logits_BEV.shape[-1]:
        raise UserError(f"tree policy: {branch} children of one row, but the drafter knows {logits_BEV.shape[-1]} tokens")
    return wide(unembedding.to_target(logits_BEV, drafter.shape.vocab_size)) if spread else logits_BEV


class Level(NamedTuple):
    """The children of the rows that are expanded at one level."""

    tokens_BEK: Tensor
    values_BEK: Tensor | None = None  # log of the value: the product of probabilities along the path (for a drawn child, of the mass)
    drawn_BEK: Tensor | None = None
    q_BEV: Tensor | None = None


def _best(drafter: Drafter, draft: Draft, depth: int, branch: int, value_BE: Tensor | None) -> Level:
    """Temperature 0: the ``branch`` likeliest tokens of each row. ``value_BE``: log values of the rows; None: the plan is fixed."""
    logits_BEV = _logits(drafter, draft, depth, branch, spread=False)
    log_p_BEK = None  # needed only where paths compete by value
    if value_BE is not None:
        logits_BEV = SHARPER * logits_BEV
    if branch == 1 and value_BE is None:
        best_BEK = logits_BEV.argmax(-1, keepdim=True)  # cheaper than topk
    elif takes(logits_BEV) and logits_BEV.dtype in DTYPES and branch <= MOST_TOKENS:
        from headstart.heads.kernels.best_tokens import best_tokens

        log_p_BEK, best_BEK = (x.unflatten(0, logits_BEV.shape[:2]) for x in best_tokens(logits_BEV.flatten(0, 1), branch))
    else:
        logits_BEV = wide(logits_BEV)
        top_BEK, best_BEK = logits_BEV.topk(branch)
        if value_BE is not None:
            log_p_BEK = top_BEK - logits_BEV.logsumexp(-1, keepdim=True)
    ids_V = drafter.unembedding(depth).ids_V
    values_BEK = None if value_BE is None or log_p_BEK is None else value_BE[..., None] + log_p_BEK
    return Level(best_BEK if ids_V is None else ids_V[best_BEK], values_BEK)


def draw_children(
    warp: LogitsWarper,
    logits_BEV: Tensor,
    branch: int,
    rng: CounterRNG,
    depth: int,
    draw: str,
    width_E1: Tensor | None = None,
    value_BE: Tensor | None = None,
) -> Level:
    """Temperature > 0: the children of rows with these draft logits, drawn as ``draw`` says (see ``verify.RULES``).

    ``width_E1``: how many children each row really has; the others, up to ``branch``, are not used. Where no mass of q is left to draw
    from, the child counts as deterministic (which every rule verifies exactly) and has the value -inf. A greedy sequence among sampled
    ones gets its likeliest tokens.
    """
    q_BEV, slot = warp.drafter(logits_BEV), SLOTS * depth
    warm_B11 = (warp.temperature_B > 0)[:, None, None]
    if branch == 1 and value_BE is None:  # the only child is drawn
        drawn_BE1 = rng.draws(q_BEV, slot)
        tokens_BE1 = torch.where(warm_B11, drawn_BE1, q_BEV.argmax(-1, keepdim=True)) if warp.greedy else drawn_BE1
        return Level(tokens_BE1, None, warm_B11.expand_as(tokens_BE1), q_BEV)
    top = q_BEV.topk(branch)
    if draw == "with_replacement":
        tokens_BEK = torch.where(warm_B11, rng.draws(q_BEV, slot, branch), top.indices)
        return Level(tokens_BEK, None, warm_B11.expand_as(tokens_BEK), q_BEV)
    if draw == "without_replacement":
        left_BEV, columns, drawn = q_BEV, [], []
        for k in range(branch):
            drawn.append(left_BEV.sum(-1, keepdim=True) > 0)
            columns.append(rng.draws(left_BEV, slot + k))
            left_BEV = left_BEV.scatter(-1, columns[-1], 0.0)
        tokens_BEK = torch.where(warm_B11, torch.cat(columns, -1), top.indices)
        return Level(tokens_BEK, None, torch.cat(drawn, -1) & warm_B11, q_BEV)
    rank_K = torch.arange(branch, device=q_BEV.device)
    last = branch - 1 if width_E1 is None else width_E1 - 1
    # q without the deterministic tokens
    rest_BEV = q_BEV.scatter(-1, top.indices, top.values.masked_fill(rank_K < last, 0.0))
    mass_BE1 = rest_BEV.sum(-1, keepdim=True)
    drawn_BEK = (rank_K == last) & (mass_BE1 > 0) & warm_B11
    tokens_BEK = torch.where(drawn_BEK, rng.draws(rest_BEV, slot), top.indices)
    rest_BEV = rest_BEV / torch.where(mass_BE1 > 0, mass_BE1, 1.0)
    if value_BE is None:
        return Level(tokens_BEK, None, drawn_BEK, rest_BEV)
    # clamped: a mass that rounding puts above 1 would let a child outrank its parent
    mass_BEK = torch.where((rank_K == last) & warm_B11, mass_BE1, top.values).clamp_(max=1)
    return Level(tokens_BEK, value_BE[..., None] + mass_BEK.log(), drawn_BEK, rest_BEV)


def _deeper(own_BEX: Tensor | None, parent_BE: Tensor) -> Tensor:
    """The next step's visibility, [B, E, X]: a newly read row sees the nodes that its parent row sees, and itself."""
    B, E = parent_BE.shape
    itself_BEE = _themselves(E, parent_BE.device).expand(B, E, E)
    if own_BEX is None:
        return itself_BEE
    return torch.cat([own_BEX.gather(1, parent_BE[..., None].expand(-1, -1, own_BEX.shape[2])), itself_BEE], dim=2)


@functools.lru_cache(maxsize=1024)  # captured graphs read these tensors
def _themselves(rows: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(rows, dtype=torch.bool, device=device)


def _cut(policy: TreePolicy, plan: Plan | None, levels: list[Level], expanded: list[Tensor], draw: str, hasty: bool) -> Tree:
    """Cut the pools to trees: the planned nodes, or those of the highest value (among equal values, the first in the pool)."""
    tokens_BP = torch.cat([x.tokens_BEK.flatten(1) for x in levels], 1)
    B, device = tokens_BP.shape[0], tokens_BP.device
    if plan is not None:
        kept_BN, origin_BN, parents_BN, depths_BN = (x.expand(B, -1) for x in (plan.kept_N, plan.origin_N, plan.parents_N, plan.depths_N))
    else:
        values_BP = torch.cat([x.values_BEK.flatten(1) for x in levels], 1)  # type: ignore[union-attr]
        best = values_BP.sort(dim=1, descending=True, stable=True)
        # -inf: children of rows that were not expanded, or tokens that the drafter never says. Index P sorts them last.
        P = values_BP.shape[1]
        kept_BN = torch.where(best.values > -torch.inf, best.indices, P)[:, : policy.nodes].sort(dim=1).values
        here_BN = kept_BN < P
        if hasty and levels[0].drawn_BEK is not None:
            kept_BN = kept_BN[:, : int(here_BN.sum(1).max())]
            here_BN = here_BN[:, : kept_BN.shape[1]]
        kept_BN = kept_BN.clamp(max=P - 1)
        origin_BN = kept_BN // policy.branch  # the expanded row that each node is a child of
        above_BN = torch.cat(expanded, 1).gather(1, origin_BN)  # its parent, in the pool
        place_BN = torch.where(here_BN, kept_BN, P)  # ascending
        parents_BN = torch.searchsorted(F.pad(place_BN, (1, 0), value=-1), above_BN) - 1
        parents_BN = torch.where(here_BN, parents_BN, NO_NODE)
        depths_X = torch.cat([torch.full((x.shape[1],), d, device=device) for d, x in enumerate(expanded, 1)])
        depths_BN = torch.where(here_BN, depths_X[origin_BN], 0)
    tokens_BN = tokens_BP.gather(1, kept_BN)
    tree = Tree(tokens_BN, parents_BN, depths_BN, len(levels), by_value=plan is None, planned=plan is not None)
    tree._rows_BRR = None if plan is None else plan.rows_1RR.expand(B, -1, -1)
    if levels[0].drawn_BEK is None:
        return tree
    drawn_BN = torch.cat([x.drawn_BEK.flatten(1) for x in levels], 1).gather(1, kept_BN)  # type: ignore[union-attr]
    drawn_BN = drawn_BN & (parents_BN != NO_NODE)
    q_BXV = torch.cat([x.q_BEV for x in levels], 1)  # type: ignore[misc]
    # Each row's q, where a drawn child of it is kept. A row whose drawn children were all cut counts as having drawn nothing.
    row_BN = torch.where(drawn_BN, parents_BN + 1, kept_BN.shape[1] + 1)
    source_BR = row_BN.new_full((B, kept_BN.shape[1] + 2), -1).scatter_(1, row_BN, origin_BN)[:, :-1]
    b_B1 = torch.arange(B, device=device)[:, None]
    tree.drawn_BN, tree.q_BRV = drawn_BN, q_BXV[b_B1, source_BR.clamp(min=0)] * (source_BR >= 0)[..., None]
    tree.draws = 1 if draw == "top_plus_one" else policy.branch
    return tree
