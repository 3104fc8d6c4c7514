"""Whether tokens that differ from those of plain decoding are the target's all the same.

In half precision the shape of a pass (how many rows it has, how they lie in memory) decides between logits that are nearly equal: two
decoders of the same target may part at such a tie, and then say different texts, both the target's. So the place where a text leaves
what plain decoding said is read again in passes of other shapes. It is a tie if the gap between the two tokens is no larger than it moves
from shape to shape, and one rounding more: that is how far logits are known in any shape. Behind the first tie the text has no plain one
to be compared with: there one pass over all of it tells where a token is not the likeliest, and those places must be ties too. In float32
nothing passes as a tie.

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

WIDTHS = (1, 2, 4, 8, 16)  # rows of the last pass, behind a memory of the others: as plain decoding and trees have
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
    """Of ``others`` that are not what plain decoding ``said`` (greedy, under this repetition penalty, up to ``new_tokens``): the first that
    is not the target's own, else the first. None: all are equal.

    ``token``: where it leaves the text, or what cannot be explained. ``gap``: between the logits of its token and of the other one;
    ``tolerance``: how far it moves between passes, and one rounding. ``tie``: whether all of the text is explained; then ``ties``: at
    so many places.
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
    """What one pass over the text says behind each of its tokens, from token ``at`` on."""
    tokens_1T = torch.tensor([[*prompt, *text]], device=target.device)
    _, final_1TD = target.read(tokens_1T, torch.arange(tokens_1T.shape[1], device=target.device)[None], ())
    found = []
    for i, final_D in enumerate(final_1TD[0, len(prompt) + at - 1 :], start=at):
        found.append(int(_scores(target, final_D, [*prompt, *text[:i]], penalty).argmax()))
    return found


def _gap(target: Target, text: Sequence[int], a: int, b: int | None, penalty: float) -> tuple[float, float]:
    """Between the logits of two tokens behind a text (b is None: of a and the likeliest other one); and how far it moves between passes,
    and one rounding of the best logit.
    """
    scores_SV = torch.stack([_scores(target, final_D, text, penalty) for final_D in _shapes(target, text)])
    if b is None:
        b = next(token for token in scores_SV[0].topk(2).indices.tolist() if token != a)
    gaps_S = scores_SV[:, a] - scores_SV[:, b]
    rounding = torch.finfo(target.dtype).eps * float(scores_SV[0].abs().max())
    return float(gaps_S[0].abs()), float(gaps_S.max() - gaps_S.min()) + rounding


def _shapes(target: Target, text: Sequence[int]) -> list[Tensor]:
    """The target's final state [D] behind a text, read whole, in a batch of two, and in pieces."""
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
    """[V] behind a text."""
    logits_11V = target.logits(final_D[None, None]).float()
    seen_11V = torch.zeros_like(logits_11V, dtype=torch.bool)
    seen_11V[..., torch.tensor(text, device=final_D.device)] = True
    return LogitsWarper.of([SamplingParams(repetition_penalty=penalty)], final_D.device).scores(logits_11V, seen_11V)[0, 0]
