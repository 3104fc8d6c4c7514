"""Decides whether a text that differs from plain decoding's is the target's own output all the same.

In half precision the shape of a pass (how many rows it has, how they lie in memory) decides between nearly equal logits: two decoders of
the same target may part at such a tie, and then give different texts, both of them the target's own. So the position where a text first
differs from plain decoding's is computed again, in passes of several shapes. It is a tie if the gap between the logits of the two tokens
is at most as large as this gap varies between the passes, plus one rounding of a logit: logits are known no better than that. After the
first tie there is no plain text to compare with. There one pass over the whole text finds the tokens that are not the likeliest, and each
of them must be a tie too. In float32 nothing passes as a tie.

Shape suffixes: T tokens, N new ones, R rows of a pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.inference.decoding.context import Context
from headstart.inference.decoding.row import in_common
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target

WIDTHS = (1, 2, 4, 8, 16)  # rows of a pass that follow cached rows, as in plain decoding (1) and in verifying trees
EXACT = (torch.float32, torch.float64)


@torch.no_grad()
def differs(
    target: Target,
    prompt: Sequence[int],
    said: Sequence[int],
    others: Sequence[Sequence[int]],
    *,
    new_tokens: int | None = None,
    penalty: float = 1.0,
) -> dict[str, Any] | None:
    """Compare the texts ``others`` with ``said``, plain decoding's (greedy, under this repetition penalty, up to ``new_tokens``). Returns
    None if all are equal; else what is known of the first text that is not the target's own, or of the first that differs at a tie.

    ``token``: index of the token where the text first differs, or of the first one that is no tie. ``gap``: between the logits of this
    token and the other one; ``tolerance``: how far the gap varies between passes, plus one rounding. ``tie``: whether ties explain the
    whole text; ``ties``, only then: how many there are.
    """
    found = [_compared(target, prompt, said, other, new_tokens, penalty) for other in others if list(other) != list(said)]
    return next((x for x in found if not x["tie"]), found[0] if found else None)


def _compared(
    target: Target, prompt: Sequence[int], said: Sequence[int], other: Sequence[int], new_tokens: int | None, penalty: float
) -> dict[str, Any]:
    at = in_common(said, other)
    first: dict[str, Any] | None = None
    best_N, ties = _likeliest(target, prompt, other, at, penalty), 0
    for i in range(at, max(len(other), at + 1)):
        rival = said[at] if i == at < len(said) else best_N[i - at]
        if i > at and rival == other[i]:
            continue
        gap, tolerance = _gap(target, [*prompt, *other[:i]], rival, other[i] if i < len(other) else None, penalty)
        tie = target.dtype not in EXACT and at < min(len(said), len(other)) and gap <= tolerance
        place = {"token": i, "gap": gap, "tolerance": tolerance, "tie": tie}
        if not tie:
            return place
        first, ties = first or place, ties + 1
    assert first is not None
    if new_tokens is not None and len(other) < new_tokens and other[-1] not in target.stop_ids:
        return first | {"token": len(other), "tie": False}  # cut short
    return first | {"ties": ties}


def _likeliest(target: Target, prompt: Sequence[int], text: Sequence[int], at: int, penalty: float) -> list[int]:
    """The target's likeliest token at each index of ``text`` from ``at`` on, and at the one after its last token; from one pass."""
    tokens_1T = torch.tensor([[*prompt, *text]], device=target.device)
    _, final_1TD = target.read(tokens_1T, torch.arange(tokens_1T.shape[1], device=target.device)[None], ())
    found = []
    for i, final_D in enumerate(final_1TD[0, len(prompt) + at - 1 :], start=at):
        found.append(int(_scores(target, final_D, [*prompt, *text[:i]], penalty).argmax()))
    return found


def _gap(target: Target, text: Sequence[int], a: int, b: int | None, penalty: float) -> tuple[float, float]:
    """The gap between the logits of tokens ``a`` and ``b`` after ``text`` (``b`` None: the likeliest one but ``a``), and its tolerance: how
    far the gap varies between passes, plus one rounding of the largest logit.
    """
    scores_SV = torch.stack([_scores(target, final_D, text, penalty) for final_D in _shapes(target, text)])
    if b is None:
        b = next(token for token in scores_SV[0].topk(2).indices.tolist() if token != a)
    gaps_S = scores_SV[:, a] - scores_SV[:, b]
    rounding = torch.finfo(target.dtype).eps * float(scores_SV[0].abs().max())
    return float(gaps_S[0].abs()), float(gaps_S.max() - gaps_S.min()) + rounding


def _shapes(target: Target, text: Sequence[int]) -> list[Tensor]:
    """The target's final state [D] after ``text``, from passes of several shapes: over the whole text, in a batch of two, in two pieces."""
    tokens_T = torch.tensor(text, device=target.device)
    positions_T, found = torch.arange(len(text), device=target.device), []
    for batch in (1, 2):
        _, final_BTD = target.read(tokens_T.expand(batch, -1), positions_T.expand(batch, -1), ())
        found.append(final_BTD[0, -1])
    for rows in WIDTHS:
        if rows < len(text):
            context = Context(target, (), len(text))
            context.read_prompt(tokens_T[:-rows])
            context.keep(len(text) - rows)
            found.append(context.read(tokens_T[-rows:])[1][0, -1])
    return found


def _scores(target: Target, final_D: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """The target's scores [V] of the token after ``text``, with the repetition penalty applied."""
    logits_11V = target.logits(final_D[None, None]).float()
    seen_11V = torch.zeros_like(logits_11V, dtype=torch.bool)
    seen_11V[..., torch.tensor(text, device=final_D.device)] = True
    return LogitsWarper.of([SamplingParams(repetition_penalty=penalty)], final_D.device).scores(logits_11V, seen_11V)[0, 0]
