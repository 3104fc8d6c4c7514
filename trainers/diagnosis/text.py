"""Checks whether the training text is like the prompts: how rows and prompts begin, where answers begin, and whether the target could
have written the rows.

Shape suffixes: B batch, T tokens, N supervised tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.data.batch import TokenBatch, spans
from headstart.inference.serving.text import BadRow, render
from headstart.trainers.diagnosis.case import Case, Finding

MOST, HARDLY, NEARLY = 0.8, 0.2, 0.95  # shares that count as most, hardly any, nearly all
SHIFTS = (1, -1, 2, -2, 3, -3)  # tokens by which a loss mask may be shifted
BEHIND = 12  # the most tokens before an answer to compare
ALIKE = 0.7  # the least share of tokens that must survive decoding and tokenizing again
NATS, SIGMAS = 0.5, 5.0  # the least excess of cross-entropy over entropy per token, and in standard errors
LOOKED = 64  # the most documents to tokenize again
ROWS = 256  # positions whose logits are computed at a time: a training may leave no memory for those of a whole row


class Document(NamedTuple):
    """A document in a row."""

    tokens: list[int]
    begins: list[int]  # indices at which supervised runs begin
    whole: bool  # whether the row has it from its first token on


def documents(rows: Sequence[TokenBatch]) -> Iterator[Document]:
    """All documents of these rows."""
    for batch in rows:
        for tokens_T, mask_T, positions_T, documents_T in zip(
            batch.tokens_BT.tolist(), batch.loss_mask_BT.tolist(), batch.positions_BT.tolist(), batch.documents_BT.tolist(), strict=True
        ):
            for start, stop in spans(documents_T):
                mask = mask_T[start:stop]
                begins = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
                yield Document(tokens_T[start:stop], begins, positions_T[start] == 0)


def header(case: Case) -> list[int]:
    """The tokens by which the chat template asks for an answer; [] if there is no template or it cannot be told."""
    tokenizer = case.target.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return []
    asking = [{"role": "user", "content": "x"}]
    try:
        plain, asked = render(tokenizer, asking), render(tokenizer, asking, ask=True)
    except BadRow:
        return []
    found: list[int] = tokenizer(asked.removeprefix(plain), add_special_tokens=False)["input_ids"] if asked.startswith(plain) else []
    return found


def mask(case: Case) -> list[Finding]:
    """Whether supervised runs begin a few tokens before or after the end of the header that asks for an answer."""
    asks, places = header(case), [(d.tokens, i) for d in documents(case.rows) for i in d.begins]
    if not asks or not places:
        return []

    def share(shift: int) -> float:
        return sum(t[max(i - shift - len(asks), 0) : max(i - shift, 0)] == asks for t, i in places) / len(places)

    shift = max(SHIFTS, key=share)
    if share(0) > HARDLY or share(shift) < MOST:
        return []
    tokens, i = places[0]
    where = f"{abs(shift)} token{'s' * (abs(shift) > 1)} {'after' if shift > 0 else 'before'} the end of the header that asks for an answer"
    return [Finding.of("mask", f"{share(shift):.0%} of the supervised runs begin {where}, like {case.text(tokens[i : i + 4])}")]


def template(case: Case) -> list[Finding]:
    """Whether prompts end in other tokens than those before answers in the training rows."""
    behind = Counter(tuple(d.tokens[max(i - BEHIND, 0) : i]) for d in documents(case.rows) for i in d.begins)
    common: tuple[int, ...] = ()
    for n in range(1, BEHIND + 1):  # find the longest ending that most of them share
        ends: Counter[tuple[int, ...]] = Counter()
        for tokens, count in behind.items():
            ends[tokens[-n:]] += count
        best, count = ends.most_common(1)[0] if ends else ((), 0)
        if len(best) < n or count < MOST * behind.total():
            break
        common = best
    here = sum(tuple(p[-len(common) :]) == common for p in case.prompts) / max(len(case.prompts), 1)
    if len(common) < 2 or not case.prompts or here > HARDLY:
        return []
    ends_in = case.text(case.prompts[0][-len(common) :])
    return [Finding.of("template", f"in the training answers stand behind {case.text(common)}, the prompts end in {ends_in}")]


def tokenizer(case: Case) -> list[Finding]:
    """Whether the rows were made with another tokenizer than the target's: by the first token, and by tokenizing their text again."""
    found = [d.tokens for d in documents(case.rows) if d.whole][:LOOKED]
    first = getattr(case.target.tokenizer, "bos_token_id", None)
    if found and case.prompts and first is not None:
        theirs, ours = (sum(list(t[:1]) == [first] for t in some) / len(some) for some in (found, case.prompts))
        if min(theirs, ours) <= 1 - NEARLY and max(theirs, ours) >= NEARLY:
            evidence = f"{theirs:.0%} of the training's documents begin with {case.text([first])}, {ours:.0%} of the prompts"
            return [Finding.of("tokenizer", evidence)]
    if case.target.tokenizer is None or not found:
        return []
    same = total = 0
    for tokens in found:
        text = case.target.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        again = Counter(case.target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        same, total = same + (again & Counter(tokens)).total(), total + len(tokens)
    if same >= ALIKE * total:
        return []
    like = case.text(found[0][:12])
    evidence = f"of the training's tokens, decoded and tokenized again here, {same / total:.0%} come out again; a text begins {like}"
    return [Finding.of("tokenizer", evidence)]


@torch.no_grad()
def policy(case: Case) -> list[Finding]:
    """Whether the training text is not the target's own. On its own samples a target's mean negative log-likelihood equals its entropy; on
    other text it is higher.
    """

    def excess(final_ND: Tensor, said_N: Tensor) -> float:
        """The negative log-likelihood of these tokens above the entropy, summed."""
        log_p_NV = case.target.logits(final_ND).float().log_softmax(-1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).nan_to_num().sum(-1)
        return float((-log_p_NV.gather(-1, said_N[:, None])[:, 0] - entropy_N).sum())

    gaps = []
    for batch in case.rows:
        _, final_BTD = case.target.read(batch.tokens_BT, batch.positions_BT, ())
        for b in range(len(final_BTD)):
            counts_T = (batch.loss_mask_BT[b, 1:] & (batch.documents_BT[b, 1:] == batch.documents_BT[b, :-1])).to(final_BTD.device)
            final_ND, said_N = final_BTD[b, :-1][counts_T], batch.tokens_BT[b, 1:].to(final_BTD.device)[counts_T]
            if len(said_N):
                pieces = zip(final_ND.split(ROWS), said_N.split(ROWS), strict=True)
                gaps.append(sum(excess(*piece) for piece in pieces) / len(said_N))
    if len(gaps) < 2:
        return []
    gap = sum(gaps) / len(gaps)
    error = sqrt(sum((x - gap) ** 2 for x in gaps) / (len(gaps) - 1) / len(gaps))
    if gap < NATS or gap < SIGMAS * error:
        return []
    more = f"{gap:.2f} nats more than one of its own would"
    return [Finding.of("policy", f"a token of the training's text surprises the target by {more}: it would not have written it")]
