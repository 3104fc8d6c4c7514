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
from headstart.inference.decoding.tree import Acceptance, Tree

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

    A drawn child x is accepted with probability min(1, p(x)/q(x)); otherwise p becomes the normalised max(p - q, 0). This is
    SpecInfer's multi-round sampling (2305.09781, algorithm 2), for children drawn independently from q. The token is drawn from
    what is left of p; if a deterministic child holds that token, the walk goes on there (2502.18779), else it ends.

    With one drawn child a row this is also the rule ``token`` (2211.17192) on a chain and ``top_plus_one`` on a tree: there q has
    no mass on the deterministic children, so the residual keeps all of p on them.
    """
    return _walk(tree, p_BRV, rng, hasty, lambda q_BV, token_B: q_BV)


def without_replacement(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool = False) -> Acceptance:
    """As ``multi_round``, for children drawn one after the other without replacement (RSD 2402.14160, Sequoia 2402.12374)."""

    def remaining(q_BV: Tensor, token_B: Tensor) -> Tensor:
        q_BV = q_BV.scatter(1, token_B[:, None], 0.0)
        total_B1 = q_BV.sum(-1, keepdim=True)
        return q_BV / torch.where(total_B1 > 0, total_B1, 1.0)

    return _walk(tree, p_BRV, rng, hasty, remaining)


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
        if depth == tree.depth:
            token_B = torch.where(draws_B, drawn_B, token_B)
            break
        found_BN = child_BN & (tree.tokens_BN == drawn_B[:, None])
        if tree.drawn_BN is not None:
            found_BN = found_BN & ~tree.drawn_BN
        found_B = draws_B & found_BN.any(1)
        next_B = torch.where(found_B, found_BN.int().argmax(1), next_B)
        token_B = torch.where(draws_B & ~found_B, drawn_B, token_B)
        going_B = going_B & (next_B >= 0)
        row_B = torch.where(going_B, next_B + 1, 0)
        rows_BA[:, depth + 1] = row_B
        count_B = count_B + going_B
        if hasty and not bool(going_B.any()):
            break
    return Acceptance(rows_BA, count_B, token_B)


def block(tree: Tree, p_BRV: Tensor, rng: CounterRNG, hasty: bool = False) -> Acceptance:
    """Block verification of chains (2403.10444, algorithm 2): accept the longest of all prefixes that pass.

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and s_i = sum max(w_i p - q, 0) at row i. The prefix of i < n tokens passes with
    probability s_i / (s_i + 1 - w_i), the whole chain with w_n. The token after an accepted prefix i is drawn from the normalised
    max(w_i p - q, 0), or from p after the whole chain. Raises UserError for a tree that is no chain.
    """
    B, R, V = p_BRV.shape
    N, device = R - 1, p_BRV.device
    if tree.depth != N:
        raise UserError("the block rule verifies chains: use policy kind 'chain', or the rule top_plus_one for trees")
    node_N = torch.arange(N, device=device)
    here_BN = tree.parents_BN == node_N - 1
    n_B = here_BN.sum(1)  # nodes of each chain; its empty places stand after them
    q_BNV, at_BN1 = _drawn_from(tree, p_BRV), tree.tokens_BN[..., None]
    ratio_BN = torch.where(here_BN, (p_BRV[:, :-1].gather(2, at_BN1) / q_BNV.gather(2, at_BN1))[..., 0], 0.0)
    w = [torch.ones(B, dtype=p_BRV.dtype, device=device)]
    for i in range(N):
        w.append((w[-1] * ratio_BN[:, i]).clamp(max=1.0))
    w_BR = torch.stack(w, 1)
    left_BNV = (w_BR[:, :-1, None] * p_BRV[:, :-1] - q_BNV).clamp_(min=0)
    s_BN = left_BNV.sum(-1)
    room_BN = s_BN + 1 - w_BR[:, :-1]
    passes_BR = F.pad(torch.where(room_BN > 0, s_BN / room_BN, 1.0), (0, 1))
    row_R, whole_BR = torch.arange(R, device=device), torch.arange(R, device=device) == n_B[:, None]
    passes_BR = torch.where(whole_BR, w_BR, torch.where(row_R < n_B[:, None], passes_BR, 0.0))
    count_B, closed_B = torch.zeros_like(n_B), torch.zeros_like(n_B, dtype=torch.bool)
    for i in range(N, 0, -1):  # the flips are independent, so the longest one that passes is found from the end
        passed_B = rng.flip(torch.where(closed_B, 0.0, passes_BR[:, i]), VERIFYING + i)
        count_B, closed_B = torch.where(passed_B, i, count_B), closed_B | passed_B
    b_B, i_B = torch.arange(B, device=device), count_B.clamp(max=max(N - 1, 0))
    own_BV = p_BRV[b_B, count_B]
    if N:
        rest_B = (count_B < n_B) & (s_BN[b_B, i_B] > 0)  # where s = 0 the token comes from p: see _residual
        own_BV = torch.where(rest_B[:, None], left_BNV[b_B, i_B], own_BV)
    rows_BA = torch.where(row_R <= count_B[:, None], row_R, 0)[:, : tree.depth + 1]
    return Acceptance(rows_BA, count_B, rng.draws(own_BV[:, None], VERIFYING)[:, 0, 0])


def _drawn_from(tree: Tree, p_BRV: Tensor) -> Tensor:
    """The distribution that each guess of a chain was drawn from, [B, N, V]. A guess that was not drawn has a point mass on itself."""
    if tree.q_BRV is not None and tree.all_drawn:
        return tree.q_BRV[:, :-1]
    point_BNV = p_BRV.new_zeros(p_BRV.shape[0], len(tree), p_BRV.shape[2]).scatter_(2, tree.tokens_BN[..., None], 1.0)
    if tree.q_BRV is None or tree.drawn_BN is None:
        return point_BNV
    return torch.where(tree.drawn_BN[..., None], tree.q_BRV[:, :-1], point_BNV)


def block_alone(tree: Tree, p_1RV: Tensor, rng: CounterRNG) -> tuple[list[int], int]:
    """``block`` for one sequence: the same decisions, made on the host. Returns what ``choose_alone`` returns."""
    N = len(tree)
    if tree.depth != N:
        raise UserError("the block rule verifies chains: use policy kind 'chain', or the rule top_plus_one for trees")
    q_1NV, at_1N1, w = _drawn_from(tree, p_1RV), tree.tokens_BN[..., None], [1.0]
    for ratio in (p_1RV[:, :-1].gather(2, at_1N1) / q_1NV.gather(2, at_1N1)).flatten().tolist() if N else ():
        w.append(min(w[-1] * ratio, 1.0))
    left_NV = (p_1RV[0, :-1] * p_1RV.new_tensor(w[:-1])[:, None] - q_1NV[0]).clamp_(min=0)
    s = left_NV.sum(-1).tolist() if N else []
    passes = [x / (x + 1 - w[i]) if x + 1 - w[i] > 0 else 1.0 for i, x in enumerate(s)] + [w[N]]
    count = next((i for i in range(N, 0, -1) if rng.flip_alone(passes[i], VERIFYING + i)), 0)
    own_V = left_NV[count] if count < N and s[count] > 0 else p_1RV[0, count]
    return list(range(count + 1)), int(rng.draws(own_V[None, None], VERIFYING))


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
    "block": Rule(block, chain_only=True),
    "multi_round": Rule(multi_round, "with_replacement"),
    "without_replacement": Rule(without_replacement, "without_replacement"),
    "top_plus_one": Rule(multi_round),
}


def rule_of(rule: str, shape: Tree | TreePolicy) -> str:
    """The rule itself; for "auto" the best one: ``block`` for a chain, ``without_replacement`` for a tree whose shape is fixed beforehand,
    ``top_plus_one`` for one whose nodes are selected by value.

    Asked of the policy when children are drawn, and of the tree when they are verified. A tree may say less than its policy (a lookup's
    may be a chain under any), but never what is inexact: where a row has one drawn child at most, the three rules for trees are one.
    """
    return rule if rule != "auto" else "block" if shape.is_chain else "top_plus_one" if shape.by_value else "without_replacement"


def choose(
    logits_BRV: Tensor, tree: Tree, warp: LogitsWarper, rule: str, rng: CounterRNG, seen_BRV: Tensor | None = None, hasty: bool = False
) -> Acceptance:
    """Verify every sequence's tree from the target's logits. ``seen_BRV``: the tokens to penalise, from ``seen_rows``."""
    if not warp.sampled:
        return greedy(tree, warp.scores(logits_BRV, seen_BRV).argmax(-1) if warp.penalty else logits_BRV.argmax(-1))
    return RULES[rule].verify(tree, warp.target(logits_BRV, seen_BRV), rng, hasty)


def choose_alone(
    logits_1RV: Tensor, tree: Tree, warp: LogitsWarper, rule: str, rng: CounterRNG, seen_1RV: Tensor | None = None
) -> tuple[list[int], int]:
    """``choose`` for one sequence, on the host. Returns the accepted path's rows, the root row first, and the target's token after it."""
    if not warp.sampled:
        choice_1R = warp.scores(logits_1RV, seen_1RV).argmax(-1)  # in fp32: torch's argmax in half precision takes four times as long
        return greedy_alone(tree, choice_1R[0].tolist())
    p_1RV = warp.target(logits_1RV, seen_1RV)
    if not len(tree):
        return [0], int(rng.draws(p_1RV[:, :1], VERIFYING))
    if rule == "block":
        return block_alone(tree, p_1RV, rng)
    verdict = RULES[rule].verify(tree, p_1RV, rng, True)
    return verdict.rows_BA[0, : int(verdict.count_B) + 1].tolist(), int(verdict.token_B)


def seen_rows(seen_BV: Tensor, root_B: Tensor, tree: Tree) -> Tensor:
    """The tokens of the text before the one that follows each row, bool [B, R, V]: the sequence's, the root row's and those of its path."""
    rows_BRR = tree.rows()
    tokens_BR = torch.cat([root_B[:, None], tree.tokens_BN], 1)
    here_BRV = torch.zeros(*rows_BRR.shape[:2], seen_BV.shape[1], dtype=torch.int8, device=seen_BV.device)
    here_BRV.scatter_add_(2, tokens_BR[:, None].expand_as(rows_BRR), rows_BRR.to(torch.int8))
    return (here_BRV > 0) | seen_BV[:, None]
