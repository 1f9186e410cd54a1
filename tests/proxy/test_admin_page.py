"""The admin page in a real browser, while a fact is evicted and recovered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_client import admin_call, ask_for_fact, conversation_with_evicted_fact, fact_block
from chromium import Page, browser, tab
from harness import RunningProxy, ask, proxy

from evoke_proxy.demo.processes import free_port

pytestmark = pytest.mark.skipif(
    browser() is None and "BROWSER_TESTS" not in os.environ,
    reason="needs Chromium; on Debian: apt-get install chromium",
)
TOKEN = "a-word-that-only-the-operator-knows"


def _block(number: int) -> str:
    """Return the JavaScript expression of a block of the map."""
    return f"document.querySelectorAll('.map .block')[{number}]"


@contextlib.contextmanager
def _proxy_with_token(folder: Path) -> Iterator[RunningProxy]:
    """Start a proxy whose admin page needs a token; its llama-server does not run."""
    file = folder / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    with proxy(free_port(), security__admin_token_file=str(file)) as running:
        yield running


def test_the_page_displays_a_block_evicted_and_recovered(
    patched_proxy: RunningProxy, tmp_path: Path
) -> None:
    program = browser()
    assert program is not None
    with _proxy_with_token(tmp_path) as token_proxy:
        asyncio.run(_check_page(patched_proxy, token_proxy, program))


async def _check_page(running: RunningProxy, token_proxy: RunningProxy, program: str) -> None:
    client = await asyncio.to_thread(conversation_with_evicted_fact, running.port, "watched")
    async with tab(program) as page:
        await page.set_viewport(1280, 900)
        await page.open(f"http://127.0.0.1:{running.port}/evoke/")
        await _choose_by_keyboard(page)
        at = await _check_map(page, running)
        await asyncio.to_thread(ask_for_fact, client)
        await page.wait_for(f"{_block(at)}.classList.contains('resident')")
        await page.wait_for("document.querySelector('#events').innerText.includes('recovered')")
        await page.wait_for(
            "document.querySelector('#ttft').innerText.includes('blocks copied back')"
        )
        await _change_block_by_keyboard(page, running, at)
        await _check_phone_and_dark_mode(page)
        text = await page.evaluate("document.body.innerText")
        assert "Meridian" not in text and "quick brown" not in text
        assert page.errors == []
        await _enter_token(page, token_proxy)


async def _choose_by_keyboard(page: Page) -> None:
    await page.wait_for("document.querySelectorAll('#sessions a').length")
    for _ in range(12):
        await page.press_key("Tab")
        if await page.evaluate("document.activeElement.closest('#sessions') !== null"):
            break
    await page.press_key("Enter")
    await page.wait_for("document.querySelectorAll('.map .block').length")


async def _check_map(page: Page, running: RunningProxy) -> int:
    """Check that the map has the blocks of the API; returns the number of the fact's block."""
    session = (await asyncio.to_thread(admin_call, running, "GET", "sessions"))["sessions"][0]["id"]
    session_details = await asyncio.to_thread(admin_call, running, "GET", f"sessions/{session}")
    fact = fact_block(session_details)
    at: int = session_details["blocks"].index(fact)
    assert fact["state"] == "saved_ram"
    drawn = "[...document.querySelectorAll('.map .block')].map((b) => b.dataset.place)"
    await page.wait_for(f"{drawn}.length === {len(session_details['blocks'])}")
    assert await page.evaluate(drawn) == [f"{b['p0']}-{b['p1']}" for b in session_details["blocks"]]
    for state, tokens in session_details["totals"].items():
        counted = f"""[...document.querySelectorAll('.map .{state}')].map((b) => b.dataset.place
            .split('-').map(Number)).reduce((sum, [a, b]) => sum + b - a, 0)"""
        assert await page.evaluate(counted) == tokens
    label = await page.evaluate(f"{_block(at)}.getAttribute('aria-label')")
    assert label.startswith("user, tokens ") and "saved in RAM" in label and "score 0." in label
    return at


async def _change_block_by_keyboard(page: Page, running: RunningProxy, at: int) -> None:
    """Pin, unpin and drop a block with one key each."""
    await page.evaluate(f"{_block(at - 1)}.focus()")
    await page.press_key("ArrowRight")
    assert await page.evaluate(f"document.activeElement === {_block(at)}")
    text = await page.evaluate("document.querySelector('#facts').innerText")
    assert "in the cache" in text and "score" in text
    for pinned in (True, False):
        await page.press_key("p")
        await page.wait_for(f"{_block(at)}.classList.contains('pinned') === {json.dumps(pinned)}")
        assert await page.evaluate(f"document.activeElement === {_block(at)}")
    await page.press_key("d")
    await page.wait_for(f"{_block(at)}.classList.contains('omitted')")
    session = (await asyncio.to_thread(admin_call, running, "GET", "sessions"))["sessions"][0]["id"]
    session_details = await asyncio.to_thread(admin_call, running, "GET", f"sessions/{session}")
    assert fact_block(session_details)["state"] == "omitted"


async def _check_phone_and_dark_mode(page: Page) -> None:
    """Check that nothing is wider than a phone, and that the dark scheme is dark."""
    colours = []
    for dark in (False, True):
        await page.set_viewport(360, 740, dark)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_one = (sum(map(int, c[4:-1].split(","))) for c in colours)
    assert light > 600 > 150 > dark_one


async def _enter_token(page: Page, token_proxy: RunningProxy) -> None:
    await page.open(f"http://127.0.0.1:{token_proxy.port}/evoke/")
    await page.wait_for("document.querySelector('#token')?.open")
    await page.type_text(TOKEN)
    await page.press_key("Enter")
    await page.wait_for("document.querySelector('#health').innerText === 'llama-server is away'")


def test_the_page_loads_only_its_own_files(patched_proxy: RunningProxy) -> None:
    port = patched_proxy.port
    page = ask(port, "GET", "/evoke/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert ask(port, "GET", "/evoke").headers["location"] == "/evoke/"
    for name in ("page.js", "api.js", "map.js", "charts.js", "dom.js", "style.css", "icon.svg"):
        file = ask(port, "GET", f"/evoke/page/{name}")
        assert file.status == 200 and file.headers["x-content-type-options"] == "nosniff"
        assert b"://" not in file.body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in ("", "other.js", "..%2fguard.py", "index.html/"):
        assert ask(port, "GET", f"/evoke/page/{name}").status == 404
