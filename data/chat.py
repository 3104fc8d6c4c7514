"""Conversations -> documents of which only the assistant's tokens are supervised.

Rows are ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``, from a JSONL
file or a Hugging Face dataset. The target's chat template is rendered once; where the assistant's text stands in it is
told by the template's ``{% generation %}`` tags or, without them, by rendering prefixes of the conversation. A mask
that cannot be right is an error: an empty, full or shifted one trains quietly, and the drafter is worthless.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.pack import Document
from heads.errors import UserError
from inference.text import BadRow, Messages, conversation, render, template_of

log = logging.getLogger(__name__)

_THINKING = re.compile(r"</?think>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]  # characters of the rendered text


# ---- reading rows ----


def rows_of(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row): each line of a JSONL file as bytes, or each row of a Hugging Face dataset."""
    path = Path(source).expanduser()
    if path.is_file():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", line
        return
    if path.suffix in (".jsonl", ".json") or source.startswith(("/", ".", "~")):
        raise UserError(f"{path}: no such file")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{source!r} is no file, and a Hugging Face dataset needs `pip install datasets`") from error
    try:
        rows = load_dataset(source, split=split)
    except Exception as error:  # datasets raises a dozen kinds of error for names, networks and files
        raise UserError(f"{source!r} is no file, and dataset split {split!r} did not load: {str(error).splitlines()[0]}") from error
    for number, row in enumerate(rows):
        yield f"{source} row {number}", row


def parsed(row: Any) -> dict[str, Any]:
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadRow(f"not an object but {type(row).__name__}")
    return row


# ---- where the assistant speaks ----


def _tagged(tokenizer: Any, messages: Messages, template: str) -> tuple[str, Spans]:
    """Rendered text and spans of a template with {% generation %} tags."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
        )
    except TemplateError as error:
        raise BadRow(f"the chat template refuses it ({error})") from None
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


def documents(source: str, tokenizer: Any, split: str = "train", on_bad: str = "error") -> list[Document]:
    """Documents of a JSONL file of conversations, or of a Hugging Face dataset's ``split``.

    A row that is not a conversation raises ``UserError`` with its line, or is dropped and counted (``on_bad="skip"``).
    Also raises ``UserError`` where the template or its mask cannot be trusted (see ``check_masks``).
    """
    if on_bad not in ("error", "skip"):
        raise UserError(f"on_bad={on_bad!r}: choose error or skip")
    template = template_of(tokenizer)
    if not tokenizer.is_fast:
        raise UserError("the target's tokenizer gives no character offsets: use its fast version (tokenizer.json)")
    tagged, added = _GENERATION.search(template) is not None, tuple(tokenizer.get_added_vocab())
    talks: list[Messages] = []
    texts: list[str] = []
    spans: list[Spans] = []
    names: list[str] = []
    dropped: list[str] = []
    for where, row in rows_of(source, split):
        try:
            messages = conversation(parsed(row))
            if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
                raise BadRow("the assistant says nothing in it")
            found = _tagged(tokenizer, messages, template) if tagged else _untagged(tokenizer, messages, added)
        except BadRow as error:
            if on_bad == "error":
                raise UserError(f"{where}: {error} (on_bad=skip drops such lines)") from None
            dropped.append(f"{where}: {error}")
            continue
        talks.append(messages)
        texts.append(found[0])
        spans.append(found[1])
        names.append(where)
    if dropped:
        log.warning("%s: dropped %d of %d rows, first %s", source, len(dropped), len(dropped) + len(talks), "; ".join(dropped[:3]))
    if not talks:
        raise UserError(f"{source}: no conversations in it" + (f" ({dropped[0]})" if dropped else ""))
    made: list[Document] = []
    for start in range(0, len(texts), 256):
        made.extend(_masked(tokenizer, texts[start : start + 256], spans[start : start + 256]))
    check_masks(tokenizer, talks, made, names)
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
