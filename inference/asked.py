"""What a request over HTTP asks for: a JSON body, checked field by field, as tokens and settings (OpenAI's names and defaults).

Beside OpenAI's: ``top_k``, ``min_p``, ``repetition_penalty``, and ``return_token_ids`` for the tokens beside the text.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

from heads.errors import UserError
from inference.decode import check_prompt
from inference.sampling import Sampling
from inference.target import Target
from inference.text import BadRow, asking, conversation, ids

SAMPLING: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # when absent
FIELDS = {"model", "max_tokens", "max_completion_tokens", "seed", "stop", "stream", "stream_options", "return_token_ids", "user"}
OFF = {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0}  # no other value
COMPLETION_TOKENS = 16  # OpenAI's default; an answer in a chat may fill the context
MOST_STOPS, LONGEST_STOP, LARGEST = 4, 256, 1e6


class Refused(Exception):
    """A request that gets an error: what is said, the field it is about, the HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Asked(NamedTuple):
    """A request, checked."""

    chat: bool
    prompt: list[int]
    new_tokens: int
    sampling: Sampling
    stops: list[str]
    stream: bool
    usage: bool  # at the end of a stream too
    token_ids: bool  # beside the text


def read(raw: bytes, chat: bool, target: Target, name: str, limit: int, rule: str) -> Asked:
    """A body as a request of up to ``limit`` tokens in all. Raises ``Refused`` naming the field that is wrong."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    what = "messages" if chat else "prompt"
    for field in body.keys() - FIELDS - SAMPLING.keys() - OFF.keys() - {what}:
        raise Refused(f"{field}: there is no such field here", field, "unknown_field")
    for field, value in OFF.items():
        given = body.get(field)
        if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):  # 0 is not false here
            raise Refused(f"{field}: nothing but {json.dumps(value)} is supported", field, "unsupported_value")
    if take(body, "model", str, name) != name:
        raise Refused(f"model: {body['model']!r} is not here, only {name!r}", "model", "model_not_found", 404)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise Refused(f"stop must be a text or up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop")
    stream, options = take(body, "stream", bool, False), take(body, "stream_options", dict, {})
    for field in options.keys() - {"include_usage"}:
        raise Refused(f"stream_options.{field}: there is no such field here", "stream_options", "unknown_field")
    usage, token_ids = take(options, "include_usage", bool, False), take(body, "return_token_ids", bool, False)
    sampling = sampling_of(body, rule, target.shape.vocab_size)
    try:
        prompt = messages_of(body.get(what), target) if chat else prompt_of(body.get(what), target)
        length = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        new_tokens = take(body, length, int, max(limit - len(prompt), 1) if chat else COMPLETION_TOKENS)
        if new_tokens < 1:
            raise Refused(f"{length} must be at least 1, found {new_tokens}", length)
        if len(prompt) + new_tokens > limit:
            text = f"{what}: its {len(prompt)} tokens and {length}, {new_tokens}, are more than the {limit} that fit"
            raise Refused(text, what, "context_length_exceeded")
        check_prompt(target, prompt, new_tokens)
    except (BadRow, UserError) as error:
        raise Refused(f"{what}: {error}", what) from None
    return Asked(chat, prompt, new_tokens, sampling, stops, stream, usage, token_ids)


def take(body: dict[str, Any], field: str, kind: type, default: Any) -> Any:
    """The value of a field, or the default where it is absent or null."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(f"{field} must be of type {kind.__name__}, found {json.dumps(value)[:40]}", field, "wrong_type")
    if isinstance(value, int | float) and kind is float and not abs(value) <= LARGEST:  # not: Python reads NaN in JSON
        raise Refused(f"{field} must be a number of at most {LARGEST:.0f}", field)
    return value


def sampling_of(body: dict[str, Any], rule: str, vocab_size: int) -> Sampling:
    found: dict[str, Any] = {}
    for field, default in SAMPLING.items():
        found[field] = take(body, field, int if field == "top_k" else float, default)
        try:
            Sampling(**{field: found[field]})
        except UserError as error:
            raise Refused(str(error).removeprefix("sampling: "), field) from None
    if found["temperature"] < 1e-4:  # there is no difference, and nothing overflows
        found["temperature"] = 0.0
    found["top_k"] = min(found["top_k"], vocab_size)
    seed = take(body, "seed", int, secrets.randbits(62))
    if not -(1 << 63) <= seed < 1 << 63:
        raise Refused("seed must fit into 64 bits", "seed")
    return Sampling(**found, seed=seed, rule=rule)


def prompt_of(prompt: Any, target: Target) -> list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise Refused(f"prompt: {len(prompt)} prompts in one request, send a request for each", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return ids(target.tokenizer, prompt, special=True)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise Refused("prompt must be a text or a list of token ids", "prompt", "wrong_type")
    return prompt


def messages_of(messages: Any, target: Target) -> list[int]:
    if messages == []:
        raise Refused("messages is empty: give at least one message", "messages")
    for message in messages if isinstance(messages, list) else []:
        for field in message.keys() - {"role", "content"} if isinstance(message, dict) else ():
            if message[field]:  # clients send an answer back with its empty fields
                raise Refused(f"messages: {field!r} is not supported in a message", "messages", "unknown_field")
    return asking(target.tokenizer, conversation({"messages": messages}))
