"""The page without sessions: signing in, no llama-server, no proxy, a standard llama-server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from axe import TWO_VIEWS, axe_script, violations_in
from chromium import Page, browser, tab
from harness import llama_server, proxy, server_binary, unused_port

from evoke_proxy.demo.processes import free_port

pytestmark = pytest.mark.skipif(
    browser() is None and "BROWSER_TESTS" not in os.environ,
    reason="needs Chromium; on Debian: apt-get install chromium",
)
TOKEN = "a-word-that-only-the-operator-knows"
Check = Callable[[Page], Awaitable[None]]


def _open(port: int, check: Check) -> None:
    """Open the page of a proxy in a new browser, and run a check on it."""

    async def run() -> None:
        program = browser()
        assert program is not None
        async with tab(program) as page:
            await page.set_viewport(1280, 844)
            await page.open(f"http://127.0.0.1:{port}/evoke/")
            await check(page)

    asyncio.run(run())


def _shows(selector: str, text: str) -> str:
    """Return an expression for whether an element is visible and contains this text."""
    node = f"document.querySelector('{selector}')"
    return f"{node}?.checkVisibility() && {node}.innerText.includes('{text}')"


def test_an_operator_signs_in_or_closes_the_dialog(tmp_path: Path) -> None:
    script, file = axe_script(), tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)

    async def check(page: Page) -> None:
        await page.wait_for("document.querySelector('#token')?.open")
        assert await violations_in(TWO_VIEWS, page, script) == []

        # Escape closes the dialog, which opens again only by its button.
        await page.press_key("Escape")
        await page.wait_for(_shows("#connection", "Without the token"))
        assert await violations_in(TWO_VIEWS, page, script) == []
        await asyncio.sleep(1.2)
        assert not await page.evaluate("document.querySelector('#token').open")

        await page.click("#connection button")
        await page.wait_for("document.querySelector('#token').open")
        for given, outcome in (
            ("wrong", _shows("#token-error", "refused this token")),
            (TOKEN, "!document.querySelector('#token').open"),
        ):
            await page.type_text(given)
            await page.press_key("Enter")
            await page.wait_for(outcome)
        await page.wait_for(_shows("#health", "llama-server is away"))
        await page.wait_for(_shows("#problems", "Start it"))
        await page.wait_for(_shows("#sessions", "None yet"))
        assert not await page.evaluate("document.querySelector('#connection').checkVisibility()")
        assert await violations_in(TWO_VIEWS, page, script) == []

    with proxy(unused_port(), security__admin_token_file=str(file)) as running:
        _open(running.port, check)


def test_a_link_with_an_invalid_escape_opens_the_page_without_a_session() -> None:
    async def check(page: Page) -> None:
        await page.wait_for(_shows("#sessions", "None yet"))
        await page.evaluate("location.hash = '#/%'")
        await asyncio.sleep(0.3)
        await page.evaluate("location.reload()")
        await page.wait_for("location.hash === '#/%' && Number(document.body?.dataset.drawn) > 0")
        await page.wait_for(_shows("#sessions", "None yet"))
        assert not await page.evaluate("document.body.innerText.includes('malformed')")

    with proxy(unused_port()) as running:
        _open(running.port, check)


def test_the_page_reports_that_its_proxy_has_stopped() -> None:
    script = axe_script()

    async def check(page: Page) -> None:
        await page.wait_for("Number(document.body?.dataset.drawn) > 0")
        await asyncio.to_thread(running.__exit__, None, None, None)
        await page.wait_for(_shows("#connection", "evoke-proxy does not answer at http"))
        await page.wait_for(_shows("#connection", "Check that it runs"))
        await page.wait_for(_shows("#health", "disconnected"))
        assert await violations_in(TWO_VIEWS, page, script) == []

    running = proxy(unused_port())
    _open(running.__enter__().port, check)


def test_the_page_notices_without_a_request_that_llama_server_has_started_and_ended() -> None:
    async def check(page: Page) -> None:
        await page.wait_for(_shows("#health", "llama-server is away"))
        with ExitStack() as stack:
            server = llama_server(server_binary(patched=True), *options, port=port)
            await asyncio.to_thread(stack.enter_context, server)
            await page.evaluate("location.reload()")
            await page.wait_for(_shows("#health", "evicting and recovering"))
            await page.wait_for(_shows("#totals", "Saved in RAM"))
        await page.evaluate("location.reload()")
        await page.wait_for(_shows("#health", "llama-server is away"))
        await page.wait_for(_shows("#problems", "Start it"))

    port = free_port()
    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--ctx-logical", "4096")
    with proxy(port) as running:
        _open(running.port, check)


def test_the_page_reports_a_directory_of_snapshots_that_cannot_be_used(
    stock_port: int, tmp_path: Path
) -> None:
    script = axe_script()

    async def check(page: Page) -> None:
        await page.wait_for(_shows("#health", "snapshots are off"))
        await page.wait_for(_shows("#server", "neither saved nor restored"))
        await page.wait_for(_shows("#problems", "To fix it: start it with --slot-save-path"))
        assert await violations_in(TWO_VIEWS, page, script) == []

    with proxy(stock_port, snapshots__directory=str(tmp_path)) as running:
        _open(running.port, check)


def test_the_page_reports_no_problem_for_a_stock_server_with_snapshots(tmp_path: Path) -> None:
    async def check(page: Page) -> None:
        await page.wait_for(_shows("#health", "snapshots"))
        await page.wait_for(_shows("#server", "saved to disk and restored"))
        await page.wait_for(_shows("#events", "kept as snapshots on disk"))
        text = await page.evaluate("document.body.innerText")
        assert "not patched" not in text and "build-server" not in text
        assert not await page.evaluate("document.querySelector('#problems').checkVisibility()")

    options = ("-np", "1", "--slot-save-path", str(tmp_path))
    with llama_server(server_binary(patched=False), *options) as port:
        with proxy(port, snapshots__directory=str(tmp_path)) as running:
            _open(running.port, check)


def test_the_page_reports_a_server_that_refuses_the_calls_of_the_proxy() -> None:
    script = axe_script()

    async def check(page: Page) -> None:
        await page.wait_for(_shows("#problems", "answers 401 to the calls that the proxy makes"))
        await page.wait_for(_shows("#problems", "To fix it: set upstream.api_key"))
        await page.wait_for(_shows("#health", "passing through"))
        assert "does not answer" not in await page.evaluate("document.body.innerText")
        assert await violations_in(TWO_VIEWS, page, script) == []

    with llama_server(server_binary(patched=False), "-np", "1", "--api-key", "k") as port:
        with proxy(port) as running:
            _open(running.port, check)


def test_the_page_reports_a_budget_that_is_not_in_force_with_its_fix(stock_port: int) -> None:
    script = axe_script()

    async def check(page: Page) -> None:
        await page.wait_for(_shows("#problems", "The budget of 4096 tokens is not in force"))
        await page.wait_for(_shows("#health", "passing through"))
        await page.wait_for(_shows("#problems", "To fix it: build the patched llama-server"))
        await page.wait_for(_shows("#sessions", "None: requests pass through"))
        assert await violations_in(TWO_VIEWS, page, script) == []

    with proxy(stock_port, policy__budget=4096) as running:
        _open(running.port, check)


@pytest.mark.parametrize(
    ("state", "reasons", "kind", "text"),
    [
        ({"budget": None}, ["exceeds_cells"], "bad", "not kept within the configured budget"),
        ({"budget": 8192}, ["exceeds_cells"], "plain", "at most 8,192 tokens"),
        ({"budget": 3000}, ["api_key"], "plain", "at most 3,000 tokens"),
        ({"budget": None}, ["api_key"], "plain", "what the proxy does"),
        ({"budget": 9000}, ["exceeds_context"], "plain", "at most 9,000 tokens"),
        ({"budget": 3000, "degraded": False}, [], "good", "at most 3,000 tokens"),
    ],
)
def test_the_head_says_that_a_budget_is_not_in_force_only_where_none_is(
    state: dict[str, object], reasons: list[str], kind: str, text: str
) -> None:
    status = {"reachable": True, "mode": "budgeted", "degraded": True} | state
    status["server"] = "what the proxy does"
    given = f"{json.dumps(status)}, problems = {json.dumps([{'reason': it} for it in reasons])}"

    async def check(page: Page) -> None:
        words = await page.evaluate(
            "import('/evoke/page/words.js').then((words) => { const status = "
            f"{given}; return [words.health(status, true, problems)[0],"
            " words.modeText(status, problems)]; })"
        )
        assert words[0] == kind and text in words[1]

    with proxy(unused_port()) as running:
        _open(running.port, check)


def test_the_page_names_the_cells_that_keep_sessions_below_the_budget() -> None:
    script = axe_script()
    is_good = "document.querySelector('#health').classList.contains('good')"

    async def check(page: Page) -> None:
        await page.wait_for(_shows("#problems", "The budget of 5000 tokens"))
        await page.wait_for(_shows("#health", "evicting and recovering"))
        await page.wait_for(_shows("#server", "at most 1,024 tokens"))
        assert not await page.evaluate(is_good)
        assert await violations_in(TWO_VIEWS, page, script) == []
        await page.evaluate("document.querySelector('#budget').value = 'auto'")
        await page.click("#default-budget button")
        await page.wait_for(_shows("#health", "evicting and recovering"))
        await page.wait_for(_shows("#server", "at most 768 tokens"))
        await page.wait_for("!document.querySelector('#problems').checkVisibility()")
        assert await page.evaluate(is_good)

    options = ("-np", "1", "-c", "1024", "--evoke-ram", "16", "--ctx-logical", "4096")
    with llama_server(server_binary(patched=True), *options) as port:
        with proxy(port, policy__budget=5000) as running:
            _open(running.port, check)
