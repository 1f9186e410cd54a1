"""The files of the admin page: what is served, with which headers."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from evoke_proxy.config import Config
from evoke_proxy.core.request.look_ahead import KINDS
from evoke_proxy.errors import RequestError
from evoke_proxy.web import page_files
from evoke_proxy.web.operator_access import OPERATOR_ACCESS, OperatorAccess

FOLDER = Path(page_files.__file__).with_name("page")


def get(path: str) -> tuple[int, dict[str, str], bytes]:
    """The answer of a server that has only the routes of the page."""

    @web.middleware
    async def errors(request: web.Request, handler: object) -> web.StreamResponse:
        try:
            response = await handler(request)  # type: ignore[operator]
        except RequestError as error:
            return web.Response(status=error.status)
        assert isinstance(response, web.StreamResponse)
        return response

    async def answer() -> tuple[int, dict[str, str], bytes]:
        app = web.Application(middlewares=[errors])
        app[OPERATOR_ACCESS] = OperatorAccess(Config())
        app.router.add_routes(page_files.routes())
        async with TestClient(TestServer(app)) as client:
            response = await client.get(path, allow_redirects=False)
            return response.status, dict(response.headers), await response.read()

    return asyncio.run(answer())


def test_the_page_and_each_of_its_files_are_served() -> None:
    status, _, page = get("/evoke/")
    assert (status, page) == (200, (FOLDER / "index.html").read_bytes())
    names = set(re.findall(r'(?:src|href)="page/([^"]+)"', page.decode()))
    assert names, "the page refers to no file"
    for name in names:
        status, headers, body = get(f"/evoke/page/{name}")
        assert (status, body) == (200, (FOLDER / name).read_bytes())
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_no_browser_loads_or_frames_anything_of_another_site() -> None:
    _, headers, page = get("/evoke/")
    policy = headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert not re.search(rb'(?:src|href)="(?:https?:)?//', page)


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fserve.py", "%2e%2e%2Fapp.py", "page"])
def test_no_other_file_is_served(name: str) -> None:
    assert get(f"/evoke/page/{name}")[0] == 404


def test_the_page_has_words_for_each_kind_of_snapshot() -> None:
    words = (FOLDER / "words.js").read_text("utf-8").split("SNAPSHOT_KINDS = {")[1].split("}")[0]
    assert re.findall(r"^  (\w+): \"", words, re.MULTILINE) == list(KINDS)


def test_the_path_without_a_slash_is_redirected() -> None:
    status, headers, _ = get("/evoke")
    assert (status, headers["Location"]) == (308, "/evoke/")
