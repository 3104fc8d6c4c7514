"""Prompts for decoding, as tokens: read from benchmark files and files of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headstart.data.forms import logged
from headstart.data.rows import file_rows, parsed
from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.serving.text import BadRow, asking, conversation, ids, text_of

NAMED = 100  # the most prompts that a message names


def read(path: str, tokenizer: Any, key: str) -> Iterator[dict[str, Any]]:
    """The prompts of a file of JSON lines or a JSON array, each as {"id", "tokens"}. ``key``: the user's setting for the file, for errors.

    A row holds ``turns`` (the first is taken), ``messages`` or ``conversations`` (up to the last user turn; of a server's log those of the
    request), ``prompt`` or ``text``. All but ``text`` go through the chat template if the tokenizer has one. Raises ``UserError`` for a row
    that is none of these.
    """
    for number, row in enumerate(file_rows(path, key), 1):
        try:
            found = parsed(row.value)
            name = next((found[key] for key in ("id", "question_id") if found.get(key) is not None), number)
            yield {"id": str(name), "tokens": _prompt(found, tokenizer)}
        except BadRow as error:
            raise UserError(f"{row.where}: {error}") from None


class Size(NamedTuple):
    """How long a prompt is, and may be."""

    name: str
    tokens: int
    most: int  # tokens of the prompt and its continuation together

    def fits(self, new_tokens: int) -> bool:
        """Whether ``new_tokens`` more tokens can follow."""
        return self.tokens + new_tokens <= self.most


def fitting(
    path: str, count: int | None, target: TargetInfo, new_tokens: int, on_long: str, *, keys: tuple[str, str, str]
) -> list[list[int]]:
    """The tokens of the first ``count`` prompts of a file (None: all), which must all fit the target's context with ``new_tokens`` more
    tokens. With ``on_long="skip"``, those that do not fit are replaced by later ones, and a line names them. Otherwise a UserError names
    them. ``keys``: the names of the user's settings for the file, ``new_tokens`` and ``on_long``, for errors.
    """
    key, new, setting = keys
    found, sizes, long = list[list[int]](), list[Size](), list[Size]()
    for prompt in read(path, target.tokenizer, key):
        size = Size(prompt["id"], len(prompt["tokens"]), longest(target, len(prompt["tokens"])))
        if on_long == "skip" and not size.fits(new_tokens):
            long.append(size)
        else:
            found.append(prompt["tokens"])
            sizes.append(size)
        if len(found) == count:
            break
    if long:
        say_skipped(path, long, len(long) + len(found), new_tokens)
    if not found:
        raise UserError(f"{key}={path}: no prompts in it" + (" that fit the target's context" if long else ""))
    check_sizes(sizes, new_tokens, new, f", or {setting}=skip")
    return found


def say_skipped(path: str, long: Sequence[Size], of: int, new_tokens: int) -> None:
    """Print which prompts of a file were skipped, of how many."""
    limit = min(size.most for size in long)
    print(f"{path}: skipped {len(long)} of {of} prompts, too long for the target's context of {limit} with {new_tokens} new tokens: "
          f"{_some([size.name for size in long])}")  # fmt: skip


def check_prompts(prompts: Sequence[Sequence[int]], new_tokens: int, target: TargetInfo) -> None:
    """Raises UserError if a run has no prompts to decode, or if some do not fit the target's context with ``new_tokens`` more tokens."""
    if not prompts:
        raise UserError("there are no prompts to decode: raise decode.prompts, lower decode.new_tokens, or give more data")
    sizes = [Size(f"number {i}", len(prompt), longest(target, len(prompt))) for i, prompt in enumerate(prompts, 1)]
    check_sizes(sizes, new_tokens, "decode.new_tokens")


def check_sizes(sizes: Sequence[Size], new_tokens: int, new: str, advice: str = "") -> None:
    """Raises UserError that names up to ``NAMED`` prompts that do not fit the target's context with ``new_tokens`` more.

    ``new``: the setting of ``new_tokens``. ``advice``: added at the end.
    """
    if too_long := [size for size in sizes if not size.fits(new_tokens)]:
        limit, long = min(size.most for size in too_long), [f"{size.name} ({size.tokens} tokens)" for size in too_long]
        what = f"prompt {long[0]} does" if len(long) == 1 else f"{len(long)} of {len(sizes)} prompts do"
        which = "" if len(long) == 1 else f": {_some(long)}"
        least = min(size.most - size.tokens for size in sizes)
        lower = f"set {new} to {least} or less, " if least > 0 else ""
        raise UserError(f"{what} not fit the target's context of {limit} with {new_tokens} new tokens{which}: "
                        f"{lower}shorten or take out what is too long{advice}")  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(name[:100] for name in names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _prompt(row: dict[str, Any], tokenizer: Any) -> list[int]:
    row = logged(row)
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        messages = [{"role": "user", "content": text_of(turns[0])}]
    elif row.get("messages") is not None or row.get("conversations") is not None:  # data sets give all rows the same columns
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
