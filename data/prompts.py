"""Prompts to decode from: benchmark files and conversations, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.chat import parsed, rows_of
from heads.errors import UserError
from inference.target import Target
from inference.text import BadRow, asking, conversation, ids, text_of


def prompts(path: str, count: int | None, tokenizer: Any) -> list[dict[str, Any]]:
    """The first ``count`` prompts of a JSONL file (all: None) as {"id", "tokens"}.

    A line holds ``turns`` (the first is taken), ``messages`` or ``conversations`` (up to the last user turn), ``prompt``,
    or ``text``. All but ``text`` go through the chat template if the tokenizer has one. Raises ``UserError`` with the
    line that is none of these.
    """
    if not Path(path).expanduser().is_file():
        raise UserError(f"{path}: no such file")
    found: list[dict[str, Any]] = []
    for number, (where, line) in enumerate(rows_of(path, ""), 1):
        if count is not None and len(found) >= count:
            break
        try:
            row = parsed(line)
            tokens = _prompt(row, tokenizer)
        except BadRow as error:
            raise UserError(f"{where}: {error}") from None
        found.append({"id": str(row.get("id", row.get("question_id", number))), "tokens": tokens})
    if not found:
        raise UserError(f"{path}: no prompts in it")
    return found


def check_prompts(prompts: Sequence[Sequence[int]], new_tokens: int, target: Target, names: Sequence[str] = ()) -> None:
    """Raises UserError where there are none, or one does not fit the target's context with ``new_tokens`` more."""
    if not prompts:
        raise UserError("there are no prompts to decode: raise decode.prompts, lower decode.new_tokens, or give more data")
    limit = target.shape.max_positions
    for i, prompt in enumerate(prompts):
        if len(prompt) + new_tokens > limit:
            name = names[i] if names else f"number {i + 1}"
            raise UserError(f"prompt {name} has {len(prompt)} tokens: with decode.new_tokens={new_tokens} it exceeds the target's context "
                            f"of {limit}. Shorten it, take it out, or lower decode.new_tokens")  # fmt: skip


def _prompt(row: dict[str, Any], tokenizer: Any) -> list[int]:
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        messages = [{"role": "user", "content": text_of(turns[0])}]
    elif "messages" in row or "conversations" in row:
        messages = conversation(row)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    elif isinstance(row.get("text"), str):
        return ids(tokenizer, row["text"], special=True)
    else:
        raise BadRow('not a prompt: none of "turns", "messages", "prompt" and "text"')
    if not any(m["content"].strip() for m in messages):
        raise BadRow("the prompt is empty")
    if len(messages) > 1 or tokenizer.chat_template:
        return asking(tokenizer, messages)
    return ids(tokenizer, messages[0]["content"], special=True)
