"""An OpenAI-compatible endpoint that answers prompts: many requests at a time, what fails is asked again."""

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
CONNECT, ANSWER = 10.0, 3600.0  # seconds that it may take to be reached, and to answer
AGAIN = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses that may pass
ALL = 1 << 20  # as top_k: more than any vocabulary; some take 0 for off, some -1
FIRST, LONGEST = 0.5, 30.0  # seconds between two attempts: twice as many each time


class Unfit(Exception):
    """The endpoint found the prompt too long."""


class Again(Exception):
    """What went wrong may pass. ``after``: seconds that the endpoint asks to wait."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class Endpoint:
    """A connection to an endpoint. ``url`` ends in /v1; ``where`` is the group of the setting that it comes from, for errors.

    ``sequences`` requests at a time; what may pass is asked again up to ``retries`` times, at 0.5, 1, 2 ... seconds.
    Raises UserError where it cannot be reached, refuses, or does not have ``model`` (None: the only one it has).
    """

    patience = ANSWER

    def __init__(self, url: str, model: str | None, key: str | None, *, sequences: int, retries: int, where: str = "") -> None:
        self.url, self.sequences, self.retries, self.where = url.rstrip("/"), sequences, retries, where
        self.failures = 0  # that passed, or not
        self.tasks: dict[asyncio.Task[Any], Any] = {}  # that nobody has waited for yet
        self.loop = asyncio.new_event_loop()
        try:
            self.session = self.loop.run_until_complete(self._open({"Authorization": f"Bearer {key}"} if key else {}))
            self.name, self.longest = self._model(model)
        except BaseException:
            self.close()
            raise

    @property
    def said(self) -> str:
        """The setting, as errors name it."""
        return f"{self.where}url={self.url}"

    async def _open(self, headers: dict[str, str]) -> aiohttp.ClientSession:
        wait = aiohttp.ClientTimeout(total=self.patience, sock_connect=CONNECT)
        return aiohttp.ClientSession(headers=headers, timeout=wait, connector=aiohttp.TCPConnector(limit=self.sequences))

    def _model(self, wanted: str | None) -> tuple[str, int | None]:
        """The model's name at the endpoint, and how many tokens it takes, if the endpoint says so."""
        try:
            found = self.loop.run_until_complete(self.once("GET", "/models"))
            cards = {card["id"]: card for card in found["data"]}
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
        """Call ``ask``, and again where it raises Again. Returns what it returns; raises UserError where it fails too often."""
        attempt = 0
        while True:
            try:
                return await ask()
            except Again as error:
                self.failures += 1
                if attempt == self.retries:
                    often = f"{attempt + 1} times ({self.where}retries={self.retries})"
                    raise UserError(f"{self.said} failed {often}, the last time: {error}: run again to go on") from None
                await asyncio.sleep(min(max(FIRST * 2**attempt, error.after), LONGEST))
            attempt += 1

    async def once(self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
        """The JSON of a response of status 200. Raises Again, Unfit and UserError for others."""
        try:
            async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
                status, raw, after = response.status, await response.read(), response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Again(" ".join(str(error).split()) or type(error).__name__) from None
        except ValueError as error:  # what is no address
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
        raise UserError(f"{self.said}{path} refuses: {why}")

    def close(self) -> None:
        """Cancel the requests under way, and close the session."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self.tasks, return_exceptions=True)  # asyncio logs failures that nobody has looked at
            if hasattr(self, "session"):
                await self.session.close()

        if not self.loop.is_closed():
            self.loop.run_until_complete(end())
            self.loop.close()


class ByEndpoint(Endpoint):
    """Answers prompts. They go to /completions as tokens, so that the target's template here is the one that counts."""

    def __init__(
        self, url: str, model: str | None, key: str | None, *, sequences: int, max_length: int, sampling: SamplingParams, new_tokens: int,
        retries: int,
    ) -> None:  # fmt: skip
        super().__init__(url, model, key, sequences=sequences, retries=retries)
        self.max_length, self.new_tokens = min(max_length, self.longest or max_length), new_tokens
        filters = {"top_p": sampling.top_p, "top_k": sampling.top_k or ALL}  # told even where they are off: servers have defaults
        self.body: dict[str, Any] = {"max_tokens": new_tokens, "temperature": sampling.temperature, **filters}
        self.body |= {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "model": self.name}

    @property
    def free(self) -> int:
        """Requests that may still be sent beside those under way."""
        return self.sequences - len(self.tasks)

    def unfit(self, prompt: Sequence[int]) -> str | None:
        """Too long for the model behind the endpoint."""
        return too_long(prompt, self.new_tokens, self.max_length) if len(prompt) + self.new_tokens > self.max_length else None

    def ask(self, line: Line) -> None:
        """Send a request."""
        self.tasks[self.loop.create_task(self._answer({**self.body, "prompt": line.prompt, "seed": line.seed}))] = line

    def wait(self) -> list[tuple[Line, Answer]]:
        """Until at least one request is answered."""
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
    """The endpoint's key from the environment variable (None: no key). Raises UserError where there is no such variable."""
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"{where}key={variable}: there is no such environment variable, which should hold the endpoint's key")
    return None if variable is None else os.environ[variable]


def _read(found: Any, url: str) -> Answer:
    """The answer in a completion's JSON. Raises UserError for anything else."""
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
