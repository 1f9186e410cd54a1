"""Drives a headless Chromium through the Chrome DevTools Protocol."""

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
TIMEOUT_S = 60.0
# What a page shows when a wait fails: its focus, its open dialogs and its texts.
_STATE = """[document.activeElement.outerHTML.slice(0, 300),
    document.querySelectorAll("dialog[open]").length, document.body.innerText.slice(0, 3000)]"""


def browser() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """A browser tab.

    Attributes:
        errors: Exceptions and error log entries of the page so far, as JSON.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Read replies and events of the browser until the connection closes."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._replies.pop(data["id"]).set_result(data)
            elif data["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(data["params"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the protocol; returns its result."""
        number = next(self._ids)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            reply = await future
        assert "error" not in reply, reply
        return reply["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def set_viewport(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the viewport and the preferred colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true; returns its value."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := await self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise AssertionError((expression, self.errors, await self.evaluate(_STATE)))
            await asyncio.sleep(0.05)
        return value

    async def press_key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Delete": 46}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key} | code | (text if kind == "keyDown" else {})
            await self.call("Input.dispatchKeyEvent", **event)

    async def point(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        await self._mouse(selector, "mouseMoved")

    async def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self._mouse(selector, kind)

    async def _mouse(self, selector: str, kind: str) -> None:
        box = await self.evaluate(
            f"""(() => {{ const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{ block: "nearest" }}); const box = node.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2]; }})()"""
        )
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        event = {"type": kind, "x": box[0], "y": box[1], **button}
        await self.call("Input.dispatchMouseEvent", **event)

    async def type_text(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path, whole_page: bool = False) -> None:
        image = await self.call("Page.captureScreenshot", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(image["data"]))


@contextlib.asynccontextmanager
async def tab(program: str) -> AsyncIterator[Page]:
    """Start a browser and open one tab; the browser ends with the block."""
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
            process.wait(TIMEOUT_S)


async def _port(file: Path) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while not (file.exists() and "\n" in (text := file.read_text())):
        assert time.monotonic() < deadline, "the browser does not start"
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
