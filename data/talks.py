"""The requests to the target: the assistant's turns of conversations, or continuations of plain text, one prompt at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from headstart.data.answers import Answer, Talk
from headstart.data.plain import Text, encode_texts
from headstart.data.regenerated import digest
from headstart.heads.errors import UserError
from headstart.inference.serving.text import BadRow, Messages, asking, conversation, ids, in_history, render, spoken, template_of

Unfit = Callable[[list[int]], str | None]  # the reason why a prompt cannot be answered, or None


class Item(NamedTuple):
    """A conversation, or the beginning of a text."""

    number: int  # of its line in the source, from 1
    name: str  # its place in the source, for messages
    key: str  # its ``id`` in the output
    messages: Messages  # of a conversation; the last one is the assistant's, to be answered
    prefix: list[int]  # the tokens of a text's beginning; empty for a conversation
    of: str  # digest of its content


class Made(NamedTuple):
    """A line of the output file, and what to report about it."""

    record: dict[str, Any]
    truncated: int  # answers that were cut at new_tokens
    shortened: str  # the reason why it ends before the source conversation does; empty if it does not


# ---- what is to be answered ----


def questions(
    module: ModuleType, given: dict[str, Any], tokenizer: Any, *, prefix: int, new_tokens: int, seed: int, limit: int | None
) -> list[Item]:
    """The conversations of a source of data (see ``source.find``), or the beginnings of its training text.

    Raises UserError for a tokenizer without a chat template, a bad row, or a ``prefix`` that is longer than every text.
    """
    if hasattr(module, "texts"):
        return prefixes(tokenizer, module.texts(seed, **given)[0], prefix, new_tokens, seed, limit)
    template_of(tokenizer)

    def read(row: dict[str, Any]) -> tuple[Any, Messages]:
        messages = _answerable(conversation(row))
        render(tokenizer, messages)
        return row.get("id"), messages

    found = module.conversations(read, limit, **given)
    return [Item(r.number, r.where, str(r.number if key is None else key), m, [], digest(m)) for r, (key, m) in found]


def _answerable(messages: Messages) -> Messages:
    """The messages, without assistant messages before the first question, and with an answer at the end (an empty one if it is missing).

    Raises BadRow for a conversation without a user message.
    """
    asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if asked is None:
        raise BadRow("it has no message of a user")
    found = [m for i, m in enumerate(messages) if i > asked or m["role"] != "assistant"]
    return found if found[-1]["role"] == "assistant" else [*found, {"role": "assistant", "content": ""}]


def prefixes(tokenizer: Any, texts: list[Text], prefix: int, new_tokens: int, seed: int, limit: int | None) -> list[Item]:
    """Prompts from plain text: the first ``prefix`` tokens of each window of ``prefix`` + ``new_tokens`` tokens. ``seed`` shuffles them, so
    that the first ``limit`` prompts come from all texts. Raises UserError if every text is shorter than ``prefix``.
    """
    found, longest = list[tuple[str, list[int]]](), 0
    for (name, _, ends), document in zip(texts, encode_texts(tokenizer, texts), strict=True):
        tokens = document.tokens[: -1 if ends else None].tolist()  # without the end-of-text token
        first = tokens[:1] if tokens[:1] == [tokenizer.bos_token_id] else []
        longest = max(longest, len(tokens) - len(first))
        for start in range(len(first), len(tokens) - prefix, prefix + new_tokens):
            found.append((f"{name}:{start}", first + tokens[start : start + prefix]))
    if not found:
        lower = f"set prefix to {longest - 1} or less" if longest > 1 else "give longer texts"
        raise UserError(f"prefix={prefix} is too long: the longest text has {longest} tokens: {lower}")
    random.Random(seed).shuffle(found)
    return [Item(i, key, key, [], tokens, digest([key, tokens])) for i, (key, tokens) in enumerate(found[:limit], 1)]


def first_prompt(item: Item, tokenizer: Any, turns: str) -> list[int]:
    """The tokens of the item's first prompt. Raises BadRow if the chat template refuses it."""
    if item.prefix:
        return item.prefix
    last = len(item.messages) - 1
    asked = last if turns == "last" else next(i for i, message in enumerate(item.messages) if message["role"] == "assistant")
    return asking(tokenizer, item.messages[:asked])


# ---- one at a time ----


def converse(item: Item, tokenizer: Any, turns: str, unfit: Unfit) -> Talk:
    """A generator that asks for the assistant's turns in order. ``turns``: "last" asks only for the last one.

    Returns ``Made``, or the reason why there is no answer.
    """
    last = len(item.messages) - 1
    said, documents, truncated, spoke, why = Messages(), list[dict[str, Any]](), 0, False, None
    for i, message in enumerate(item.messages):
        if message["role"] != "assistant" or (turns == "last" and i < last):
            said.append(message)
            continue
        try:
            asked = render(tokenizer, said, ask=True)
            prompt = ids(tokenizer, asked, special=False)
        except BadRow as error:
            why = str(error)
            break
        why = unfit(prompt)
        answer: Answer | None = None if why else (yield prompt)
        if answer is None or answer.ended == "unfit":
            why = why or (answer.text if answer else "")
            break
        tokens = None if answer.tokens is None else answer.tokens[: -1 if answer.ended == "stop" else None]
        try:
            text = in_history(tokenizer, said, asked, answer.text if tokens is None else spoken(tokenizer, answer.text, tokens))
        except BadRow as error:
            why = str(error)
            break
        said.append({"role": "assistant", "content": text})
        truncated, spoke = truncated + (answer.ended == "length"), spoke or bool(answer.text.strip())
        _add(documents, prompt, answer)
    if not spoke:
        return why or "the target says nothing"
    while said[-1]["role"] != "assistant":
        said.pop()
    return Made({"id": item.key, "messages": said, **_known(documents)}, truncated, why or "")


def proceed(item: Item, tokenizer: Any, unfit: Unfit) -> Talk:
    """A generator that asks for the continuation of a prefix. Returns ``Made``, or the reason why there is no answer.

    Raises UserError if the answer comes without tokens.
    """
    if why := unfit(item.prefix):
        return why
    answer = yield item.prefix
    if answer.ended == "unfit":
        return answer.text
    if answer.tokens is None:
        raise UserError("this endpoint does not tell tokens (return_token_ids), and plain text cannot be learned without: take data=chat")
    documents: list[dict[str, Any]] = []
    _add(documents, item.prefix, answer)
    said = {"prompt": tokenizer.decode(item.prefix, skip_special_tokens=True), "text": answer.text}
    document = item.key.rpartition(":")[0]
    return Made({"id": item.key, "document": document, **said, "documents": documents}, int(answer.ended == "length"), "")


def _add(documents: list[dict[str, Any]], prompt: list[int], answer: Answer) -> None:
    """Add a prompt and its answer to the documents. If the prompt begins with exactly the tokens of the last document, they extend that
    document. Otherwise they form a new one.
    """
    tokens = answer.tokens
    if tokens is None:
        documents.append({})
        return
    if not (documents and documents[-1] and prompt[: len(documents[-1]["tokens"])] == documents[-1]["tokens"]):
        documents.append({"tokens": [], "answers": []})
    documents[-1]["tokens"] = prompt + tokens
    documents[-1]["answers"].append([len(prompt), len(prompt) + len(tokens)])


def _known(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return {"documents": documents} if all(documents) else {}
