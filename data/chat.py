"""Conversations -> documents of which only the assistant's tokens are supervised.

Rows are ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``, one per line or all in
one array, or of a Hugging Face dataset. The target's chat template is rendered once; where the assistant's text stands in it is
told by the template's ``{% generation %}`` tags or, without them, by rendering prefixes of the conversation. A mask
that cannot be right is an error: an empty, full or shifted one trains quietly, and the drafter is worthless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from headstart.data.pack import Document
from headstart.data.rows import Row, kept, rows
from headstart.data.source import Source, beginnings, live, split_off
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow, Messages, conversation, refused, render, template_of

_THINKING = re.compile(r"</?think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]  # characters of the rendered text
T = TypeVar("T")


def open(target: Target, *, length: int, seed: int, path: str, split: str, on_bad: str, subset: str = "") -> Source:
    """Conversations; whole ones are held out, and what assistants say is supervised. Raises UserError for fewer than two."""
    made = documents(path, target.tokenizer, split, on_bad, subset)
    if len(made) < 2:
        raise UserError(f"path={path}: one conversation is held out, so at least two are needed, found {len(made)}")
    held, train = split_off([[document] for document in made], seed)
    return live(target, train, held, length, seed, lambda count, new: beginnings(target, held, count, new))


def check(*, path: str, split: str, subset: str, on_bad: str) -> None:
    """Raises UserError for a file that is not there, or whose first row is none."""
    next(rows(path, split, subset), None)


def conversations(
    read: Callable[[dict[str, Any]], T], limit: int | None = None, *, path: str, split: str, subset: str, on_bad: str
) -> list[tuple[Row, T]]:
    """What ``read`` makes of the conversations (data/rows.py says what of those of which it makes nothing)."""
    return kept(path, split, subset, on_bad, read, "conversations", limit)


# ---- where the assistant speaks ----


def _tagged(tokenizer: Any, messages: Messages, template: str) -> tuple[str, Spans]:
    """Rendered text and spans of a template with {% generation %} tags."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
        )
    except Exception as error:  # as in inference.text.render
        raise refused(error) from None
    return texts[0], [(start, end) for start, end in spans[0]]


def _answer(content: str) -> str:
    """What stays of an assistant's message in a later turn: templates of reasoning models drop the thinking."""
    return content.rpartition("</think>")[2].strip()


def _untagged(tokenizer: Any, messages: Messages, added: tuple[str, ...]) -> tuple[str, Spans]:
    """Rendered text and spans by prefixes: an answer is what the next rendering adds to the one that asks for it.

    A turn that is rendered otherwise once it is history (without its thinking, or with another end) is found by its
    text and what closes it. Raises ``BadRow`` where the template keeps neither.
    """
    full = render(tokenizer, messages)
    spans: Spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not _answer(message["content"]):
            continue
        before = render(tokenizer, messages[:i]) if i else ""
        asked = render(tokenizer, messages[:i], ask=True) if i else ""
        told = render(tokenizer, messages[: i + 1])
        begins = i > 0 and full.startswith(asked)
        if begins and told.startswith(asked) and full.startswith(told):
            start, end = len(asked), len(told)
        else:
            place = None
            if full.startswith(before):
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
    """Where a message stands in the text, with what closes it: as in ``told``, where it is the last one, or an added token."""
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


def _masked(tokenizer: Any, texts: list[str], spans: list[Spans]) -> Iterator[Document]:
    """Tokenized texts; a token that holds a character of a span is supervised."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for ids, offsets, places in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
        first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in places:
            mask |= (last > start) & (first < end)
        yield Document(np.array(ids, dtype=np.int32), mask)


def documents(source: str, tokenizer: Any, split: str = "train", on_bad: str = "error", subset: str = "") -> list[Document]:
    """Documents of the conversations of a file (JSON lines or an array), or of a Hugging Face dataset's ``split`` (of its ``subset``).

    A row that is not a conversation raises ``UserError`` with its line, or is dropped and counted (``on_bad="skip"``).
    Also raises ``UserError`` where the template or its mask cannot be trusted (see ``check_masks``).
    """
    template = template_of(tokenizer)
    if not tokenizer.is_fast:
        raise UserError("the target's tokenizer gives no character offsets: use its fast version (tokenizer.json)")
    tagged, added = _GENERATION.search(template) is not None, tuple(tokenizer.get_added_vocab())

    def read(row: dict[str, Any]) -> tuple[Messages, tuple[str, Spans]]:
        messages = conversation(row)
        if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
            raise BadRow("the assistant says nothing in it")
        return messages, _tagged(tokenizer, messages, template) if tagged else _untagged(tokenizer, messages, added)

    found = conversations(read, path=source, split=split, subset=subset, on_bad=on_bad)
    made: list[Document] = []
    for start in range(0, len(found), 256):
        texts, spans = zip(*(place for _, (_, place) in found[start : start + 256]), strict=True)
        made.extend(_masked(tokenizer, list(texts), list(spans)))
    check_masks(tokenizer, [messages for _, (messages, _) in found], made, [row.where for row, _ in found])
    return made


# ---- is the mask right? ----


def _squeeze(text: str) -> str:
    """Without white space: tokenizers disagree about it when they decode."""
    return "".join(text.split())


def _said(tokenizer: Any, document: Document) -> list[str]:
    """The text of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.pad(document.loss_mask.astype(np.int8), 1)))
    runs = [document.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]
    return [_squeeze(tokenizer.decode(run, clean_up_tokenization_spaces=False)) for run in runs]


def check_masks(tokenizer: Any, talks: Sequence[Messages], made: Sequence[Document], names: Sequence[str], sample: int = 500) -> None:
    """Refuse masks that are empty, full, or not on the assistant's words (in up to ``sample`` conversations, evenly taken).

    Raises ``UserError`` that says which, where, and which text it is about.
    """
    advice = "look at the {% generation %} tags of the chat template"
    if not any(document.loss_mask.any() for document in made):
        raise UserError(f"the loss mask is empty in all {len(made)} conversations: {advice}")
    if all(document.loss_mask.all() for document in made):
        raise UserError(f"the loss mask is full in all {len(made)} conversations (the user's tokens would be trained too): {advice}")
    for messages, document, where in list(zip(talks, made, names, strict=True))[:: -(-len(made) // sample)]:
        if not document.loss_mask.any():
            raise UserError(f"{where}: the loss mask is empty, although the assistant speaks in it: {advice}")
        said = _said(tokenizer, document)
        rest, whole = " ".join(said), _squeeze(tokenizer.decode(document.tokens.tolist()))
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            text = message["content"] if _squeeze(message["content"]) in whole else _answer(message["content"])
            words = _squeeze(text)
            if not any(words in run for run in said):
                words = _squeeze(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))  # a normalizer's way
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
    """The last token that asks for an answer is supervised, though the target never writes it."""
    try:
        plain, text = render(tokenizer, messages), re.sub(r"<think>\s*$", "", render(tokenizer, messages, ask=True))
    except BadRow:  # a template that refuses a part of a conversation
        return False
    asked = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not asked or document.tokens[: len(asked)].tolist() != asked or text == plain:
        return False
    return bool(document.loss_mask[len(asked) - 1])
