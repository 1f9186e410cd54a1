"""The page in a real browser, with real traffic: a fact is evicted and recovered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_client import conversation_with_evicted_fact, fact_block, operate, recovered
from chromium import Page, browser, tab
from harness import RunningProxy, ask, proxy

from evoke_proxy.demo.processes import free_port

pytestmark = pytest.mark.skipif(
    browser() is None and "BROWSER_TESTS" not in os.environ,
    reason="there is no Chromium here; on Debian: apt-get install chromium",
)
TOKEN = "a-word-that-only-the-operator-knows"


def _block(number: int) -> str:
    return f"document.querySelectorAll('.map .block')[{number}]"


@contextlib.contextmanager
def _asking_for_a_token(folder: Path) -> Iterator[RunningProxy]:
    file = folder / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    with proxy(free_port(), security__admin_token_file=str(file)) as running:
        yield running


def test_the_page_shows_a_block_evicted_and_recovered(
    patched_proxy: RunningProxy, tmp_path: Path
) -> None:
    program = browser()
    assert program is not None
    with _asking_for_a_token(tmp_path) as client_access_check:
        asyncio.run(_watched(patched_proxy, client_access_check, program))


async def _watched(running: RunningProxy, client_access_check: RunningProxy, program: str) -> None:
    talk = await asyncio.to_thread(conversation_with_evicted_fact, running.port, "watched")
    async with tab(program) as page:
        await page.look(1280, 900)
        await page.open(f"http://127.0.0.1:{running.port}/evoke/")
        await _choose_by_keyboard(page)
        at = await _sees_what_the_api_says(page, running)
        await asyncio.to_thread(recovered, talk)
        await page.until(f"{_block(at)}.classList.contains('resident')")
        await page.until("document.querySelector('#events').innerText.includes('recovered')")
        await page.until("document.querySelector('#ttft').innerText.includes('blocks copied back')")
        await _changes_blocks_by_keyboard(page, running, at)
        await _fits(page)
        text = await page.value("document.body.innerText")
        assert "Meridian" not in text and "quick brown" not in text
        assert page.complaints == []
        await _asks_for_the_token(page, client_access_check)


async def _choose_by_keyboard(page: Page) -> None:
    await page.until("document.querySelectorAll('#sessions a').length")
    for _ in range(12):
        await page.press("Tab")
        if await page.value("document.activeElement.closest('#sessions') !== null"):
            break
    await page.press("Enter")
    await page.until("document.querySelectorAll('.map .block').length")


async def _sees_what_the_api_says(page: Page, running: RunningProxy) -> int:
    """The map is the API's; the number of the block that has the fact."""
    session = (await asyncio.to_thread(operate, running, "GET", "sessions"))["sessions"][0]["id"]
    shown = await asyncio.to_thread(operate, running, "GET", f"sessions/{session}")
    fact = fact_block(shown)
    at: int = shown["blocks"].index(fact)
    assert fact["state"] == "saved_ram"
    drawn = "[...document.querySelectorAll('.map .block')].map((b) => b.dataset.place)"
    await page.until(f"{drawn}.length === {len(shown['blocks'])}")
    assert await page.value(drawn) == [f"{b['p0']}-{b['p1']}" for b in shown["blocks"]]
    for state, tokens in shown["totals"].items():
        counted = f"""[...document.querySelectorAll('.map .{state}')].map((b) => b.dataset.place
            .split('-').map(Number)).reduce((sum, [a, b]) => sum + b - a, 0)"""
        assert await page.value(counted) == tokens
    label = await page.value(f"{_block(at)}.getAttribute('aria-label')")
    assert label.startswith("user, tokens ") and "saved in RAM" in label and "score 0." in label
    return at


async def _changes_blocks_by_keyboard(page: Page, running: RunningProxy, at: int) -> None:
    """Pinned, unpinned and dropped with a key each, and so it is."""
    await page.value(f"{_block(at - 1)}.focus()")
    await page.press("ArrowRight")
    assert await page.value(f"document.activeElement === {_block(at)}")
    said = await page.value("document.querySelector('#facts').innerText")
    assert "in the cache" in said and "score" in said
    for pinned in (True, False):
        await page.press("p")
        await page.until(f"{_block(at)}.classList.contains('pinned') === {json.dumps(pinned)}")
        assert await page.value(f"document.activeElement === {_block(at)}")
    await page.press("d")
    await page.until(f"{_block(at)}.classList.contains('omitted')")
    session = (await asyncio.to_thread(operate, running, "GET", "sessions"))["sessions"][0]["id"]
    shown = await asyncio.to_thread(operate, running, "GET", f"sessions/{session}")
    assert fact_block(shown)["state"] == "omitted"


async def _fits(page: Page) -> None:
    """Nothing is wider than a phone; dark is dark."""
    colours = []
    for dark in (False, True):
        await page.look(360, 740, dark)
        assert await page.value("document.documentElement.scrollWidth") == 360
        colours.append(await page.value("getComputedStyle(document.body).backgroundColor"))
    light, dark_one = (sum(map(int, c[4:-1].split(","))) for c in colours)
    assert light > 600 > 150 > dark_one


async def _asks_for_the_token(page: Page, client_access_check: RunningProxy) -> None:
    await page.open(f"http://127.0.0.1:{client_access_check.port}/evoke/")
    await page.until("document.querySelector('#token')?.open")
    await page.write(TOKEN)
    await page.press("Enter")
    await page.until("document.querySelector('#health').innerText === 'llama-server is away'")


def test_the_page_loads_only_its_own_files(patched_proxy: RunningProxy) -> None:
    port = patched_proxy.port
    page = ask(port, "GET", "/evoke/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert ask(port, "GET", "/evoke").headers["location"] == "/evoke/"
    for name in ("page.js", "api.js", "map.js", "charts.js", "dom.js", "style.css", "icon.svg"):
        part = ask(port, "GET", f"/evoke/page/{name}")
        assert part.status == 200 and part.headers["x-content-type-options"] == "nosniff"
        assert b"://" not in part.body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in ("", "other.js", "..%2fguard.py", "index.html/"):
        assert ask(port, "GET", f"/evoke/page/{name}").status == 404
