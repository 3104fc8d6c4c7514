"""``python -m inference serve``: an OpenAI-compatible endpoint over the engine, bound to this machine unless told otherwise.

The event loop reads requests and writes answers; the rounds run in the worker's thread (inference/worker.py), prompts
become tokens in others, so that it never waits for either.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from heads.base import Drafter
from heads.errors import UserError
from inference.asked import Asked, Refused, read
from inference.engine import Engine, Plans
from inference.plans import MANY, by_load, load_plans
from inference.propose import TreePolicy
from inference.report import fit_depth
from inference.settings import open_decode, open_speculator, open_target
from inference.target import Target
from inference.text import Reader
from inference.worker import EngineFailed, Event, Job, Worker

log = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STATUS = web.RequestKey("status", int)  # of an error in the middle of a stream, for the figures

Pieces = AsyncIterator[tuple[str, list[int], str | None]]  # text, its tokens, and why it ended (None: it goes on)


class Endpoint:
    def __init__(self, worker: Worker, target: Target, name: str, limit: int, rule: str) -> None:
        self.worker, self.target, self.name, self.limit, self.rule = worker, target, name, limit, rule
        self.began = int(time.time())
        self.requests: Counter[tuple[str, int]] = Counter()  # path, status (499: the client left) -> how many
        self.seconds = 0.0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if (size := request.content_length or 0) > request.client_max_size:  # before any of it is read
            raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=size)
        try:
            raw = await request.read()
        except web.RequestPayloadError:  # chunks or a compression that are none
            error = web.HTTPBadRequest(text="the body is not what its headers say")
            error.force_close()
            raise error from None
        asked = await asyncio.to_thread(read, raw, request.path == CHAT, self.target, self.name, self.limit, self.rule)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job = Job(asked.prompt, asked.new_tokens, asked.sampling, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:
            self.worker.submit(job)
            pieces = self._pieces(asked, events)
            return await (self._stream(request, asked, pieces) if asked.stream else self._whole(asked, pieces))
        finally:
            job.gone = True  # it ended, or the client left

    async def _pieces(self, asked: Asked, events: asyncio.Queue[Event]) -> Pieces:
        reader = Reader(self.target.tokenizer, asked.prompt, asked.stops)
        while True:
            event = await events.get()
            if isinstance(event, EngineFailed):
                raise Refused(str(event), code="engine_failed", status=500)
            if isinstance(event, UserError):
                raise Refused(str(event))
            tokens, ended = event
            before = reader.count
            text = reader.push(tokens[:-1] if ended == "stop" else tokens)
            text += reader.end() if ended else ""
            if reader.stopped:
                tokens, ended = tokens[: reader.count - before], "stop"
            yield text, tokens, ended or None
            if ended:
                return

    async def _whole(self, asked: Asked, pieces: Pieces) -> web.StreamResponse:
        said, new, why = "", list[int](), None
        async for text, tokens, ended in pieces:
            said, new, why = said + text, new + tokens, ended
        said_by = {"message": {"role": "assistant", "content": said}} if asked.chat else {"text": said}
        body = self._body(asked, "chat.completion") | _choices(asked, said_by, new, why) | _usage(asked, len(new))
        return web.json_response(body)

    async def _stream(self, request: web.Request, asked: Asked, pieces: Pieces) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        head, count = self._body(asked, "chat.completion.chunk"), 0

        async def send(data: str) -> None:
            await response.write(f"data: {data}\n\n".encode())

        try:
            async for text, tokens, ended in pieces:
                role = {} if response.prepared else {"role": "assistant"}
                if role:  # not earlier: until then an error has a status of its own
                    await response.prepare(request)
                count += len(tokens)
                if text or role or ended or asked.token_ids:
                    said = {"delta": role | {"content": text}} if asked.chat else {"text": text}
                    await send(json.dumps(head | _choices(asked, said, tokens, ended)))
        except Refused as error:
            if not response.prepared:
                raise
            request[STATUS] = error.status
            await send(json.dumps(error.body))
            return response
        if asked.usage:
            await send(json.dumps(head | {"choices": []} | _usage(asked, count)))
        await send("[DONE]")
        return response

    def _body(self, asked: Asked, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind if asked.chat else "text_completion", "created": int(time.time()), "model": self.name}

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "created": self.began, "owned_by": "headstart", "max_model_len": self.limit}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, request: web.Request) -> web.Response:
        failed = self.worker.failed
        return web.json_response({"status": "failed" if failed else "ok"}, status=503 if failed else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text form, version 0.0.4."""
        sums, worker = self.worker.sums, self.worker
        passes, drafts = sums["passes"], sorted(worker.accepted.items())
        requests: list[tuple[str, float]] = [
            (f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.requests.items())
        ]
        rows: list[tuple[str, str, str, list[tuple[str, float]]]] = [
            ("requests_total", "counter", "Requests that ended, by HTTP status; 499: the client left.", requests),
            ("request_seconds_total", "counter", "Seconds that these took, with waiting.", [("", self.seconds)]),
            ("requests_running", "gauge", "Requests in a row of the engine.", [("", len(worker.running))]),
            ("requests_waiting", "gauge", "Requests that wait for a row.", [("", len(worker.waiting) + worker.inbox.qsize())]),
            ("rows_free", "gauge", "Rows of the engine that take a request.", [("", worker.free)]),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", [("", sums["prompt_tokens"])]),
            ("tokens_total", "counter", "New tokens.", [("", sums["tokens"])]),
            ("target_passes_total", "counter", "Passes of the target after the prompt's, counted for each request.", [("", passes)]),
            ("accepted_length", "gauge", "New tokens a target pass, its own counted.", [("", sums["pass_tokens"] / max(passes, 1))]),
            ("accepted_total", "counter", "Passes that accepted a guess at this depth.", [(f'{{depth="{d}"}}', n) for d, n in drafts]),
            ("acceptance", "gauge", "Their share of all passes.", [(f'{{depth="{d}"}}', n / max(passes, 1)) for d, n in drafts]),
            ("engine_seconds_total", "counter", "Seconds the engine was at work.", [("", sums["seconds"])]),
            ("engine_restarts_total", "counter", "Times it failed and was built anew.", [("", sums["restarts"])]),
        ]
        text = ""
        for name, kind, meaning, values in rows:
            text += f"# HELP headstart_{name} {meaning}\n# TYPE headstart_{name} {kind}\n"
            text += "".join(f"headstart_{name}{labels} {value:.10g}\n" for labels, value in values)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @web.middleware
    async def guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Every error is JSON, and every completion is counted."""
        began, status = time.perf_counter(), 499
        try:
            try:
                response = await handler(request)
            except Refused as error:
                response = web.json_response(error.body, status=error.status)
            except EngineFailed as error:
                response = web.json_response(Refused(str(error), code="engine_failed", status=503).body, status=503)
            except web.HTTPException as error:  # aiohttp's own: no such path, another method, a body too large
                error.content_type, error.text = "application/json", json.dumps(Refused(error.text or error.reason, code="http").body)
                status = error.status
                raise
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                log.exception("%s %s failed", request.method, request.path)
                response = web.json_response(Refused("an error of the server", code="internal", status=500).body, status=500)
            status = request.get(STATUS, response.status)
            return response
        finally:
            if request.path in (COMPLETIONS, CHAT):
                self.requests[request.path, status] += 1
                self.seconds += time.perf_counter() - began


def _choices(asked: Asked, said: dict[str, Any], tokens: list[int], ended: str | None) -> dict[str, Any]:
    shown = {"token_ids": tokens} if asked.token_ids else {}
    return {"choices": [{"index": 0} | said | shown | {"logprobs": None, "finish_reason": ended}]}


def _usage(asked: Asked, new: int) -> dict[str, Any]:
    old = len(asked.prompt)
    return {"usage": {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}}


def application(
    target: Target,
    drafter: Drafter | None,
    *,
    rows: int = 8,
    capacity: int | None = None,
    policy: TreePolicy | None = None,
    plans: Plans | None = None,
    rule: str = "top_plus_one",
    name: str = "",
    max_body: int = 1 << 20,
) -> web.Application:
    """``rows`` requests at a time of up to ``capacity`` tokens each (None: the target's context); bodies of up to ``max_body`` bytes."""
    if rows < 1 or max_body < 1 or (capacity is not None and capacity < 2):
        raise UserError(f"rows and max_body must be at least 1, capacity at least 2, found {rows}, {max_body} and {capacity}")
    limit = min(capacity or target.shape.max_positions, target.shape.max_positions)
    worker = Worker(lambda: Engine(target, drafter, rows=rows, capacity=limit, policy=policy, plans=plans, rule=rule))
    here = Endpoint(worker, target, name or Path(target.name).name, limit, rule)

    async def work(app: web.Application) -> AsyncIterator[None]:
        worker.thread.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = web.Application(client_max_size=max_body, middlewares=[here.guard])
    app.add_routes([web.post(COMPLETIONS, here.complete), web.post(CHAT, here.complete), web.get("/v1/models", here.models)])
    app.add_routes([web.get("/health", here.health), web.get("/metrics", here.metrics)])
    app.cleanup_ctx.append(work)
    return app


def serve(
    target: Target, drafter: Drafter | None, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 30.0, **settings: Any
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end for up to ``grace`` seconds; a second signal ends at once.

    ``port`` 0: any that is free. ``settings``: those of ``application``. Raises UserError where they or the address cannot be used.
    """
    app = application(target, drafter, **settings)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it writes a stack trace for every malformed request

    async def run() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=grace, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except (OSError, OverflowError) as error:
                raise UserError(f"cannot listen on host={host} port={port}: {error}") from None
            for sign in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sign, over.set)
            name, number = runner.addresses[0][:2]
            print(f"serving on http://{f'[{name}]' if ':' in name else name}:{number}", flush=True)
            await over.wait()
            for sign in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(sign)
            print("shutting down: running requests end first", flush=True)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def main(config: dict[str, Any]) -> None:
    decode = open_decode(config["decode"])
    if decode.proposer["kind"] != "drafter":
        raise UserError(f"decode: serve drafts with a trained drafter or not at all, not with {decode.proposer['kind']}")
    target, folder = open_target(config["target"], to_decode=True), config["speculator"]
    drafter = None if folder is None else open_speculator(folder, target)
    plans: dict[int, TreePolicy | None] = {}
    if drafter is not None and decode.tuned:
        plans = {sequences: tree for sequences, tree in (load_plans(folder, target, drafter) or {}).items() if sequences}
    settings = {key: config[key] for key in ("host", "port", "rows", "capacity", "max_body", "grace")}
    policy = None if drafter is None else fit_depth(decode.policy, drafter)
    if policy is not None:
        alike = "the tree of the settings at any load; `python -m inference tune` finds when not to draft:"
        print("trees of decode.json:" if plans else alike)
        print(*by_load(plans or {MANY: policy}), sep="\n")
    serve(target, drafter, policy=policy, plans=plans or None, rule=decode.sampling.rule, name=config["target"]["name"], **settings)
