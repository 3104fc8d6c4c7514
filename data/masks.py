"""The loss mask of a conversation: the assistant's tokens are supervised, as the target's chat template writes them, and no others.

The template renders the whole conversation. The assistant's text is located in it by the template's ``{% generation %}`` tags. Without
tags, it is located by rendering prefixes of the conversation. A mask that cannot be right is an error: training runs silently on an empty,
full or shifted mask, and the drafter is worthless. Templates that write today's date always get the same date. Otherwise the rows would
change from day to day, and no run could be resumed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from headstart.data.packed import Document
from headstart.heads.errors import UserError
from headstart.inference.serving import text as texts
from headstart.inference.serving.text import BadRow, Messages, as_read, refused, template_of, unicode
from headstart.inference.serving.thoughts import BEGUN, THOUGHTS

_ONE = threading.RLock()  # one thread at a time changes the date
_THOUGHT = re.compile(r"\A<think>.*?</think>\s*", re.DOTALL)  # a complete thought in front of an answer
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIELD = re.compile(rf"""([\w\]]+)(?:\.get\(['"]|\.|\[['"])({"|".join(THOUGHTS)})\b""")  # where a template reads a thought
_BLOCK = re.compile(r"""for\s+(\w+)\s+in\s+[\w\[\].'"-]*content\b""")  # a template's loop over the parts of a message's content
_WRITTEN = (("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]"))  # marks around thoughts in a text, as DeepSeek and Mistral write them

CUT = "cut"  # key of a message that something else has ended than the target: it would have gone on

Spans = list[tuple[int, int]]  # characters of the rendered text
Tools = list[Any] | None  # the tools that the assistant may call, as the row lists them


class _SomeDay(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime(2025, 1, 1)


@contextmanager
def _some_day() -> Iterator[None]:
    """Inside, a template that asks for the date gets this one. (transformers 5.23 passes no functions to templates, so that the date cannot
    be given as a variable.)
    """
    from transformers.utils import chat_template_utils as templates

    with _ONE:
        usual = templates.datetime
        templates.datetime = _SomeDay
        try:
            yield
        finally:
            templates.datetime = usual


def render(tokenizer: Any, messages: Messages, ask: bool = False, tools: Tools = None) -> str:
    """The conversation rendered as in serving (``texts.render``), but always with the same date. ``ask``: with the generation prompt."""
    with _some_day():
        return texts.render(tokenizer, messages, ask=ask, tools=tools)


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
        template_of(tokenizer)  # raises where there is none
        self.tokenizer, self.last, self.added = tokenizer, last, tuple(tokenizer.get_added_vocab())
        if not tokenizer.is_fast:
            raise UserError("the target's tokenizer gives no character offsets: use its fast version (tokenizer.json)")

    def content(self) -> str:
        """The text of the template; if the tokenizer has several, all of them as JSON."""
        content = self.tokenizer.chat_template
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True)

    def talk(self, messages: Messages, tools: Tools = None) -> Talk:
        """Render a conversation and find the assistant's text in it.

        Raises BadRow if the template refuses the conversation, ignores its tools or tool calls, or does not show where the assistant's
        text begins and ends. Also raises BadRow if there is no answer to supervise.
        """
        called, template = any(message.get("tool_calls") for message in messages), template_of(self.tokenizer, tools or None)
        for word, needed in (("tools", tools), ("tool_calls", called)):
            if needed and word not in template:
                raise BadRow(f"the chat template writes no {word.replace('_', ' ')}")
        since = last_question(messages) + 1 if self.last else 0
        learnt = [message.get("weight") != 0 for message in messages[since:] if _says(message)]
        said, cut = any(learnt), bool(learnt and learnt[-1] and messages[-1].get(CUT) and _says(messages[-1]))
        messages = [_thinking(message, template) for message in messages]
        how = (self.tokenizer, messages, tools)
        if said and _GENERATION.search(template):
            text, spans = _tagged(*how, template)
            spans = spans[-len(learnt) :] if self.last else spans
            if not all(learnt):
                if len(spans) != len(learnt):
                    raise BadRow(
                        "a message has weight 0, and the template's {% generation %} tags do not show which text is that message's"
                    )
                spans = [span for span, learn in zip(spans, learnt, strict=True) if learn]
            return Talk(messages, text, self._ended(messages[-1], text, spans) if cut else spans)
        text, spans = _untagged(*how, self.added, since) if said else ("", [])
        spans = self._ended(messages[-1], text, spans) if cut and spans else spans
        if not spans:
            raise BadRow("the last question has no answer" if self.last else "the assistant says nothing in it")
        return Talk(messages, text, spans)

    def _ended(self, message: dict[str, Any], text: str, spans: Spans) -> Spans:
        """The spans, the last one without what the template adds to ``message``, which was cut: the ends of its thought and of its turn."""
        start, end = spans[-1]
        said, content = text[start:end], message["content"].strip()
        if content and content in said and not message.get("tool_calls"):
            said = said[: said.rindex(content) + len(content)]
        else:
            said = said.rstrip()
            while mark := next((mark for mark in self.added if mark and said.endswith(mark)), ""):
                said = said.removesuffix(mark).rstrip()
        return [*spans[:-1], (start, start + len(said))] if said else spans[:-1]


def _thinking(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with its thought (``reasoning_content``) moved to where this template reads it: to its own field, or into the text.
    If the template supports no thinking, the target does not think. The thought is then dropped, and only the answer is learnt.
    """
    found = {key: value for key, value in message.items() if key not in ("reasoning_content", CUT)}
    thought = message.get("reasoning_content")
    if thought is None or thought in found["content"]:
        return found
    blocks = _BLOCK.findall(template)
    if field := next((field for of, field in _FIELD.findall(template) if of not in blocks), None):
        return found | {field: thought}
    for begin, end in _WRITTEN:
        if end.strip() in template:
            return found | {"content": f"{begin}{thought}{end}{found['content']}"}
    return found


def _says(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def last_question(messages: Messages) -> int:
    """The index of the last user message, or -1 without one."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _tagged(tokenizer: Any, messages: Messages, tools: Tools, template: str) -> tuple[str, Spans]:
    """The rendered text and the assistant's spans, for a template with {% generation %} tags. Raises BadRow if the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with _some_day():
            rendered, spans = render_jinja_template(
                conversations=[as_read(tokenizer, messages)], chat_template=template, tools=tools, return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )  # fmt: skip
    except Exception as error:  # templates raise errors of many kinds, see texts.render
        raise refused(error) from None
    return unicode(rendered[0], "what the chat template writes"), [(start, end) for start, end in spans[0]]


def answer_of(content: str) -> str:
    """The part of an assistant's message that remains in later turns. Templates of reasoning models drop the thinking there."""
    return content.rpartition("</think>")[2].strip()


def _untagged(tokenizer: Any, messages: Messages, tools: Tools, added: tuple[str, ...], first: int = 0) -> tuple[str, Spans]:
    """The rendered text and the assistant's spans, for a template without tags. Messages before index ``first`` get no span, nor
    do those of weight 0.

    The conversation is rendered up to each answer, once with the generation prompt and once with the answer. The difference is the answer.
    Some templates render a turn differently once more messages follow (without its thinking, or with another end). Such a turn is
    found by its text and the token that closes it. Raises ``BadRow`` if the template keeps neither.
    """
    full = render(tokenizer, messages, tools=tools)
    spans, passed = Spans(), 0  # passed: characters up to the end of the last answer found
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not (answer_of(message["content"]) or message.get("tool_calls")):
            continue
        place = _place(tokenizer, messages, i, tools, added, full, passed)
        if place is None:
            raise BadRow(
                f"the chat template does not show where message {i + 1} (assistant) begins and ends: it writes messages otherwise once "
                "more follow. Add {% generation %} tags to it (data.template=FILE), or take the thinking out of the conversations"
            )
        place = place[0], _closed(full, place[1], added, messages[i + 1 :])
        passed = place[1]
        if i >= first and message.get("weight") != 0:
            # The target stops at its end-of-turn token. The template writes the white space after it, so the span leaves that out.
            spans.append((place[0], place[0] + len(full[slice(*place)].rstrip())))
    return full, spans


def _place(
    tokenizer: Any, messages: Messages, i: int, tools: Tools, added: tuple[str, ...], full: str, passed: int
) -> tuple[int, int] | None:
    """The (start, end) of answer ``i`` in ``full``, which stands behind character ``passed``; None if the template does not show it."""
    content, asked, before = messages[i]["content"], "", ""
    told = render(tokenizer, messages[: i + 1], tools=tools)
    if i:
        asked = render(tokenizer, messages[:i], ask=True, tools=tools)
        if place := _added(full, asked, told):
            return place
        before = render(tokenizer, messages[:i], tools=tools)
    if messages[i].get("tool_calls"):
        # Templates may write tool calls without the thought that the generation prompt opens, or drop a text message in front of them.
        begun, header = BEGUN.sub("", asked), asked[len(before) :]
        return _added(full, begun, told) or (_added(full, begun, begun + told.rpartition(header)[2]) if header else None)
    if i and full.startswith(asked):
        place = _find(full, len(asked), content, told, added)
        return place and (len(asked), place[1])
    if full.startswith(before):
        return _find(full, len(before), content, told, added)
    # earlier messages are rendered differently once more follow (a system prompt may move to the last question)
    question = messages[i - 1]["content"].strip()
    at = full.find(question, passed)
    return None if at < 0 else _find(full, at + len(question), content, told, added)


def _added(full: str, asked: str, told: str) -> tuple[int, int] | None:
    """The (start, end) in ``full`` of the text that ``told`` adds to ``asked``. Some templates write a thought only in the last turn, so
    the text is also tried without its thought. None if ``full`` has neither at that place.
    """
    if full.startswith(asked) and told.startswith(asked):
        said = told[len(asked) :]
        for text in (said, _THOUGHT.sub("", said, count=1)):
            if full.startswith(text, len(asked)):
                return len(asked), len(asked) + len(text)
    return None


def _closed(full: str, end: int, added: tuple[str, ...], after: Messages) -> int:
    """The end of a turn whose text ends at ``end``. If the template writes no end-of-turn token (GLM-4.5), the target stops with the token
    that begins the next message, so the turn includes it, unless the next message is the assistant's. ``after``: the messages that follow.
    """
    if not after or after[0]["role"] == "assistant" or full[:end].rstrip().endswith(added):
        return end
    return end + max((len(mark) for mark in added if full.startswith(mark, end)), default=0)


def _find(full: str, since: int, content: str, told: str, added: tuple[str, ...]) -> tuple[int, int] | None:
    """The (start, end) of a message in ``full``, searched from character ``since`` on. The end includes what closes the message: an added
    token, or the text that follows it in ``told`` (in which it is the last message). None if the message is not found.
    """
    found = []
    for text in (content.strip(), answer_of(content)):
        closing = told[told.rfind(text) + len(text) :] if text in told else ""
        at = full.find(text, since)
        while at >= 0:
            end = at + len(text)
            if closed := [mark for mark in (closing, *added) if mark and full.startswith(mark, end)]:
                found.append((at, end + max(map(len, closed))))
                break
            at = full.find(text, at + 1)  # a short text ("assistant") can also stand in a header, but nothing closes it there
    # The whole text may also occur later, repeated or quoted, while its own turn is rendered without the thought: take the first place.
    return min(found, key=lambda place: (place[0], -place[1]), default=None)


def masked(tokenizer: Any, talks: Sequence[Talk]) -> Iterator[Document]:
    """The conversations as documents. A token is supervised if it contains at least one character of a span."""
    encoded = tokenizer([talk.text for talk in talks], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for ids, offsets, talk in zip(encoded["input_ids"], encoded["offset_mapping"], talks, strict=True):
        first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in talk.spans:
            mask |= (last > start) & (first < end)
        yield Document(np.array(ids, dtype=np.int32), mask)
