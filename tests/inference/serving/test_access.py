"""Who reaches the endpoint: keys, names of requests, clients that are slow, settings that cannot be used, the end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient
from omegaconf import OmegaConf

from headstart.heads.errors import UserError
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.plans import ALONE, MANY
from headstart.inference.decoding.policy import AUTO, fit_depth
from headstart.inference.serving import access, serve
from tests.inference.serving.served import CHAT, COMPLETIONS, ROOT, ask, client, drafter, endpoint, figures, greedy, plain, running, until
from tests.inference.serving.speech import POLICY, target


@running
async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with client(max_body=1000) as it:
        reader, writer = await asyncio.open_connection(it.host, it.port)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)


@pytest.mark.slow
@running
async def test_slow_clients_are_let_go() -> None:
    body = json.dumps(greedy(0)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()

    async def send(it: TestClient, *parts: bytes) -> bytes:
        """A part every tenth of a second, until the server has enough of it."""
        reader, writer = await asyncio.open_connection(it.host, it.port)
        try:
            for part in parts:
                if not reader.at_eof():
                    writer.write(part)
                    await asyncio.sleep(0.1)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async with client(read_timeout=1.5) as it:
        drops = [bytes([b]) for b in body[:20]]
        silent, headers, trickle, stuck = await asyncio.gather(
            send(it), send(it, *(bytes([b]) for b in head[:20])), send(it, head + b"\r\n", *drops), send(it, head + b"\r\n" + body[:-1])
        )
        assert silent == headers == b""  # closed
        assert trickle == b"" or trickle.startswith(b"HTTP/1.1 408 ")  # a reset may overtake the answer to who is still sending
        assert stuck.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 1.5 seconds" in stuck
        endpoint(it).patience = it.server.runner.server._kwargs["keepalive_timeout"] = 30.0  # this one may be slow
        assert (await ask(it, greedy(0)))["token_ids"] == plain(0)


@running
async def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first part. The limit is short from then on only: the request itself may be slow."""
    write = web.StreamResponse.write

    async def stuck(self: Any, data: bytes) -> None:
        if endpoint(it).patience == 0.2:
            await asyncio.sleep(30)
        endpoint(it).patience = 0.2
        await write(self, data)

    async with client() as it:
        with monkeypatch.context() as patch:
            patch.setattr(web.StreamResponse, "write", stuck)
            async with it.post(COMPLETIONS, json=greedy(0, stream=True)) as response:
                with pytest.raises(ClientError):
                    await response.text()
        await until(it, requests_running=0, rows_free=2)
        assert (await figures(it))[f'requests_total{{path="{COMPLETIONS}",status="499"}}'] == 1


@running
async def test_who_has_no_key_gets_no_further(caplog: pytest.LogCaptureFixture) -> None:
    def shows(key: str) -> dict[str, str]:
        return {"Authorization": key}

    async with client(key="s3cret") as it:
        assert (await it.get("/health")).status == 200
        for path in ("/v1/models", "/v1/models/toy", "/metrics", "/v1/nothing"):
            assert (await it.get(path)).status == 401, path
            assert (await it.get(path, headers=shows("Bearer s3cret"))).status == (404 if path == "/v1/nothing" else 200), path
        for wrong in ("", "Bearer", "Bearer s3cre", "Bearer s3crett", "Basic s3cret", "s3cret", "Bearer \xe9", "Bearer s3cret s3cret"):
            async with it.post(COMPLETIONS, json=greedy(0), headers=shows(wrong)) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (401, "invalid_api_key"), wrong
                assert response.headers["WWW-Authenticate"] == "Bearer" and "s3cre" not in json.dumps(error)
        async with it.post(COMPLETIONS, data=b"{", headers=shows("bearer s3cret")) as response:
            assert response.status == 400
        async with it.post(COMPLETIONS, json=greedy(0), headers=shows("Bearer s3cret")) as response:
            assert (await response.json())["choices"][0]["token_ids"] == plain(0)
    assert "s3cret" not in caplog.text


def test_a_key_is_read_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "from-here")
    monkeypatch.setenv("EMPTY", "")
    (tmp_path / "key").write_text("from-there\n")
    (tmp_path / "two").write_text("a b\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("x" * 4097)
    (tmp_path / "full").write_text("x" * 4096)
    assert access.key_of(str(tmp_path / "full")) == "x" * 4096
    assert access.key_of(None) is None and access.key_of("A_KEY") == "from-here" and access.key_of(str(tmp_path / "key")) == "from-there"
    for wrong in (
        "sk-SECRET",
        "x" * 300,
        "a\0b",
        "",
        str(tmp_path),
        "EMPTY",
        *(str(tmp_path / name) for name in ("two", "binary", "long")),
    ):
        with pytest.raises(UserError, match="api_key") as error:
            access.key_of(wrong)
        assert "\n" not in str(error.value) and "SECRET" not in str(error.value)
    with pytest.raises(UserError, match="more than 4096 bytes: it must hold nothing but the key"):
        access.key_of(str(tmp_path / "long"))


@running
async def test_every_answer_bears_the_name_of_its_request() -> None:
    async with client() as it:
        given = {"X-Request-Id": "mine-1"}
        async with it.post(COMPLETIONS, json=greedy(0), headers=given) as response:
            assert response.headers["X-Request-Id"] == "mine-1" and (await response.json())["id"] == "cmpl-mine-1"
        async with it.post(CHAT, data=b"{", headers=given) as response:
            assert response.status == 400 and response.headers["X-Request-Id"] == "mine-1"
        names = set()
        for wrong in ("", "x" * 129, "a b", "\xe9"):
            async with it.post(COMPLETIONS, json=greedy(0, stream=True), headers={"X-Request-Id": wrong}) as response:
                names.add(response.headers["X-Request-Id"])
                assert wrong not in names and response.headers["X-Request-Id"] in await response.text()
        assert len(names) == 4 and all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def config(**changes: Any) -> dict[str, Any]:
    """conf/serve.yaml as the door hands it over, for the toy."""
    found: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "serve.yaml"))
    decode = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "decode" / "auto.yaml"))
    return found | {"decode": decode, "target": {"name": "toy"}, "port": 0} | changes


def test_settings_that_cannot_be_used_are_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> Any:
        raise AssertionError("the target was opened first")

    def resolve(host: str, *rest: Any, **how: Any) -> Any:
        if host == "unresolved.invalid":  # without asking anybody
            raise socket.gaierror(-2, "Name or service not known")
        return by_the_system(host, *rest, **how)

    by_the_system = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(serve, "open_target", opened)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wrong: list[dict[str, Any]] = [
            {"api_key": "nothing-of-this-name"},
            {"host": ""}, {"host": "unresolved.invalid"},
            {"host": "x" * 300}, {"host": "a\ud800"}, {"host": "192.0.2.1"}, {"port": 1 << 17}, {"port": -1},
            {"port": taken.getsockname()[1]},
        ]  # fmt: skip
        for settings in wrong:
            with pytest.raises(UserError, match=next(iter(settings))) as error:
                serve.main(config(**settings))
            assert "\n" not in str(error.value)
    with pytest.raises(AssertionError, match="opened first"):  # nothing is wrong with the rest
        serve.main(config())
    (place,) = access.listen("127.0.0.1", 0)  # a port that another process took while the model was read
    with place, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(place.getsockname())
        other.listen()
        with pytest.raises(UserError, match="cannot listen"):
            serve.serve(target(), None, [place], sequences=1, max_length=10)


def test_an_address_that_the_machine_does_not_have_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ::1 of localhost, where IPv6 is off and /etc/hosts names it."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)), (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (place,) = access.listen("localhost", 0)
    with place:
        assert place.getsockname()[0] == "127.0.0.1" and place.getsockname()[1]
    found.pop()
    with pytest.raises(UserError, match=r"cannot listen on host=localhost port=0: .*assign"):
        access.listen("localhost", 0)


def test_people_are_told_which_trees_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    used: list[Any] = []
    monkeypatch.setattr(serve, "open_target", lambda *_, **__: target())
    monkeypatch.setattr(serve, "open_speculator", lambda *_: drafter())
    monkeypatch.setattr(serve, "listen", lambda *_: [])
    monkeypatch.setattr(serve, "serve", lambda *_, plans, **__: used.append(plans))
    monkeypatch.setattr(serve, "load_plans", lambda *_: {ALONE: None, 2: POLICY, MANY: None})
    asked = config(speculator="x")
    for kind, told in (("tuned", "up to 2 at once: "), ("auto", "any number at once: a chain or tree, 15 nodes, depth ")):
        serve.main(asked | {"decode": asked["decode"] | {"kind": kind}})
        assert told in capsys.readouterr().out
    serve.main(config())
    auto = fit_depth(AUTO, drafter())
    assert capsys.readouterr().out == "" and used == [{2: POLICY, MANY: None}, {MANY: auto}, {MANY: None}]


def test_a_signal_lets_running_requests_end_and_frees_the_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sockets = access.listen("localhost", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    monkeypatch.setattr(serve, "listen", lambda *_: sockets)
    monkeypatch.setattr(serve, "open_target", lambda *_, **__: target())
    rest: list[bytes] = []

    def talk() -> None:
        body = json.dumps({"prompt": "def", "max_tokens": 90, "stream": True}).encode()
        for _ in range(600):  # refused until it listens
            try:
                with direct.open(url + COMPLETIONS, body, timeout=60) as answer:
                    assert answer.readline().startswith(b"data: ")
                    signal.raise_signal(signal.SIGTERM)
                    rest.append(answer.read())
                return
            except urllib.error.URLError:
                time.sleep(0.05)

    class Slow(Engine):
        def step(self) -> Any:
            time.sleep(0.005)
            return super().step()

    monkeypatch.setattr(serve, "Engine", Slow)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # if nobody handles it, this test must fail and not the whole run
    client = threading.Thread(target=talk, daemon=True)
    try:
        client.start()
        serve.main(config(sequences=1, max_length=100))
    finally:
        signal.signal(signal.SIGTERM, before)
    client.join(timeout=60)
    assert len(rest) == 1 and rest[0].endswith(b"data: [DONE]\n\n")
    assert capsys.readouterr().out.splitlines()[-1] == "shutting down: running requests end first"
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(url.rpartition(":")[2])))
