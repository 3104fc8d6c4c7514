"""A real browser without a window: Debian's Chromium, controlled over its DevTools protocol. It needs no driver."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
MISSING = "no Chromium here (on Debian: apt-get install chromium)"
PHONE, DESK = (390, 844), (1280, 900)


class Tab:
    """A page that a test looks at. ``complaints``: errors and warnings of its console; ``asked``: addresses that it requested."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.number, self.session = socket, 0, ""
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.events: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result. Events that arrive meanwhile are recorded."""
        self.number += 1
        about = {"sessionId": self.session} if self.session else {}
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters, **about})
        while True:
            told = json.loads((await self.socket.receive(timeout=60)).data)
            if told.get("id") == self.number:
                assert "error" not in told, told
                return dict(told["result"])
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        kind, what = told.get("method", ""), told.get("params", {})
        self.events.append(kind)
        if kind == "Runtime.exceptionThrown" or (kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning")):
            self.complaints.append(json.dumps(what)[:500])
        if kind == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(what)[:500])
        if kind == "Network.requestWillBeSent":
            self.asked.append(what["request"]["url"])

    async def open(self, path: Path, size: tuple[int, int] = DESK, *, dark: bool = False, paper: bool = False) -> None:
        """Open a file and wait until it has loaded."""
        width, height = size
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        self.complaints.clear(), self.asked.clear(), self.events.clear()
        await self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._note(json.loads((await self.socket.receive(timeout=60)).data))

    async def run(self, script: str) -> Any:
        """Run a script and return its value; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36, "Enter": 13}[key]
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def screenshot(self, path: Path, *, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """Write a PNG of the page: of all of it, of what is visible (``whole=False``), or of the part in ``clip``."""
        if whole and clip is None:
            box = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 16000)}
        more = {} if clip is None else {"clip": {**clip, "scale": clip.get("scale", 1)}}
        made = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **more)
        path.write_bytes(base64.b64decode(made["data"]))


def browse(look: Callable[[Tab], Awaitable[Any]]) -> Any:
    """Start a browser, call ``look`` with a tab of it, and end the browser. Returns what ``look`` returns."""
    assert CHROMIUM is not None, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                   "--disable-background-networking", "--disable-component-update", "--disable-extensions",
                   "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        browser = subprocess.Popen([CHROMIUM, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
        try:
            assert browser.stderr is not None
            address = next((found[1] for line in browser.stderr if (found := re.search(r"DevTools listening on (ws://\S+)", line))), None)
            assert address is not None, "the browser did not start"
            return asyncio.run(_with_tab(address, look))
        finally:
            browser.kill()
            browser.wait()


async def _with_tab(address: str, look: Callable[[Tab], Awaitable[Any]]) -> Any:
    async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(socket)
        made = await tab.call("Target.createTarget", url="about:blank")
        tab.session = (await tab.call("Target.attachToTarget", targetId=made["targetId"], flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        return await look(tab)
