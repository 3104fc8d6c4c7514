"""A served toy target and its clients, for the tests of the endpoint."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import generate
from headstart.inference.serving import serve
from headstart.inference.serving.endpoint import Endpoint
from tests.drafters import random_tokens
from tests.inference.serving import speech
from tests.inference.serving.speech import NEW, POLICY, target

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18)]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@functools.cache
def plain(prompt: int, new: int = NEW) -> list[int]:
    return generate(target(), None, PROMPTS[prompt], new_tokens=new).tokens


def drafter() -> Drafter:
    return speech.drafter(*map(tuple, PROMPTS))


class Server(TestServer):
    """A test server that uses the runner of the real server."""

    def __init__(self, app: web.Application, runner: web.AppRunner) -> None:
        super().__init__(app)
        self.own = runner

    async def _make_runner(self, **_: Any) -> web.AppRunner:
        return self.own


@asynccontextmanager
async def client(drafted: bool = True, **settings: Any) -> AsyncIterator[TestClient]:
    settings = {"sequences": 2, "max_length": 100, "read_timeout": 30.0, "name": "toy"} | settings
    app = serve.application(target(), drafter() if drafted else None, plans=POLICY, **settings)
    async with TestClient(Server(app, serve.runner_of(app, settings["read_timeout"]))) as it:
        yield it


def endpoint(it: TestClient) -> Endpoint:
    """What answers this client. Its ``patience`` may be changed meanwhile."""
    return next(route.handler.__self__ for route in it.app.router.routes() if route.method == "POST")  # type: ignore[union-attr]


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        drafter(), *map(plain, range(len(PROMPTS)))  # made before the loop runs, where they would take the time of requests under way
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def greedy(prompt: int, new: int = NEW, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[prompt], "max_tokens": new, "temperature": 0, "return_token_ids": True, **more}


async def ask(it: TestClient, body: Any, path: str = COMPLETIONS) -> dict[str, Any]:
    """Send a request and return the only choice of the answer, with its usage."""
    (choice,) = await ask_all(it, body, path)
    return choice


async def ask_all(it: TestClient, body: Any, path: str = COMPLETIONS) -> list[dict[str, Any]]:
    """Send a request, check that it succeeds, and return the choices in order, each with the usage of the answer. Streams are joined."""
    async with it.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            answer = await response.json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
            return [choice | {"usage": answer["usage"]} for choice in answer["choices"]]
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines.pop() == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        events = [json.loads(line[6:]) for line in lines]
        made: dict[int, dict[str, Any]] = {}
        assert len({event["id"] for event in events}) == 1
        for event in events:
            for choice in event["choices"]:
                whole = made.setdefault(choice["index"], {"text": "", "token_ids": [], "pieces": 0, "logprobs": []})
                whole["text"] += choice["delta"]["content"] if path == CHAT else choice["text"]
                whole["token_ids"] += choice.get("token_ids", [])
                whole["logprobs"].append(choice["logprobs"])
                whole |= {"finish_reason": choice["finish_reason"], "pieces": whole["pieces"] + 1}
        told = [event["usage"] for event in events if "usage" in event]
        assert not told[:-1] or (len(told) == len(events) and not any(told[:-1]) and events[-1]["choices"] == [])
        return [made[i] | ({"usage": told[-1]} if told else {}) for i in range(len(made))]


async def figures(it: TestClient) -> dict[str, float]:
    text = await (await it.get("/metrics")).text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'headstart_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? \S+', line) for line in lines)
    return {line.rpartition(" ")[0].removeprefix("headstart_"): float(line.rpartition(" ")[2]) for line in lines}


async def until(it: TestClient, **wanted: float) -> None:
    while {name: (await figures(it))[name] for name in wanted} != wanted:
        await asyncio.sleep(0.01)
