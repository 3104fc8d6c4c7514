"""The endpoint says what plain decoding says, to everyone at once; what is wrong with one request is told to it and harms no other."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from omegaconf import OmegaConf

from heads.base import Drafter
from heads.errors import UserError
from inference import serve
from inference.decode import generate
from inference.engine import Engine
from inference.plans import ALONE, MANY
from inference.sampling import Sampling
from inference.text import HALF, ids
from tests.drafters import random_tokens
from tests.inference import speech
from tests.inference.speech import NEW, POLICY, target, text_of, tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18)]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@functools.cache
def plain(prompt: int, new: int = NEW) -> list[int]:
    return generate(target(), None, PROMPTS[prompt], new_tokens=new).tokens


def drafter() -> Drafter:
    return speech.drafter(*map(tuple, PROMPTS))


@asynccontextmanager
async def client(drafted: bool = True, **settings: Any) -> AsyncIterator[TestClient]:
    app = serve.application(target(), drafter() if drafted else None, policy=POLICY, name="toy", **{"rows": 2, "capacity": 100} | settings)
    async with TestClient(TestServer(app)) as it:
        yield it


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def greedy(prompt: int, new: int = NEW, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[prompt], "max_tokens": new, "temperature": 0, "return_token_ids": True, **more}


async def ask(it: TestClient, body: Any, path: str = COMPLETIONS) -> dict[str, Any]:
    """Status 200, and the choice with usage; the pieces of a stream put together."""
    async with it.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            answer = await response.json()
            return answer["choices"][0] | {"usage": answer["usage"]}
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines.pop() == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        events = [json.loads(line[6:]) for line in lines]
        made: dict[str, Any] = {"text": "", "token_ids": [], "pieces": 0}
        assert len({event["id"] for event in events}) == 1
        for event in events:
            for choice in event["choices"]:
                made["text"] += choice["delta"]["content"] if path == CHAT else choice["text"]
                made["token_ids"] += choice.get("token_ids", [])
                made |= {"finish_reason": choice["finish_reason"], "pieces": made["pieces"] + 1}
            made |= {"usage": event["usage"]} if "usage" in event else {}
        return made


async def figures(it: TestClient) -> dict[str, float]:
    text = await (await it.get("/metrics")).text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'headstart_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? \S+', line) for line in lines)
    return {line.rpartition(" ")[0].removeprefix("headstart_"): float(line.rpartition(" ")[2]) for line in lines}


async def until(it: TestClient, **wanted: float) -> None:
    while {name: (await figures(it))[name] for name in wanted} != wanted:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("drafted", [True, False])
@running
async def test_everyone_gets_what_plain_decoding_says(drafted: bool) -> None:
    async with client(drafted) as it:
        asked = [greedy(i % 5, NEW - i % 3, stream=i % 2 == 0, stream_options={"include_usage": True}) for i in range(12)]
        for body, answer in zip(asked, await asyncio.gather(*(ask(it, body) for body in asked)), strict=True):
            said = plain(PROMPTS.index(body["prompt"]))[: body["max_tokens"]]
            assert answer["token_ids"] == said and answer["text"] == text_of(said) and answer["finish_reason"] == "length"
            old, new = len(body["prompt"]), len(said)
            assert answer["usage"] == {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
            assert not body["stream"] or (answer["pieces"] < new if drafted else answer["pieces"] == new)
        await until(it, requests_running=0, requests_waiting=0, rows_free=2)
        seen = await figures(it)
        assert seen["tokens_total"] == sum(body["max_tokens"] for body in asked)
        assert seen["prompt_tokens_total"] == sum(len(body["prompt"]) for body in asked)
        assert seen[f'requests_total{{path="{COMPLETIONS}",status="200"}}'] == 12 and seen["engine_restarts_total"] == 0
        assert seen["accepted_length"] == pytest.approx((seen["tokens_total"] - 12) / seen["target_passes_total"])
        depths = [seen.get(f'acceptance{{depth="{d}"}}', 0.0) for d in range(1, 6)]
        assert sum(depths) == pytest.approx(seen["accepted_length"] - 1) and depths == sorted(depths, reverse=True)
        assert seen["accepted_length"] > 1.1 if drafted else seen["accepted_length"] == 1


@pytest.mark.parametrize("drafted", [True, False])
@running
async def test_a_stop_string_across_accepted_tokens_is_cut_out(drafted: bool) -> None:
    said = plain(0)
    text = text_of(said)
    async with client(drafted) as it:
        for at in (at for at in range(1, len(text) - 3, 2) if HALF not in text[at : at + 3]):
            stop = [text[at : at + 3], "never said"]
            until_then = next(n for n in range(NEW + 1) if stop[0] in text_of(said[:n]))
            for stream in (False, True):
                answer = await ask(it, greedy(0, stop=stop, stream=stream))
                assert answer["text"] == text[: text.index(stop[0])] and answer["finish_reason"] == "stop"
                assert answer["token_ids"] == said[:until_then]
        await until(it, requests_running=0, rows_free=2)


@running
async def test_an_end_of_text_token_stops_and_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    said = plain(0)
    monkeypatch.setattr(type(target()), "stop_ids", (said[5],))
    async with client() as it:
        answer = await ask(it, greedy(0))
        first = said.index(said[5])
        assert answer["finish_reason"] == "stop" and answer["text"] == text_of(said[:first])
        assert answer["usage"]["completion_tokens"] == first + 1


@running
async def test_chats_are_rendered_by_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "yo", "refusal": None}]
    talk.append({"role": "user", "content": "é?"})
    prompt = ids(tokenizer(), "u:Hi\na:yo\nu:é?\na:", special=False)
    said = text_of(generate(target(), None, prompt, new_tokens=100 - len(prompt)).tokens)
    async with client() as it:
        body = {"model": "toy", "messages": talk, "temperature": 0}
        whole = await ask(it, body, CHAT)
        assert whole["message"] == {"role": "assistant", "content": said} and whole["usage"]["total_tokens"] == 100
        assert (await ask(it, body | {"stream": True}, CHAT))["text"] == said
        assert (await ask(it, body | {"max_completion_tokens": 3}, CHAT))["usage"]["completion_tokens"] == 3
        monkeypatch.setattr(target(), "tokenizer", tokenizer(None))
        async with it.post(CHAT, json=body) as response:
            assert response.status == 400 and "no chat template" in (await response.json())["error"]["message"]


@running
async def test_a_seed_gives_the_same_text_in_any_company() -> None:
    body = greedy(0, seed=7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1) | {"temperature": 1.0}
    how = Sampling(1.0, 20, 0.9, 0.01, 1.1, seed=7)
    async with client(False) as it:
        one, *_, other = await asyncio.gather(ask(it, body), *(ask(it, greedy(i)) for i in range(4)), ask(it, body | {"stream": True}))
        assert one["token_ids"] == other["token_ids"] == generate(target(), None, PROMPTS[0], new_tokens=NEW, sampling=how).tokens
        free = {tuple((await ask(it, {"prompt": PROMPTS[0], "max_tokens": 8, "return_token_ids": True}))["token_ids"]) for _ in range(4)}
        assert len(free) > 1  # temperature 1 and another seed where neither is given


BAD: list[tuple[Any, int, str | None, str]] = [
    (b"{", 400, None, "not JSON"),
    (b"[" * 100_000, 400, None, "not JSON"),
    (b'"\xff"', 400, None, "not JSON"),
    (b"[1]", 400, None, "JSON object"),
    (b"x" * 300_000, 413, None, "size"),
    ({}, 400, "prompt", "prompt"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": "a\ud800"}, 400, "prompt", "surrogate"),
    ({"prompt": ["a", "b"]}, 400, "prompt", "2 prompts"),
    ({"prompt": [3, "a"]}, 400, "prompt", "token ids"),
    ({"prompt": [True]}, 400, "prompt", "token ids"),
    ({"prompt": [96]}, 400, "prompt", "vocabulary has 96"),
    ({"prompt": [-1]}, 400, "prompt", "vocabulary"),
    ({"prompt": [1 << 70]}, 400, "prompt", "vocabulary"),
    ({"prompt": {"a": 1}}, 400, "prompt", "prompt must be"),
    ({"prompt": [5] * 90, "max_tokens": 11}, 400, "prompt", "90 tokens and max_tokens, 11, are more than the 100"),
    ({"prompt": "a" * 300}, 400, "prompt", "300 tokens and max_tokens, 16, are more"),
    ({"prompt": [5] * 300}, 400, "prompt", "300 tokens and max_tokens, 16, are more"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"max_tokens": "9"}, 400, "max_tokens", "type int"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "type int"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens", "at least 1"),
    ({"temperature": -0.1}, 400, "temperature", "at least 0"),
    ({"temperature": "hot"}, 400, "temperature", "type float"),
    ({"temperature": True}, 400, "temperature", "type float"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "number"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature", "number"),
    ({"top_p": 0}, 400, "top_p", "above 0"),
    ({"top_k": 1.5}, 400, "top_k", "type int"),
    ({"min_p": 1}, 400, "min_p", "below 1"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "above 0"),
    ({"seed": 1 << 63}, 400, "seed", "64 bits"),
    ({"stop": ["a"] * 5}, 400, "stop", "up to 4"),
    ({"stop": [""]}, 400, "stop", "1 to 256"),
    ({"stop": 3}, 400, "stop", "up to 4"),
    ({"n": 2}, 400, "n", "nothing but 1"),
    ({"logprobs": 0}, 400, "logprobs", "nothing but false"),
    ({"n": True}, 400, "n", "nothing but 1"),
    ({"logprobs": 5}, 400, "logprobs", "nothing but false"),
    ({"stream": "yes"}, 400, "stream", "type bool"),
    ({"stream_options": {"a": 1}}, 400, "stream_options", "stream_options.a"),
    ({"maxtokens": 5}, 400, "maxtokens", "no such field"),
    ({"messages": []}, 400, "messages", "no such field"),
    ({"model": "another"}, 404, "model", "only 'toy'"),
]  # fmt: skip
EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e-30}, {"temperature": 1e6}, {"repetition_penalty": 1e6}, {"repetition_penalty": 1e-30}, {"top_k": 1 << 40},
    {"top_p": 1e-30}, {"min_p": 0.999999}, {"seed": -(1 << 63)}, {"user": "me", "n": 1, "stop": None},
]  # fmt: skip
BAD_CHATS: list[tuple[Any, int, str | None, str]] = [
    ({}, 400, "messages", "no list"),
    ({"messages": "hi"}, 400, "messages", "no list"),
    ({"messages": []}, 400, "messages", "messages is empty"),
    ({"messages": [3]}, 400, "messages", "not an object"),
    ({"messages": [{"role": "bard", "content": "a"}]}, 400, "messages", "'bard'"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages", "not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "parts that are not text"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, 400, "messages", "'tool_calls'"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages", "no tools"),
    ({"messages": [{"role": "user", "content": "a" * 200}]}, 400, "messages", "are more than the 100"),
    ({"prompt": "a"}, 400, "prompt", "no such field"),
]


@running
async def test_a_bad_request_is_told_why_and_harms_nobody() -> None:
    async with client(max_body=200_000) as it:
        others = [asyncio.ensure_future(ask(it, greedy(i, stream=True))) for i in range(5)]
        for path, cases, usual in ((COMPLETIONS, BAD, {"prompt": "abc"}), (CHAT, BAD_CHATS, {})):
            for body, status, param, message in cases:
                whole = usual | body if isinstance(body, dict) and (body or path == CHAT) else body
                data = whole if isinstance(whole, bytes) else json.dumps(whole).encode()
                for stream in (False, True) if isinstance(whole, dict) and "stream" not in whole else [False]:
                    data = json.dumps(whole | {"stream": True}).encode() if stream else data
                    async with it.post(path, data=data) as response:
                        assert response.content_type == "application/json", body
                        error = (await response.json())["error"]
                        assert (response.status, error["param"]) == (status, param), (body, error)
                        assert message in error["message"] and error["type"] == "invalid_request_error" and error["code"]
        async with it.post(COMPLETIONS, data=b"no gzip", headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400 and "headers" in (await response.json())["error"]["message"]
        for path, method, status in (("/v1/nothing", it.get, 404), (COMPLETIONS, it.get, 405), ("/health", it.post, 405)):
            async with method(path) as response:
                assert response.status == status and (await response.json())["error"]["message"]
        for i, answer in enumerate(await asyncio.gather(*others)):
            assert answer["token_ids"] == plain(i)
        for extreme in EXTREME:
            assert len((await ask(it, greedy(0) | {"temperature": 1.0} | extreme))["token_ids"]) == NEW
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)
        assert await (await it.get("/health")).json() == {"status": "ok"}
        assert [card["id"] for card in (await (await it.get("/v1/models")).json())["data"]] == ["toy"]
        assert (await figures(it))["engine_restarts_total"] == 0


@running
async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with client(max_body=1000) as it:
        reader, writer = await asyncio.open_connection(it.host, it.port)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)


@running
async def test_a_client_that_leaves_frees_its_row_and_its_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(0)

    class Gated(Engine):
        def step(self) -> Any:
            assert gate.acquire(timeout=30)
            return super().step()

    monkeypatch.setattr(serve, "Engine", Gated)
    async with client() as it:
        leaving = await it.post(COMPLETIONS, json=greedy(0, stream=True))
        staying = asyncio.ensure_future(ask(it, greedy(1)))
        await until(it, requests_waiting=1)
        gate.release()
        await until(it, requests_running=2)
        impatient = asyncio.ensure_future(ask(it, greedy(2)))
        await until(it, requests_waiting=1)
        patient = asyncio.ensure_future(ask(it, greedy(3)))
        await until(it, requests_waiting=2)
        impatient.cancel()
        leaving.close()
        while (await figures(it)).get(f'requests_total{{path="{COMPLETIONS}",status="499"}}') != 2:
            await asyncio.sleep(0.01)
        gate.release(2)  # the round that was waited for, and one after it
        await until(it, requests_waiting=0, requests_running=2)
        gate.release(1000)
        assert (await staying)["token_ids"] == plain(1) and (await patient)["token_ids"] == plain(3)
        await until(it, requests_running=0, rows_free=2)
        assert (await figures(it))["prompt_tokens_total"] == sum(len(PROMPTS[i]) for i in (0, 1, 3))  # the impatient one's was not read


@running
async def test_an_engine_that_fails_is_built_anew_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    all_here = threading.Event()

    class Fragile(Engine):
        broken = False

        def admit(self, prompt: Any, **how: Any) -> Any:
            row = super().admit(prompt, **how)
            if list(prompt) == PROMPTS[4]:
                raise RuntimeError("out of memory, for example")
            return row

        def step(self) -> Any:
            assert all_here.wait(timeout=30)
            made = super().step()
            if Fragile.broken:
                Fragile.broken = False
                raise RuntimeError("a kernel failed, for example")
            return made

    monkeypatch.setattr(serve, "Engine", Fragile)
    async with client(rows=3) as it:
        others = [asyncio.ensure_future(ask(it, greedy(1, 70, stream=True)))]
        await until(it, requests_running=1)
        others.append(asyncio.ensure_future(ask(it, greedy(2, 70))))
        await until(it, requests_waiting=1)
        failed = [asyncio.ensure_future(it.post(COMPLETIONS, json=greedy(4, stream=i == 1))) for i in range(2)]
        await until(it, requests_waiting=3)
        all_here.set()
        for response in await asyncio.gather(*failed):
            assert response.status == 500 and (await response.json())["error"]["code"] == "engine_failed"
        for i, answer in zip((1, 2), await asyncio.gather(*others), strict=True):
            assert answer["token_ids"] == plain(i, 70)
        assert (await figures(it))["engine_restarts_total"] == 2
        Fragile.broken = True
        async with it.post(COMPLETIONS, json=greedy(0, stream=True)) as response:  # it fails after its first token
            *_, last = (await response.text()).strip().split("\n\n")
            assert json.loads(last[6:])["error"]["type"] == "server_error"
        assert (await figures(it))[f'requests_total{{path="{COMPLETIONS}",status="500"}}'] == 3
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)
        await until(it, requests_running=0, rows_free=3)

        def gone(*args: Any, **how: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(serve, "Engine", gone)
        Fragile.broken = True
        assert (await it.post(COMPLETIONS, json=greedy(0))).status == 500
        while (await it.get("/health")).status != 503:
            await asyncio.sleep(0.01)
        assert (await it.post(COMPLETIONS, json=greedy(0))).status == 503


def test_settings_that_cannot_be_used_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"rows": 0}, {"capacity": 1}, {"max_body": 0}]
    for settings in wrong:
        with pytest.raises(UserError, match=next(iter(settings))):
            serve.application(target(), None, **settings)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot listen"):
            serve.serve(target(), None, port=taken.getsockname()[1], rows=1, capacity=10)
    with pytest.raises(UserError, match="cannot listen"):
        serve.serve(target(), None, port=1 << 17, rows=1, capacity=10)


def test_people_are_told_which_trees_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    used: list[Any] = []
    monkeypatch.setattr(serve, "open_target", lambda *_, **__: target())
    monkeypatch.setattr(serve, "open_speculator", lambda *_: drafter())
    monkeypatch.setattr(serve, "serve", lambda *_, plans, **__: used.append(plans))
    decode: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "decode" / "dynamic.yaml"))
    settings = dict.fromkeys(("host", "port", "rows", "capacity", "max_body", "grace"))
    config = {"decode": decode, "target": {"name": "toy"}, "speculator": "x", **settings}
    for found, told in (
        ({ALONE: None, 2: POLICY, MANY: None}, "trees of decode.json:\nup to 2 at once: "),
        (None, "any load; `python -m inf"),
    ):
        monkeypatch.setattr(serve, "load_plans", lambda *_, found=found: found)
        serve.main(config)
        assert told in capsys.readouterr().out
    serve.main(config | {"speculator": None})
    assert capsys.readouterr().out == "" and used == [{2: POLICY, MANY: None}, None, None]


def test_a_signal_lets_running_requests_end_and_frees_the_port() -> None:
    command = [sys.executable, "-m", "inference", "serve", "target=tiny", "target.device=cpu", "port=0", "rows=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(found for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
            body = json.dumps({"prompt": "def", "max_tokens": 100, "stream": True, "temperature": 1.0}).encode()
            with direct.open(url[0] + COMPLETIONS, body, timeout=60) as answer:
                assert answer.readline().startswith(b"data: ")
                server.send_signal(signal.SIGTERM)
                rest = answer.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(url[1])))
