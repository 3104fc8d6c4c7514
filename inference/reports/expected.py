"""The accepted length to be expected of a drafter's guesses, from one teacher-forced pass over a text, without decoding.

Shape suffixes: N roots, K depths, T positions, B = 1, H draft width, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.unroll import unroll
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.verify import rule_of
from headstart.inference.reports.recorded import Recorded
from headstart.inference.reports.walk import Walk, walk


@torch.no_grad()
def guesses_of(drafter: Drafter, recorded: Recorded, depth: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each depth 1, 2, ...: the draft logits over the target's vocabulary [N, V], the tokens to guess [N], and the target's final
    states that predict these tokens [N, D]. The N roots begin at the prompt's last token and have a token to guess at this depth.
    """
    tokens_BT = torch.tensor([recorded.text], device=recorded.device)
    T, first = tokens_BT.shape[1], len(recorded.prompt) - 1
    roots = Roots(tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1)), recorded.states, torch.arange(T, device=recorded.device)[None])
    for d, draft in enumerate(unroll(drafter, roots, None, depth), start=1):
        if first + 1 + d >= T:
            return
        unembedding = drafter.unembedding(d)
        logits_NV = unembedding.logits(draft.hidden_BNH[0, first : T - 1 - d]).float()
        yield (
            unembedding.to_target(logits_NV, recorded.shape.vocab_size),
            tokens_BT[0, first + 1 + d :],
            recorded.final_1TD[0, first + d : T - 1],
        )


@torch.no_grad()
def greedy_walk(drafter: Drafter, recorded: Recorded, depth: int) -> Walk:
    """The walk of a chain at temperature 0 over a recorded prompt and continuation."""
    first, T = len(recorded.prompt) - 1, len(recorded.text)
    accept_KT = torch.zeros(depth, T, dtype=torch.float64)
    for d, (q_NV, x_N, _) in enumerate(guesses_of(drafter, recorded, depth)):
        accept_KT[d, first : first + len(x_N)] = (q_NV.argmax(-1) == x_N).cpu()
    return walk(accept_KT, first, T)


@torch.no_grad()
def expected_walk(
    target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], depth: int, sampling: SamplingParams
) -> Walk:
    """The walk of a chain over the target's own continuation ``said``, from one teacher-forced pass.

    Under the block rule (2403.10444; on a chain ``traversal`` is the same), p is scaled by w, the weight of the path so far: 1 at the root,
    and min(1, w p(x) / q(x)) after token x. Of the mass w p(x) on emitting x, min(q, w p)(x) comes from accepting the guess x, so the guess
    was accepted with probability min(1, q(x) / (w p(x))). Under the token rule w stays 1.
    """
    recorded = Recorded.by(target, drafter.taps, prompt, said)
    if sampling.temperature == 0:
        return greedy_walk(drafter, recorded, depth)
    first, T = len(prompt) - 1, len(prompt) + len(said)
    accept_KT, w_N = torch.zeros(depth, T, dtype=torch.float64), torch.ones(len(said), dtype=torch.float64)
    block = rule_of(sampling.rule, TreePolicy("chain", depth=depth)) in ("block", "traversal")
    for d, (q_NV, x_N, final_ND) in enumerate(guesses_of(drafter, recorded, depth)):
        ratio_N = chance_ratio(q_NV, target.logits(final_ND), x_N, sampling).double().cpu()
        accept_KT[d, first : first + len(x_N)] = (ratio_N / w_N[: len(x_N)]).clamp_max(1.0)
        if block:
            w_N = (w_N[: len(x_N)] / ratio_N.clamp_min(1e-30)).clamp_max(1.0)
    return walk(accept_KT, first, T)


def chance_ratio(q_NV: Tensor, p_NV: Tensor, x_N: Tensor, sampling: SamplingParams) -> Tensor:
    """q(x) / p(x) [N] after filters, from draft and target logits: capped at 1, the token rule's probability that x was accepted."""
    warp = LogitsWarper.of([sampling], x_N.device)
    q, p = (y[0].gather(-1, x_N[:, None])[:, 0] for y in (warp.drafter(q_NV[None]), warp.target(p_NV[None])))
    return q / p.clamp_min(1e-30)
