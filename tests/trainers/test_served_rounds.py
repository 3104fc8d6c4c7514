"""The rounds of a running engine are compared with those of its folder, and the wrong connection that gives them is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import causes
from headstart.data.accepted import Answered
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.recorded import Recorded, replay
from headstart.trainers.diagnosis import CURES, Case
from headstart.trainers.diagnosis.served import apart, beside, served
from tests.trainers.test_diagnosis import healthy, without_norms

CHAIN = TreePolicy("chain", depth=5)
WRONG = {  # plant -> its drafter, and what it is named
    "norm": (healthy, "with norm_output=false, it has"),
    "tap": (without_norms, "fed with the layers before those it names"),
    "embedding": (without_norms, "with the embedding times the square root of the hidden size"),
}


def asked() -> Case:
    return replace(healthy(), guesses=5, new_tokens=32)


def test_an_engine_that_drafts_as_here_raises_no_alarm() -> None:
    case = replace(asked(), answered=causes.answers(asked()))
    walk, here, there = beside(case)
    assert served(case) == [] and not apart(here, there)
    assert here.rounds == there.rounds and here.tokens == there.tokens == [31.0] * len(case.answered)
    assert walk.rounds == sum(there.rounds) and len(walk.reached) == 5
    assert served(asked()) == []  # that nobody has asked


@pytest.mark.parametrize("plant", [pytest.param(key, marks=() if key == "norm" else pytest.mark.slow) for key in WRONG])
def test_the_connection_that_gives_its_rounds_is_named(plant: str) -> None:
    healthy_case, words = WRONG[plant]
    case = replace(healthy_case(), guesses=5, new_tokens=32)
    (found,) = served(replace(case, answered=causes.answers(causes.PLANTS[plant](case))))
    assert found.cause == CURES["served"][0] and words in found.evidence and found.evidence.endswith("the engine seems to run it so")


def test_rounds_that_no_connection_gives_are_told_as_such() -> None:
    answered = [each._replace(rounds=round(0.8 * len(each.tokens))) for each in causes.answers(asked())]
    (found,) = served(replace(asked(), answered=answered))
    assert found.cause == CURES["served"][0] and "has 1.19 tokens there" in found.evidence
    assert "other lengths of chains among them, has the engine's rounds" in found.evidence


def test_an_engine_that_guesses_nothing_right_is_told_as_such_whatever_its_answers_lengths() -> None:
    """Answers of few tokens differ by few rounds: that is no chance."""
    room = dict(zip(map(tuple, asked().prompts), (32, 4, 2, 32, 3, 6), strict=True))
    case = replace(asked(), answered=[each._replace(tokens=each.tokens[: room[tuple(each.prompt)]]) for each in causes.answers(asked())])
    case = replace(case, answered=[each._replace(rounds=len(each.tokens) - 1) for each in case.answered])
    (found,) = served(case)
    assert "has 1.00 tokens there" in found.evidence and found.evidence.endswith("no guess was accepted there, or none was made")
    assert served(replace(case, answered=case.answered[:1])) == [], "of one answer nothing is said"


def test_a_wrong_number_of_guesses_is_named() -> None:
    """llama.cpp does not say how many guesses a round has: what it was asked for may be wrong."""
    (found,) = served(replace(asked(), answered=causes.answers(replace(asked(), guesses=3))))
    assert "a round of a chain of 5" in found.evidence and "in chains of 3, it has" in found.evidence


def test_answers_of_another_target_are_told_apart_from_ties() -> None:
    """The last token of an answer has none behind it that would follow from it."""
    answered = causes.answers(asked())

    def changed(count: int) -> list[str]:
        other = [each._replace(tokens=[*each.tokens[:-1], each.tokens[-1] ^ (i < count)]) for i, each in enumerate(answered)]
        return [found.evidence for found in served(replace(asked(), answered=other)) if found.cause == CURES["served_target"][0]]

    assert changed(0) == changed(3) == []
    (evidence,) = changed(len(answered))
    assert evidence.startswith("of 192 tokens that the engine says, 6 are not the likeliest here; the first is token 32 of answer 1")


def test_few_rounds_more_or_less_are_no_evidence() -> None:
    answered = causes.answers(asked())
    near = [each._replace(rounds=each.rounds + (i < 2)) for i, each in enumerate(answered)]
    assert served(replace(asked(), answered=near)) == []


def test_sampled_answers_tell_the_rounds_too() -> None:
    """An engine that guesses the likeliest token, and verifies by sampling: after a guess that is refused, another token is emitted."""
    case, made = asked(), list[Answered]()
    for seed, prompt in enumerate(case.prompts):
        sampling = SamplingParams(1.0, seed=seed)
        said = generate(case.target, None, prompt, new_tokens=32, sampling=sampling, stop_ids=()).tokens
        recorded = Recorded.by(case.target, case.drafter.taps, prompt, said)
        made.append(Answered(list(prompt), said, len(replay(recorded, case.drafter, CHAIN, SamplingParams()).emitted), [], 1.0))
    case = replace(case, answered=made, sampled=True)
    assert served(case) == [] and served(replace(case, sampled=False))[0].cause == CURES["served_target"][0]
