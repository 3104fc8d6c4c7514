"""What a drafter's guesses are worth by one teacher-forced pass over a text, without decoding.

Shape suffixes: N roots, K depths, T positions, B = 1, H draft width, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.base import Drafter, Roots
from headstart.heads.unroll import unroll
from headstart.inference.decoding.sampling import SamplingParams, LogitsWarper
from headstart.inference.decoding.target import Target
from headstart.inference.reports.walk import Walk, walk


@torch.no_grad()
def guesses_over(
    target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], depth: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """One teacher-forced pass over prompt and continuation. For depths 1, 2, ..: the draft logits over the target's vocabulary [N, V] of
    the N roots from the prompt's last token on that have a token to guess, these tokens [N], and the target's states that chose them.
    """
    tokens_BT = torch.tensor([[*prompt, *said]], device=target.device)
    T, first = tokens_BT.shape[1], len(prompt) - 1
    positions_BT = torch.arange(T, device=target.device)[None]
    states, final_BTD = target.read(tokens_BT, positions_BT, drafter.taps)
    roots = Roots(tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1)), states, positions_BT)
    for d, draft in enumerate(unroll(drafter, roots, None, depth), start=1):
        if first + 1 + d >= T:
            return
        unembedding = drafter.unembedding(d)
        logits_NV = unembedding.logits(draft.hidden_BNH[0, first : T - 1 - d]).float()
        yield unembedding.to_target(logits_NV, target.shape.vocab_size), tokens_BT[0, first + 1 + d :], final_BTD[0, first + d : T - 1]


@torch.no_grad()
def expected_walk(target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], depth: int, sampling: SamplingParams) -> Walk:
    """The walk of a chain over the target's own continuation ``said``, from one teacher-forced pass."""
    first, T = len(prompt) - 1, len(prompt) + len(said)
    accept_KT = torch.zeros(depth, T, dtype=torch.float64)
    for d, (q_NV, x_N, final_ND) in enumerate(guesses_over(target, drafter, prompt, said, depth)):
        accept_KT[d, first : first + len(x_N)] = accept_probability(q_NV, target.logits(final_ND), x_N, sampling).double().cpu()
    return walk(accept_KT, first, T)


def accept_probability(q_NV: Tensor, p_NV: Tensor, x_N: Tensor, sampling: SamplingParams) -> Tensor:
    """From draft and target logits: whether, or how probably, emitted token x was an accepted guess."""
    if sampling.temperature == 0:
        return (q_NV.argmax(-1) == x_N).float()
    warp = LogitsWarper.of([sampling], x_N.device)
    q, p = (y[0].gather(-1, x_N[:, None])[:, 0] for y in (warp.drafter(q_NV[None]), warp.target(p_NV[None])))
    return (q / p.clamp_min(1e-30)).clamp_max(1.0)
