"""The conversation of a chat request as tokens: its messages, and what the client tells the target's chat template."""

from __future__ import annotations

import inspect
import re
from typing import Any

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.serving.fields import Refused, short, take
from headstart.inference.serving.text import BadRow, asking, conversation, template_of
from headstart.inference.serving.thoughts import THOUGHTS

PASSED_ON = ("name", *THOUGHTS)  # texts of a message that the template may read
HARMLESS = (("type", "text"), ("type", "message"))


def messages_of(body: dict[str, Any], target: Target) -> list[int]:
    """The conversation of a request as tokens, by the target's template. Raises Refused."""
    given: Any = body.get("messages")
    if given == []:
        raise Refused("messages is empty: give at least one message", "messages")
    more = [_more(message) for message in given] if isinstance(given, list) else []
    try:
        variables = _variables(body, target.tokenizer, template_of(target.tokenizer))
        messages = conversation({"messages": [_with_content(message) for message in given] if more else given})
        talk = [message | others for message, others in zip(messages, more, strict=True)]
        return asking(target.tokenizer, talk, variables, special=take(body, "add_special_tokens", bool, False))
    except (BadRow, UserError) as error:
        raise Refused(f"messages: {error}", "messages") from None


def _more(message: Any) -> dict[str, str]:
    """What a message has beside role and content. Raises Refused for what is not supported."""
    found = {}
    for field, value in message.items() if isinstance(message, dict) else ():
        if field in ("role", "content") or not value or (field, value) in HARMLESS:  # clients send an answer back with its empty fields
            continue
        if field not in PASSED_ON:
            raise Refused(f"messages: {short(repr(field))} is not supported in a message", "messages", "unknown_field")
        if not isinstance(value, str):
            raise Refused(f"messages: {field} must be text", "messages", "wrong_type")
        found[field] = value
    thought = next((found[field] for field in THOUGHTS if field in found), None)
    return found | ({} if thought is None else {THOUGHTS[0]: thought})  # under the name that most templates read, too


def _with_content(message: Any) -> Any:
    """An assistant that was cut within a thought has no content."""
    empty = isinstance(message, dict) and message.get("role") == "assistant" and message.get("content") is None
    return message | {"content": ""} if empty else message


def _variables(body: dict[str, Any], tokenizer: Any, template: str) -> dict[str, Any]:
    """What the template is told beside the messages. Raises Refused for what is the server's: the template itself, tokens, tools."""
    found: dict[str, Any] = take(body, "chat_template_kwargs", dict, {})
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if wrong := sorted(found.keys() & own):
        raise Refused(f"chat_template_kwargs: {wrong[0]} is not for clients to set, leave it out", "chat_template_kwargs")
    effort = take(body, "reasoning_effort", str, None)
    if effort is None:
        return found
    if re.search(r"\breasoning_effort\b", template) is None:
        raise Refused("reasoning_effort: there is no such field here", "reasoning_effort", "unknown_field")
    return found | {"reasoning_effort": effort}
