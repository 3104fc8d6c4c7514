"""A served target answers as the one in this process does, and what an endpoint may do wrong is told in one line."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headstart.data import endpoint, regenerate, regenerated
from headstart.data.endpoint import pause
from headstart.data.source import open_source
from headstart.heads.errors import UserError
from headstart.inference.serving.serve import application
from headstart.inference.serving.text import asking
from tests.data.conftest import NEW, PLAIN, TALKS, lines
from tests.fake_engine import serving


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST", 0.001)


def same(path: Path) -> list[Any]:
    """All but who made it."""
    return [{k: v for k, v in m.items() if k != "regenerated"} | {"cut": m["regenerated"]["truncated"]} for m in lines(path)]


@pytest.mark.parametrize(
    "how",
    [
        ["temperature=0"],
        ["temperature=0.8", "top_k=20"],
        *(pytest.param(each, marks=pytest.mark.slow) for each in (["temperature=1"], ["temperature=0", *PLAIN])),
    ],
)
@pytest.mark.usefixtures("few_files")
def test_the_endpoint_and_the_engine_say_the_same(how: list[str], door: Any, target: Any, tmp_path: Path) -> None:
    here = door(*how)
    with serving(application(target, None, sequences=3, max_length=256, name="toy")) as url:
        there = door(*how, f"url={url}", "sequences=5", f"out={tmp_path / 'served.jsonl'}")
    assert same(here) == same(there) and lines(there)[0]["regenerated"]["model"] == "toy"
    assert regenerated.read(str(there), target.tokenizer, 320).groups


def fake(answer: Callable[[dict[str, Any], int], tuple[int, Any]], names: tuple[str, ...] = ("toy",)) -> web.Application:
    """An endpoint whose n-th answer (from 0) is a status and a body."""
    count = 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        status, body = answer(await request.json(), count - 1)
        return web.json_response(body, status=status) if not isinstance(body, str) else web.Response(text=body, status=status)

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in names]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    return app


def said(text: str = "yes", **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "stop", **more}], "usage": {"completion_tokens": 2}}


def test_a_server_that_asks_for_time_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST", 0.5)
    assert [pause(n, 0) for n in (0, 1, 3, 50, 5000)] == [0.5, 1.0, 4.0, 30.0, 30.0]
    assert pause(0, 90) == 90 and pause(5, 3) == 16 and pause(0, 1e9) == 120


def test_what_may_pass_is_asked_again(door: Any, target: Any) -> None:
    seen = []

    def answer(body: dict[str, Any], n: int) -> tuple[int, Any]:
        seen.append(body)
        return ((503, "busy"), (200, "half a js"), (429, {"error": "slow down"}))[n] if n < 3 else (200, said(token_ids=[9, 0]))

    with serving(fake(answer)) as url:
        (made,) = lines(door(f"url={url}", "limit=1"))
    assert len(seen) == 4 and all(body == seen[0] for body in seen)
    assert seen[0]["prompt"] == asking(target.tokenizer, TALKS[0][:2]) and seen[0]["seed"] == regenerate.seed_of(0, 1)
    assert (seen[0]["max_tokens"], seen[0]["temperature"], seen[0]["top_p"], seen[0]["model"]) == (NEW, 1.0, 1.0, "toy")
    assert made["messages"][-1]["content"] == "yes" and made["documents"][0]["tokens"] == [*seen[0]["prompt"], 9, 0]


@pytest.mark.parametrize(
    ("answer", "more", "says"),
    [
        ((503, "busy"), ["retries=1"], r"failed 2 times \(retries=1\), the last time: status 503: busy: run again to go on"),
        ((400, {"error": {"message": "no such field"}}), [], r"/v1/completions refuses: status 400: no such field"),
        ((200, {"choices": []}), [], "its answer is no completion"),
        ((200, {"choices": [{"text": "x", "finish_reason": "tool"}]}), [], "ended by 'tool'"),
        ((200, said(token_ids=["a"])), [], "no list of tokens"),
        ((200, said()), ["model=other"], "give model=NAME, one of toy"),
        ((200, said()), ["data=stdlib", "prefix=10"], "does not tell tokens"),
        ((200, said()), ["key=WRONG"], "refuses: status 401: who are you"),
        ((400, {"error": {"message": "the maximum context length is 7"}}), [], "nothing was made of 14 lines"),
    ],
)
@pytest.mark.usefixtures("few_files")
def test_an_endpoint_that_refuses(
    answer: Any, more: list[str], says: str, door: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG", "wrong")
    with serving(fake(lambda body, n: answer)) as url, pytest.raises(UserError, match=says) as error:
        door(f"url={url}", *more)
    gc.collect()  # then asyncio tells of every request whose failure nobody has seen
    assert "\n" not in str(error.value) and not [r for r in caplog.records if r.name == "asyncio" and r.levelname == "ERROR"]


def test_an_address_without_its_last_part(door: Any) -> None:
    says = r"/models refuses: status 404.*\(does url end in /v1\?\)"
    with serving(fake(lambda body, n: (200, said()))) as url, pytest.raises(UserError, match=says):
        door(f"url={url.removesuffix('/v1')}")


def test_an_endpoint_without_tokens_gives_text_to_train_on(door: Any, target: Any) -> None:
    with serving(fake(lambda body, n: (200, said(f"answer {n}")))) as url:
        path = door(f"url={url}")
    with pytest.raises(UserError, match="data=chat"):
        open_source({"name": "regenerated", "path": str(path)}, target, length=64, seed=0)
    assert open_source({"name": "chat", "path": str(path), "split": "", "on_bad": "error"}, target, length=64, seed=0).packed
