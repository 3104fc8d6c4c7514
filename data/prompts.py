"""Prompts for decoding, as tokens: read from benchmark files and files of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from headstart.data.rows import file_rows, parsed
from headstart.heads.errors import UserError
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.serving.text import BadRow, asking, conversation, ids, text_of

NAMED = 100  # a message names at most so many of the prompts that do not fit


def prompts(path: str, count: int | None, tokenizer: Any, key: str = "prompts") -> list[dict[str, Any]]:
    """The first ``count`` prompts (None: all) of a file of JSON lines or a JSON array, each as {"id", "tokens"}.

    A row holds ``turns`` (the first is taken), ``messages`` or ``conversations`` (up to the last user turn), ``prompt`` or ``text``. All
    but ``text`` go through the chat template if the tokenizer has one. ``key``: the setting that names the file. Raises ``UserError`` for
    a line that is none of these, and for a file without prompts.
    """
    found = list(islice(_read(path, tokenizer, key), count))
    if not found:
        raise UserError(f"{key}={path}: no prompts in it")
    return found


def fitting(
    path: str, count: int | None, target: TargetInfo, new_tokens: int, on_long: str, *, keys: tuple[str, str, str]
) -> list[dict[str, Any]]:
    """The first ``count`` prompts of a file. All must fit the target's context with ``new_tokens`` more tokens.

    With ``on_long="skip"``, prompts that do not fit are skipped and reported in a line. Otherwise UserError names them. ``keys``: the names
    of the user's settings for the file, ``new_tokens`` and ``on_long``, for errors.
    """
    key, new, setting = keys
    if on_long != "skip":
        found = prompts(path, count, target.tokenizer, key)
        check_prompts([p["tokens"] for p in found], new_tokens, target, [p["id"] for p in found], new, f", or {setting}=skip")
        return found
    found, long = list[dict[str, Any]](), list[str]()
    for prompt in _read(path, target.tokenizer, key):
        if len(prompt["tokens"]) + new_tokens <= target.shape.max_positions:
            found.append(prompt)
        else:
            long.append(prompt["id"])
        if len(found) == count:
            break
    if long:
        say_skipped(path, long, len(long) + len(found), target.shape.max_positions, new_tokens)
    if not found:
        raise UserError(f"{key}={path}: no prompts in it" + (" that fit the target's context" if long else ""))
    return found


def say_skipped(path: str, long: list[str], of: int, limit: int, new_tokens: int) -> None:
    """Print which prompts of a file were skipped. ``limit``: the target's context in tokens."""
    print(f"{path}: skipped {len(long)} of {of} prompts, too long for the target's context of {limit} with {new_tokens} new tokens: "
          f"{_some(long)}")  # fmt: skip


def check_prompts(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    target: TargetInfo,
    names: Sequence[str] = (),
    new: str = "decode.new_tokens",
    advice: str = "",
) -> None:
    """Raises UserError if there are no prompts, or if some do not fit the target's context with ``new_tokens`` more tokens.

    The error names up to ``NAMED`` of these, by ``names``. ``new``: the setting of ``new_tokens``. ``advice``: added at the end.
    """
    if not prompts:
        raise UserError("there are no prompts to decode: raise decode.prompts, lower decode.new_tokens, or give more data")
    limit, sizes = target.shape.max_positions, list(map(len, prompts))
    long = [f"{names[i] if names else f'number {i + 1}'} ({size} tokens)" for i, size in enumerate(sizes) if size + new_tokens > limit]
    if long:
        what = f"prompt {long[0]} does" if len(long) == 1 else f"{len(long)} of {len(prompts)} prompts do"
        which = "" if len(long) == 1 else f": {_some(long)}"
        lower = f"set {new} to {limit - max(sizes)} or less, " if max(sizes) < limit else ""
        raise UserError(f"{what} not fit the target's context of {limit} with {new_tokens} new tokens{which}: "
                        f"{lower}shorten or take out what is too long{advice}")  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(name[:100] for name in names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _read(path: str, tokenizer: Any, key: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(file_rows(path, key), 1):
        try:
            found = parsed(row.value)
            yield {"id": str(found.get("id", found.get("question_id", number))), "tokens": _prompt(found, tokenizer)}
        except BadRow as error:
            raise UserError(f"{row.where}: {error}") from None


def _prompt(row: dict[str, Any], tokenizer: Any) -> list[int]:
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        messages = [{"role": "user", "content": text_of(turns[0])}]
    elif "messages" in row or "conversations" in row:
        messages = conversation(row)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": text_of(row["prompt"])}]
    elif isinstance(row.get("text"), str):
        return ids(tokenizer, row["text"], special=True)
    else:
        raise BadRow('not a prompt: none of "turns", "messages", "prompt" and "text"')
    if not any(m["content"].strip() for m in messages):
        raise BadRow("the prompt is empty")
    if len(messages) > 1 or tokenizer.chat_template:
        return asking(tokenizer, messages)
    return ids(tokenizer, messages[0]["content"], special=True)
