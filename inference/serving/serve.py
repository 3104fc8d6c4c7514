"""``python -m inference serve``: an OpenAI-compatible endpoint over the engine, bound to this machine unless told otherwise."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.engine import Engine, Plans
from headstart.inference.decoding.plans import by_load, load_plans
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.serving.access import Lock, key_of, listen, sign
from headstart.inference.serving.endpoint import CHAT, COMPLETIONS, HEALTH, MODELS, Endpoint
from headstart.inference.serving.fields import SAMPLING
from headstart.inference.serving.record import Record
from headstart.inference.serving.worker import Worker
from headstart.inference.settings import open_decode, open_target
from headstart.inference.speculator import open_speculator


def application(
    target: Target,
    drafter: Drafter | None,
    *,
    sequences: int = 8,
    max_length: int | None = None,
    plans: Plans | TreePolicy | None = None,
    rule: str = "auto",
    name: str = "",
    max_body: int = 1 << 20,
    queue: int = 1024,
    read_timeout: float = 30.0,
    key: str | None = None,
    defaults: Mapping[str, float] = SAMPLING,
    record: Record | None = None,
) -> web.Application:
    """The web application of the endpoint. It decodes ``sequences`` at a time, each of up to ``max_length`` tokens (None: the target's
    context), while up to ``queue`` more wait. Bodies have up to ``max_body`` bytes, and must arrive within ``read_timeout`` seconds.
    ``key``: the API key that clients must send; None: everyone is answered. ``defaults``: settings of sampling that hold unless a request
    gives others. ``record``: the log of requests and replies; None: none is kept.
    """
    longest = min(target.rope_switch or target.shape.max_positions, target.shape.max_positions)  # most tokens of a sequence in the engine
    limit = min(max_length or longest, longest)
    worker = Worker(lambda: Engine(target, drafter, sequences=sequences, max_length=limit, plans=plans, rule=rule))
    how: dict[str, Any] = {"limit": limit, "rule": rule, "defaults": defaults}
    how |= {"sequences": sequences, "queue": queue, "patience": read_timeout}
    here = Endpoint(worker, target, name or Path(target.name).name, **how, lock=None if key is None else Lock(key), record=record)

    async def work(app: web.Application) -> AsyncIterator[None]:
        worker.thread.start()
        yield
        await asyncio.to_thread(worker.stop)
        if record is not None:
            await asyncio.to_thread(record.close)

    app = web.Application(client_max_size=max_body, middlewares=[here.guard])
    app.add_routes([web.post(COMPLETIONS, here.complete), web.post(CHAT, here.complete), web.get(MODELS, here.models)])
    app.add_routes([web.get(MODELS + "/{name:.+}", here.models), web.get(HEALTH, here.health), web.get("/metrics", here.metrics)])
    app.on_response_prepare.append(sign)
    app.cleanup_ctx.append(work)
    return app


def runner_of(app: web.Application, read_timeout: float = 30.0, grace: float = 30.0) -> web.AppRunner:
    """The runner of an application. ``read_timeout``: seconds for a request's headers, and between two requests of a connection: aiohttp
    has one timeout for both. ``grace``: seconds that running requests get to end.
    """
    clocks: dict[str, Any] = {"keepalive_timeout": read_timeout, "lingering_time": min(read_timeout, 10.0), "shutdown_timeout": grace}
    return web.AppRunner(app, handler_cancellation=True, access_log=None, **clocks)


def serve(target: Target, drafter: Drafter | None, sockets: Sequence[socket.socket], *, grace: float = 30.0, **settings: Any) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end for up to ``grace`` seconds; a second signal ends at once.

    ``sockets`` are bound already (see ``listen``). ``settings``: those of ``application``. Raises UserError for a socket or setting that
    cannot be used.
    """
    doing = ["capturing the rounds that are to be expected as device graphs"] if target.device.type == "cuda" else []
    plans = settings.get("plans")
    if any(tree is not None and tree.kind == "auto" for tree in (plans.values() if isinstance(plans, Mapping) else [plans])):
        doing.append("measuring what rounds cost on this machine (decode=auto; decode=chain starts without it)")
    if doing:
        print(f"{', '.join(doing)} ...", flush=True)
    app = application(target, drafter, **settings)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it writes a stack trace for every malformed request

    async def run() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        runner = runner_of(app, settings.get("read_timeout", 30.0), grace)
        await runner.setup()
        try:
            for place in sockets:
                try:
                    await web.SockSite(runner, place).start()
                except OSError as error:  # another process has begun to listen there
                    raise UserError(f"cannot listen on {place.getsockname()}: {error}") from None
            for sign in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sign, over.set)
            for name, number, *_ in runner.addresses:
                print(f"serving on http://{f'[{name}]' if ':' in name else name}:{number}", flush=True)
            await over.wait()
            for sign in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(sign)
            print("shutting down: running requests end first", flush=True)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def defaults_of(target: Target) -> dict[str, float]:
    """The settings of sampling in the model's generation_config.json, completed by OpenAI's defaults."""
    own = target.model.generation_config.to_diff_dict()
    return {name: usual if own.get(name) is None else own[name] for name, usual in SAMPLING.items()}


def main(config: dict[str, Any]) -> None:
    """Serve until a signal ends it."""
    decode = open_decode(config["decode"])
    if decode.proposer["kind"] != "drafter":
        raise UserError(f"decode: serve drafts with a trained drafter or not at all, not with {decode.proposer['kind']}")
    settings = {key: config[key] for key in ("sequences", "max_length", "max_body", "queue", "read_timeout")}
    key, sockets = key_of(config["api_key"]), listen(config["host"], config["port"])
    record = None if config["log"] is None else Record(config["log"])
    target, folder = open_target(config["target"], to_decode=True), config["speculator"]
    drafter = None if folder is None else open_speculator(folder, target)
    given = load_plans(folder, target, drafter) if drafter is not None and decode.tuned else decode.policy
    plans = Decoder(target, drafter, given).several
    if drafter is not None:
        print(*by_load(plans), sep="\n")
    defaults = defaults_of(target) if config["sampling_defaults"] == "model" else SAMPLING
    if others := ", ".join(f"{name} {value:g}" for name, value in defaults.items() if value != SAMPLING[name]):
        print(f"requests that do not say otherwise are sampled as the model's generation_config.json says: {others}")
    settings |= {
        "defaults": defaults,
        "plans": plans,
        "rule": decode.sampling.rule,
        "name": config["target"]["name"],
        "key": key,
        "record": record,
    }
    serve(target, drafter, sockets, grace=config["grace"], **settings)
