"""Verification: which guesses the target accepts, and its own token after them.

At temperature 0 the longest path that equals the target's choices. Above it, rules under which the emitted tokens
are distributed exactly as the target's own (METHODS section 4). ``p_RV`` is always the target's distribution after
temperature, top-k and top-p; ``tree.q_RV`` is what the drawn children were drawn from.

Shape suffixes: N nodes, R = N + 1 rows, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.errors import UserError
from inference.tree import Tree, Verdict


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; above it ``rule`` (a key of RULES) verifies. top_k 0 and top_p 1: off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str = "top_plus_one"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            found = f"{self.temperature}, {self.top_k}, {self.top_p}"
            raise UserError(f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, found {found}")
        if self.rule not in RULES:
            raise UserError(f"there is no verification rule {self.rule!r}: choose one of {', '.join(RULES)}")


class Chance:
    """The only source of randomness in decoding. What is certain consumes none."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator or torch.Generator().manual_seed(0)

    def flip(self, p: float) -> bool:
        """True with probability p."""
        if p <= 0 or p >= 1:
            return p >= 1
        return torch.rand((), generator=self.generator, dtype=torch.float64, device=self.generator.device).item() < p

    def draw(self, probs_V: Tensor) -> int:
        """One token; ``probs_V`` need not sum to 1."""
        return int(self.draws(probs_V[None]))

    def draws(self, probs_RV: Tensor, count: int = 1) -> Tensor:
        """``count`` independent tokens from each row, int64 [R, count]. A row of zeros gives a token without meaning.

        The inverse of the cumulative sum, in fp64 so that no token of a large vocabulary is lost to rounding.
        """
        cdf_RV = probs_RV.cumsum(-1, dtype=torch.float64)
        open_R = (probs_RV > 0).sum(-1) > 1
        u = cdf_RV.new_zeros(probs_RV.shape[0], count)
        if bool(open_R.any()):
            shape = (int(open_R.sum()), count)
            u[open_R] = torch.rand(shape, generator=self.generator, dtype=torch.float64, device=self.generator.device).to(u.device)
        at = torch.searchsorted(cdf_RV, u * cdf_RV[:, -1:], right=True)  # right: never a token of probability 0
        return at.clamp_(max=probs_RV.shape[-1] - 1)


def warp(logits_RV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p: transformers' order and conventions.

    Ties with the k-th logit are kept; top-p drops the least likely tokens whose joint mass is at most 1 - top_p,
    never the likeliest. Computed in fp32 (fp64 if given). ``top_k=0`` and ``top_p=1`` mean off.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: 0 is greedy and has no distribution")
    x = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature
    if 0 < top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ascending, order = x.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[..., -1] = False
        x = x.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
    return x.softmax(-1)


def greedy(tree: Tree, choice_R: Tensor) -> Verdict:
    """Temperature 0: the deepest node whose path equals the target's choice (argmax) at every row."""
    right_R = F.pad(tree.tokens_N == choice_R[tree.parents_N + 1], (1, 0), value=True)
    reached_R = (right_R | ~tree.rows()).all(-1)
    leaf = (reached_R * F.pad(tree.depths_N, (1, 0))).argmax()
    return Verdict(tree.rows()[leaf, 1:].nonzero()[:, 0], int(choice_R[leaf]))


def multi_round(tree: Tree, p_RV: Tensor, chance: Chance) -> Verdict:
    """Walk down from the root row; at each row its drawn children are tried in turn, then one token is drawn.

    A drawn child x is accepted with min(1, p(x)/q(x)), else p becomes the normalised max(p - q, 0): SpecInfer's
    multi-round sampling (2305.09781, algorithm 2) for children drawn independently from q. The last token is drawn
    from what is left of p; if a deterministic child has it, the walk goes on there (2502.18779).

    With one drawn child a row this is also ``token`` (2211.17192) on a chain and ``top_plus_one`` on a tree:
    there q has no mass on the deterministic children, so the residual keeps all of p on them.
    """
    return _walk(tree, p_RV, chance, lambda q_V, token: q_V)


def without_replacement(tree: Tree, p_RV: Tensor, chance: Chance) -> Verdict:
    """As ``multi_round``, for children drawn one after the other without replacement (RSD 2402.14160, Sequoia 2402.12374)."""

    def remaining(q_V: Tensor, token: int) -> Tensor:
        q_V = q_V.clone()
        q_V[token] = 0
        return q_V / q_V.sum()

    return _walk(tree, p_RV, chance, remaining)


def _walk(tree: Tree, p_RV: Tensor, chance: Chance, next_q: Callable[[Tensor, int], Tensor]) -> Verdict:
    tokens = tree.tokens_N.tolist()
    drawn = [False] * len(tree) if tree.drawn_N is None else tree.drawn_N.tolist()
    path: list[int] = []
    row = 0
    while True:
        children, p_V, accepted = tree.children(row), p_RV[row], None
        q_V = None if tree.q_RV is None else tree.q_RV[row]
        for child in children:
            if q_V is None or not drawn[child]:
                continue
            x = tokens[child]
            if chance.flip(_ratio(p_V[x], q_V[x])):
                accepted = child
                break
            p_V, q_V = _residual(p_V, q_V), next_q(q_V, x)
        if accepted is None:
            token = chance.draw(p_V)
            accepted = next((c for c in children if not drawn[c] and tokens[c] == token), None)
        if accepted is None:
            return Verdict(torch.tensor(path, dtype=torch.int64, device=tree.tokens_N.device), token)
        path.append(accepted)
        row = accepted + 1


def block(tree: Tree, p_RV: Tensor, chance: Chance) -> Verdict:
    """Block verification of one chain (2403.10444, algorithm 2): accepts the longest of all prefixes that pass.

    w_i = min(1, w_{i-1} p(x_i)/q(x_i)) and s_i = sum max(w_i p - q, 0) at row i; prefix i < n passes with probability
    s_i / (s_i + 1 - w_i), the whole chain with w_n; the token after it comes from the normalised max(w_i p - q, 0).
    """
    n, device = len(tree), tree.tokens_N.device
    if not torch.equal(tree.parents_N, torch.arange(-1, n - 1, device=device)):
        raise UserError("the block rule verifies chains: use policy kind 'chain', or the rule top_plus_one for trees")
    point_NV = F.one_hot(tree.tokens_N, p_RV.shape[-1]).to(p_RV.dtype)
    q_NV = point_NV if tree.q_RV is None else torch.where(tree.drawn_N[:, None], tree.q_RV[:-1], point_NV)  # type: ignore[index]
    at = tree.tokens_N[:, None]
    w = [1.0]
    for p, q in zip(p_RV[:-1].gather(1, at)[:, 0].tolist(), q_NV.gather(1, at)[:, 0].tolist(), strict=True):
        w.append(1.0 if w[-1] * p >= q else w[-1] * p / q)
    w_N1 = torch.tensor(w[:-1], dtype=p_RV.dtype, device=device)[:, None]
    left_NV = (w_N1 * p_RV[:-1] - q_NV).clamp_(min=0)
    s = left_NV.sum(-1).tolist()
    passes = [s_i / (s_i + 1 - w_i) if s_i + 1 - w_i > 0 else 1.0 for s_i, w_i in zip(s, w[:-1], strict=True)] + [w[-1]]
    i = n  # the flips are independent, so the longest one that passes is found from the end
    while i > 0 and not chance.flip(passes[i]):
        i -= 1
    own_V = p_RV[i] if i == n or s[i] == 0 else left_NV[i]  # s = 0 here: see _residual
    return Verdict(torch.arange(i, device=device), chance.draw(own_V))


def _ratio(p: Tensor, q: Tensor) -> float:
    a, b = float(p), float(q)
    return 1.0 if a >= b else a / b


def _residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    left_V = (p_V - q_V).clamp_(min=0)
    total = left_V.sum()
    return left_V / total if total > 0 else p_V  # p <= q everywhere: they are equal, and only rounding rejects


@dataclass(frozen=True)
class Rule:
    """A rule for temperature > 0 and how the children it verifies are drawn (see ``propose.draw_children``)."""

    verify: Callable[[Tree, Tensor, Chance], Verdict]
    draw: str = "top_plus_one"  # or "with_replacement", "without_replacement"
    chain_only: bool = False


RULES = {
    "token": Rule(multi_round, chain_only=True),
    "block": Rule(block, chain_only=True),
    "multi_round": Rule(multi_round, "with_replacement"),
    "without_replacement": Rule(without_replacement, "without_replacement"),
    "top_plus_one": Rule(multi_round),
}
