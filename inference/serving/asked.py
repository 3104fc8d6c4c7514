"""Reads the JSON body of an HTTP request: checks it field by field, and makes tokens and settings of it (OpenAI's names and defaults).

A field that is null counts as absent. A field that would change the answer and is not supported is refused by its name, unless
its value means "off"; a field that cannot change the answer is accepted. Beside OpenAI's fields there are some of other engines:
``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``ignore_eos``, ``stop_token_ids``, and ``return_token_ids``, which
asks for the tokens beside the text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import check_prompt
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import BadRow, asking, conversation, ids

SAMPLING: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # when absent
FIELDS = {"model", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "stop", "n", "best_of"}
FIELDS |= {"logprobs", "top_logprobs", "stream", "stream_options", "return_token_ids"}
# Fields that do not change the answer: they are about accounts, caches and speed.
HARMLESS = {"user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "parallel_tool_calls", "request_id", "priority"}
HARMLESS |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt", "include_reasoning"}
# Fields of OpenAI's and of other engines that would change the answer, and those of their values that do not.
OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "verbosity": ("medium",), "bad_words": ([],),
    "use_beam_search": (False,), "length_penalty": (1,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "chat_template_kwargs": ({},), "documents": ([],), "return_tokens_as_token_ids": (False,),
}  # fmt: skip
COMPLETION_TOKENS = 16  # OpenAI's default; an answer in a chat may fill the context
MOST_STOPS, LONGEST_STOP, LARGEST = 64, 256, 1e6
HARMLESS_IN_MESSAGES = (("type", "text"), ("type", "message"))
MOST_CHOICES = 128  # answers to one prompt, as OpenAI
MOST_ANSWERS = 1024  # answers to all prompts of a request
MOST_LIKELIEST = {"logprobs": 5, "top_logprobs": 20}  # tokens told beside each token of the answer, as OpenAI


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


class Asked(NamedTuple):
    """A checked request for ``n`` answers to each of its prompts."""

    chat: bool
    prompts: list[list[int]]
    n: int
    new_tokens: int
    min_tokens: int  # before so many tokens neither a stop token nor a stop string ends an answer
    samplings: list[SamplingParams]  # of each answer: those to the first prompt, those to the second, ...
    stop_ids: list[int]
    stops: list[str]
    logprobs: int | None  # log-probabilities of so many likeliest tokens are told, beside each token's own; None: none at all
    stream: bool
    usage: bool  # whether a stream too ends with the counts of tokens
    always: bool  # whether each of its pieces has them
    token_ids: bool  # whether the tokens are told beside the text


def read(raw: bytes, chat: bool, target: Target, name: str, limit: int, rule: str) -> Asked:
    """Read the body of a request. ``limit``: most tokens of a prompt and its answer. Raises ``Refused`` naming the field that is wrong."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    what = "messages" if chat else "prompt"
    check_fields(body, what)
    if take(body, "model", str, name) != name:
        raise Refused(f"model: {short(body['model'])} is not here, only {name!r}", "model", "model_not_found", 404)
    n = take(body, "n", int, 1)
    if not 1 <= n <= MOST_CHOICES:
        raise Refused(f"n must be 1 to {MOST_CHOICES}, found {short(n)}", "n")
    if take(body, "best_of", int, n) != n:
        raise Refused(f"best_of: nothing but n, {n}, is supported", "best_of", "unsupported_value")
    stops = stops_of(body.get("stop"))
    stop_ids = stop_ids_of(body, target)
    logprobs = logprobs_of(body, chat)
    stream, options = take(body, "stream", bool, False), take(body, "stream_options", dict, {})
    for field in options.keys() - {"include_usage", "continuous_usage_stats", "include_obfuscation"}:  # the last: padding, needed nowhere
        if options[field] is not None:
            raise Refused(f"stream_options.{short(field)}: there is no such field here", "stream_options", "unknown_field")
    usage, token_ids = take(options, "include_usage", bool, False), take(body, "return_token_ids", bool, False)
    always = usage and take(options, "continuous_usage_stats", bool, False)
    sampling = sampling_of(body, rule, target.shape.vocab_size)
    prompts = [messages_of(body.get(what), target)] if chat else prompts_of(body.get(what), target)
    if len(prompts) * n > MOST_ANSWERS:
        raise Refused(f"{what}: {len(prompts)} prompts and n, {n}, are more than {MOST_ANSWERS} answers: send several requests", what)
    length = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    new_tokens = take(body, length, int, max(limit - len(prompts[0]), 1) if chat else COMPLETION_TOKENS)
    if new_tokens < 1:
        raise Refused(f"{length} must be at least 1, found {short(new_tokens)}", length)
    least = take(body, "min_tokens", int, 0)
    if not 0 <= least <= new_tokens:
        raise Refused(f"min_tokens must be 0 to {length}, {short(new_tokens)}, found {short(least)}", "min_tokens")
    for i, prompt in enumerate(prompts):
        where = what if len(prompts) == 1 else f"{what}[{i}]"
        if len(prompt) + new_tokens > limit:
            text = f"{where}: its {len(prompt)} tokens and {length}, {short(new_tokens)}, are more than the {limit} that fit"
            raise Refused(text, what, "context_length_exceeded")
        try:
            check_prompt(target, prompt, new_tokens)
        except UserError as error:
            raise Refused(f"{where}: {error}", what) from None
    seed = take(body, "seed", int, None)
    samplings = [replace(sampling, min_tokens=least, seed=seed_of(seed, i % n)) for i in range(len(prompts) * n)]
    return Asked(chat, prompts, n, new_tokens, least, samplings, stop_ids, stops, logprobs, stream, usage, always, token_ids)


def check_fields(body: dict[str, Any], what: str) -> None:
    """Raises Refused for a field that is not known, or that has a value which would change the answer and is not supported."""
    for field in body.keys() - FIELDS - SAMPLING.keys() - HARMLESS - {what}:
        value, off = body[field], OFF.get(field, ())
        if value is None or any(same(value, o) for o in off):
            continue
        if not off:
            raise Refused(f"{short(field)}: there is no such field here", short(field), "unknown_field")
        only = " or ".join(map(json.dumps, off))
        raise Refused(f"{field}: nothing but {only} is supported, leave it out", field, "unsupported_value")


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, where 0 is not false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


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
    if isinstance(value, int | float) and kind is float and not abs(value) <= LARGEST:  # not: NaN, which Python reads in JSON
        raise Refused(f"{field} must be a number of at most {LARGEST:.0f}", field)
    return value


def stops_of(given: Any) -> list[str]:
    """The texts at which an answer ends. Raises Refused."""
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise Refused(f"stop must be a text or up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop")
    return stops


def stop_ids_of(body: dict[str, Any], target: Target) -> list[int]:
    """The tokens that end an answer: the target's own, unless they are to be ignored, and those that are asked for. Raises Refused."""
    own = [] if take(body, "ignore_eos", bool, False) else [*target.stop_ids]
    given, vocab_size = take(body, "stop_token_ids", list, []), target.shape.vocab_size
    if not all(type(token) is int and 0 <= token < vocab_size for token in given):
        raise Refused(f"stop_token_ids must be tokens of the vocabulary, 0 to {vocab_size - 1}", "stop_token_ids")
    return own + given


def logprobs_of(body: dict[str, Any], chat: bool) -> int | None:
    """How many of the likeliest tokens are told beside each token; None: no log-probabilities. A completion's ``logprobs`` is the number; a
    chat's ``logprobs`` says whether, its ``top_logprobs`` how many. Raises Refused.
    """
    field = "top_logprobs" if chat else "logprobs"
    if not chat and body.get("top_logprobs") is not None:
        raise Refused("top_logprobs is a chat's: give logprobs, a number", "top_logprobs", "unknown_field")
    if not chat and body.get(field) is False:
        return None
    told = take(body, "logprobs", bool, False) if chat else body.get(field) is not None
    count: int = take(body, field, int, 0)
    if not 0 <= count <= MOST_LIKELIEST[field]:
        raise Refused(f"{field} must be 0 to {MOST_LIKELIEST[field]}, found {short(count)}", field)
    if count and not told:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    return count if told else None


def sampling_of(body: dict[str, Any], rule: str, vocab_size: int) -> SamplingParams:
    """The settings of sampling. Raises Refused naming the field that is wrong."""
    found: dict[str, Any] = {}
    for field, default in SAMPLING.items():
        found[field] = take(body, field, int if field == "top_k" else float, default)
        if field == "top_k" and found[field] == -1:  # off, as vLLM and SGLang have it
            found[field] = 0
        try:
            SamplingParams(**{field: found[field]})
        except UserError as error:
            raise Refused(str(error).removeprefix("sampling: "), field) from None
    if found["temperature"] < 1e-4:  # as good as greedy, and nothing overflows
        found["temperature"] = 0.0
    found["top_k"] = min(found["top_k"], vocab_size)
    return SamplingParams(**found, rule=rule)


def seed_of(given: int | None, choice: int) -> int:
    """The seed of an answer; ``choice``: its number among those to the same prompt. The first has the given seed, so that it is the same
    alone and beside others. Without a given seed it is random. Raises Refused.
    """
    if given is None:
        return secrets.randbits(62)
    if not -(1 << 63) <= given < 1 << 63:
        raise Refused("seed must fit into 64 bits", "seed")
    return (given + choice + (1 << 63)) % (1 << 64) - (1 << 63)


def prompts_of(given: Any, target: Target) -> list[list[int]]:
    """The prompts of a completion as tokens. ``given``: a text, a list of tokens, or a list of these. Raises Refused."""
    several = isinstance(given, list) and bool(given) and all(isinstance(prompt, str | list) for prompt in given)
    prompts = []
    for i, prompt in enumerate(given if several else [given]):
        where = f"prompt[{i}]" if several and len(given) > 1 else "prompt"
        if isinstance(prompt, str):
            try:
                prompt = ids(target.tokenizer, prompt, special=True)
            except BadRow as error:
                raise Refused(f"{where}: {error}", "prompt") from None
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise Refused(f"{where} must be a text or a list of token ids", "prompt", "wrong_type")
        prompts.append(prompt)
    return prompts


def messages_of(messages: Any, target: Target) -> list[int]:
    """A conversation as tokens, by the target's template. Raises Refused."""
    if messages == []:
        raise Refused("messages is empty: give at least one message", "messages")
    for message in messages if isinstance(messages, list) else []:
        for field in message.keys() - {"role", "content"} if isinstance(message, dict) else ():
            if message[field] and (field, message[field]) not in HARMLESS_IN_MESSAGES:  # clients send an answer back with its empty fields
                raise Refused(f"messages: {short(repr(field))} is not supported in a message", "messages", "unknown_field")
    try:
        return asking(target.tokenizer, conversation({"messages": messages}))
    except (BadRow, UserError) as error:
        raise Refused(f"messages: {error}", "messages") from None
