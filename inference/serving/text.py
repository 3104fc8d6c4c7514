"""Text and tokens: conversations as the target's template writes them, and text that grows as tokens are accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headstart.heads.errors import UserError, first_line

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
ROLES |= {"developer": "system"}  # OpenAI's newer name
SHARED = ROLES | dict.fromkeys(("chatgpt", "bing", "bard"), "assistant")  # in ShareGPT's files
HALF = "\ufffd"  # what tokenizers write for a character whose bytes are not all there
CONTEXT = 5  # tokens of the prompt that the first text is read with: some tokenizers drop the white space a text begins with
GARBAGE = 64  # after so many tokens without a whole character none is coming

Messages = list[dict[str, Any]]  # role and content; of what calls tools, tool_calls too

_THOUGHT = re.compile(r"<think>\s*$")


class BadRow(Exception):
    """What is not a conversation or a prompt, and why."""


# ---- into tokens ----


def text_of(content: Any) -> str:
    """A message's text; the text parts of a list of parts, joined."""
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise BadRow("content has parts that are not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f"content is not text but {type(content).__name__}")
    return unicode(content)


def unicode(text: str, what: str = "content") -> str:
    """Raises BadRow for half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{what} is not Unicode: it holds half of a surrogate pair") from None
    return text


def conversation(row: dict[str, Any]) -> Messages:
    """``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}`` as the former's list."""
    messages = row.get("messages") or row.get("conversations")
    if not isinstance(messages, list) or not messages:
        raise BadRow('not a conversation: no list "messages" or "conversations"')
    if row.get("tools"):
        raise BadRow("conversations with tools are not supported")
    found = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadRow(f"a message is not an object but {type(message).__name__}")
        role = message.get("role") or message.get("from")
        names = ROLES if "role" in message else SHARED
        if not isinstance(role, str) or role not in names:
            raise BadRow(f"a message's role is {role!r:.60}, not one of {', '.join(names)}")
        if message.get("tool_calls") or message.get("function_call"):
            raise BadRow("tool calls are not supported")
        content = message.get("content")
        found.append({"role": names[role], "content": text_of(message.get("value") if content is None else content)})
    return found


def template_of(tokenizer: Any) -> str:
    """The tokenizer's chat template. Raises ``UserError`` where it has none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "the target's tokenizer has no chat template, so it cannot read conversations: use plain text (data=text), or the target's "
            "chat version"
        ) from None
    return template


def render(tokenizer: Any, messages: Messages, ask: bool = False, tools: list[Any] | None = None, **more: Any) -> str:
    """The template's text; ``ask`` adds the beginning of an answer that the target is asked for, ``tools`` are what it may call, and
    ``more`` are variables of the template's own.
    """
    try:
        more |= {"tools": tools} if tools else {}
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask, **more)
    except Exception as error:  # a template is a program: it may raise any kind of error for a conversation it was not written for
        raise refused(error) from None
    return text


def refused(error: Exception) -> BadRow:
    """The error for a conversation that the tokenizer's template does not take."""
    return BadRow(f"the chat template refuses it ({first_line(error)})")


def in_history(tokenizer: Any, messages: Messages, asked: str, answer: str) -> str:
    """What an answer must be called in ``messages`` for the template to write it where it was generated: behind ``asked``.

    ``asked`` is what ``messages`` render to with the beginning of an answer, ``answer`` the text that was generated there. Many
    templates write a space or a line break in front of an answer that the target began with itself, so that the answer
    as it stands would come out with two; and some ask with the beginning of a thought, which belongs to the answer then. Among
    what comes out right, what has the least white space around it; where the template writes the answer otherwise in
    any case (trims it, drops a thought, adds an empty one), without any. Of an answer in several channels (see ``spoken``) it
    is the last one, which users are shown. Raises BadRow where such an answer was cut before it.
    """
    begun = _THOUGHT.search(asked)
    thought = begun[0] if begun else ""
    for text in dict.fromkeys((answer, thought + answer)):
        for content in dict.fromkeys((text.strip(), text.rstrip(), text.lstrip(), text[1:], text)):
            with suppress(BadRow):
                if render(tokenizer, [*messages, {"role": "assistant", "content": content}]).startswith(asked + answer):
                    return content
    if len(channels := _channels(tokenizer, answer)) > 1:
        final = channels[-1].strip()
        added = render(tokenizer, [*messages, {"role": "assistant", "content": final}]).removeprefix(asked)
        said, written = (text[: text.rfind(final) + len(final)] for text in (answer, added))
        if not said.endswith(written.lstrip()):
            raise BadRow("the answer was cut before what it was to say")
        return final
    return (thought + answer).strip()


def spoken(tokenizer: Any, text: str, tokens: Sequence[int]) -> str:
    """The ``text`` of an answer, whose ``tokens`` come without a stop token; with the special tokens in it where it has some: targets that
    speak in several channels (gpt-oss) mark with them what is thought and what is said.
    """
    known = tokenizer.added_tokens_decoder
    if not any(token in known and known[token].special for token in tokens):
        return text
    raw: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return raw if len(_channels(tokenizer, raw)) > 1 else text


def _channels(tokenizer: Any, text: str) -> list[str]:
    """What stands between special tokens, without what is empty."""
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [part for part in re.split("|".join(special), text) if part.strip()] if special else [text]


def ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """Tokens of a text; ``special`` lets the tokenizer add its own, which a chat template has written already."""
    found: list[int] = tokenizer(unicode(text, "the prompt"), add_special_tokens=special, verbose=False)["input_ids"]
    if not found:
        raise BadRow("the prompt is empty")
    return found


def asking(tokenizer: Any, messages: Messages) -> list[int]:
    """Tokens of a conversation up to where the assistant answers. Raises ``BadRow``, and ``UserError`` without a chat template."""
    template_of(tokenizer)
    return ids(tokenizer, render(tokenizer, messages, ask=True), special=False)


# ---- out of tokens ----


class Reader:
    """The text of new tokens, piece by piece: never a part of a character, never a part of what may become a stop string.

    The pieces make up the same text however the tokens arrive, in runs or one at a time. Where a stop string is complete
    the text ends before it, ``stopped`` is set, and ``count`` is the tokens up to the one that completed it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stops: Sequence[str] = (), least: int = 0) -> None:
        """``least``: a stop string that is complete within so many tokens ends nothing."""
        self.tokenizer, self.stops, self.least = tokenizer, stops, least
        self.tokens = list(prompt[-CONTEXT:])
        self.start, self.clean = 0, len(self.tokens)  # what is decoded begins at a border of characters; the last such border
        self.given = len(self._decoded().rstrip(HALF))  # characters of what is decoded that were given out
        self.held, self.stopped, self.count = "", False, 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        said = ""
        for run in [[token] for token in tokens] if self.stops else [tokens]:
            self.tokens += run
            self.count += len(run)
            said += self._before_stop(self._fresh())
            if self.stopped:
                break
        return said

    def end(self) -> str:
        """What was held back: no more tokens come."""
        if self.stopped:
            return ""
        said = self._before_stop(self._fresh(last=True))
        held, self.held = self.held, ""
        return said + held

    def _decoded(self) -> str:
        text: str = self.tokenizer.decode(self.tokens[self.start :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _fresh(self, last: bool = False) -> str:
        text = self._decoded()
        whole = text if last or len(self.tokens) - self.clean > GARBAGE else text.rstrip(HALF)
        fresh, self.given = whole[self.given :], max(self.given, len(whole))
        if fresh and whole == text:  # the next text is decoded with this one in front of it, and no more
            self.start, self.clean = self.clean, len(self.tokens)
            self.given = len(self._decoded())
        elif text == whole and not fresh and len(self.tokens) - self.clean > CONTEXT:
            del self.tokens[self.clean :]  # special tokens, which have no text: else every further one is read with all of them
        return fresh

    def _before_stop(self, fresh: str) -> str:
        text, self.held = self.held + fresh, ""
        if not self.stops:
            return text
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0] if self.count > self.least else []
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((n for stop in self.stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
