"""The client of vLLM's hidden-state extraction: how to start the server, send it texts, and check and read its files.

Each request asks the server for one token after a text. The server writes the states of the text to a file in a shared folder, with

    hidden_states [T, L, D], in the server's dtype: the state after each served layer, always before the final norm
    token_ids [T]

It holds a lock on NAME.lock until the file is complete, and names the file in its answer. This client checks, reads and removes each
file. It never opens anything outside the folder.

Shape suffixes: T tokens, L served layers, D target hidden.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.data.endpoint import Again, Endpoint, Unfit
from headstart.heads.errors import UserError
from headstart.heads.stored import STORED

ROWS = 256  # requests at a time; the server batches them as it can
# Seconds: the most to wait for a complete file; the first pause between two looks for it, doubled each time; the longest pause.
LATE, FIRST, SELDOM = 60.0, 0.001, 0.1
LEAVING = 5.0  # seconds to wait for pending answers at the end: the server may still write their files after the client has gone
HOW = "`python -m data engine` prints how to start it"


class Said(NamedTuple):
    """The server's answer to one text."""

    states_TLD: Tensor  # before the final norm, on the CPU
    next_token: int


class Engine(Endpoint):
    """A server that writes hidden states to ``folder``. Requests run in a thread of their own. ``close`` must be called at the end."""

    patience = 600.0  # seconds for an answer

    def __init__(self, url: str, folder: str, *, retries: int, key: str | None = None) -> None:
        """Raises UserError if the server cannot be reached, or ``folder`` is missing or not writable."""
        self.folder, self._mine, self._number = Path(folder), f"headstart-{uuid.uuid4().hex[:12]}", itertools.count()
        if not self.folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"served.folder={folder} is no folder to read and remove files in: give the one that the server writes to")
        self._closing = False
        super().__init__(url, None, key, sequences=ROWS, retries=retries, where="served.")
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="served")
        self._thread.start()

    def run(self, texts: Sequence[list[int]], layers: int, hidden: int, dtype: torch.dtype) -> Future[list[Said]]:
        """Ask for the states of all ``texts``, each [T, ``layers``, ``hidden``] of ``dtype``. The future raises UserError if the server
        refuses, fails too often, or returns states of another shape or dtype.
        """

        async def all_of_them() -> list[Said]:
            return await asyncio.gather(*(self.patiently(partial(self.ask, text, layers, hidden, dtype)) for text in texts))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self.loop)

    async def ask(self, text: list[int], layers: int, hidden: int, dtype: torch.dtype) -> Said:
        """Ask once for the states of one text. Raises Again for a temporary failure, and UserError for a permanent one."""
        if self._closing:
            raise UserError(f"{self.said} is asked no more")
        mine = f"{self._mine}-{next(self._number)}"
        body = {"model": self.name, "prompt": text, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        body["repetition_penalty"] = 1.0  # servers take settings that are not sent from the model's folder
        try:
            found = await self.once("POST", "/completions", body, {"X-Request-Id": mine})
        except Unfit as error:
            raise UserError(f"{self.said} does not take {len(text)} tokens: {error}") from None
        try:
            name, (token,) = found["kv_transfer_params"]["hidden_states_path"], found["choices"][0]["token_ids"]
            name = re.fullmatch(r"(?:.*/)?([\w.-]+\.safetensors)", name)[1]  # type: ignore[index]
            token = int(token)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{self.said} answers without hidden states and a token: {HOW}") from None
        if f"-{mine}-" not in f"-{name}":
            raise UserError(f"{self.said} names {name}, which is not the file of request {mine}: does X-Request-Id reach it?")
        path = self.folder / name
        try:
            await self._written(path)
            return Said(await asyncio.to_thread(self._checked, path, text, layers, hidden, dtype), token)
        finally:
            self._remove(path)

    async def _written(self, path: Path) -> None:
        """Wait until the file exists and its lock is free. Raises Again after ``LATE`` seconds."""
        begun, pause = time.monotonic(), FIRST
        while not (_unlocked(Path(f"{path}.lock")) and path.exists()):
            if time.monotonic() - begun > LATE:
                raise Again(f"{path.name} is not there and whole after {LATE:.0f} s: does the server write to served.folder={self.folder}?")
            await asyncio.sleep(pause)
            pause = min(2 * pause, SELDOM)

    def _checked(self, path: Path, text: list[int], layers: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """The states [T, L, D] in the file. Raises Again for a damaged file, non-finite states or another text, and UserError for a file
        that cannot be read, or states of another shape or dtype.
        """
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise Again(f"{path.name} is no file")
            with safe_open(path, framework="pt") as file:
                about = file.get_slice("hidden_states")
                T, *shape = about.get_shape()
                if (kind := STORED.get(about.get_dtype())) is not dtype:
                    raise UserError(f"{self.said} computes in {kind or about.get_dtype()}, target.dtype is {dtype}: start it with --dtype "
                                    f"{str(dtype).removeprefix('torch.')}")  # fmt: skip
                if shape != [layers, hidden]:
                    raise UserError(f"{self.said} gives states of {shape}, not of {[layers, hidden]} (layers, hidden size): {HOW}")
                states_TLD, ids_T = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
        except PermissionError:  # only the server's user can read its files
            raise UserError(f"served.folder: {path} cannot be read: the server and this process must run as the same user") from None
        except (OSError, SafetensorError, ValueError) as e:
            raise Again(f"{path.name} is truncated or damaged ({e})") from None
        if ids_T.tolist() != text or len(text) != T:
            raise Again(f"{path.name} holds the states of another text")
        if not (finite := states_TLD.isfinite()).all():
            raise Again(f"{path.name} holds numbers that are not finite, first in column {int((~finite).any(-1).any(0).int().argmax())}")
        return states_TLD

    def _remove(self, path: Path) -> None:
        for each in (path, Path(f"{path}.lock")):
            try:
                each.unlink(missing_ok=True)
            except OSError as e:
                raise UserError(f"served.folder={self.folder}: {each.name} cannot be removed ({e.strerror}), it would grow full") from None

    async def _under_way(self) -> None:
        self._closing = True
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=LEAVING)

    def close(self) -> None:
        """Stop sending requests, wait up to ``LEAVING`` seconds for pending answers, and remove this client's files from the folder."""
        if hasattr(self, "_thread") and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._under_way(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        super().close()
        for path in self.folder.glob(f"*{self._mine}-*"):
            with suppress(OSError):
                path.unlink()


def _unlocked(path: Path) -> bool:
    """Whether the lock file exists and no process holds the lock. Raises UserError on a file system without locks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as e:  # Lustre without flock and some NFS servers
        why = f"cannot be locked ({e.strerror}), and by a lock the server says that a file is whole"
        raise UserError(f"served.folder={path.parent} {why}: choose a folder on another file system") from e
    finally:
        os.close(fd)


def command(model: str, layers: Sequence[int], *, length: int, dtype: str, folder: str, port: int) -> list[str]:
    """The command that starts such a server, for texts of up to ``length`` tokens. ``layers``: the state after each of
    these numbers of layers is served. ``folder``: where the server writes its files.
    """
    asked = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    extraction = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": asked}
    transfer: dict[str, Any] = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": folder}
    words = ["vllm", "serve", model, "--port", str(port), "--dtype", dtype, "--max-model-len", str(length + 1)]
    words += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(extraction), "--kv-transfer-config", json.dumps(transfer)]
    return words
