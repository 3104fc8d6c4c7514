"""Text and tokens: conversations as the target's template writes them, and text that grows as tokens are accepted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from headstart.heads.errors import UserError, first_line
from headstart.heads.spelling import HALF
from headstart.inference.serving.thoughts import BEGUN

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
ROLES |= {"developer": "system"}  # OpenAI's newer name
SHARED = ROLES | dict.fromkeys(("chatgpt", "bing", "bard"), "assistant")  # in ShareGPT's files
CONTEXT = 5  # tokens of the prompt decoded before the first new ones: some tokenizers drop the white space a text begins with
WORD = "headstart"  # a text by which it is tried what a template writes
GARBAGE = 64  # tokens without a whole character, after which none is expected any more

Messages = list[dict[str, Any]]  # role and content; in messages that call tools, tool_calls too


class BadRow(Exception):
    """Raised for data that are no conversation or prompt; the message says why."""


# ---- into tokens ----


def text_of(content: Any) -> str:
    """The text of a message; of a list of text parts, all joined. Raises BadRow for any other content."""
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise BadRow("content has parts that are not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f"content is not text but {type(content).__name__}")
    return unicode(content)


def unicode(text: str, what: str = "content") -> str:
    """Returns ``text``. Raises BadRow if it holds half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{what} is not Unicode: it holds half of a surrogate pair") from None
    return text


def conversation(row: dict[str, Any]) -> Messages:
    """The messages of ``{"messages": [{"role", "content"}]}`` or ShareGPT's ``{"conversations": [{"from", "value"}]}``, in the first form.
    Raises BadRow for anything else.
    """
    messages = with_system(row)
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


def with_system(row: dict[str, Any]) -> Any:
    """The ``messages`` or ``conversations`` of a row, with the text of its ``system`` in front: there LLaMA-Factory's files keep the system
    prompt. Messages that begin with a system message of their own are returned as they are.
    """
    messages, system = row.get("messages") or row.get("conversations"), row.get("system")
    if not (isinstance(system, str) and system.strip() and isinstance(messages, list) and messages):
        return messages
    first = messages[0]
    own = isinstance(first, dict) and (first.get("role") or first.get("from")) in ("system", "developer")
    return messages if own else [{"role": "system", "content": system}, *messages]


def template_of(tokenizer: Any, tools: list[Any] | None = None) -> str:
    """The tokenizer's chat template; if it has several, the one for these ``tools``. Raises ``UserError`` where it has none."""
    try:
        template: str = tokenizer.get_chat_template(tools=tools)
    except ValueError:
        raise UserError(
            "the target's tokenizer has no chat template, so it cannot read conversations: use plain text (data=text), or the target's "
            "chat version"
        ) from None
    return template


@lru_cache(8)
def _wants_parts(tokenizer: Any, template: str) -> bool:
    """Whether its template leaves out a text that is no list of parts, as those of some multimodal models do (SmolVLM, LLaVA)."""

    def shows(content: Any) -> bool:
        with suppress(Exception):  # a template is a program, see ``render``
            return WORD in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return False

    return not shows(WORD) and shows(_parts(WORD))


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def as_read(tokenizer: Any, messages: Messages) -> Messages:
    """The messages as the template reads them: their texts as lists of one part where it leaves out others."""
    if not _wants_parts(tokenizer, str(tokenizer.chat_template)):
        return messages
    return [message | {"content": _parts(message["content"])} if message.get("content") else message for message in messages]


def render(
    tokenizer: Any, messages: Messages, ask: bool = False, tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
) -> str:
    """The conversation as the template writes it. ``ask`` adds the beginning of an answer, for the target to continue; ``tools``: what the
    target may call; ``variables``: further variables of the template. Raises BadRow where the template refuses the conversation, and for
    half of a surrogate pair in it.
    """
    try:
        more = dict(variables or {}) | ({"tools": tools} if tools else {})
        given = as_read(tokenizer, messages)
        text: str = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=ask, **more)
    except Exception as error:  # a template is a program: it may raise any kind of error for a conversation it was not written for
        raise refused(error) from None
    return unicode(text, "what the chat template writes")


def refused(error: Exception) -> BadRow:
    """The error for a conversation that the tokenizer's template does not take."""
    return BadRow(f"the chat template refuses it ({first_line(error)})")


def in_history(tokenizer: Any, messages: Messages, asked: str, answer: str) -> str:
    """The content to store for an answer, such that the template renders it as it was generated: ``asked`` followed by ``answer``.

    ``asked`` is the rendering of ``messages`` with the beginning of an answer, ``answer`` the text that was generated there. Many
    templates write a space or a line break before an answer; if the target generated one too, the unchanged answer would be rendered
    with two. Some templates begin an answer with the opening of a thought, which then belongs to the content. Of the contents that
    render exactly, the one with the least white space around it is returned. If none does (the template trims the answer, drops a
    thought, or adds an empty one), the answer is returned without white space around it. For an answer in several channels (see
    ``spoken``) it is the last channel, which users are shown. Raises BadRow where such an answer was cut before its last channel.
    """
    begun = BEGUN.search(asked)
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
    """The text of an answer to store: ``text``, or, if special tokens divide the answer into several channels, the text with these special
    tokens in it. Targets with channels (gpt-oss) separate thoughts from answers this way. ``tokens``: the answer's, without a stop token.
    """
    known = tokenizer.added_tokens_decoder
    if not any(token in known and known[token].special for token in tokens):
        return text
    raw: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return raw if len(_channels(tokenizer, raw)) > 1 else text


def _channels(tokenizer: Any, text: str) -> list[str]:
    """The parts of ``text`` between special tokens, without empty ones."""
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [part for part in re.split("|".join(special), text) if part.strip()] if special else [text]


def ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    """The tokens of a text. ``special``: the tokenizer adds its special tokens; False for a rendered conversation, where the chat template
    wrote them. Raises BadRow where there are no tokens.
    """
    found: list[int] = tokenizer(unicode(text, "the prompt"), add_special_tokens=special, verbose=False)["input_ids"]
    if not found:
        raise BadRow("the prompt is empty")
    return found


def asking(tokenizer: Any, messages: Messages, variables: Mapping[str, Any] | None = None, special: bool = False) -> list[int]:
    """Tokens of a conversation up to where the assistant answers; ``variables``: as in ``render``, ``special``: as in ``ids``. Raises
    ``BadRow``, and ``UserError`` without a chat template.
    """
    template_of(tokenizer)
    return ids(tokenizer, render(tokenizer, messages, ask=True, variables=variables), special)


# ---- out of tokens ----


class Reader:
    """Decodes new tokens piece by piece: no piece ends within a character, or within what may become a stop string.

    The pieces make up the same text however the tokens arrive, in runs or one at a time. When a stop string is complete, the text
    ends before it, ``stopped`` is set, ``by`` is that string, and ``count`` the number of tokens up to the one that completed it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stops: Sequence[str] = (), least: int = 0) -> None:
        """``prompt``: the tokens before the new ones. ``least``: a stop string completed within this many new tokens is ignored."""
        self.tokenizer, self.stops, self.least = tokenizer, stops, least
        self.tokens = list(prompt[-CONTEXT:])
        self.start, self.clean = 0, len(self.tokens)  # token indices between two characters: where decoding begins; the last such one
        self.given = len(self._decoded().rstrip(HALF))  # characters of the decoded text that were given out
        self.held, self.stopped, self.by, self.count = "", False, "", 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the text that is certain now and was not before."""
        said = ""
        # If every run ended within a character, no end of a character would ever be found: token by token, the next one is.
        alone = self.stops or len(self.tokens) + len(tokens) - self.clean > GARBAGE // 2
        for run in [[token] for token in tokens] if alone else [tokens]:
            self.tokens += run
            self.count += len(run)
            said += self._before_stop(self._fresh())
            if self.stopped:
                break
        return said

    def end(self) -> str:
        """Call it when no more tokens come. Returns the text that was held back."""
        if self.stopped:
            return ""
        said = self._before_stop(self._fresh(last=True) if len(self.tokens) > self.clean else "")  # the prompt may end within a character
        held, self.held = self.held, ""
        return said + held

    def _decoded(self) -> str:
        text: str = self.tokenizer.decode(self.tokens[self.start :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _fresh(self, last: bool = False) -> str:
        text = self._decoded()
        whole = text if last or len(self.tokens) - self.clean > GARBAGE else text.rstrip(HALF)
        fresh, self.given = whole[self.given :], max(self.given, len(whole))
        if fresh and whole == text:  # the next piece is decoded with only this one before it
            self.start, self.clean = self.clean, len(self.tokens)
            self.given = len(self._decoded())
        elif text == whole and not fresh and len(self.tokens) - self.clean > CONTEXT:
            del self.tokens[self.clean :]  # special tokens, which have no text: else every further token would be decoded with them
        return fresh

    def _before_stop(self, fresh: str) -> str:
        text, self.held = self.held + fresh, ""
        if not self.stops:
            return text
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0] if self.count > self.least else []
        if found:
            self.stopped, (at, self.by) = True, min(found)
            return text[:at]
        keep = max((n for stop in self.stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]
