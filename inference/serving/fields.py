"""The fields that the JSON body of a request may have, and the error that names a wrong one.

A field that is null counts as absent. A field that would change the answer and is not supported is refused by its name, unless
its value means "off"; a field that cannot change the answer is accepted. In addition to OpenAI's fields, some of other engines are known:
``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``ignore_eos`` and ``stop_token_ids``; ``return_token_ids``, which returns the
tokens with the text; ``separate_reasoning`` (thoughts apart from the answer) and ``include_reasoning`` (whether they are returned).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstart.heads.errors import near
from headstart.heads.formats.keys import alike

SAMPLING: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # OpenAI's defaults
FIELDS = {"model", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "stop", "n", "best_of"}
FIELDS |= {"logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids", "separate_reasoning", "include_reasoning"}
FIELDS |= {"add_special_tokens"}
ONLY = {"messages": {"chat_template_kwargs", "reasoning_effort"}, "prompt": {"echo"}}  # further fields of chats and of completions
# Fields that do not change the answer: they are about accounts, caches and speed.
HARMLESS = {"user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "parallel_tool_calls", "request_id", "priority"}
HARMLESS |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"}
# Fields of OpenAI's and of other engines that would change the answer -> the values with which they do not.
OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "verbosity": ("medium",), "bad_words": ([],),
    "use_beam_search": (False,), "length_penalty": (1,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "chat_template_kwargs": ({},), "documents": ([],), "return_tokens_as_token_ids": (False,), "detokenize": (True,),
}  # fmt: skip
LARGEST = 1e6  # of a number


class Refused(Exception):
    """Raised to answer a request with an error: the message, the field that it is about (``param``), the HTTP status."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers or {}


def check_fields(body: dict[str, Any], what: str) -> None:
    """Raises Refused for a field that is not known, or that has a value which would change the answer and is not supported."""
    known = FIELDS | SAMPLING.keys() | ONLY[what] | {what}
    for field in body.keys() - known - HARMLESS:
        value, off = body[field], OFF.get(field, ())
        if value is None or any(alike(value, o) for o in off):
            continue
        if field in ONLY:
            raise Refused(f"{field} is not for this address: chats have messages, completions a prompt", field, "unknown_field")
        if not off:
            raise Refused(f"{short(field)}: there is no such field here{near(field, known)}", short(field), "unknown_field")
        only = " or ".join(map(json.dumps, off))
        raise Refused(f"{field}: nothing but {only} is supported, leave it out", field, "unsupported_value")


def short(value: Any) -> str:
    """A value cut to be put into a message: a client may send names and numbers of any length."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def take(body: dict[str, Any], field: str, kind: type, default: Any) -> Any:
    """The value of a field, or the default where it is absent or null. Raises Refused for a value of another type."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(f"{field} must be of type {kind.__name__}, found {short(json.dumps(value))}", field, "wrong_type")
    if isinstance(value, int | float) and kind is float and not abs(value) <= LARGEST:  # false for NaN, which Python reads in JSON
        raise Refused(f"{field} must be a number of at most {LARGEST:.0f}", field)
    return value
