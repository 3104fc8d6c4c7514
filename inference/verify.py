"""Verification: which guesses the target accepts, and its own token after them, for many sequences at once.

At temperature 0 the longest path that equals the target's choices. Above it, rules under which the emitted tokens
are distributed exactly as the target's own (METHODS section 4). ``p_BRV`` is always the target's distribution after
penalty, temperature and filters; ``tree.q_BRV`` is what the drawn children were drawn from. All of it is tensor
operations of fixed shape: nothing here waits for the device, unless ``hasty`` asks to stop where all walks have ended.

Shape suffixes: B sequences, N nodes, R = N + 1 rows, A = depth + 1 rows of a path, X rows of any kind, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.errors import UserError
from inference.tree import Tree, Verdict


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen: transformers' settings, in transformers' order (penalty, temperature, top_k,
    top_p, min_p). Temperature 0 is greedy; above it ``rule`` (a key of RULES) verifies. Off: top_k 0, top_p 1, min_p 0, penalty 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rule: str = "top_plus_one"
    seed: int = 0

    def __post_init__(self) -> None:
        wanted = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p < 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }
        for name, right in wanted.items():
            if not right:
                raise UserError(f"sampling: {name} must be {LIMITS[name]}, found {getattr(self, name)!r}")
        if self.rule not in RULES:
            raise UserError(f"there is no verification rule {self.rule!r}: choose one of {', '.join(RULES)}")


LIMITS = {
    "temperature": "at least 0 (0: greedy)",
    "top_k": "at least 0 (0: off)",
    "top_p": "above 0 and at most 1 (1: off)",
    "min_p": "at least 0 and below 1 (0: off)",
    "repetition_penalty": "above 0 (1: off)",
}


@dataclass
class Warp:
    """The sampling settings of B sequences side by side, and on the host which of them any sequence uses."""

    values: dict[str, Tensor]  # name -> [B]
    sampled: bool  # some sequence is above temperature 0
    greedy: bool  # some sequence is at temperature 0
    top_k: int  # at least the largest
    top_p: bool
    min_p: bool
    penalty: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Warp:
        return cls.over(columns([settings_of(s) for s in samplings], device), samplings)

    @classmethod
    def over(cls, values: dict[str, Tensor], samplings: Sequence[Sampling]) -> Warp:
        """``values`` hold the settings of ``samplings`` (and rows that nobody uses)."""
        used = [settings_of(s) for s in samplings]
        top_k = max(int(s["top_k"]) for s in used)
        return cls(
            values,
            sampled=any(s["temperature"] > 0 for s in used),
            greedy=any(s["temperature"] == 0 for s in used),
            top_k=1 << (top_k - 1).bit_length() if top_k else 0,  # rounded up: each is a device graph of its own
            top_p=any(s["top_p"] < 1 for s in used),
            min_p=any(s["min_p"] > 0 for s in used),
            penalty=any(s["repetition_penalty"] != 1 for s in used),
        )

    @property
    def temperature_B(self) -> Tensor:
        return self.values["temperature"]

    def scores(self, logits_BRV: Tensor, seen_BRV: Tensor | None) -> Tensor:
        """In fp32 (fp64 if given), tokens that were seen penalised: a positive logit divided, a negative one multiplied (1909.05858)."""
        x = logits_BRV.to(torch.promote_types(logits_BRV.dtype, torch.float32))
        if not self.penalty or seen_BRV is None:
            return x
        penalty_B11 = self.values["repetition_penalty"].to(x.dtype)[:, None, None]
        return torch.where(seen_BRV, torch.where(x < 0, x * penalty_B11, x / penalty_B11), x)

    def target(self, logits_BRV: Tensor, seen_BRV: Tensor | None = None) -> Tensor:
        """The target's distribution; where a sequence is greedy, all of it on the likeliest token."""
        x = self.scores(logits_BRV, seen_BRV)
        p_BRV = self._filtered(x)
        if not self.greedy:
            return p_BRV
        only_BRV = torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
        return torch.where((self.temperature_B > 0)[:, None, None], p_BRV, only_BRV)

    def drafter(self, logits_BXV: Tensor) -> Tensor:
        """The drafter's distribution under the same settings; where a sequence is greedy, as it is (guesses are then its best)."""
        return self._filtered(logits_BXV.to(torch.promote_types(logits_BXV.dtype, torch.float32)))

    def _filtered(self, x: Tensor) -> Tensor:
        """Probabilities after temperature, top_k, top_p and min_p: transformers' order and conventions.

        Ties with the k-th logit are kept; top-p drops the least likely tokens whose joint mass is at most 1 - top_p,
        never the likeliest; min-p those below min_p times the likeliest.
        """

        def value(name: str) -> Tensor:
            return self.values[name][:, None, None]

        temperature = value("temperature").to(x.dtype)
        x = (x - x.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)  # at most 0: nothing overflows upwards
        if self.top_k:
            best = x.topk(min(self.top_k, x.shape[-1])).values
            kth = best.gather(-1, (value("top_k").clamp(1, best.shape[-1]) - 1).expand(*x.shape[:-1], 1))
            x = x.masked_fill((x < kth) & (value("top_k") > 0), -torch.inf)
        if self.top_p:
            ascending, order = x.sort(dim=-1)
            drop = ascending.softmax(-1).cumsum(-1) <= (1 - value("top_p")).to(x.dtype)
            drop[..., -1:].fill_(False)
            x = x.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
        p = x.softmax(-1)
        if self.min_p:
            kept = p.masked_fill(p < value("min_p").to(p.dtype) * p.amax(-1, keepdim=True), 0.0)
            p = torch.where(value("min_p") > 0, kept / kept.sum(-1, keepdim=True), p)  # others stay as they are alone, to the bit
        return p


def settings_of(sampling: Sampling) -> dict[str, float]:
    """The numbers of a sampling; at temperature 0 the filters change nothing and are off."""
    warm = sampling.temperature > 0
    return {
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k if warm else 0,
        "top_p": float(sampling.top_p) if warm else 1.0,
        "min_p": float(sampling.min_p) if warm else 0.0,
        "repetition_penalty": float(sampling.repetition_penalty),
    }


def columns(used: Sequence[dict[str, float]], device: torch.device | str) -> dict[str, Tensor]:
    """A tensor for each setting; in fp64, so that 1 - top_p is what it is in Python."""
    return {k: torch.tensor([u[k] for u in used], dtype=torch.int64 if k == "top_k" else torch.float64, device=device) for k in used[0]}


class Chance:
    """The only source of randomness in decoding: a number for every (seed, position, slot), by hashing.

    So a sequence draws the same whatever it is batched with, on any device, and nothing waits for a generator. Within
    one round every use has a slot of its own; from round to round the position of the root differs.
    """

    def __init__(self, seeds_B: Tensor, positions_B: Tensor) -> None:
        self.seeds_B, self.positions_B = seeds_B, positions_B

    @cached_property
    def key_B(self) -> Tensor:  # at temperature 0 nobody asks for it
        return _mix(_mix(self.seeds_B) + self.positions_B)

    @classmethod
    def of(cls, seed: int = 0, position: int = 0, device: torch.device | str = "cpu") -> Chance:
        """For one sequence."""
        return cls(torch.tensor([seed], device=device), torch.tensor([position], device=device))

    def uniform(self, slot: int, *shape: int) -> Tensor:
        """[B, *shape] in [0, 1), fp64. 52 bits, so that u times a sum stays below the sum."""
        count = 1
        for size in shape:
            count *= size
        index = torch.arange(slot << 32, (slot << 32) + count, device=self.seeds_B.device)
        bits_BX = _shift(_mix(self.key_B[:, None] + _mix(index)), 12)
        return (bits_BX.double() * 2.0**-52).view(-1, *shape)

    def flip(self, p_B: Tensor, slot: int) -> Tensor:
        """True with probability p, bool [B]."""
        return self.uniform(slot) < p_B

    def draws(self, probs_BXV: Tensor, slot: int, count: int = 1) -> Tensor:
        """``count`` independent tokens from each row, int64 [B, X, count]; rows need not sum to 1. A row of zeros gives a token
        without meaning.

        The inverse of the cumulative sum, in fp64 so that no token of a large vocabulary is lost to rounding.
        """
        cdf_BXV = probs_BXV.cumsum(-1, dtype=torch.float64)
        u = self.uniform(slot, probs_BXV.shape[1], count) * cdf_BXV[..., -1:]
        at = torch.searchsorted(cdf_BXV, u, right=True)  # right: never a token of probability 0
        return at.clamp_(max=probs_BXV.shape[-1] - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 whose every output bit depends on every input bit (the finaliser of splitmix64, Steele et al. 2014)."""
    x = x + -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


VERIFYING = 1 << 20  # the first slot of verification; drafting uses those below
SLOTS = 1 << 10  # slots of one depth


def greedy(tree: Tree, choice_BR: Tensor) -> Verdict:
    """Temperature 0: the deepest node whose path equals the target's choice (argmax) at every row."""
    if not len(tree):
        none_B1 = torch.zeros_like(choice_BR)
        return Verdict(none_B1, none_B1[:, 0], choice_BR[:, 0])
    up_BN = (tree.parents_BN + 1).clamp(min=0)
    right_BN = (tree.tokens_BN == choice_BR.gather(1, up_BN)) & (tree.parents_BN >= -1)
    reached_BR = (F.pad(right_BN, (1, 0), value=True)[:, None] | ~tree.rows()).all(-1)
    depths_BR = F.pad(tree.depths_BN, (1, 0))
    count_B, leaf_B = (reached_BR * depths_BR).max(1)
    onto_BR = tree.rows()[torch.arange(len(leaf_B), device=leaf_B.device), leaf_B]  # the rows of the accepted path
    rows_BA = _by_depth(onto_BR, depths_BR, tree.depth)
    return Verdict(rows_BA, count_B, choice_BR.gather(1, leaf_B[:, None])[:, 0])


def _by_depth(onto_BR: Tensor, depths_BR: Tensor, depth: int) -> Tensor:
    """The rows of a path in their order, [B, depth + 1]; 0 behind its end."""
    B, R = onto_BR.shape
    row_BR = torch.arange(R, device=onto_BR.device).expand(B, R)
    place_BR = torch.where(onto_BR, depths_BR, depth + 1)  # a place more for the rows that are not on the path
    return row_BR.new_zeros(B, depth + 2).scatter_(1, place_BR, row_BR)[:, : depth + 1]


def multi_round(tree: Tree, p_BRV: Tensor, chance: Chance, hasty: bool = False) -> Verdict:
    """Walk down from the root row; at each row its drawn children are tried in turn, then one token is drawn.

    A drawn child x is accepted with min(1, p(x)/q(x)), else p becomes the normalised max(p - q, 0): SpecInfer's
    multi-round sampling (2305.09781, algorithm 2) for children drawn independently from q. The last token is drawn
    from what is left of p; if a deterministic child has it, the walk goes on there (2502.18779).

    With one drawn child a row this is also ``token`` (2211.17192) on a chain and ``top_plus_one`` on a tree:
    there q has no mass on the deterministic children, so the residual keeps all of p on them.
    """
    return _walk(tree, p_BRV, chance, hasty, lambda q_BV, token_B: q_BV)


def without_replacement(tree: Tree, p_BRV: Tensor, chance: Chance, hasty: bool = False) -> Verdict:
    """As ``multi_round``, for children drawn one after the other without replacement (RSD 2402.14160, Sequoia 2402.12374)."""

    def remaining(q_BV: Tensor, token_B: Tensor) -> Tensor:
        q_BV = q_BV.scatter(1, token_B[:, None], 0.0)
        total_B1 = q_BV.sum(-1, keepdim=True)
        return q_BV / torch.where(total_B1 > 0, total_B1, 1.0)

    return _walk(tree, p_BRV, chance, hasty, remaining)


def _walk(tree: Tree, p_BRV: Tensor, chance: Chance, hasty: bool, next_q: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
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
                yes_B = chance.flip(torch.where(open_B, p_BV[b_B, x_B] / q_BV[b_B, x_B], 0.0), slot + k)
                next_B, refused_B1 = torch.where(yes_B, node_B, next_B), (open_B & ~yes_B)[:, None]
                p_BV = torch.where(refused_B1, _residual(p_BV, q_BV), p_BV)
                if k < tree.draws:
                    q_BV = torch.where(refused_B1, next_q(q_BV, x_B), q_BV)
        draws_B = going_B & (next_B < 0)
        drawn_B = chance.draws(torch.where(draws_B[:, None], p_BV, 0.0)[:, None], slot)[:, 0, 0]
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
    return Verdict(rows_BA, count_B, token_B)


def block(tree: Tree, p_BRV: Tensor, chance: Chance, hasty: bool = False) -> Verdict:
    """Block verification of chains (2403.10444, algorithm 2): accepts the longest of all prefixes that pass.

    w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and s_i = sum max(w_i p - q, 0) at row i; prefix i < n passes with probability
    s_i / (s_i + 1 - w_i), the whole chain with w_n; the token after it comes from the normalised max(w_i p - q, 0).
    """
    B, R, V = p_BRV.shape
    N, device = R - 1, p_BRV.device
    if tree.depth != N:
        raise UserError("the block rule verifies chains: use policy kind 'chain', or the rule top_plus_one for trees")
    node_N = torch.arange(N, device=device)
    here_BN = tree.parents_BN == node_N - 1
    n_B = here_BN.sum(1)  # nodes of each chain: places without a node stand behind them
    point_BNV = p_BRV.new_zeros(B, N, V).scatter_(2, tree.tokens_BN[..., None], 1.0)
    q_BNV = point_BNV if tree.q_BRV is None else torch.where(tree.drawn_BN[..., None], tree.q_BRV[:, :-1], point_BNV)  # type: ignore[index]
    at_BN1 = tree.tokens_BN[..., None]
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
        passed_B = chance.flip(torch.where(closed_B, 0.0, passes_BR[:, i]), VERIFYING + i)
        count_B, closed_B = torch.where(passed_B, i, count_B), closed_B | passed_B
    b_B, i_B = torch.arange(B, device=device), count_B.clamp(max=max(N - 1, 0))
    own_BV = p_BRV[b_B, count_B]
    if N:
        rest_B = (count_B < n_B) & (s_BN[b_B, i_B] > 0)  # s = 0 here: see _residual
        own_BV = torch.where(rest_B[:, None], left_BNV[b_B, i_B], own_BV)
    rows_BA = torch.where(row_R <= count_B[:, None], row_R, 0)[:, : tree.depth + 1]
    return Verdict(rows_BA, count_B, chance.draws(own_BV[:, None], VERIFYING)[:, 0, 0])


def _residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    left_BV = (p_BV - q_BV).clamp_(min=0)
    total_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, left_BV / total_B1, p_BV)  # p <= q everywhere: they are equal, and only rounding rejects


@dataclass(frozen=True)
class Rule:
    """A rule for temperature > 0 and how the children it verifies are drawn (see ``propose.draw_children``)."""

    verify: Callable[[Tree, Tensor, Chance, bool], Verdict]
    draw: str = "top_plus_one"  # or "with_replacement", "without_replacement"
    chain_only: bool = False


RULES = {
    "token": Rule(multi_round, chain_only=True),
    "block": Rule(block, chain_only=True),
    "multi_round": Rule(multi_round, "with_replacement"),
    "without_replacement": Rule(without_replacement, "without_replacement"),
    "top_plus_one": Rule(multi_round),
}


def choose(
    logits_BRV: Tensor, tree: Tree, warp: Warp, rule: str, chance: Chance, seen_BRV: Tensor | None = None, hasty: bool = False
) -> Verdict:
    """The verdict over every sequence's tree from the target's logits; ``seen_BRV`` as ``seen_rows`` gives it, for the penalty."""
    if not warp.sampled:
        return greedy(tree, warp.scores(logits_BRV, seen_BRV).argmax(-1) if warp.penalty else logits_BRV.argmax(-1))
    return RULES[rule].verify(tree, warp.target(logits_BRV, seen_BRV), chance, hasty)


def seen_rows(seen_BV: Tensor, root_B: Tensor, tree: Tree) -> Tensor:
    """Which tokens stand before each row's own next one: those of the sequence, the root row's, those of its path. bool [B, R, V]."""
    rows_BRR = tree.rows()
    tokens_BR = torch.cat([root_B[:, None], tree.tokens_BN], 1)
    here_BRV = torch.zeros(*rows_BRR.shape[:2], seen_BV.shape[1], dtype=torch.int8, device=seen_BV.device)
    here_BRV.scatter_add_(2, tokens_BR[:, None].expand_as(rows_BRR), rows_BRR.to(torch.int8))
    return (here_BRV > 0) | seen_BV[:, None]
