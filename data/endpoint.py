"""An OpenAI-compatible endpoint that answers prompts: it gets many requests at a time, and failed ones are repeated."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from headstart.data.answers import Answer, Line, too_long
from headstart.heads.errors import UserError
from headstart.inference.decoding.sampling import SamplingParams

T = TypeVar("T")
CONNECT, ANSWER = 10.0, 3600.0  # timeouts in seconds: to connect, and to answer
AGAIN = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses of temporary failures
ALL = 1 << 20  # top_k that keeps every token (more than any vocabulary): servers disagree on whether 0 or -1 turns it off
FIRST, LONGEST = 0.5, 30.0  # seconds before the second attempt, doubled for each further one up to the longest
ASKED = 120.0  # seconds: the longest wait that a server may ask for (Retry-After)


class Unfit(Exception):
    """The endpoint found the prompt too long."""


class Again(Exception):
    """A failure that may be temporary. ``after``: seconds that the endpoint asks to wait before the next attempt."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


def pause(attempt: int, asked: float) -> float:
    """Seconds to wait after a failed attempt (from 0). ``asked``: what the server asks for, 0 if nothing."""
    return max(min(FIRST * 2 ** min(attempt, 16), LONGEST), min(asked, ASKED))  # 16: beyond the longest pause, and no overflow


class Endpoint:
    """A connection to an endpoint. ``url`` ends in /v1. ``where``: the prefix of the settings, for errors ("served." for served.url).

    At most ``sequences`` requests run at a time. A temporary failure is repeated up to ``retries`` times, after 0.5, 1, 2 ... seconds.
    Raises UserError if the endpoint cannot be reached, refuses, or does not have ``model`` (None: the only one it has).
    """

    patience = ANSWER
    anew = False  # whether each request has a connection of its own, for commands that ask seldom: servers close what is idle
    advice = ": run again to go on"  # after repeated failures; "" for commands that have nothing to go on with, and no ``retries``

    def __init__(self, url: str, model: str | None, key: str | None, *, sequences: int, retries: int, where: str = "") -> None:
        self.url, self.sequences, self.retries, self.where = url.rstrip("/"), sequences, retries, where
        self.failures = 0  # temporary failures so far, whether repeating helped or not
        self.tasks: dict[asyncio.Task[Any], Any] = {}  # requests whose result has not been collected yet
        self.loop = asyncio.new_event_loop()
        try:
            self.session = self.loop.run_until_complete(self._open({"Authorization": f"Bearer {key}"} if key else {}))
            self.name, self.longest = self._model(model)
        except BaseException:
            self.close()
            raise

    @property
    def said(self) -> str:
        """The setting ``url`` with its value, for errors."""
        return f"{self.where}url={self.url}"

    async def _open(self, headers: dict[str, str]) -> aiohttp.ClientSession:
        wait = aiohttp.ClientTimeout(total=self.patience, sock_connect=CONNECT)
        return aiohttp.ClientSession(
            headers=headers, timeout=wait, connector=aiohttp.TCPConnector(limit=self.sequences, force_close=self.anew)
        )

    def _model(self, wanted: str | None) -> tuple[str, int | None]:
        """The model's name at the endpoint, and its context length in tokens (None if the endpoint does not report it).

        Raises UserError if the endpoint does not answer, lists no models, or does not have the ``wanted`` one.
        """
        try:
            found = self.loop.run_until_complete(self.once("GET", "/models"))
            cards = {str(card["id"]): card for card in found["data"]}
        except Again as error:
            raise UserError(f"{self.said} does not answer: {error}") from None
        except (KeyError, TypeError):
            raise UserError(
                f"{self.said}: its /models is no list of models: is this an OpenAI-compatible endpoint (ending in /v1)?"
            ) from None
        if wanted not in cards and (wanted is not None or len(cards) != 1):
            raise UserError(f"{self.said}: give {self.where}model=NAME, one of {', '.join(map(str, cards)) or 'none at all'}")
        name = str(next(iter(cards))) if wanted is None else wanted
        limit = cards[name].get("max_model_len")
        return name, limit if type(limit) is int else None

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call ``ask``, and repeat the call while it raises Again. Returns its result. Raises UserError if it fails too often."""
        attempt = 0
        while True:
            try:
                return await ask()
            except Again as error:
                self.failures += 1
                if attempt == self.retries:
                    often = f"{attempt + 1} times" + (f" ({self.where}retries={self.retries})" if self.advice else "")
                    raise UserError(f"{self.said} failed {often}, the last time: {error}{self.advice}") from None
                await asyncio.sleep(pause(attempt, error.after))
            attempt += 1

    async def once(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, root: str | None = None
    ) -> Any:
        """Send one request and return the JSON of the response, if its status is 200. ``root``: what ``path`` belongs to; None: ``url``.

        Otherwise raises Again for a temporary failure, Unfit for too long a prompt, and UserError for anything else.
        """
        try:
            async with self.session.request(method, (root or self.url) + path, json=body, headers=headers) as response:
                status, raw, after = response.status, await response.read(), response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Again(" ".join(str(error).split()) or type(error).__name__) from None
        except ValueError as error:  # the URL is not an address
            raise UserError(f"{self.said}: {error}") from None
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if status == 200:
            if found is None:
                raise Again("its answer is not JSON")
            return found
        said = found.get("error", found) if isinstance(found, dict) else raw.decode(errors="replace")
        said = said.get("message", said) if isinstance(said, dict) else said
        why = f"status {status}: {' '.join(str(said).split())[:300]}"
        if status in AGAIN:
            raise Again(why, float(after) if after.isdecimal() else 0.0)
        if status in (400, 413, 422) and re.search(rb"context.length", raw, re.IGNORECASE):
            raise Unfit(why)
        hint = " (does url end in /v1?)" if status == 404 and not self.url.endswith("/v1") else ""
        raise UserError(f"{self.said}{path} refuses: {why}{hint}")

    def close(self) -> None:
        """Cancel the running requests and close the session."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self.tasks, return_exceptions=True)  # asyncio logs failures that are never collected
            if hasattr(self, "session"):
                await self.session.close()

        if not self.loop.is_closed():
            self.loop.run_until_complete(end())
            self.loop.close()


class ByEndpoint(Endpoint):
    """Answers prompts by an endpoint. Prompts go to /completions as tokens, so the chat template on this side counts, not the server's."""

    def __init__(
        self, url: str, model: str | None, key: str | None, *, sequences: int, max_length: int, sampling: SamplingParams, new_tokens: int,
        retries: int,
    ) -> None:  # fmt: skip
        super().__init__(url, model, key, sequences=sequences, retries=retries)
        self.max_length, self.new_tokens = min(max_length, self.longest or max_length), new_tokens
        filters = {"top_p": sampling.top_p, "top_k": sampling.top_k or ALL}  # sent even if off: servers have defaults
        self.body: dict[str, Any] = {"max_tokens": new_tokens, "temperature": sampling.temperature, **filters}
        self.body |= {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "model": self.name}

    @property
    def free(self) -> int:
        """How many more requests may be sent now."""
        return self.sequences - len(self.tasks)

    def unfit(self, prompt: Sequence[int]) -> str | None:
        """Why the prompt is too long for the model behind the endpoint, or None if it fits."""
        return too_long(prompt, self.new_tokens, self.max_length) if len(prompt) + self.new_tokens > self.max_length else None

    def ask(self, line: Line) -> None:
        """Send the prompt of a line as a request."""
        self.tasks[self.loop.create_task(self._answer({**self.body, "prompt": line.prompt, "seed": line.seed}))] = line

    def wait(self) -> list[tuple[Line, Answer]]:
        """Wait until at least one request is answered. Returns the answered lines with their answers.

        Raises UserError for a request that the endpoint refuses, or that fails too often.
        """
        done, _ = self.loop.run_until_complete(asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED))
        return [(self.tasks.pop(task), task.result()) for task in done]

    async def _answer(self, body: dict[str, Any]) -> Answer:
        async def ask() -> Answer:
            return _read(await self.once("POST", "/completions", body), self.url)

        try:
            return await self.patiently(ask)
        except Unfit as error:
            return Answer(None, str(error), "unfit", 0)


def key_in(variable: str | None, where: str = "") -> str | None:
    """The endpoint's key from the environment variable ``variable`` (None: no key). Raises UserError if it is not set or empty."""
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"{where}key={variable}: there is no such environment variable, which should hold the endpoint's key")
    return None if variable is None else os.environ[variable]


def _read(found: Any, url: str) -> Answer:
    """The answer in the JSON of a completion. Raises UserError if the JSON is not a completion."""
    try:
        choice = found["choices"][0]
        text, ended, tokens = choice["text"], choice["finish_reason"], choice.get("token_ids")
        usage = found.get("usage")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UserError(f"url={url}: its answer is no completion (choices[0] with text and finish_reason)") from None
    if not isinstance(text, str) or ended not in ("stop", "length"):
        raise UserError(f"url={url}: its answer ended by {ended!r}, not by stop or length")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)):
        raise UserError(f"url={url}: token_ids of its answer are no list of tokens")
    told = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    return Answer(tokens, text, ended, len(tokens) if tokens is not None else told if type(told) is int else 0)
