"""The drafter's probabilities of its guesses, from one teacher-forced pass over the decoded text; decoding does not record them.

For the same tokens, training's logits equal decoding's, so the pass gives the probability of every guess whose ancestors were all
accepted. Below a guess that was not accepted the text has other tokens, so the guesses there have no known probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from headstart.heads.base import Drafter
from headstart.inference.decoding.target import Target
from headstart.inference.reports.expected import guesses_of
from headstart.inference.reports.recorded import Recorded
from headstart.inference.reports.report import Round

DIGITS = 3
ROWS = 64  # positions whose logits are computed at a time


@torch.no_grad()
def confidences(
    target: Target, drafter: Drafter, prompt: Sequence[int], said: Sequence[int], rounds: Sequence[Round]
) -> list[list[float | None]]:
    """For each round the drafter's probability of each guess, at temperature 1 without filters; None where it is not known.

    ``said``: the tokens of the text; the first of them belongs to no round.
    """
    found: list[list[float | None]] = [[None] * len(r.guesses) for r in rounds]
    asked, root = defaultdict[int, list[tuple[int, int, int, int]]](list), 0  # depth -> root, guess, round, node
    for i, r in enumerate(rounds):
        depth_below = {-1: 1} | {node: d for d, node in enumerate(r.accepted, start=2)}
        for node, (token, parent) in enumerate(zip(r.guesses, r.parents, strict=True)):
            if (depth := depth_below.get(parent)) is not None and root + depth < len(said):
                asked[depth].append((root, token, i, node))
        root += len(r.tokens)
    recorded = Recorded.by(target, drafter.taps, prompt, said)
    for depth, (q_NV, _, _) in enumerate(guesses_of(drafter, recorded, max(asked, default=0)), start=1):
        if not (some := asked[depth]):
            continue
        roots, tokens, *_ = zip(*some, strict=True)
        log_q_nV = q_NV[list(roots)].log_softmax(-1)
        q_n = log_q_nV.gather(1, torch.tensor(tokens, device=q_NV.device)[:, None])[:, 0].exp().tolist()
        for (_, _, i, node), q in zip(some, q_n, strict=True):
            found[i][node] = round(q, DIGITS)
    return found


@torch.no_grad()
def probabilities(target: Target, prompt: Sequence[int], said: Sequence[int]) -> list[float]:
    """The target's probability of each token of ``said``, at temperature 1 without filters, from one pass; rounded to four digits."""
    tokens_T = torch.tensor([*prompt, *said], device=target.device)
    _, final_1TD = target.read(tokens_T[None], torch.arange(len(tokens_T), device=target.device)[None], ())
    found = []
    for final_TD, said_T in zip(final_1TD[0, len(prompt) - 1 : -1].split(ROWS), tokens_T[len(prompt) :].split(ROWS), strict=True):
        found += target.logits(final_TD).float().softmax(-1).gather(1, said_T[:, None])[:, 0].tolist()
    return [round(p, 4) for p in found]
