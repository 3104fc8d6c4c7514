"""A stand-in for vLLM with its hidden-state extraction, in a thread of this process: it answers and writes as vLLM 0.32 does.

Its answers are computed by transformers alone. ``spoil`` turns the n-th answer into what a test needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import save

Written = tuple[int, dict[str, Any], dict[str, torch.Tensor] | bytes | None]  # status, answer, and what is in the file (None: nothing)


@contextlib.contextmanager
def serving(app: web.Application) -> Iterator[str]:
    """Serve the application in a thread of its own. Yields its address."""
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app, handler_cancellation=True)

    async def begin() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class FakeEngine:
    """``layers``: those whose states its files hold. ``count``: requests so far."""

    def __init__(self, model: Path, folder: Path, layers: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.folder, self.layers, self.longest, self.count = folder, layers, 512, 0
        self.late = 0.01  # seconds until a file is whole
        self.spoil: Callable[[int, int, dict[str, Any], dict[str, torch.Tensor]], Written] = lambda n, status, *rest: (status, *rest)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> tuple[torch.Tensor, int]:
        """[T, layers, D] and the next token. The last layer's state is that before the final norm."""
        before: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        said = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        hook.remove()
        every = [*said.hidden_states[:-1], before[0]]
        return torch.stack([every[k][0] for k in self.layers], dim=1), int(said.logits[0, -1].argmax())

    async def complete(self, request: web.Request) -> web.Response:
        n, self.count = self.count, self.count + 1
        body = await request.json()
        assert body["max_tokens"] == 1 and body["temperature"] == 0 and body["return_token_ids"] and body["model"] == "toy"
        states, token = self.states(body["prompt"])
        path = self.folder / f"cmpl-{request.headers['X-Request-Id']}-0-{n:08x}.safetensors"
        answer = {"choices": [{"text": "x", "token_ids": [token]}], "kv_transfer_params": {"hidden_states_path": f"/there/{path.name}"}}
        status, answer, written = self.spoil(n, 200, answer, {"hidden_states": states, "token_ids": torch.tensor(body["prompt"])})
        if written is not None:
            lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            half = asyncio.get_running_loop()
            data = written if isinstance(written, bytes) else save({k: v.contiguous() for k, v in written.items()})
            half.call_later(self.late / 2, path.write_bytes, data[: len(data) // 2])
            half.call_later(self.late, lambda: (path.write_bytes(data), os.close(lock)))
        return web.json_response(answer, status=status)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy", "max_model_len": self.longest}]})

    @property
    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/v1/completions", self.complete), web.get("/v1/models", self.models)])
        return app
