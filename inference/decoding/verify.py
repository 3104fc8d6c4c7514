"""Verification: which guesses the target accepts, and its own token after them, for many sequences at once.

At temperature 0 the longest path that equals the target's choices is accepted. Above it there are several rules; under each the
emitted tokens are distributed exactly as the target's own (each names its paper). ``p_BRV`` is always the target's distribution after
penalty, temperature and filters; ``tree.q_BRV`` is the distribution that the drawn children were drawn from. Everything is tensor
operations of fixed shape that never wait for the device, except with ``hasty``: it asks the device at every depth whether a walk
still goes on, and stops when none does. The functions ``*_alone`` serve one sequence and decide on the host, which is fastest where
reading a number from the device costs nothing, as on a CPU.

Shape suffixes: B sequences, N nodes, R = N + 1 rows, A = depth + 1 rows of a path, X rows of any kind, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.inference.decoding.counter_rng import SLOTS, VERIFYING, CounterRNG
from headstart.inference.decoding.sampling import LogitsWarper
from headstart.inference.decoding.tree import NO_NODE, Acceptance, Tree

if TYPE_CHECKING:
    from headstart.inference.decoding.policy import TreePolicy


def greedy(tree: Tree, choice_BR: Tensor) -> Acceptance:
    """Temperature 0: accept the deepest node whose path equals the target's choice (argmax) at every row."""
    if not len(tree):
        none_B1 = torch.zeros_like(choice_BR)
        return Acceptance(none_B1, none_B1[:, 0], choice_BR[:, 0])
    up_BN = (tree.parents_BN + 1).clamp(min=0)
    right_BN = (tree.tokens_BN == choice_BR.gather(1, up_BN)) & (tree.parents_BN >= -1)
    reached_BR = (F.pad(right_BN, (1, 0), value=True)[:, None] | ~tree.rows()).all(-1)
    depths_BR = F.pad(tree.depths_BN, (1, 0))
    count_B, leaf_B = (reached_BR * depths_BR).max(1)
    onto_BR = tree.rows()[torch.arange(len(leaf_B), device=leaf_B.device), leaf_B]  # the rows of the accepted path
    rows_BA = _by_depth(onto_BR, depths_BR, tree.depth)
    return Acceptance(rows_BA, count_B, choice_BR.gather(1, leaf_B[:, None])[:, 0])


def _by_depth(onto_BR: Tensor, depths_BR: Tensor, depth: int) -> Tensor:
    """The rows of each path (``onto_BR``) from the root row to its leaf, [B, depth + 1], then zeros."""
    B, R = onto_BR.shape
    row_BR = torch.arange(R, device=onto_BR.device).expand(B, R)
    place_BR = torch.where(onto_BR, depths_BR, depth + 1)  # rows that are not on the path go to one more place, which is cut off
    return row_BR.new_zeros(B, depth + 2).scatter_(1, place_BR, row_BR)[:, : depth + 1]


def multi_round(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool = False) -> Acceptance:
    """Walk down from the root row. At each row its drawn children are tried in turn; if none is accepted, a token is drawn.

    A drawn child x is accepted with probability min(1, p(x)/q(x)); otherwise p becomes the normalized max(p - q, 0). This is
    SpecInfer's multi-round sampling (2305.09781, algorithm 2), for children drawn independently from q. The token is drawn from
    what is left of p; if a deterministic child holds that token, the walk goes on there (2502.18779), else it ends.

    With one drawn child a row this is also the rule ``token`` (2211.17192) on a chain and ``top_plus_one`` on a tree: there q has
    no mass on the deterministic children, so the residual keeps all of p on them.
    """
    return _walk(tree, p_BRV, rng, hasty, lambda q_BV, token_B: q_BV)


def without_replacement(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool = False) -> Acceptance:
    """As ``multi_round``, for children drawn one after the other without replacement (RSD 2402.14160, Sequoia 2402.12374)."""
    return _walk(tree, p_BRV, rng, hasty, lambda q_BV, token_B: _without(q_BV, token_B[:, None]))


def _walk(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool, next_q: Callable[[Tensor, Tensor], Tensor]) -> Acceptance:
    # next_q: from q and a rejected child's token, the distribution that the row's next drawn child was drawn from
    B, b_B = p_BRV.shape[0], torch.arange(p_BRV.shape[0], device=p_BRV.device)
    rows_BA = torch.zeros(B, tree.depth + 1, dtype=torch.int64, device=p_BRV.device)
    row_B, count_B, token_B = rows_BA[:, 0], torch.zeros_like(b_B), torch.zeros_like(b_B)
    going_B = torch.ones(B, dtype=torch.bool, device=p_BRV.device)
    for depth in range(tree.depth + 1):
        slot = VERIFYING + SLOTS * depth
        p_BV = p_BRV[b_B, row_B]
        child_BN = tree.parents_BN == row_B[:, None] - 1
        next_B = torch.full_like(b_B, -1)  # the accepted child
        if tree.drawn_BN is not None and tree.q_BRV is not None and depth < tree.depth:
            q_BV, drawn_BN = tree.q_BRV[b_B, row_B], child_BN & tree.drawn_BN
            rank_BN = drawn_BN.cumsum(1)
            for k in range(1, tree.draws + 1):
                this_BN = drawn_BN & (rank_BN == k)
                node_B = this_BN.int().argmax(1)
                x_B = tree.tokens_BN[b_B, node_B]
                open_B = going_B & (next_B < 0) & this_BN.any(1)
                yes_B = rng.flip(torch.where(open_B, p_BV[b_B, x_B] / q_BV[b_B, x_B], 0.0), slot + k)
                next_B, refused_B1 = torch.where(yes_B, node_B, next_B), (open_B & ~yes_B)[:, None]
                p_BV = torch.where(refused_B1, _residual(p_BV, q_BV), p_BV)
                if k < tree.draws:
                    q_BV = torch.where(refused_B1, next_q(q_BV, x_B), q_BV)
        draws_B = going_B & (next_B < 0)
        drawn_B = rng.draws(torch.where(draws_B[:, None], p_BV, 0.0)[:, None], slot)[:, 0, 0]
        token_B = torch.where(draws_B, drawn_B, token_B)  # where a child holds it, the walk goes on and draws a later one
        if depth == tree.depth:
            break
        found_BN = child_BN & (tree.tokens_BN == drawn_B[:, None])
        if tree.drawn_BN is not None:
            found_BN = found_BN & ~tree.drawn_BN
        next_B = torch.where(draws_B & found_BN.any(1), found_BN.int().argmax(1), next_B)
        going_B, row_B = next_B >= 0, next_B + 1  # a walk that has ended accepts no more: -1, and the root row
        rows_BA[:, depth + 1] = row_B
        count_B = count_B + going_B
        if hasty and not bool(going_B.any()):
            break
    return Acceptance(rows_BA, count_B, token_B)


def traversal(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool = False) -> Acceptance:
    """From the leaves to the root: the first row that passes, in post-order, ends the accepted path (2505.12398; for chains it is block
    verification, 2403.10444). Only for trees whose shape does not depend on what was drawn: see below.

    Every row has a weight w, the probability that the path ends in it or below it, and keeps a distribution p of the token after it; the
    root row has w = 1 and the target's p. A child x that was drawn from q (a deterministic child: from a point mass) gets the weight
    min(1, w p(x)/q(x)). If nothing in its subtree passes, its parent goes on with s = sum max(w p - q, 0), p = max(w p - q, 0) / s and
    w = s / (s + 1 - w), and its next sibling is judged by these. After its last child a row passes with probability w, and the token
    after the path is drawn from its p.

    Summed over x, a subtree takes min(q, w p)(x) and leaves max(w p - q, 0)(x): together w p, so every row hands on w times the target's
    distribution. This uses that x has the distribution q whatever happened in other subtrees. Where nodes of all subtrees compete for
    places in the tree by their value, this does not hold.
    """
    B, R, _ = p_BRV.shape
    rng.prepare(range(VERIFYING, VERIFYING + R))
    b_B, parents_BN, tokens_BN = torch.arange(B, device=p_BRV.device), tree.parents_BN, tree.tokens_BN
    p_BRV, w_BR = p_BRV.clone(), F.pad(torch.ones_like(p_BRV[:, 0, :1]), (0, R - 1))
    q_BRV = None if tree.q_BRV is None else tree.q_BRV.clone()
    for node in range(R - 1):
        here_B, row_B, x_B1 = parents_BN[:, node] > NO_NODE, (parents_BN[:, node] + 1).clamp(min=0), tokens_BN[:, node, None]
        w_B, p_BV = w_BR[b_B, row_B], p_BRV[b_B, row_B]
        from_BV = torch.zeros_like(p_BV).scatter_(1, x_B1, 1.0)
        if q_BRV is not None and tree.drawn_BN is not None:
            q_BV, drawn_B1 = q_BRV[b_B, row_B], tree.drawn_BN[:, node, None]
            from_BV = torch.where(drawn_B1, q_BV, from_BV)
            q_BRV[b_B, row_B] = torch.where(drawn_B1, _without(q_BV, x_B1), q_BV)
        w_BR[:, node + 1] = torch.where(here_B, (w_B * (p_BV.gather(1, x_B1) / from_BV.gather(1, x_B1))[:, 0]).clamp(max=1.0), 0.0)
        left_BV = (w_B[:, None] * p_BV - from_BV).clamp_(min=0)
        s_B = left_BV.sum(-1)
        room_B, some_B1 = s_B + (1 - w_B), (here_B & (s_B > 0))[:, None]  # in this order: exactly s where w = 1
        w_BR[b_B, row_B] = torch.where(here_B, torch.where(room_B > 0, s_B / room_B, 1.0), w_B)
        p_BRV[b_B, row_B] = torch.where(some_B1, left_BV / s_B[:, None], p_BV)
    flips = [rng.flip(w_BR[:, row], VERIFYING + row) for row in range(1, R)]
    passes_BR = torch.stack([torch.ones_like(b_B, dtype=torch.bool), *flips], 1)
    ends_BR = (tree.rows() & passes_BR[..., None]).any(1)  # whether the path may end in this row or below it
    row_B = torch.zeros_like(b_B)
    for _ in range(tree.depth):
        next_BN = (parents_BN == row_B[:, None] - 1) & ends_BR[:, 1:]
        row_B = torch.where(next_BN.any(1), next_BN.int().argmax(1) + 1, row_B)
    depths_BR = F.pad(tree.depths_BN, (1, 0))
    rows_BA = _by_depth(tree.rows()[b_B, row_B], depths_BR, tree.depth)
    return Acceptance(rows_BA, depths_BR[b_B, row_B], rng.draws(p_BRV[b_B, row_B][:, None], VERIFYING)[:, 0, 0])


def traversal_alone(tree: Tree, p_1RV: Tensor, rng: CounterRNG) -> tuple[list[int], int]:
    """``traversal`` for one sequence: the same decisions, made on the host and only as far as they are needed. Returns what
    ``choose_alone`` returns.
    """
    tokens, children = tree.tokens_BN[0].tolist(), [list[int]() for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents_BN[0].tolist()):
        children[parent + 1].append(node)
    drawn = [False] * len(tree) if tree.drawn_BN is None else tree.drawn_BN[0].tolist()

    def end(row: int, w: float) -> tuple[list[int], Tensor] | None:
        """The path from ``row`` to the first row that passes in its subtree, and the distribution of the token after it."""
        p_V, q_V = p_1RV[0, row], None if tree.q_BRV is None else tree.q_BRV[0, row]
        for node in children[row]:
            x, from_V = tokens[node], q_V if drawn[node] else None
            mine = w * float(p_V[x]) / (1.0 if from_V is None else float(from_V[x]))
            if mine > 0 and (found := end(node + 1, min(mine, 1.0))) is not None:
                return [row, *found[0]], found[1]
            left_V = (w * p_V).index_fill_(0, tree.tokens_BN[0, node], 0.0) if from_V is None else (w * p_V - from_V).clamp_(min=0)
            s = float(left_V.sum())
            room = s + (1 - w)
            w, p_V = s / room if room > 0 else 1.0, left_V / s if s > 0 else p_V
            if from_V is not None and node != children[row][-1]:
                q_V = _without(from_V[None], tree.tokens_BN[:, node, None])[0]
        return ([row], p_V) if row == 0 or rng.flip_alone(w, VERIFYING + row) else None

    found = end(0, 1.0)
    assert found is not None  # the root row always passes
    return found[0], int(rng.draws(found[1][None, None], VERIFYING))


def _without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """The distribution of the next child that is drawn without replacement after ``x``."""
    q_BV = q_BV.scatter(1, x_B1, 0.0)
    total_B1 = q_BV.sum(-1, keepdim=True)
    return q_BV / torch.where(total_B1 > 0, total_B1, 1.0)


def greedy_alone(tree: Tree, choice_R: list[int]) -> tuple[list[int], int]:
    """``greedy`` for one sequence, on the host. Children stand after their parents, so one look at each node is enough."""
    path = [0]
    for node, (token, parent) in enumerate(zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True)):
        if parent == path[-1] - 1 and token == choice_R[path[-1]]:
            path.append(node + 1)
    return path, choice_R[path[-1]]


def _residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    left_BV = (p_BV - q_BV).clamp_(min=0)
    total_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, left_BV / total_B1, p_BV)  # total 0: p equals q, and only rounding rejected


@dataclass(frozen=True)
class Rule:
    """A rule for temperature > 0, and how the children that it verifies are drawn (see ``growth.draw_children``)."""

    verify: Callable[[Tree, Tensor, CounterRNG, bool], Acceptance]
    draw: str = "top_plus_one"  # or "with_replacement", "without_replacement"
    chain_only: bool = False


RULES = {  # the rule "auto" stands for one of these, by the shape of the tree: see ``rule_of``
    "token": Rule(multi_round, chain_only=True),
    "block": Rule(traversal, chain_only=True),
    "multi_round": Rule(multi_round, "with_replacement"),
    "without_replacement": Rule(without_replacement, "without_replacement"),
    "traversal": Rule(traversal, "without_replacement"),
    "top_plus_one": Rule(multi_round),
}


def rule_of(rule: str, shape: Tree | TreePolicy) -> str:
    """The rule itself; for "auto" the best one: ``block`` for a chain, ``traversal`` for a tree whose shape was fixed beforehand,
    ``top_plus_one`` for one whose nodes are selected by value, ``without_replacement`` for any other.

    Called with the policy when children are drawn, and with the tree when they are verified. The two answers may differ (a lookup's tree
    may be a chain under any policy), but verification stays exact: where every row has at most one drawn child, the rules assume the same
    way of drawing it, and ``without_replacement`` can verify what was drawn for ``traversal`` (a planned tree to which guesses were added).
    """
    if rule != "auto":
        return rule
    if shape.is_chain:
        return "block"
    return "top_plus_one" if shape.by_value else "traversal" if shape.planned else "without_replacement"


def _check_chain(rule: str, tree: Tree) -> None:
    if RULES[rule].chain_only and tree.depth != len(tree):
        raise UserError(f"the {rule} rule verifies chains: use policy kind 'chain', or the rule auto for trees")


def choose(
    logits_BRV: Tensor, tree: Tree, warp: LogitsWarper, rule: str, rng: CounterRNG, seen_BRV: Tensor | None = None, hasty: bool = False
) -> Acceptance:
    """Verify every sequence's tree from the target's logits. ``seen_BRV``: the tokens to penalize, from ``seen_rows``. Raises UserError
    where the rule verifies chains only and the trees are none.
    """
    if not warp.sampled:
        return greedy(tree, warp.scores(logits_BRV, seen_BRV).argmax(-1) if warp.penalty else logits_BRV.argmax(-1))
    _check_chain(rule, tree)
    return RULES[rule].verify(tree, warp.target(logits_BRV, seen_BRV), rng, hasty)


def choose_alone(
    logits_1RV: Tensor, tree: Tree, warp: LogitsWarper, rule: str, rng: CounterRNG, seen_1RV: Tensor | None = None
) -> tuple[list[int], int]:
    """``choose`` for one sequence, on the host. Returns the rows of the accepted path, the root row first, and the target's own token after
    it. Raises what ``choose`` raises.
    """
    if not warp.sampled:
        choice_1R = warp.scores(logits_1RV, seen_1RV).argmax(-1)  # in fp32: torch's argmax in half precision takes four times as long
        return greedy_alone(tree, choice_1R[0].tolist())
    p_1RV = warp.target(logits_1RV, seen_1RV)
    if not len(tree):
        return [0], int(rng.draws(p_1RV[:, :1], VERIFYING))
    _check_chain(rule, tree)
    if RULES[rule].verify is traversal:
        return traversal_alone(tree, p_1RV, rng)
    verdict = RULES[rule].verify(tree, p_1RV, rng, True)
    return verdict.rows_BA[0, : int(verdict.count_B) + 1].tolist(), int(verdict.token_B)


def seen_rows(seen_BV: Tensor, root_B: Tensor, tree: Tree) -> Tensor:
    """Which tokens the text up to each row contains, bool [B, R, V]: those of ``seen_BV``, of the root row and of the row's path."""
    rows_BRR = tree.rows()
    tokens_BR = torch.cat([root_B[:, None], tree.tokens_BN], 1)
    # int16: int8 would overflow where a path repeats a token more than 127 times
    here_BRV = torch.zeros(*rows_BRR.shape[:2], seen_BV.shape[1], dtype=torch.int16, device=seen_BV.device)
    here_BRV.scatter_add_(2, tokens_BR[:, None].expand_as(rows_BRR), rows_BRR.to(torch.int16))
    return (here_BRV > 0) | seen_BV[:, None]
