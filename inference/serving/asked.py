"""Reads the JSON body of an HTTP request: checks each field, and turns it into tokens and settings (with OpenAI's names and defaults)."""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.heads.errors import UserError
from headstart.inference.decoding.decode import check_prompt
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.fields import Refused, check_fields, short, take
from headstart.inference.serving.text import BadRow, asking, conversation, ids, template_of
from headstart.inference.serving.thoughts import THOUGHTS, Marks, begun, marks_of

COMPLETION_TOKENS = 16  # OpenAI's default; an answer in a chat may fill the context
MOST_STOPS, LONGEST_STOP = 64, 256
MOST_CHOICES = 128  # answers to one prompt, as OpenAI
MOST_ANSWERS = 1024  # answers to all prompts of a request
MOST_LIKELIEST = 20  # alternatives returned for each token of the answer
PASSED_ON = ("name", *THOUGHTS)  # texts of a message that the template may read
HARMLESS = (("type", "text"), ("type", "message"))


class Asked(NamedTuple):
    """A checked request for ``n`` answers to each of its prompts."""

    chat: bool
    prompts: list[list[int]]
    n: int
    new_tokens: int
    min_tokens: int  # no stop token and no stop string ends an answer within this many tokens
    samplings: list[SamplingParams]  # one for each answer: first the answers to the first prompt, then those to the second, ...
    stop_ids: list[int]
    stops: list[str]
    logprobs: int | None  # how many likeliest tokens are returned with each token's own log-probability; None: no log-probabilities
    stream: bool
    usage: bool  # whether a stream ends with the counts of tokens, as a whole answer does
    always: bool  # whether each piece of a stream has these counts too
    token_ids: bool  # whether token ids are returned beside the text
    marks: Marks | None  # by which thoughts are separated from the answer; None: they are not separated
    begun: bool  # whether the prompt already opens a thought
    thoughts: bool  # whether separated thoughts are returned
    echo: bool  # whether the prompt is returned before the answer


def read(raw: bytes, chat: bool, target: Target, name: str, limit: int, rule: str, defaults: Mapping[str, float]) -> Asked:
    """Read the body of a request. ``limit``: most tokens of a prompt and its answer. ``defaults``: settings of sampling that hold unless
    the request gives others. Raises ``Refused`` naming the field that is wrong.
    """
    body, what = body_of(raw), "messages" if chat else "prompt"
    check_fields(body, what)
    if take(body, "model", str, name) != name:
        raise Refused(f"model: {short(body['model'])} is not here, only {name!r}", "model", "model_not_found", 404)
    n = choices_of(body)
    stops, stop_ids, logprobs = stops_of(body.get("stop")), stop_ids_of(body, target), logprobs_of(body, chat)
    stream, options = take(body, "stream", bool, False), stream_options_of(body)
    usage, token_ids = take(options, "include_usage", bool, False), take(body, "return_token_ids", bool, False)
    always = usage and take(options, "continuous_usage_stats", bool, False)
    sampling = sampling_of(body, rule, target.shape.vocab_size, defaults)
    prompts = [messages_of(body, target)] if chat else prompts_of(body, target, n)
    length = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    new_tokens = take(body, length, int, max(limit - len(prompts[0]), 1) if chat else COMPLETION_TOKENS)
    echo = not chat and take(body, "echo", bool, False)
    if new_tokens < 1 - echo:
        raise Refused(f"{length} must be at least {1 - echo}, found {short(new_tokens)}", length)
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
    marks = marks_of(target.tokenizer) if take(body, "separate_reasoning", bool, True) and chat else None
    return Asked(
        chat=chat, prompts=prompts, n=n, new_tokens=new_tokens, min_tokens=least, samplings=samplings, stop_ids=stop_ids, stops=stops,
        logprobs=logprobs, stream=stream, usage=usage, always=always, token_ids=token_ids, marks=marks,
        begun=marks is not None and begun(target.tokenizer, marks, prompts[0]),
        thoughts=take(body, "include_reasoning", bool, True), echo=echo,
    )  # fmt: skip


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refused."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    return body


def choices_of(body: dict[str, Any]) -> int:
    """The number of answers to each prompt. Raises Refused."""
    n: int = take(body, "n", int, 1)
    if not 1 <= n <= MOST_CHOICES:
        raise Refused(f"n must be 1 to {MOST_CHOICES}, found {short(n)}", "n")
    if take(body, "best_of", int, n) != n:
        raise Refused(f"best_of must equal n ({n})", "best_of", "unsupported_value")
    return n


def stream_options_of(body: dict[str, Any]) -> dict[str, Any]:
    """The options of a stream. Raises Refused for one that is not known."""
    options: dict[str, Any] = take(body, "stream_options", dict, {})
    for field in options.keys() - {"include_usage", "continuous_usage_stats", "include_obfuscation"}:  # the last: padding, never sent
        if options[field] is not None:
            raise Refused(f"stream_options.{short(field)}: there is no such field here", "stream_options", "unknown_field")
    return options


def stops_of(given: Any) -> list[str]:
    """The texts at which an answer ends. Raises Refused."""
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise Refused(f"stop must be a text or up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop")
    return stops


def stop_ids_of(body: dict[str, Any], target: Target) -> list[int]:
    """The tokens that end an answer: those of the target, unless they are to be ignored, and those that are asked for. Raises Refused."""
    own = [] if take(body, "ignore_eos", bool, False) else list(target.stop_ids)
    given, vocab_size = take(body, "stop_token_ids", list, []), target.shape.vocab_size
    if not all(type(token) is int and 0 <= token < vocab_size for token in given):
        raise Refused(f"stop_token_ids must be tokens of the vocabulary, 0 to {vocab_size - 1}", "stop_token_ids")
    return own + given


def logprobs_of(body: dict[str, Any], chat: bool) -> int | None:
    """The number of likeliest tokens to return for each token; None: no log-probabilities. In a completion ``logprobs`` is that number; in
    a chat ``logprobs`` is true or false, and ``top_logprobs`` is the number. Raises Refused.
    """
    field = "top_logprobs" if chat else "logprobs"
    if not chat and body.get("top_logprobs") is not None:
        raise Refused("top_logprobs is a chat's: give logprobs, a number", "top_logprobs", "unknown_field")
    if not chat and body.get(field) is False:
        return None
    told = take(body, "logprobs", bool, False) if chat else body.get(field) is not None
    count: int = take(body, field, int, 0)
    if not 0 <= count <= MOST_LIKELIEST:
        raise Refused(f"{field} must be 0 to {MOST_LIKELIEST}, found {short(count)}", field)
    if count and not told:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    return count if told else None


def sampling_of(body: dict[str, Any], rule: str, vocab_size: int, defaults: Mapping[str, float]) -> SamplingParams:
    """The settings of sampling. Raises Refused naming the field that is wrong."""
    found: dict[str, Any] = {}
    for field, default in defaults.items():
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
    """The seed of an answer; ``choice``: its index among the answers to the same prompt. The first answer has the given seed, so it is the
    same whatever ``n`` is. Without a given seed, the seed is random. Raises Refused.
    """
    if given is None:
        return secrets.randbits(62)
    if not -(1 << 63) <= given < 1 << 63:
        raise Refused("seed must fit into 64 bits", "seed")
    return (given + choice + (1 << 63)) % (1 << 64) - (1 << 63)


def prompts_of(body: dict[str, Any], target: Target, n: int) -> list[list[int]]:
    """The prompts of a completion as tokens. The request has one prompt (a text or a list of tokens) or a list of prompts. ``n``: answers
    to each. Raises Refused.
    """
    given: Any = body.get("prompt")
    special = take(body, "add_special_tokens", bool, True)
    several = isinstance(given, list) and bool(given) and all(isinstance(prompt, str | list) for prompt in given)
    if several and len(given) * n > MOST_ANSWERS:  # before they become tokens, which takes seconds for a large body
        text = f"prompt: {len(given)} prompts and n, {n}, are more than {MOST_ANSWERS} answers: send several requests"
        raise Refused(text, "prompt")
    prompts = []
    for i, prompt in enumerate(given if several else [given]):
        where = f"prompt[{i}]" if several and len(given) > 1 else "prompt"
        if isinstance(prompt, str):
            try:
                prompt = ids(target.tokenizer, prompt, special)
            except BadRow as error:
                raise Refused(f"{where}: {error}", "prompt") from None
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise Refused(f"{where} must be a text or a list of token ids", "prompt", "wrong_type")
        prompts.append(prompt)
    return prompts


# ---- the conversation of a chat: its messages, and what the client tells the target's chat template ----


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
    """The fields of a message other than role and content. Raises Refused for a field that is not supported."""
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
    """The message, with empty content for an assistant's that has none: its answer was cut within a thought."""
    empty = isinstance(message, dict) and message.get("role") == "assistant" and message.get("content") is None
    return message | {"content": ""} if empty else message


def _variables(body: dict[str, Any], tokenizer: Any, template: str) -> dict[str, Any]:
    """The template's variables beside the messages. Raises Refused for those that the server sets: the template itself, tokens, tools."""
    found: dict[str, Any] = take(body, "chat_template_kwargs", dict, {})
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if wrong := sorted(found.keys() & own):
        raise Refused(f"chat_template_kwargs: {wrong[0]} is not for clients to set, leave it out", "chat_template_kwargs")
    effort = take(body, "reasoning_effort", str, None)
    if effort is None:
        return found
    if re.search(r"\breasoning_effort\b", template) is None:
        raise Refused("reasoning_effort: the target's chat template does not read it, leave it out", "reasoning_effort", "unknown_field")
    return found | {"reasoning_effort": effort}
