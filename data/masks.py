"""Which tokens of a conversation are supervised: what the assistant says, as the target's template writes it, and nothing else.

The template is rendered once; where the assistant's text stands in it is told by the template's ``{% generation %}`` tags or, without
them, by rendering prefixes of the conversation. A mask that cannot be right is an error: an empty, full or shifted one trains quietly,
and the drafter is worthless.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from headstart.data.packed import Document, Documents
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, Messages, refused, render, template_of

_THINKING = re.compile(r"</?think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]  # characters of the rendered text
Tools = list[Any] | None  # what the assistant may call, as the row has it


class Talk(NamedTuple):
    """A conversation as its template writes it, and which of its characters are supervised."""

    messages: Messages
    text: str
    spans: Spans


class Template:
    """A tokenizer's chat template, and how the assistant is found in what it writes. Goes to other processes (pickled)."""

    def __init__(self, tokenizer: Any, last: bool = False) -> None:
        """``last``: supervise only what the assistant says behind the last question. Raises UserError where there is no template."""
        self.tokenizer, self.last, self.text = tokenizer, last, template_of(tokenizer)
        if not tokenizer.is_fast:
            raise UserError("the target's tokenizer gives no character offsets: use its fast version (tokenizer.json)")
        self.tagged, self.added = _GENERATION.search(self.text) is not None, tuple(tokenizer.get_added_vocab())

    def talk(self, messages: Messages, tools: Tools = None) -> Talk:
        """Render a conversation and find what the assistant says in it. Raises BadRow where the template refuses it, or does not show where
        the assistant speaks.
        """
        called = any(message.get("tool_calls") for message in messages)
        for word, needed in (("tools", tools), ("tool_calls", called)):
            if needed and word not in self.text:
                raise BadRow(f"the chat template writes no {word.replace('_', ' ')}")
        said = sum(map(_says, messages[_last_question(messages) + 1 if self.last else 0 :]))
        if not said:
            raise BadRow("the last question has no answer" if self.last else "the assistant says nothing in it")
        how = (self.tokenizer, messages, tools)
        text, spans = _tagged(*how, self.text) if self.tagged else _untagged(*how, self.added)
        return Talk(messages, text, spans[-said:] if self.last else spans)


def _says(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _last_question(messages: Messages) -> int:
    """The number of the last message that a user sends; -1 where none does."""
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _tagged(tokenizer: Any, messages: Messages, tools: Tools, template: str) -> tuple[str, Spans]:
    """Rendered text and spans of a template with {% generation %} tags."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=template, tools=tools, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
        )
    except Exception as error:  # as in inference.text.render
        raise refused(error) from None
    return texts[0], [(start, end) for start, end in spans[0]]


def _answer(content: str) -> str:
    """What stays of an assistant's message in a later turn: templates of reasoning models drop the thinking."""
    return content.rpartition("</think>")[2].strip()


def _untagged(tokenizer: Any, messages: Messages, tools: Tools, added: tuple[str, ...]) -> tuple[str, Spans]:
    """Rendered text and spans by prefixes: an answer is what the next rendering adds to the one that asks for it.

    A turn that is rendered otherwise once it is history (without its thinking, or with another end) is found by its
    text and what closes it. Raises ``BadRow`` where the template keeps neither.
    """
    full = render(tokenizer, messages, tools=tools)
    spans: Spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not (_answer(message["content"]) or message.get("tool_calls")):
            continue
        asked = render(tokenizer, messages[:i], ask=True, tools=tools) if i else ""
        told = render(tokenizer, messages[: i + 1], tools=tools)
        begins = i > 0 and full.startswith(asked)
        if begins and told.startswith(asked) and full.startswith(told):
            start, end = len(asked), len(told)
        else:
            place, before = None, render(tokenizer, messages[:i], tools=tools) if i else ""
            if full.startswith(before) and not message.get("tool_calls"):
                place = _find(full, len(asked if begins else before), message["content"], told, added)
            if place is None:
                raise BadRow(
                    f"the chat template does not show where message {i + 1} (assistant) begins and ends: add "
                    "{% generation %} tags to the template, or take the thinking out of the conversations"
                )
            start, end = (len(asked) if begins else place[0]), place[1]
        # The target stops at its end-of-turn token: white space after it is the template's, not the target's.
        spans.append((start, start + len(full[start:end].rstrip())))
    return full, spans


def _find(full: str, since: int, content: str, told: str, added: tuple[str, ...]) -> tuple[int, int] | None:
    """(start, end) of a message in ``full``, from character ``since`` on, with what closes it: what follows it in ``told``, where it is the
    last message, or an added token. None where it is not found.
    """
    for text in (content.strip(), _answer(content)):
        closing = told[told.rfind(text) + len(text) :] if text in told else ""
        at = full.find(text, since)
        while at >= 0:
            end = at + len(text)
            closed = [mark for mark in (closing, *added) if mark and full.startswith(mark, end)]
            if closed:
                return at, end + max(map(len, closed))
            at = full.find(text, at + 1)  # a header can hold a short text ("assistant") too, but does not close it
    return None


def masked(tokenizer: Any, talks: Sequence[Talk]) -> Iterator[Document]:
    """The conversations as documents. A token that holds a character of a span is supervised."""
    encoded = tokenizer([talk.text for talk in talks], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for ids, offsets, talk in zip(encoded["input_ids"], encoded["offset_mapping"], talks, strict=True):
        first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in talk.spans:
            mask |= (last > start) & (first < end)
        yield Document(np.array(ids, dtype=np.int32), mask)


# ---- is the mask right? ----


def _squeeze(text: str) -> str:
    """The text without white space, which tokenizers may change when they decode."""
    return "".join(text.split())


def _said(tokenizer: Any, document: Document) -> list[str]:
    """The text of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.pad(document.loss_mask.astype(np.int8), 1)))
    runs = [document.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]
    return [_squeeze(tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in runs]


def check_masks(
    tokenizer: Any, talks: Sequence[Messages], made: Documents, names: Sequence[str], sample: int = 500, last: bool = False
) -> None:
    """Refuse masks that are empty, full, or not on the assistant's words (in up to ``sample`` conversations, evenly taken).

    ``last``: only what is said behind the last question is supervised. Raises ``UserError`` that says which, where, and which text
    it is about.
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
            for call in message.get("tool_calls") or ():
                if not any(_squeeze(call["function"]["name"]) in run for run in said):
                    raise UserError(f"{where}: the loss mask is shifted: the call of a tool in message {i + 1} is not supervised: {advice}")
            text = message["content"] if _squeeze(message["content"]) in whole else _answer(message["content"])
            words = _squeeze(text)
            if not any(words in run for run in said):
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                words = _squeeze(tokenizer.decode(ids))  # a normalizer's way
            if not any(words in run for run in said):
                raise UserError(f"{where}: the loss mask is shifted: message {i + 1} (assistant) is not all supervised: {advice}")
            for part in sorted([words, *map(_squeeze, _THINKING.split(message["content"]))], key=len, reverse=True):
                rest = rest.replace(part, " ") if part else rest
            if i and _asks(tokenizer, messages[:i], document):
                raise UserError(
                    f"{where}: the loss mask is shifted: it begins before the text of message {i + 1} (assistant), in the header "
                    f"that asks for it: {advice}"
                )
        for i, message in enumerate(messages):
            words = _squeeze(message["content"])
            # Short ones ("yes", "end") occur by chance, inside a special token for one.
            if message["role"] != "assistant" and len(words) >= 12 and words in rest:
                raise UserError(f"{where}: the loss mask is shifted: message {i + 1} ({message['role']}) is supervised: {advice}")


def _asks(tokenizer: Any, messages: Messages, document: Document) -> bool:
    """Whether the last token of the header that asks for an answer is supervised, though the target never writes it."""
    try:
        plain, text = render(tokenizer, messages), re.sub(r"<think>\s*$", "", render(tokenizer, messages, ask=True))
    except BadRow:  # a template that refuses a part of a conversation
        return False
    asked = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not asked or document.tokens[: len(asked)].tolist() != asked or text == plain:
        return False
    return bool(document.loss_mask[len(asked) - 1])
