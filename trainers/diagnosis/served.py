"""Checks the answers of a running engine: whether the target gives them, and whether the engine drafts as Headstart does.

The engine's rounds are compared with those that the drafter would take over the same texts, which one teacher-forced pass for each text
tells. If they part, all known alternative connections (trainers/diagnosis/wiring.py) take their rounds over the texts too. The one whose
rounds are the engine's is how the engine computes the drafter.

Engines guess the likeliest token also above temperature 0. A guess that is refused is never the token that is emitted in its place, so
there too the text says which guesses were accepted.

Shape suffixes: N new tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from headstart.inference.reports.lengths import APART, SIGMAS, Lengths
from headstart.inference.reports.walk import Walk
from headstart.trainers.diagnosis.case import Case, Finding
from headstart.trainers.diagnosis.wiring import Told, others, read, walked

FOREIGN = 0.02  # the least share of an engine's tokens that are not the likeliest here; ties in half precision stay below
LONGEST = 16  # guesses of the chains that are tried: the engine's may be others than it was said to make
FEW = 3  # rounds: a smaller difference, over all texts, is no evidence
NEAR = 0.25  # an alternative explains an engine whose rounds are at most this much as far from its own as from the drafter's


def served(case: Case) -> list[Finding]:
    """At most one finding about the target of the engine, and at most one about its drafting."""
    told = _told(case)
    return [*_says(case, told), *_drafts(case, told)] if told else []


def beside(case: Case) -> tuple[Walk, Lengths, Lengths]:
    """The walk of the drafter over the engine's texts, its lengths, and those of the engine."""
    walks, expected = _walks(case, _told(case)), Walk()
    for each in walks:
        expected.add(each)
    return expected, *_lengths(case, walks)


def _told(case: Case) -> list[Told]:
    return [read(case.target, case.drafter, each.prompt, each.tokens) for each in case.answered]


def _walks(case: Case, told: Sequence[Told], states: Callable[[Told, int], Tensor] | None = None) -> list[Walk]:
    return [walked(case.drafter, each, case.guesses, states) for each in told]


def _lengths(case: Case, walks: Sequence[Walk]) -> tuple[Lengths, Lengths]:
    here, there = Lengths(), Lengths()
    for walk, answer in zip(walks, case.answered, strict=True):
        here.add(walk.rounds, walk.tokens)
        there.add(answer.rounds, len(answer.tokens) - 1)  # the pass over the prompt emits one token, and is no round
    return here, there


@torch.no_grad()
def _says(case: Case, told: Sequence[Told]) -> list[Finding]:
    """Whether the engine's greedy answers are the target's."""
    if case.sampled:
        return []
    foreign, count, first = 0, 0, ""
    for i, (each, answer) in enumerate(zip(told, case.answered, strict=True)):
        final_ND = each.recorded.final_1TD[0, len(answer.prompt) - 1 : -1]
        best = case.target.logits(final_ND).argmax(-1).tolist()
        other = [n for n, (own, said) in enumerate(zip(best, answer.tokens, strict=True)) if own != said]
        foreign, count = foreign + len(other), count + len(best)
        if other and not first:
            said, own = (case.text([tokens[other[0]]]) for tokens in (answer.tokens, best))
            first = f"the first is token {other[0] + 1} of answer {i + 1}, {said} instead of {own}"
    if foreign <= FOREIGN * count:
        return []
    return [Finding.of("served_target", f"of {count} tokens that the engine says, {foreign} are not the likeliest here; {first}")]


def _drafts(case: Case, told: Sequence[Told]) -> list[Finding]:
    """Whether the engine's rounds are those of this drafter; if not, with which connection they would be."""
    here, there = _lengths(case, _walks(case, told))
    own, tried, parted = _far(here, there), list[tuple[float, str, float]](), apart(here, there)
    if own < FEW or len(told) < 2:  # of a single text, half precision might be the cause
        return []
    said = f"a round of a chain of {case.guesses} has {there.length:.2f} tokens there, and {here.length:.2f} here over the same texts"
    if parted and there.rounds == there.tokens:
        return [Finding.of("served", f"{said}: no guess was accepted there, or none was made")]

    def try_it(what: str, other: Case, states: Callable[[Told, int], Tensor] | None = None) -> None:
        found = _lengths(other, _walks(other, told, states))[0]
        tried.append((_far(found, there), what, found.length))

    for guesses in range(1, min(LONGEST, case.drafter.max_depth or LONGEST) + 1) if parted else ():
        if guesses != case.guesses:
            try_it(f"in chains of {guesses}", replace(case, guesses=guesses))
    for other in others(case.target, case.drafter):
        with other.within():
            try_it(other.what, case, other.states)
    distance, what, length = min(tried)
    if not parted and distance:
        return []
    if distance <= NEAR * own:
        return [Finding.of("served", f"{said}; {what}, it has {length:.2f} here: the engine seems to run it so")]
    return [Finding.of("served", f"{said}; none of {len(tried)} alternatives, other lengths of chains among them, has the engine's rounds")]


def apart(here: Lengths, there: Lengths) -> bool:
    """Whether the lengths differ by more than ``APART`` and beyond chance. Chance is what the texts differ by from a difference that is
    proportional to their tokens; over one text there is none.
    """
    off, n = [a - b for a, b in zip(there.rounds, here.rounds, strict=True)], len(here.rounds)
    slope = sum(off) / max(sum(here.tokens), 1)
    left = sum((x - slope * tokens) ** 2 for x, tokens in zip(off, here.tokens, strict=True))
    chance = SIGMAS * sqrt(n / (n - 1) * left) if n > 1 else 0.0
    return abs(there.length - here.length) > APART * here.length and abs(sum(off)) > chance


def _far(a: Lengths, b: Lengths) -> float:
    """By how many rounds the two differ, added up over the texts."""
    return sum(abs(x - y) for x, y in zip(a.rounds, b.rounds, strict=True))
