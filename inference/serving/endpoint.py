"""The handlers of the endpoint: requests become jobs of the worker, and their tokens become JSON or a stream of it.

The event loop reads requests and writes answers. The rounds run in the worker's thread (inference/serving/worker.py), and prompts
are tokenized in other threads, so the event loop never waits for either.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.serving.access import NAME, Lock, name_of
from headstart.inference.serving.asked import Asked, read
from headstart.inference.serving.fields import Refused, short
from headstart.inference.serving.record import Record
from headstart.inference.serving.reply import Answer, Piece, usage
from headstart.inference.serving.worker import EngineFailed, Event, Job, Worker

log = logging.getLogger(__name__)

COMPLETIONS, CHAT, MODELS, HEALTH = "/v1/completions", "/v1/chat/completions", "/v1/models", "/health"
STATUS = web.RequestKey("status", int)  # of an error in the middle of a stream, for the metrics

Pieces = AsyncIterator[tuple[Answer, Piece]]


class Endpoint:
    """The handlers of the routes. ``limit``: most tokens of a sequence. ``defaults``: settings of sampling that hold unless a request gives
    others. ``sequences``: rows of the engine. ``queue``: how many more may wait for a row. ``patience``: seconds that a client has to
    send a request, and to take each piece of a stream. ``record``: the log of requests and replies; None: none is kept.
    """

    def __init__(
        self,
        worker: Worker,
        target: Target,
        name: str,
        *,
        limit: int,
        rule: str,
        defaults: Mapping[str, float],
        sequences: int,
        queue: int,
        patience: float,
        lock: Lock | None,
        record: Record | None,
    ) -> None:
        self.worker, self.target, self.name, self.limit, self.rule, self.defaults = worker, target, name, limit, rule, defaults
        self.most, self.patience, self.lock, self.record = sequences + queue, patience, lock, record
        tree = worker.engine.plan_for(1)
        self.guesses = [] if tree is not None and tree.kind != "chain" else [("", 0.0 if tree is None else tree.depth)]  # for the metrics
        self.inside: set[Job] = set()  # sequences that run or wait
        self.began = int(time.time())
        self.requests: Counter[tuple[str, int]] = Counter()  # path, status (499: the client left) -> how many
        self.seconds = 0.0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or a chat, whole or as a stream. Raises Refused for a wrong request, and where no place is free."""
        self._check_room(1)
        raw = await self._body_of(request)
        asked = await asyncio.to_thread(read, raw, request.path == CHAT, self.target, self.name, self.limit, self.rule, self.defaults)
        self._check_room(len(asked.samplings))
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def job(index: int) -> Job:
            def tell(event: Event) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            prompt, sampling = asked.prompts[index // asked.n], asked.samplings[index]
            scored = asked.echo and asked.logprobs is not None
            return Job(prompt, asked.new_tokens, sampling, tell, asked.stop_ids, asked.logprobs, request[NAME], scored)

        jobs = [job(i) for i in range(len(asked.samplings))]
        self.inside.update(jobs)
        try:
            for each in jobs:
                self.worker.submit(each)
            answers = [Answer(asked, i, self.target.tokenizer) for i in range(len(jobs))]

            def ended() -> None:
                if self.record is not None:
                    choices = {"choices": [answer.to_record() for answer in answers]}
                    self.record.add(raw, self._head(request, asked, "chat.completion") | choices | usage(asked, answers))

            pieces = self._pieces(answers, jobs, events, ended)
            return await (self._stream if asked.stream else self._whole)(request, asked, answers, pieces)
        finally:
            self._leave(jobs)

    def _check_room(self, answers: int) -> None:
        """Raises Refused if there is no room for so many more answers. A request too large for all places is taken if it comes alone."""
        if self.inside and len(self.inside) + answers > self.most:
            raise Refused("too many requests wait: ask again later", None, "queue_full", 429, {"Retry-After": "1"})

    def _leave(self, jobs: list[Job]) -> None:
        """Forget jobs that have ended, or that nobody waits for any more."""
        for job in jobs:
            job.gone = True
            self.inside.discard(job)

    async def _body_of(self, request: web.Request) -> bytes:
        if (size := request.content_length or 0) > request.client_max_size:  # before any of it is read
            raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=size)
        try:
            async with asyncio.timeout(self.patience):
                return await request.read()
        except web.RequestPayloadError:  # broken chunks or compression
            error: web.HTTPError = web.HTTPBadRequest(text="the body is not what its headers say")
        except TimeoutError:
            error = web.HTTPRequestTimeout(text=f"the request did not arrive within {self.patience:g} seconds")
        error.force_close()
        raise error

    async def _pieces(
        self, answers: list[Answer], jobs: list[Job], events: asyncio.Queue[tuple[int, Event]], ended: Callable[[], object] = lambda: None
    ) -> Pieces:
        """The pieces by which the answers grow. ``ended`` is called before the last one: the client may leave with it."""
        left = len(answers)
        while left:
            index, event = await events.get()
            if jobs[index].gone:  # a stop string has ended this answer; its row ran one more round, which may even have failed
                continue
            if isinstance(event, EngineFailed):
                raise Refused(str(event), code="engine_failed", status=500)
            if isinstance(event, UserError):
                raise Refused(str(event))
            answer = answers[index]
            piece = answer.take(*event)
            if answer.ended:
                left -= 1
                self._leave([jobs[index]])
                if not left:
                    ended()
            yield answer, piece

    async def _whole(self, request: web.Request, asked: Asked, answers: list[Answer], pieces: Pieces) -> web.StreamResponse:
        async for _ in pieces:
            pass
        choices = {"choices": [answer.whole() for answer in answers]}
        return web.json_response(self._head(request, asked, "chat.completion") | choices | usage(asked, answers))

    async def _stream(self, request: web.Request, asked: Asked, answers: list[Answer], pieces: Pieces) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        head = self._head(request, asked, "chat.completion.chunk")
        later: dict[str, Any] = {"usage": None} if asked.usage else {}

        async def send(data: str) -> None:
            try:
                async with asyncio.timeout(self.patience):
                    await response.write(f"data: {data}\n\n".encode())
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the client does not read its answer") from None

        try:
            async for answer, piece in pieces:
                if not response.prepared:  # not earlier: until the headers are sent, an error has its own status
                    await response.prepare(request)
                if (choice := answer.part(piece)) is not None:
                    await send(json.dumps(head | {"choices": [choice]} | (usage(asked, answers) if asked.always else later)))
        except Refused as error:
            if not response.prepared:
                raise
            request[STATUS] = error.status
            await send(json.dumps(error.body))
            return response
        if asked.usage:
            await send(json.dumps(head | {"choices": []} | usage(asked, answers)))
        await send("[DONE]")
        return response

    def _head(self, request: web.Request, asked: Asked, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{request[NAME]}"
        return {"id": name, "object": kind if asked.chat else "text_completion", "created": int(time.time()), "model": self.name}

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "object": "model", "created": self.began, "owned_by": "headstart", "max_model_len": self.limit}
        card["root"] = self.target.name  # clients load the tokenizer from there
        wanted = request.match_info.get("name")
        if wanted is None:
            return web.json_response({"object": "list", "data": [card]})
        if wanted != self.name:
            raise Refused(f"model: {short(wanted)} is not here, only {self.name!r}", "model", "model_not_found", 404)
        return web.json_response(card)

    async def health(self, request: web.Request) -> web.Response:
        failed = self.worker.failed
        return web.json_response({"status": "failed" if failed else "ok"}, status=503 if failed else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text form, version 0.0.4."""
        sums, worker = self.worker.sums, self.worker
        passes, drafts = sums["passes"], sorted(worker.accepted.items())
        waiting = len(worker.scoring) + len(worker.waiting) + worker.inbox.qsize()
        requests: list[tuple[str, float]] = [
            (f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(self.requests.items())
        ]
        rows: list[tuple[str, str, str, list[tuple[str, float]]]] = [
            ("requests_total", "counter", "Requests that ended, by HTTP status; 499: the client left.", requests),
            ("request_seconds_total", "counter", "Seconds that these took, with waiting.", [("", self.seconds)]),
            ("requests_running", "gauge", "Answers in a row of the engine; a request may ask for several.", [("", len(worker.running))]),
            ("requests_waiting", "gauge", "Answers that wait for a row.", [("", waiting)]),
            ("rows_free", "gauge", "Rows of the engine that are free for an answer.", [("", worker.free)]),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", [("", sums["prompt_tokens"])]),
            ("tokens_total", "counter", "New tokens.", [("", sums["tokens"])]),
            ("target_passes_total", "counter", "Passes of the target after the prompt's, counted for each answer.", [("", passes)]),
            ("accepted_length", "gauge", "New tokens a target pass, its own counted.", [("", sums["pass_tokens"] / max(passes, 1))]),
            ("guesses", "gauge", "Guesses of a chain, for one answer at a time; 0: none; not there: trees, or what pays.", self.guesses),
            ("accepted_total", "counter", "Passes that accepted a guess at this depth.", [(f'{{depth="{d}"}}', n) for d, n in drafts]),
            ("acceptance", "gauge", "Their share of all passes.", [(f'{{depth="{d}"}}', n / max(passes, 1)) for d, n in drafts]),
            ("engine_seconds_total", "counter", "Seconds the engine was at work.", [("", sums["seconds"])]),
            ("engine_restarts_total", "counter", "Times the engine failed and was started again.", [("", sums["restarts"])]),
        ]
        text = ""
        for name, kind, meaning, values in rows:
            text += f"# HELP headstart_{name} {meaning}\n# TYPE headstart_{name} {kind}\n"
            text += "".join(f"headstart_{name}{labels} {value:.10g}\n" for labels, value in values)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @web.middleware
    async def guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Refuse requests without the key, turn every error into JSON, and count every completion."""
        began, status = time.perf_counter(), 499
        request[NAME] = name_of(request)
        try:
            try:
                if self.lock is not None and request.path != HEALTH and not self.lock.opens(request):
                    who = "give the key of this endpoint: Authorization: Bearer KEY"
                    raise Refused(who, None, "invalid_api_key", 401, {"WWW-Authenticate": "Bearer"})
                response = await handler(request)
            except Refused as error:
                response = web.json_response(error.body, status=error.status, headers=error.headers)
            except EngineFailed as error:
                response = web.json_response(Refused(str(error), code="engine_failed", status=503).body, status=503)
            except web.HTTPException as error:  # aiohttp's own: no such path, another method, a body too large
                known = f": this endpoint has {CHAT}, {COMPLETIONS} and {MODELS}" * (error.status == 404)
                error.content_type = "application/json"
                error.text = json.dumps(Refused(f"{error.text or error.reason}{known}", code="http").body)
                status = error.status
                raise
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                log.exception("%s %s failed (request %s)", request.method, short(request.path), request[NAME])
                response = web.json_response(Refused("an error of the server", code="internal", status=500).body, status=500)
            status = request.get(STATUS, response.status)
            return response
        finally:
            if request.path in (COMPLETIONS, CHAT):
                self.requests[request.path, status] += 1
                self.seconds += time.perf_counter() - began
