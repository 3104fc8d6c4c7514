"""Checks loss masks. A drafter trained with an empty, full or shifted mask is worthless, and nothing else would show the mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from headstart.data.masks import answer_of, last_question, render
from headstart.data.packed import Document, Documents
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, Messages
from headstart.inference.serving.thoughts import BEGUN, THOUGHTS

_THINKING = re.compile(r"</?think>")
SAMPLE = 500  # conversations that are checked
SHORT = 12  # characters; a shorter text ("yes", "end") can occur by chance, for example inside a special token


def check_masks(tokenizer: Any, talks: Sequence[Messages], made: Documents, names: Sequence[str], last: bool = False) -> None:
    """Refuse loss masks that are empty, full, or shifted off the assistant's words. Up to ``SAMPLE`` conversations are checked, evenly
    spaced.

    ``last``: only the text after the last question is supervised. Raises ``UserError`` with the fault, the conversation and the message.
    """
    advice = "look at the {% generation %} tags of the chat template"
    if not any(made[i].loss_mask.any() for i in range(len(made))):
        raise UserError(f"the loss mask is empty in all {len(made)} conversations: {advice}")
    if all(made[i].loss_mask.all() for i in range(len(made))):
        raise UserError(f"the loss mask is full in all {len(made)} conversations (the user's tokens would be trained too): {advice}")
    for number in range(0, len(made), -(-len(made) // SAMPLE)):
        if fault := _fault(tokenizer, talks[number], made[number], last):
            raise UserError(f"{names[number]}: the loss mask is {fault}: {advice}")


def _fault(tokenizer: Any, messages: Messages, document: Document, last: bool) -> str | None:
    """What is wrong with the mask of a conversation; None: nothing was found."""
    if not document.loss_mask.any():
        return "empty, although the assistant speaks in it"
    said, whole = _said(tokenizer, document), _squeeze(tokenizer.decode(document.tokens.tolist()))
    contents, own, since = [_squeeze(message["content"]) for message in messages], list[str](), last_question(messages) if last else -1
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < since or message.get("weight") == 0:
            continue
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if not all(any(_squeeze(call["name"]) in run for run in said) for call in calls):
            return f"shifted: the call of a tool in message {i + 1} is not supervised"
        own += [_squeeze(part) for call in calls for part in (call["name"], *_spelled(call["arguments"]))]
        thought = next((message[field] for field in THOUGHTS if message.get(field)), "")
        answer = message["content"] if contents[i] in whole else answer_of(message["content"])
        others = contents[:i] + contents[i + 1 :]
        for text, must in ((answer, not calls), (thought, False)):  # templates may drop a thought, or a text with a call
            ways = _ways(tokenizer, text)
            words = next((way for way in ways if any(way in run for run in said)), None)
            if words is None and (must or any(_occurs_here(way, whole, others) for way in ways)):
                return f"shifted: message {i + 1} (assistant) is not all supervised"
            own += [words or "", *map(_squeeze, _THINKING.split(text))]
        if i and _asks(tokenizer, messages[:i], document):
            return f"shifted: it begins before the text of message {i + 1} (assistant), in the header that asks for it"
    rest = _without(" ".join(said), own)  # the assistant may repeat the user's words, in a text or in a call
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and len(contents[i]) >= SHORT and contents[i] in rest:
            return f"shifted: message {i + 1} ({message['role']}) is supervised"
    return None


def _ways(tokenizer: Any, text: str) -> list[str]:
    """The ways in which a rendered conversation may have a text: whole, behind an opening mark of the prompt, normalized."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [_squeeze(text), _squeeze(text).removeprefix("<think>"), _squeeze(tokenizer.decode(ids))]


def _occurs_here(text: str, whole: str, others: Sequence[str]) -> bool:
    """Whether the conversation has a text more often than the other messages have it: a thought left out here may occur in those."""
    return len(text) >= SHORT and whole.count(text) > sum(other.count(text) for other in others)


def _without(text: str, parts: Collection[str]) -> str:
    """``text`` without these parts, the longest first, since shorter ones may be part of them. Those below ``SHORT`` stay."""
    for part in sorted({part for part in parts if len(part) >= SHORT}, key=len, reverse=True):
        text = text.replace(part, " ")
    return text


def _squeeze(text: str) -> str:
    """The text without white space. Tokenizers may change white space when they decode."""
    return "".join(text.split())


def _said(tokenizer: Any, document: Document) -> list[str]:
    """The decoded text of every run of supervised tokens, without white space."""
    edges = np.flatnonzero(np.diff(np.pad(document.loss_mask.astype(np.int8), 1)))
    runs = [document.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]
    return [_squeeze(tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in runs]


def _spelled(value: Any) -> Iterator[str]:
    """Every string and number in the arguments of a tool call, at any depth, in all spellings that a template may use."""
    if isinstance(value, str):
        yield from (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    elif isinstance(value, int | float):
        yield json.dumps(value)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _spelled(each)


def _asks(tokenizer: Any, messages: Messages, document: Document) -> bool:
    """Whether the last token of the generation prompt is supervised, although the target never writes it."""
    try:
        plain, text = render(tokenizer, messages), BEGUN.sub("", render(tokenizer, messages, ask=True))
    except BadRow:  # the template refuses this part of the conversation
        return False
    asked = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not asked or document.tokens[: len(asked)].tolist() != asked or text == plain:
        return False
    return bool(document.loss_mask[len(asked) - 1])
