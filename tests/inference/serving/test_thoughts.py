"""A thought is separated from the answer behind it by tokens, however they arrive; what only looks like a thought stays text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken

from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.serving.asked import Asked
from headstart.inference.serving.reply import Answer, usage
from headstart.inference.serving.text import ids
from headstart.inference.serving.thoughts import begun, marks_of
from tests.inference.serving.served import CHAT, ask, client, running
from tests.inference.serving.speech import NEW, TEMPLATE, target, tokenizer
from tests.inference.serving.test_text import runs_of, whole

THINK, BRACKETS, CHANNELS = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


def speech_with(*marks: str, special: bool = False) -> Any:
    """The toy tokenizer, with these as added tokens."""
    speech = tokenizer(size=300)
    speech.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return speech


def asked_of(speech: Any, prompt: str = "u:Hi\na:", **more: Any) -> Asked:
    tokens, marks = ids(speech, prompt, special=False), marks_of(speech)
    usual: dict[str, Any] = dict(
        chat=True, prompts=[tokens], n=1, new_tokens=99, min_tokens=0, samplings=[SamplingParams()], stop_ids=[], stops=[], logprobs=None,
        stream=True, usage=True, always=False, token_ids=False, marks=marks, begun=marks is not None and begun(speech, marks, tokens),
        thoughts=True, echo=False,
    )  # fmt: skip
    return Asked(**usual | more)


def told(speech: Any, asked: Asked, said: str | list[int], runs: list[list[int]] | None = None) -> tuple[str, str, int, str]:
    """The answer, the thought, the number of the answer's tokens and why it ended. What is streamed is the same as the whole."""
    tokens = ids(speech, said, special=False) if isinstance(said, str) else said
    answer, content, thought = Answer(asked, 0, speech), "", ""
    runs = runs or [tokens]
    for i, run in enumerate(runs):
        part = answer.part(answer.take(run, "length" if i == len(runs) - 1 else "", []))
        delta = part["delta"] if part else {"content": ""}
        content, thought = content + delta["content"], thought + delta.get("reasoning_content", "")
        if answer.ended:
            break
    message = answer.whole()["message"]
    assert (message["content"], message.get("reasoning_content", "")) == (content, thought)
    return content, thought, len(answer.tokens), answer.ended


def counted(speech: Any, said: str) -> int:
    return len(ids(speech, said, special=False)) if said else 0


@pytest.mark.parametrize(("marks", "special"), [(THINK, False), (THINK, True), (BRACKETS, True)])
def test_a_thought_is_separated_wherever_the_rounds_are_cut(marks: tuple[str, str], special: bool) -> None:
    speech, dice = speech_with(*marks, special=special), random.Random(0)
    begin, end = marks
    for thought, answer in (("né 😀\n", "\n\nso é€😀"), ("", "yes"), ("why", ""), ("", "")):
        for opened in (False, True):
            asked = asked_of(speech, f"u:Hi\na:{begin}\n" if opened else "u:Hi\na:")
            said = f"{'' if opened else begin}{thought}{end}{answer}"
            for _ in range(30):
                tokens = ids(speech, said, special=False)
                assert told(speech, asked, said, runs_of(tokens, dice)) == (answer, thought, len(tokens), "length")


def test_an_answer_that_is_cut_within_a_thought_is_all_thought() -> None:
    speech, dice = speech_with(*THINK), random.Random(1)
    tokens = ids(speech, "<think>né 😀", special=False)
    for end in range(len(tokens) + 1):
        for _ in range(5):
            runs = runs_of(tokens[:end], dice) if end else [[]]
            content, thought, *_ = told(speech, asked_of(speech), tokens[:end], runs)
            assert content == "" and thought == whole(speech, tokens[1:end])
    made = Answer(asked_of(speech), 0, speech)
    made.take([*tokens, speech.eos_token_id], "stop", [])
    assert usage(made.asked, [made])["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(tokens) - 1}


@pytest.mark.parametrize(
    "said", ["so <think>no</think> yes", "\n<think>no</think>", "</think>yes", "thinking", "[THINK]a[/THINK]b", "<thi", "yes<think>"]
)
def test_what_only_looks_like_a_thought_stays_text(said: str) -> None:
    speech, dice = speech_with(*THINK), random.Random(2)
    for asked in (asked_of(speech), asked_of(speech, "u:is <think> a mark?\na:"), asked_of(speech, "u:<think>\na:")):
        assert not asked.begun
        for _ in range(10):
            assert told(speech, asked, said, runs_of(ids(speech, said, special=False), dice))[:2] == (said, "")
    plain = tokenizer(size=300)
    assert marks_of(plain) is None
    assert told(plain, asked_of(plain, "u:Hi\na:<think>"), "no</think>yes")[:2] == ("no</think>yes", "")
    off = asked_of(speech, "u:Hi\na:<think>\n", marks=None, begun=False)  # separate_reasoning: false
    assert told(speech, off, "no</think>yes")[:2] == ("no</think>yes", "")
    left_out = asked_of(speech, thoughts=False)  # include_reasoning: false
    assert told(speech, left_out, "<think>no</think>yes")[:2] == ("yes", "")


def test_stop_strings_end_answers_and_no_thoughts() -> None:
    speech, dice = speech_with(*THINK), random.Random(3)
    said = "<think>a STOP b</think>one STOP two STOP three"
    tokens = ids(speech, said, special=False)
    first, second = (counted(speech, said[: said.index(after)]) for after in (" two", " three"))
    for _ in range(60):
        for least in (0, first - 1, first, second - 1, second):
            made = told(speech, asked_of(speech, stops=["STOP"], min_tokens=least), said, runs_of(tokens, dice))
            text = "one " if least < first else "one STOP two " if least < second else "one STOP two STOP three"
            count, ended = (first, "stop") if least < first else (second, "stop") if least < second else (len(tokens), "length")
            assert made == (text, "a STOP b", count, ended)


def test_channels() -> None:
    speech, dice = speech_with(*CHANNELS, special=True), random.Random(4)
    begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    cases = [
        (f"{begin}né 😀{end}so", "so", "né 😀"),
        ("<|channel|>final<|message|>so", "so", ""),
        (f"{begin}why", "", "why"),
        ("<|channel|>comment<|message|>so", "commentso", ""),
        ("<|channel|>fin", "fin", ""),
        (f"{begin}a<|end|><|start|>assistant<|channel|>an", "", "aassistantan"),
        (f"{begin}a{end}b{end}c", "bassistantfinalc", "a"),
    ]
    for said, answer, thought in cases:
        tokens = ids(speech, said, special=False)
        for _ in range(20):
            runs = runs_of(tokens, dice)
            assert told(speech, asked_of(speech, "u:Hi\n<|start|>assistant"), tokens, runs)[:3] == (answer, thought, len(tokens)), said
    asked = asked_of(speech, stops=["nal"])
    tokens = ids(speech, "<|channel|>final!", special=False)
    for runs in ([tokens], [[token] for token in tokens]):
        content, _, count, ended = told(speech, asked, tokens, runs)
        assert (content, ended) == ("fi", "stop") and count in (6, 7)  # that it is no mark is known with the seventh token


@running
async def test_the_endpoint_separates_what_the_template_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark that ends the thought is a token that the toy says."""
    prompt = ids(tokenizer(), "u:Hi\na:0\n", special=False)
    said = generate(target(), None, prompt, new_tokens=NEW).tokens
    at = next(i for i in range(3, NEW) if said[i] not in said[:i] and said[i] not in prompt)
    speech, known = tokenizer(TEMPLATE.replace("a:{%", "a:<think>\n{%")), tokenizer()
    state = speech.backend_tokenizer.to_str()
    for token, mark in ((known.convert_tokens_to_ids("0"), "<think>"), (said[at], "</think>")):
        state = state.replace(f'"{known.convert_ids_to_tokens(token)}":{token}', f'"{mark}":{token}')
    speech._tokenizer = type(speech.backend_tokenizer).from_str(state)
    speech.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in THINK])
    monkeypatch.setattr(target(), "tokenizer", speech)
    assert ids(speech, "u:Hi\na:<think>\n", special=False) == prompt and len(speech) == len(known)
    thought, answer = (whole(speech, part) for part in (said[:at], said[at + 1 :]))
    async with client() as it:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": NEW, "temperature": 0, "return_token_ids": True}
        made = await ask(it, body, CHAT)
        assert made["message"] == {"role": "assistant", "content": answer, "reasoning_content": thought} and made["token_ids"] == said
        assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": at} and made["usage"]["completion_tokens"] == NEW
        assert (await ask(it, body | {"stream": True}, CHAT))["text"] == answer
        assert (await ask(it, body | {"include_reasoning": False}, CHAT))["message"] == {"role": "assistant", "content": answer}
        raw = await ask(it, body | {"separate_reasoning": False}, CHAT)
        assert raw["message"] == {"role": "assistant", "content": whole(speech, said)}
        text = (await ask(it, {"prompt": prompt, "max_tokens": NEW, "temperature": 0}))["text"]
        assert text == whole(speech, said) and "</think>" in text
