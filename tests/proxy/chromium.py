"""Drives a headless Chromium over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--remote-debugging-port=0", "--hide-scrollbars", "about:blank"),
)
PATIENCE_S = 60.0


def browser() -> str | None:
    """Where a Chromium is; None when there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Take what the browser says, for as long as it says something."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(said["params"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def look(self, width: int, height: int, dark: bool = False) -> None:
        """Be of this size, in these colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """What an expression comes to."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """What an expression comes to once that is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := await self.value(expression)):
            assert time.monotonic() < deadline, (expression, self.complaints)
            await asyncio.sleep(0.05)
        return found

    async def press(self, key: str) -> None:
        """A key, as a keyboard would."""
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        for kind in ("keyDown", "keyUp"):
            given = {"type": kind, "key": key} | code | (text if kind == "keyDown" else {})
            await self.call("Input.dispatchKeyEvent", **given)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path, whole: bool = False) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def tab(program: str) -> AsyncIterator[Page]:
    """A tab of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, f"--user-data-dir={folder}", *_OPTIONS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as client, _first_tab(client, port) as page:
                yield page
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


async def _port(file: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not (file.exists() and "\n" in (text := file.read_text())):
        assert time.monotonic() < deadline, "the browser does not begin"
        await asyncio.sleep(0.05)
    return int(text.split("\n")[0])


@contextlib.asynccontextmanager
async def _first_tab(client: aiohttp.ClientSession, port: int) -> AsyncIterator[Page]:
    async with client.get(f"http://127.0.0.1:{port}/json") as answer:
        targets: list[Mapping[str, Any]] = await answer.json()
    url = next(item["webSocketDebuggerUrl"] for item in targets if item["type"] == "page")
    async with client.ws_connect(url, max_msg_size=0) as socket:
        page = Page(socket)
        listening = asyncio.get_running_loop().create_task(page.listen())
        try:
            yield page
        finally:
            listening.cancel()
