"""The loss mask of a conversation: the assistant's tokens are supervised, as the target's chat template writes them, and no others.

The template renders the whole conversation. The assistant's text is located in it by the template's ``{% generation %}`` tags. Without
tags, it is located by rendering prefixes of the conversation. A mask that cannot be right is an error: training runs silently on an empty,
full or shifted mask, and the drafter is worthless. Templates that write today's date always get the same date. Otherwise the rows would
change from day to day, and no run could be resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from headstart.data.packed import Document, Documents
from headstart.heads.errors import UserError
from headstart.inference.serving import text as texts
from headstart.inference.serving.text import BadRow, Messages, refused, template_of
from headstart.inference.serving.thoughts import BEGUN, THOUGHTS

_THINKING = re.compile(r"</?think>")
_THOUGHT = re.compile(r"\A<think>.*?</think>\s*", re.DOTALL)  # a complete thought in front of an answer
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIELD = re.compile(rf"""[.'"]({"|".join(THOUGHTS)})\b""")  # the field of a message that a template reads as its thought
SHORT = 12  # characters; a shorter text ("yes", "end") can occur by chance, for example inside a special token

Spans = list[tuple[int, int]]  # characters of the rendered text
Tools = list[Any] | None  # the tools that the assistant may call, as the row lists them


def _some_day(how: str) -> str:
    return datetime(2025, 1, 1).strftime(how)


def render(tokenizer: Any, messages: Messages, ask: bool = False, tools: Tools = None) -> str:
    """The conversation rendered as in serving (``texts.render``), but always with the same date. ``ask``: with the generation prompt."""
    return texts.render(tokenizer, messages, ask=ask, tools=tools, variables={"strftime_now": _some_day})


class Talk(NamedTuple):
    """A conversation as the chat template writes it, and the character spans that are supervised."""

    messages: Messages
    text: str
    spans: Spans


class Template:
    """A tokenizer's chat template, which also locates the assistant's text in its output. Worker processes receive it pickled."""

    def __init__(self, tokenizer: Any, last: bool = False) -> None:
        """``last``: supervise only what the assistant says after the last question.

        Raises UserError for a tokenizer without a chat template or without character offsets.
        """
        self.tokenizer, self.last, self.text = tokenizer, last, template_of(tokenizer)
        if not tokenizer.is_fast:
            raise UserError("the target's tokenizer gives no character offsets: use its fast version (tokenizer.json)")
        self.tagged, self.added = _GENERATION.search(self.text) is not None, tuple(tokenizer.get_added_vocab())
        field = _FIELD.search(self.text)
        self.thinks = field[1] if field else None  # None: the template reads no such field

    def talk(self, messages: Messages, tools: Tools = None) -> Talk:
        """Render a conversation and find the assistant's text in it.

        Raises BadRow if the template refuses the conversation, ignores its tools or tool calls, or does not show where the assistant's
        text begins and ends. Also raises BadRow if there is no answer to supervise.
        """
        called = any(message.get("tool_calls") for message in messages)
        for word, needed in (("tools", tools), ("tool_calls", called)):
            if needed and word not in self.text:
                raise BadRow(f"the chat template writes no {word.replace('_', ' ')}")
        since = _last_question(messages) + 1 if self.last else 0
        said = sum(map(_says, messages[since:]))
        messages = [self._thinking(message) for message in messages]
        how = (self.tokenizer, messages, tools)
        if said and self.tagged:
            text, spans = _tagged(*how, self.text)
            return Talk(messages, text, spans[-said:] if self.last else spans)
        text, spans = _untagged(*how, self.added, since) if said else ("", [])
        if not spans:
            raise BadRow("the last question has no answer" if self.last else "the assistant says nothing in it")
        return Talk(messages, text, spans)

    def _thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its thought (``reasoning_content``) moved to where this template reads it: to its own field, or into the text.
        If the template supports no thinking, the target does not think. The thought is then dropped, and only the answer is learnt.
        """
        found = {key: value for key, value in message.items() if key != "reasoning_content"}
        thought = message.get("reasoning_content")
        if thought is None or thought in found["content"]:
            return found
        if self.thinks:
            return found | {self.thinks: thought}
        if "</think>" in self.text:
            return found | {"content": f"<think>\n{thought}\n</think>\n\n{found['content']}"}
        return found


def _says(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _last_question(messages: Messages) -> int:
    """The index of the last user message, or -1 without one."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _tagged(tokenizer: Any, messages: Messages, tools: Tools, template: str) -> tuple[str, Spans]:
    """The rendered text and the assistant's spans, for a template with {% generation %} tags. Raises BadRow if the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, spans = render_jinja_template(
            conversations=[messages], chat_template=template, tools=tools, return_assistant_tokens_mask=True, strftime_now=_some_day,
            **tokenizer.special_tokens_map,
        )  # fmt: skip
    except Exception as error:  # templates raise errors of many kinds, see texts.render
        raise refused(error) from None
    return rendered[0], [(start, end) for start, end in spans[0]]


def _answer(content: str) -> str:
    """The part of an assistant's message that remains in later turns. Templates of reasoning models drop the thinking there."""
    return content.rpartition("</think>")[2].strip()


def _untagged(tokenizer: Any, messages: Messages, tools: Tools, added: tuple[str, ...], first: int = 0) -> tuple[str, Spans]:
    """The rendered text and the assistant's spans, for a template without tags. Messages before index ``first`` get no span.

    The conversation is rendered up to each answer, once with the generation prompt and once with the answer. The difference is the answer.
    Some templates render a turn differently once more messages follow (without its thinking, or with another end). Such a turn is
    found by its text and the token that closes it. Raises ``BadRow`` if the template keeps neither.
    """
    full = render(tokenizer, messages, tools=tools)
    spans, passed = Spans(), 0  # passed: characters up to the end of the last answer found
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not (_answer(message["content"]) or message.get("tool_calls")):
            continue
        asked = render(tokenizer, messages[:i], ask=True, tools=tools) if i else ""
        told = render(tokenizer, messages[: i + 1], tools=tools)
        place = _added(full, asked, told) if i else None
        before = render(tokenizer, messages[:i], tools=tools) if i and place is None else ""
        begins = i > 0 and full.startswith(asked)
        if place is None and message.get("tool_calls"):
            # Templates may write tool calls without the thought that the generation prompt opens, or drop a text message in front of them.
            header = asked[len(before) :]
            place = _added(full, begun := BEGUN.sub("", asked), told) or (
                _added(full, begun, begun + told.rpartition(header)[2]) if header else None
            )
        elif place is None:
            if begins or full.startswith(before):
                since = len(asked if begins else before)
            else:  # earlier messages are rendered differently once more follow (a system prompt may move to the last question)
                question = messages[i - 1]["content"].strip()
                since = full.find(question, passed) + len(question) if question in full[passed:] else len(full)
            place = _find(full, since, message["content"], told, added)
            if place and begins:
                place = len(asked), place[1]
        if place is None:
            raise BadRow(
                f"the chat template does not show where message {i + 1} (assistant) begins and ends: it writes messages otherwise once "
                "more follow. Add {% generation %} tags to it (data.template=FILE), or take the thinking out of the conversations"
            )
        passed = place[1]
        if i >= first:
            # The target stops at its end-of-turn token. The template writes the white space after it, so the span leaves that out.
            spans.append((place[0], place[0] + len(full[slice(*place)].rstrip())))
    return full, spans


def _added(full: str, asked: str, told: str) -> tuple[int, int] | None:
    """The (start, end) in ``full`` of the text that ``told`` adds to ``asked``. Some templates write a thought only in the last turn, so
    the text is also tried without its thought. None if ``full`` has neither in that place.
    """
    if full.startswith(asked) and told.startswith(asked):
        said = told[len(asked) :]
        for text in (said, _THOUGHT.sub("", said, count=1)):
            if full.startswith(text, len(asked)):
                return len(asked), len(asked) + len(text)
    return None


def _find(full: str, since: int, content: str, told: str, added: tuple[str, ...]) -> tuple[int, int] | None:
    """The (start, end) of a message in ``full``, searched from character ``since`` on. The end includes what closes the message: an added
    token, or the text that follows it in ``told``, where it is the last message. None if the message is not found.
    """
    for text in (content.strip(), _answer(content)):
        closing = told[told.rfind(text) + len(text) :] if text in told else ""
        at = full.find(text, since)
        while at >= 0:
            end = at + len(text)
            closed = [mark for mark in (closing, *added) if mark and full.startswith(mark, end)]
            if closed:
                return at, end + max(map(len, closed))
            at = full.find(text, at + 1)  # a short text ("assistant") can also stand in a header, but nothing closes it there
    return None


def masked(tokenizer: Any, talks: Sequence[Talk]) -> Iterator[Document]:
    """The conversations as documents. A token is supervised if it contains at least one character of a span."""
    encoded = tokenizer([talk.text for talk in talks], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for ids, offsets, talk in zip(encoded["input_ids"], encoded["offset_mapping"], talks, strict=True):
        first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in talk.spans:
            mask |= (last > start) & (first < end)
        yield Document(np.array(ids, dtype=np.int32), mask)


# ---- is the mask right? ----


def _squeeze(text: str) -> str:
    """The text without white space. Tokenizers may change white space when they decode."""
    return "".join(text.split())


def _said(tokenizer: Any, document: Document) -> list[str]:
    """The decoded text of every run of supervised tokens, without white space."""
    edges = np.flatnonzero(np.diff(np.pad(document.loss_mask.astype(np.int8), 1)))
    runs = [document.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]
    return [_squeeze(tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in runs]


def check_masks(
    tokenizer: Any, talks: Sequence[Messages], made: Documents, names: Sequence[str], sample: int = 500, last: bool = False
) -> None:
    """Refuse loss masks that are empty, full, or shifted off the assistant's words. Up to ``sample`` conversations are checked, evenly
    spaced.

    ``last``: only the text after the last question is supervised. Raises ``UserError`` with the fault, the conversation and the message.
    """
    advice = "look at the {% generation %} tags of the chat template"
    if not any(made[i].loss_mask.any() for i in range(len(made))):
        raise UserError(f"the loss mask is empty in all {len(made)} conversations: {advice}")
    if all(made[i].loss_mask.all() for i in range(len(made))):
        raise UserError(f"the loss mask is full in all {len(made)} conversations (the user's tokens would be trained too): {advice}")
    for number in range(0, len(made), -(-len(made) // sample)):
        messages, document, where = talks[number], made[number], names[number]
        if not document.loss_mask.any():
            raise UserError(f"{where}: the loss mask is empty, although the assistant speaks in it: {advice}")
        said = _said(tokenizer, document)
        rest, whole = " ".join(said), _squeeze(tokenizer.decode(document.tokens.tolist()))
        since = _last_question(messages) if last else -1
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < since:
                continue
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            for call in calls:
                if not any(_squeeze(call["name"]) in run for run in said):
                    raise UserError(f"{where}: the loss mask is shifted: the call of a tool in message {i + 1} is not supervised: {advice}")
                for value in _strings(call["arguments"]):  # a call may repeat the user's words
                    for spelled in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]):
                        rest = rest.replace(_squeeze(spelled), " ") if len(_squeeze(spelled)) >= SHORT else rest
            thought = next((message[field] for field in THOUGHTS if message.get(field)), "")
            answer = message["content"] if _squeeze(message["content"]) in whole else _answer(message["content"])
            for text, must in ((answer, not calls), (thought, False)):  # templates may leave out a text beside a call, or a thought
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                ways = [_squeeze(text), _squeeze(text).removeprefix("<think>"), _squeeze(tokenizer.decode(ids))]  # the last: as normalized
                words = next((words for words in ways if any(words in run for run in said)), None)
                if words is None and (must or any(len(words) >= SHORT and words in whole for words in ways)):
                    raise UserError(f"{where}: the loss mask is shifted: message {i + 1} (assistant) is not all supervised: {advice}")
                for part in sorted([words or "", *map(_squeeze, _THINKING.split(text))], key=len, reverse=True):
                    rest = rest.replace(part, " ") if part else rest
            if i and _asks(tokenizer, messages[:i], document):
                raise UserError(
                    f"{where}: the loss mask is shifted: it begins before the text of message {i + 1} (assistant), in the header "
                    f"that asks for it: {advice}"
                )
        for i, message in enumerate(messages):
            words = _squeeze(message["content"])
            if message["role"] != "assistant" and len(words) >= SHORT and words in rest:
                raise UserError(f"{where}: the loss mask is shifted: message {i + 1} ({message['role']}) is supervised: {advice}")


def _strings(value: Any) -> Iterator[str]:
    """Every string in the arguments of a tool call, however deep."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(each)


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
