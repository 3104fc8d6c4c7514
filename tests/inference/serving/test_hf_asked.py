"""Ends and processors of a user's own: what ``model.generate`` makes of them, or a refusal by the name the user gave."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxTimeCriteria, StoppingCriteria

from headstart.heads.errors import UserError
from headstart.inference.hf import generate, speculate
from headstart.inference.proposers.ngram import Ngram
from headstart.inference.serving.hf_asked import split
from tests.inference.serving.calls import LONGEST, NEW, PAD, PROMPTS, both_doors, padded, plain, some_ends, target_of, trained

# ---- ends ----


class Sum(StoppingCriteria):
    """Of the last three tokens."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -3:].sum(1) % self.divisor == 0


class Nth(StoppingCriteria):
    """The n-th token that it is asked about; a bare bool, as some criteria of transformers."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("divisor", [5, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_criteria_of_ones_own_end_a_sequence_at_the_first_token_where_they_hold(divisor: int) -> None:
    model, eos = target_of().model, some_ends()
    lengths = set()
    for inputs in (padded(PROMPTS[1:2]), padded(PROMPTS)):
        for ends in ({}, {"eos_token_id": eos}):
            how = {"max_new_tokens": NEW, "pad_token_id": PAD, **ends}
            expected = model.generate(**inputs, **how, stopping_criteria=[Sum(divisor)])
            lengths.add(expected.shape[1])
            for guesser in (trained("eagle"), None, Ngram()):
                found = generate(model, guesser, **inputs, **how, stopping_criteria=[Sum(divisor)])
                assert torch.equal(found, expected), (ends, guesser)
            found = model.generate(**inputs, **how, stopping_criteria=[Sum(divisor)], custom_generate=speculate(trained("eagle")))
            assert torch.equal(found, expected)
    assert divisor > 100 or min(lengths) < LONGEST + NEW


def test_a_criterion_that_counts_is_asked_about_every_token_once() -> None:
    model, ids = target_of().model, torch.tensor(PROMPTS[:1])
    counts = [Nth(1 << 20), Nth(1 << 20)]  # of several that end early by another criterion: in the same company, at the same tokens
    eos = {"eos_token_id": some_ends(), "pad_token_id": PAD, "max_new_tokens": NEW}
    for count, guesser in zip(counts, (trained("eagle"), Ngram()), strict=True):
        found = generate(model, guesser, **padded(PROMPTS), **eos, stopping_criteria=[count, Sum(5)])
        said = [row[LONGEST:].tolist() for row in found]
    assert counts[0].left == counts[1].left and all(said)
    for n in (1, 2, 5, NEW):
        for guesser in (trained("eagle"), None):
            expected = model.generate(ids, max_new_tokens=NEW, stopping_criteria=[Nth(n), Sum(1 << 20)])
            assert torch.equal(generate(model, guesser, ids, max_new_tokens=NEW, stopping_criteria=[Nth(n), Sum(1 << 20)]), expected)
            assert expected.shape[1] == 9 + n


def test_time_that_is_over_ends_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one whenever it is looked at."""
    model, ids = target_of().model, torch.tensor(PROMPTS[:1])
    for seconds in (0.5, 3.5, 30.0):
        made = []
        for call in (model.generate, functools.partial(generate, model, trained("eagle")), functools.partial(generate, model, None)):
            clock = itertools.count()
            monkeypatch.setattr(stopping_criteria.time, "time", lambda clock=clock: float(next(clock)))
            made.append(call(ids, max_new_tokens=NEW, max_time=seconds))
        assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
        assert made[0].shape[1] == 9 + min(int(seconds + 1), NEW)
    monkeypatch.undo()
    config = GenerationConfig(max_new_tokens=NEW, max_time=600.0, pad_token_id=PAD)
    for rows in (1, 4):
        inputs = padded(PROMPTS[:rows])
        expected = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=PAD)
        assert torch.equal(generate(model, trained("eagle"), generation_config=config, **inputs), expected)
        (_, found) = both_doors(
            model, trained("eagle"), inputs, max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[MaxTimeCriteria(9e9)]
        )
        assert torch.equal(found, expected)


def test_more_stop_tokens_and_a_shorter_length_count() -> None:
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    said, how = list(plain()[0]), {"max_new_tokens": NEW, "eos_token_id": None}
    model, prompt = target_of().model, torch.tensor(PROMPTS[:1])
    first, second = (EosTokenCriteria(said[i]) for i in (4, 8))
    made = generate(model, None, prompt, stopping_criteria=[first, second], **how)[0, 9:].tolist()
    assert made == said[: said.index(said[4]) + 1]
    for length in (3, 12):  # of a prompt of 9: at least one token is said
        short = generate(model, None, prompt, stopping_criteria=[MaxLengthCriteria(length)], **how)
        assert short.shape[1] == max(length, 10)


# ---- processors ----


class Even(processors.LogitsProcessor):
    """Tokens of the parity that the sequence's length has."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange((input_ids.shape[1] + 1) % 2, scores.shape[1], 2), float("-inf"))


def allowed(b: int, ids_T: Tensor) -> list[int]:
    return list(range(3 + (b + len(ids_T)) % 3, 96, 3))


def asked_of_processors() -> list[dict[str, Any]]:
    said = plain()
    return [
        {"logits_processor": [Even()]},
        {"logits_processor": [processors.NoRepeatNGramLogitsProcessor(1), Even()], "repetition_penalty": 1.3},
        {"prefix_allowed_tokens_fn": allowed},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[said[0][0]], list(said[0][2:4])]},
        {"sequence_bias": [[[said[1][3]], -9.0]]},
        {"suppress_tokens": list(said[2][:2])},
        {"begin_suppress_tokens": [row[0] for row in said]},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": 5},
        {"do_sample": True, "top_k": 1, "typical_p": 0.99, "no_repeat_ngram_size": 1},
        {"do_sample": True, "top_k": 1, "temperature": 0.7, "logits_processor": [Even()]},
    ]


@pytest.mark.parametrize("case", [pytest.param(i, marks=() if i in (1, 2, 9, 10) else pytest.mark.slow) for i in range(12)])
def test_processors_see_what_transformers_would_show_them(case: int) -> None:
    model, said, how = target_of().model, plain(), asked_of_processors()[case]
    settings = {"max_new_tokens": 8, "pad_token_id": PAD, **how}
    inputs = padded(PROMPTS[:1])
    expected = model.generate(**inputs, **settings)
    assert torch.equal(generate(model, trained("eagle"), **inputs, **settings), expected)
    if "repetition_penalty" not in how:  # with several, padding counts for transformers
        inputs = padded(PROMPTS)
        expected = model.generate(**inputs, **settings)
        for found in both_doors(model, trained("eagle"), inputs, **settings):
            assert torch.equal(found, expected)
        for guesser in (None, Ngram()):
            assert torch.equal(generate(model, guesser, **inputs, **settings), expected), guesser
    changed = expected[:, inputs["input_ids"].shape[1] :].tolist() != [list(row[:8]) for row in said[: len(expected)]]
    assert changed, "it changes nothing: this tests nothing"


def test_a_least_length_holds_the_stop_tokens_back() -> None:
    model, said = target_of().model, plain()[0]
    inputs = padded(PROMPTS[:1])
    for how in ({"min_new_tokens": 9}, {"min_length": 9 + 11}, {"min_new_tokens": 3, "min_length": 9 + 8}, {"min_new_tokens": 2}):
        settings = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": said[4], **how}
        expected = model.generate(**inputs, **settings)
        for guesser in (None, trained("eagle")):
            assert all(torch.equal(found, expected) for found in both_doors(model, guesser, inputs, **settings)), how
        own, found = split(listed(**settings), False, [said[4]], 9, [0])
        assert not own and set(found) == {"min_tokens"}
    for beyond in (-1, 96, [said[4], 5000]):  # of 96 tokens: such an id ends nothing, and no token is held back for it
        settings |= {"eos_token_id": beyond, "min_new_tokens": NEW, "sequence_bias": [[[95], 99.0]]}  # -1 held back the last one
        expected = model.generate(**inputs, **settings)
        for guesser in (None, trained("eagle")):
            assert all(torch.equal(found, expected) for found in both_doors(model, guesser, inputs, **settings)), beyond
    expected = model.generate(**inputs, max_new_tokens=4, min_new_tokens=3)  # nothing to hold back: no stop token
    assert torch.equal(generate(model, None, **inputs, max_new_tokens=4, min_new_tokens=3), expected)


def listed(**settings: Any) -> Any:
    """The processors that transformers makes of them, for a prompt of 9 tokens."""
    found: list[Any] = []

    def noting(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        found.append(logits_processor)
        return input_ids

    target_of().model.generate(
        torch.tensor(PROMPTS[:1]), custom_generate=noting, **{"pad_token_id": PAD, "max_new_tokens": NEW, **settings}
    )
    return found[0]


def test_the_last_processors_become_settings() -> None:
    warm = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
    fields = {k: v for k, v in warm.items() if k != "do_sample"}
    assert split(listed(**warm, renormalize_logits=True), True, [], 9, [0]) == ([], fields)
    assert split(listed(**warm, repetition_penalty=1.2), True, [], 9, [0]) == ([], fields | {"repetition_penalty": 1.2})
    assert split(listed(repetition_penalty=1.2), False, [], 9, [0]) == ([], {"repetition_penalty": 1.2})
    assert split([processors.TopKLogitsWarper(3)], True, [], 9, [0]) == ([], {"temperature": 1.0, "top_k": 3})  # the user's own
    assert split([processors.TopKLogitsWarper(3)], False, [], 9, [0]) == ([], {})  # which never takes the likeliest token
    own, found = split(listed(**warm, repetition_penalty=1.2, logits_processor=[Even()]), True, [], 9, [0])
    assert [type(p).__name__ for p in own] == ["RepetitionPenaltyLogitsProcessor", "Even"] and found == fields
    own, found = split(listed(**warm, typical_p=0.9), True, [], 9, [0])
    assert len(own) == 5 and found == {"temperature": 1.0}  # typical_p stands behind all of them
    for other in (processors.TopKLogitsWarper(3, filter_value=-9.0), processors.TopPLogitsWarper(0.9, min_tokens_to_keep=2)):
        assert split([other], True, [], 9, [0]) == ([other], {"temperature": 1.0})
    swapped = [processors.TopPLogitsWarper(0.9), processors.TopKLogitsWarper(3)]
    assert split(swapped, True, [], 9, [0]) == (swapped[:1], {"temperature": 1.0, "top_k": 3})
    ignoring = processors.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)
    assert split([ignoring], False, [], 9, [0]) == ([ignoring], {})
    ignoring.prompt_ignore_length = torch.tensor([0, 2])  # as transformers 5.23 says how much padding there is
    assert split([ignoring], False, [], 9, [0, 2]) == ([], {"repetition_penalty": 1.2})
    assert split([ignoring], False, [], 9, [0, 3]) == ([ignoring], {})


def test_what_cannot_be_asked_about_a_guess_is_refused_by_the_name_the_user_gave() -> None:
    model, ids = target_of().model, torch.tensor(PROMPTS[:1])

    encoder = processors.EncoderRepetitionPenaltyLogitsProcessor(1.2, ids)
    for door in (functools.partial(generate, model, None), functools.partial(model.generate, custom_generate=speculate(None))):
        with pytest.raises(UserError, match=r"^logits_processor: EncoderRepetitionPenaltyLogitsProcessor is not supported with a drafter"):
            door(ids, max_new_tokens=4, logits_processor=[encoder])
        with pytest.raises(UserError, match=r"^watermarking_config is not supported with a drafter"):
            door(ids, max_new_tokens=4, do_sample=True, watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2]))
