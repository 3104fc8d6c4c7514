"""What a client tells the template of the target, and what of it the template reads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from headstart.inference.serving.asked import messages_of
from headstart.inference.serving.fields import Refused
from headstart.inference.serving.text import ids
from tests.inference.serving.speech import target, tokenizer

READS = (
    "{% for m in messages %}{{ m.role[0] + (m.name or '') + ':' + (m.reasoning_content or '') + '.' + m.content }}{% endfor %}"
    "{{ 'E' + reasoning_effort if reasoning_effort is defined else '' }}{{ 'T' if enable_thinking else 'N' }}a:"
)
HI = {"role": "user", "content": "Hi"}


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target(), "tokenizer", tokenizer(READS))


def rendered(**body: Any) -> str:
    text: str = tokenizer().decode(messages_of({"messages": [HI]} | body, target()))
    return text


def test_the_template_is_told_what_it_reads(reading: None) -> None:
    assert rendered() == "u:.HiNa:"
    assert rendered(chat_template_kwargs={"enable_thinking": True}) == "u:.HiTa:"
    unread = {"ask": 1, "tokenizer": 2, "variables": 3, "never read": {"a": [1]}, "strange": None}
    assert rendered(chat_template_kwargs=unread, reasoning_effort=None) == "u:.HiNa:"
    assert rendered(reasoning_effort="low") == "u:.HiElowNa:"
    assert rendered(chat_template_kwargs={"reasoning_effort": "low"}) == "u:.HiElowNa:"
    for name in ("self", "conversations", "raise_exception"):  # of the program that renders: an answer, and no failure
        with suppress(Refused):
            rendered(chat_template_kwargs={name: 1})


def test_the_template_reads_what_messages_have(reading: None) -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        said = {"role": "assistant", "content": "yo", field: "why", "refusal": None, "tool_calls": []}
        assert rendered(messages=[HI | {"name": "Al"}, said, HI]) == "uAl:.Hia:why.you:.HiNa:"
    assert rendered(messages=[HI, {"role": "assistant", "content": None, "reasoning": "why"}, HI]) == "u:.Hia:why.u:.HiNa:"
    assert rendered(messages=[HI, {"role": "assistant"}, HI]) == "u:.Hia:.u:.HiNa:"


def test_a_template_that_reads_none_of_it_writes_none_of_it() -> None:
    said = {"role": "assistant", "content": "yo", "reasoning_content": "why", "name": "Al"}
    assert messages_of({"messages": [HI, said, HI]}, target()) == ids(tokenizer(), "u:Hi\na:yo\nu:Hi\na:", special=False)
