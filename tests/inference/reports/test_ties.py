"""A difference in half precision is a tie only as far as the target itself wavers, and what follows it is compared too."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from headstart.inference.decoding.context import Context
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.target import Target
from headstart.inference.reports.lossless import differs
from tests.drafters import random_tokens
from tests.tiny_targets import tiny_target

NEW, PROMPT = 24, random_tokens(9, seed=1)


@functools.cache
def target(dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target(tiny_target().model.to(dtype), name="tiny")


def greedy(target: Target, prompt: Sequence[int], new: int = NEW) -> list[int]:
    return generate(target, None, prompt, new_tokens=new).tokens


@torch.no_grad()
def logits(target: Target, text: Sequence[int], rows: int = 0) -> torch.Tensor:
    """Behind a text, read whole, or its last ``rows`` tokens in a pass of their own."""
    tokens = torch.tensor(text)
    if not rows:
        return target.logits(target.read(tokens[None], torch.arange(len(text))[None], ())[1])[0, -1].double()
    context = Context(target, (), len(text))
    context.read(tokens[:-rows])
    context.keep(len(text) - rows)
    return target.logits(context.read(tokens[-rows:])[1])[0, -1].double()


def doubtful(most: float, least: float = 0.0) -> tuple[list[int], list[int], int]:
    """A prompt, what is said to it, and the second best token where the gap to it, in roundings of the best logit, lies between these."""
    for seed in range(300):
        prompt = random_tokens(9, seed)
        said = greedy(target(), prompt)
        for at in range(1, NEW // 2):
            best = logits(target(), [*prompt, *said[:at]]).topk(2)
            gap = float(best.values[0] - best.values[1]) / (float(best.values[0].abs()) * torch.finfo(torch.bfloat16).eps)
            if least <= gap <= most and said[at] in best.indices.tolist():
                return prompt, said[:at], next(t for t in best.indices.tolist() if t != said[at])
    raise AssertionError("no such place: this tests nothing")


def test_equal_texts_have_no_difference() -> None:
    said = greedy(target(), PROMPT)
    assert differs(target(), PROMPT, said, [said, list(said)]) is None


def test_a_tie_is_one_and_the_text_behind_it_is_compared() -> None:
    prompt, begun, second = doubtful(0.0)  # as near as can be
    said = greedy(target(), prompt)
    other = [*begun, second, *greedy(target(), [*prompt, *begun, second], NEW - len(begun) - 1)]
    assert len(said) == len(other) == NEW and said != other
    found = differs(target(), prompt, said, [said, other], new_tokens=NEW)
    assert found is not None and found["tie"] and found["token"] == len(begun) and found["ties"] >= 1
    assert found["gap"] <= found["tolerance"]
    for at in (len(begun) + 2, NEW - 1):  # one wrong token, far behind the tie
        wrong = list(other)
        wrong[at] = int(logits(target(), [*prompt, *other[:at]]).argmin())
        found = differs(target(), prompt, said, [other, wrong], new_tokens=NEW)
        assert found is not None and not found["tie"] and found["token"] == at and found["gap"] > found["tolerance"]
    found = differs(target(), prompt, said, [other[:-3]], new_tokens=NEW)
    assert found is not None and not found["tie"], "cut short"


def test_what_a_rounding_cannot_explain_is_no_tie() -> None:
    """Gaps of three to eight roundings of the best logit, where passes of any shape agree: they were let through once."""
    prompt, begun, second = doubtful(8.0, least=3.0)
    text = [*prompt, *begun]
    said, other = greedy(target(), prompt), [*begun, second, *greedy(target(), [*text, second], NEW - len(begun) - 1)]
    gaps = [logits(target(), text, rows).topk(2).values for rows in (0, 1, 2, 4)]
    moved = max(float(g[0] - g[1]) for g in gaps) - min(float(g[0] - g[1]) for g in gaps)
    found = differs(target(), prompt, said, [other], new_tokens=NEW)
    assert found is not None and not found["tie"] and found["token"] == len(begun)
    eps, best = torch.finfo(torch.bfloat16).eps, float(gaps[0][0])
    assert found["gap"] == pytest.approx(float(gaps[0][0] - gaps[0][1]))
    assert moved + 0.99 * eps * best <= found["tolerance"] < found["gap"] <= 8 * eps * best
    tokens = torch.tensor([text, text])
    twice = target().logits(target().read(tokens, torch.arange(len(text)).expand(2, -1), ())[1])[0, -1].double()
    shapes = [twice, *(logits(target(), text, rows) for rows in (0, 1, 2, 4, 8, 16) if rows < len(text))]
    off = [float(x[said[len(begun)]] - x[second]) for x in shapes]
    assert found["tolerance"] == pytest.approx(max(off) - min(off) + eps * float(shapes[1].abs().max()), rel=1e-5)


def test_in_float32_nothing_is_a_tie() -> None:
    one = target(torch.float32)
    said = greedy(one, PROMPT)
    for at in (0, 5, NEW - 1):
        second = int(logits(one, [*PROMPT, *said[:at]]).topk(2).indices[1])
        other = [*said[:at], second, *greedy(one, [*PROMPT, *said[:at], second], NEW - at - 1)][:NEW]
        found = differs(one, PROMPT, said, [other])
        assert found is not None and not found["tie"] and found["token"] == at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_that_ends_elsewhere_is_wrong(dtype: torch.dtype) -> None:
    one = target(dtype)
    said = greedy(one, PROMPT)
    for other in (said[:-2], []):
        found = differs(one, PROMPT, said, [other], new_tokens=NEW)
        assert found is not None and not found["tie"] and found["token"] == len(other)
    found = differs(one, PROMPT, said[:-2], [said])
    assert found is not None and not found["tie"] and found["token"] == NEW - 2


def test_a_penalty_is_part_of_the_scores() -> None:
    from headstart.inference.decoding.sampling import SamplingParams

    how = SamplingParams(repetition_penalty=1.7)
    said = generate(target(), None, PROMPT, new_tokens=NEW, sampling=how).tokens
    at = next(i for i in range(1, NEW) if said[i] != int(logits(target(), [*PROMPT, *said[:i]]).argmax()))  # by the penalty alone
    wrong = [*said[:at], int(logits(target(), [*PROMPT, *said[:at]]).argmax()), *said[at + 1 :]]
    found = differs(target(), PROMPT, said, [wrong], penalty=1.7)
    assert found is not None and not found["tie"] and found["token"] == at
