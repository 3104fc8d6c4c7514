"""Text that grows with the tokens is the text of all of them, whole characters only, and ends exactly before a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from headstart.heads.errors import UserError
from headstart.heads.spelling import HALF
from headstart.inference.serving.text import GARBAGE, BadRow, Reader, asking, conversation, ids, render
from tests.inference.serving.speech import spaced, tokenizer

LETTERS = [[3, 4], [5, 6, 7], [8, 9, 10, 11]]  # the tokens of é, € and 😀


def runs_of(tokens: list[int], dice: random.Random) -> list[list[int]]:
    """Cut at random places, as rounds would."""
    cuts = sorted({0, len(tokens), *dice.sample(range(len(tokens) + 1), dice.randint(0, len(tokens)))})
    return [tokens[a:b] for a, b in pairwise(cuts)]


def pieces_of(reader: Reader, runs: list[list[int]]) -> list[str]:
    pieces = []
    for run in runs:
        pieces.append(reader.push(run))
        if reader.stopped:
            break
    return [*pieces, reader.end()]


def whole(speech: Any, tokens: list[int]) -> str:
    return speech.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def random_text(speech: Any, dice: random.Random) -> list[int]:
    """Special tokens in it, and the bytes of longer characters in their order."""
    parts = [dice.choice(LETTERS) if dice.random() < 0.4 else [dice.choice([1, *range(12, len(speech))])] for _ in range(15)]
    return [token for part in parts for token in part]


@pytest.mark.parametrize("make", [tokenizer, spaced])
def test_pieces_make_up_the_text_in_whole_characters(make: Callable[[], Any]) -> None:
    speech, dice, cut = make(), random.Random(0), 0
    for _ in range(300):
        tokens = random_text(speech, dice)
        runs = runs_of(tokens, dice)
        pieces = pieces_of(Reader(speech), runs)
        assert "".join(pieces) == whole(speech, tokens)
        assert not any(HALF in piece for piece in pieces)
        cut += any(HALF in whole(speech, run) for run in runs)
    assert cut > 100, "no character was ever cut: this tested nothing"


@pytest.mark.parametrize("letter", LETTERS)
def test_rounds_that_all_end_within_a_character_lose_none(letter: list[int]) -> None:
    """As of a drafter whose guesses are all accepted, in a text of one such letter after the other."""
    speech, tokens = tokenizer(), letter * GARBAGE
    for first in range(1, len(letter)):
        for size in (len(letter), 3 * len(letter)):
            cuts = [0, *range(first, len(tokens), size), len(tokens)]
            pieces = pieces_of(Reader(speech), [tokens[a:b] for a, b in pairwise(cuts)])
            assert "".join(pieces) == whole(speech, tokens)


def test_bytes_that_are_no_text_come_out_as_the_tokenizer_writes_them() -> None:
    speech, dice = tokenizer(), random.Random(1)
    for _ in range(300):
        tokens = [dice.randrange(3, 16) for _ in range(dice.randint(1, 30))]
        assert "".join(pieces_of(Reader(speech), runs_of(tokens, dice))) == whole(speech, tokens)
    reader = Reader(speech)
    assert not any(reader.push([4]) for _ in range(GARBAGE)) and reader.push([4]) == HALF * (GARBAGE + 1)  # not held back for ever


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    speech = spaced()
    a, b = (speech.convert_tokens_to_ids(t) for t in ("▁a", "b"))
    assert Reader(speech).push([a]) == "a" and Reader(speech, [b, b]).push([a]) == " a"
    assert Reader(speech, [b, *LETTERS[0][:1]]).push(LETTERS[0][1:]) == "é"  # the prompt ends within a character
    assert Reader(speech, [b, *LETTERS[0][:1]]).end() == ""


def test_a_stop_string_ends_the_text_wherever_the_runs_are_cut() -> None:
    speech, dice, crossed = tokenizer(), random.Random(2), 0
    for _ in range(400):
        tokens = ids(speech, "".join(dice.choice("abé€ ") for _ in range(25)), special=False)
        text = whole(speech, tokens)
        stops = ["".join(dice.choice("abé€ ") for _ in range(dice.randint(1, 4))) for _ in range(dice.randint(1, 4))]
        alone = Reader(speech, stops=stops)
        said = "".join(pieces_of(alone, [[token] for token in tokens]))
        # the first to be complete counts, and of those the one that begins first
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        assert alone.stopped == bool(ends) and said == (text[: min(ends)[1]] if ends else text)
        if ends:
            assert whole(speech, tokens[: alone.count]) == text[: min(ends)[0]]
        runs = runs_of(tokens, dice)
        reader = Reader(speech, stops=stops)
        pieces = pieces_of(reader, runs)
        assert ("".join(pieces), reader.count, reader.stopped) == (said, alone.count, alone.stopped)
        crossed += bool(ends) and not any(stop in whole(speech, run) for stop in stops for run in runs)
    assert crossed > 20, "no stop string ever crossed a run: this tested nothing"


def test_what_could_become_a_stop_string_is_held_back_and_comes_in_the_end() -> None:
    speech = tokenizer()
    reader = Reader(speech, stops=["abcd", "bx"])
    said = [reader.push(ids(speech, c, special=False)) for c in "zabcyab"]
    assert said == ["z", "", "", "", "abcy", "", ""] and reader.end() == "ab" and not reader.stopped


def test_a_run_of_special_tokens_is_not_read_anew_with_each() -> None:
    """As of a target that goes on behind its end: thousands of tokens without text."""
    speech, read = tokenizer(), list[int]()

    class Counted:
        def decode(self, tokens: list[int], **how: Any) -> str:
            read.append(len(tokens))
            return str(speech.decode(tokens, **how))

    tokens = [*ids(speech, "ab", special=False), *[1] * 3000, *LETTERS[0], *[2] * 3000, *ids(speech, "cd", special=False)]
    assert "".join(pieces_of(Reader(Counted()), [[token] for token in tokens])) == "abécd" and sum(read) < 20 * len(tokens)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_counts_where_it_is_complete_behind_the_least(at_once: bool) -> None:
    speech = tokenizer()
    tokens = ids(speech, "one STOP two STOP three", special=False)  # a token a letter
    for least in range(len(tokens)):
        runs = [tokens] if at_once else [[token] for token in tokens]
        said = "".join(pieces_of(Reader(speech, stops=["STOP"], least=least), runs))
        assert said == ("one " if least < 8 else "one STOP two " if least < 17 else "one STOP two STOP three")


def test_conversations_and_texts_become_tokens_or_an_error() -> None:
    speech = tokenizer()
    talk = [{"role": "system", "content": "b"}, {"role": "user", "content": "hi"}]
    assert whole(speech, asking(speech, talk)) == "s:b\nu:hi\na:"
    with pytest.raises(UserError, match="no chat template"):
        asking(tokenizer(None), talk)
    with pytest.raises(BadRow, match="no tools"):
        asking(speech, [{"role": "tool", "content": "x"}])
    for text, message in (("", "empty"), ("a\ud800", "surrogate")):
        with pytest.raises(BadRow, match=message):
            ids(speech, text, special=True)


def test_messages_that_are_no_text_or_that_a_template_was_not_written_for() -> None:
    said = conversation({"messages": [{"role": "developer", "content": "b"}, {"from": "chatgpt", "value": "a"}]})
    assert said == [{"role": "system", "content": "b"}, {"role": "assistant", "content": "a"}]
    for content in ("\ud800", [{"type": "text", "text": "a"}, {"type": "text", "text": "\udfff"}]):
        with pytest.raises(BadRow, match="content is not Unicode: it holds half of a surrogate pair"):
            conversation({"messages": [{"role": "user", "content": content}]})
    for template in ("{{ messages[0]['content'] + 1 }}", "{{ 1 // 0 }}", "{{ messages[7]['content'] }}", "{{ raise_exception('a\nb') }}"):
        with pytest.raises(BadRow, match="the chat template refuses it") as error:
            render(tokenizer(template), said)
        assert "\n" not in str(error.value)
