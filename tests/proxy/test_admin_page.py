"""The admin page in a real browser, while a fact is evicted and recovered."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from admin_client import admin_call, ask_for_fact, conversation_with_evicted_fact, fact_block
from axe import EVERY_VIEW, axe_script, violations, violations_in
from chromium import Page, browser, tab
from conversation import ChatClient
from harness import RunningProxy, ask

pytestmark = pytest.mark.skipif(
    browser() is None and "BROWSER_TESTS" not in os.environ,
    reason="needs Chromium; on Debian: apt-get install chromium",
)
# The contrast of a colour against that of the page, from 1 to 21 (WCAG 2).
_CONTRAST = """((selector, property) => {
    const luminance = (colour) => colour.match(/\\d+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const colour = getComputedStyle(document.querySelector(selector))[property];
    const pair = [colour, getComputedStyle(document.body).backgroundColor].map(luminance);
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
})"""


def _block(number: int) -> str:
    """Return the JavaScript expression of a block of the map."""
    return f"document.querySelectorAll('.map .block')[{number}]"


def test_the_page_displays_a_block_evicted_and_recovered(patched_proxy: RunningProxy) -> None:
    program, script = browser(), axe_script()
    assert program is not None
    asyncio.run(_check_page(patched_proxy, program, script))


async def _check_page(running: RunningProxy, program: str, script: str) -> None:
    client = await asyncio.to_thread(conversation_with_evicted_fact, running.port, "watched")
    async with tab(program) as page:
        await page.set_viewport(1280, 900)
        await page.open(f"http://127.0.0.1:{running.port}/evoke/")
        # The session that was used last is shown without a choice.
        await page.wait_for("document.querySelectorAll('.map .block').length")
        await _check_focus_order(page)
        await _choose_by_keyboard(page)
        at = await _check_map(page, running)
        await asyncio.to_thread(ask_for_fact, client)
        await page.wait_for(f"{_block(at)}.classList.contains('resident')")
        await page.wait_for("document.querySelector('#events').innerText.includes('recovered')")
        await page.wait_for(
            "document.querySelector('#ttft').innerText.includes('blocks copied back')"
        )
        await _check_totals(page, running)
        await _change_block_by_keyboard(page, running, at)
        await _set_budgets(page, running)
        await _check_readability(page, script)
        await _check_list_order(page, running)
        text = await page.evaluate("document.body.innerText")
        assert "Meridian" not in text and "quick brown" not in text
        assert [one for one in page.errors if "status of 400" not in one] == []


async def _check_focus_order(page: Page) -> None:
    """Tab reaches each control, with an outline, and begins again after the last one.

    Each event of the log has a link to its session; how many have come by now is not fixed.
    """
    focused = """(() => { const node = document.activeElement, seen = window.seen ??= new Set();
        if (node === document.body || seen.has(node)) return null;
        seen.add(node);
        const name = node.id || node.className || node.textContent;
        return [node.closest("#events ol") ? "event" : name, getComputedStyle(node).outlineStyle];
        })()"""
    stops: list[Any] = []
    await page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        await page.press_key("Tab")
        stop = await page.evaluate(focused)
        if stop is None:
            break
        stops.append(stop)
    names = [name for name, _ in stops]
    assert len(stops) < 40, "the focus is trapped"
    assert all(outline == "solid" for _, outline in stops), stops
    wanted = ("skip", "budget", "keep", "delete", "own", "events")
    assert set(wanted) <= set(names), names
    controls = [name for name in names if name != "event"]
    assert len(controls) == len(set(controls)) + names.count("Set") - 1, names
    (blocks,) = [name for name in names if name.startswith("block ")]
    assert names.index("own") < names.index(blocks) < names.index("events")


async def _choose_by_keyboard(page: Page) -> None:
    await page.wait_for("document.querySelectorAll('#sessions a').length")
    await page.evaluate("document.querySelector('#session').focus()")
    for _ in range(30):
        await page.press_key("Tab")
        if await page.evaluate("document.activeElement.closest('#sessions') !== null"):
            break
    await page.press_key("Enter")
    await page.wait_for("document.querySelectorAll('.map .block').length")
    assert await page.evaluate("document.querySelector('#sessions [aria-current]') !== null")


async def _check_map(page: Page, running: RunningProxy) -> int:
    """Check that the map has the blocks of the API; returns the number of the fact's block."""
    session = (await asyncio.to_thread(admin_call, running, "GET", "sessions"))["sessions"][0]["id"]
    shown = await asyncio.to_thread(admin_call, running, "GET", f"sessions/{session}")
    fact = fact_block(shown)
    at: int = shown["blocks"].index(fact)
    assert fact["state"] == "saved_ram"
    drawn = "[...document.querySelectorAll('.map .block')].map((b) => b.dataset.place)"
    await page.wait_for(f"{drawn}.length === {len(shown['blocks'])}")
    assert await page.evaluate(drawn) == [f"{b['p0']}-{b['p1']}" for b in shown["blocks"]]
    for state, tokens in shown["totals"].items():
        counted = f"""[...document.querySelectorAll('.map .{state}')].map((b) => b.dataset.place
            .split('-').map(Number)).reduce((sum, [a, b]) => sum + b - a, 0)"""
        assert await page.evaluate(counted) == tokens
    label = await page.evaluate(f"{_block(at)}.getAttribute('aria-label')")
    assert label.startswith("user, tokens ") and "saved in RAM" in label
    assert label.endswith(f"score {fact['score']:.2f}")
    return at


async def _change_block_by_keyboard(page: Page, running: RunningProxy, at: int) -> None:
    """Pin, unpin and drop a block by keyboard; dropping it needs a confirmation."""
    await page.evaluate(f"{_block(at - 1)}.focus()")
    await page.press_key("ArrowRight")
    assert await page.evaluate(f"document.activeElement === {_block(at)}")
    said = await page.evaluate("document.querySelector('#facts').innerText")
    assert "in the cache" in said and "score" in said
    for pinned in (True, False):
        await page.press_key("p")
        await page.wait_for(f"{_block(at)}.classList.contains('pinned') === {json.dumps(pinned)}")
        assert await page.evaluate(f"document.activeElement === {_block(at)}")
    for key in ("d", "Delete"):  # both open a confirmation, which Escape cancels
        await page.press_key(key)
        await page.wait_for("document.querySelector('#sure').open")
        assert "Drop tokens" in await page.evaluate("document.querySelector('#question').innerText")
        await page.press_key("Escape")
        await page.wait_for("!document.querySelector('#sure').open")
        assert await page.evaluate(f"document.activeElement === {_block(at)}")
    assert fact_block(await _shown(running))["state"] == "resident"
    await page.press_key("Delete")
    await page.wait_for("document.activeElement.innerText === 'Cancel'")
    await page.press_key("Tab")
    await page.press_key("Enter")
    await page.wait_for(f"{_block(at)}.classList.contains('omitted')")
    assert fact_block(await _shown(running))["state"] == "omitted"


async def _shown(running: RunningProxy) -> dict[str, Any]:
    """Return the API's details of the conversation with the fact."""
    rows = (await asyncio.to_thread(admin_call, running, "GET", "sessions"))["sessions"]
    id = next(row["id"] for row in rows if row["turns"] > 2)
    shown: dict[str, Any] = await asyncio.to_thread(admin_call, running, "GET", f"sessions/{id}")
    return shown


async def _check_totals(page: Page, running: RunningProxy) -> None:
    """The totals are those of llama-server and of the metrics, also of copies made afterwards."""
    await asyncio.to_thread(running.wait_for_background)
    facts = await asyncio.to_thread(admin_call, running, "GET", "overview")
    assert (
        facts["ram"]["budget"] == 64 * 2**20 and 0 < facts["ram"]["used"] < facts["ram"]["budget"]
    )
    for kind, count in facts["tokens"].items():
        assert count == running.metric("evoke_tokens_total", kind=kind)
    assert facts["tokens"]["omitted"] > 0 and facts["tokens"]["recovered"] > 0
    assert facts["blocks_recovered"] > 0 and facts["resident"] <= facts["cells"] == 8192
    gauges = """[...document.querySelectorAll('#totals [role=meter]')].map((meter) =>
        [meter.ariaLabel, Number(meter.ariaValueNow), Number(meter.ariaValueMax)])"""
    # The page asks again at intervals; both of its numbers and ours may be of different moments.
    for _ in range(60):
        shown = await page.evaluate(f"JSON.stringify({gauges})")
        if all(f",{number}," in shown for number in (facts["ram"]["used"], facts["resident"])):
            break
        await asyncio.sleep(0.25)
        facts = await asyncio.to_thread(admin_call, running, "GET", "overview")
    said = {name: (now, most) for name, now, most in await page.evaluate(gauges)}
    assert said["Saved in RAM"] == (facts["ram"]["used"], facts["ram"]["budget"])
    assert said["Tokens in the KV cache"] == (facts["resident"], 8192)
    text = await page.evaluate("document.querySelector('#totals').innerText")
    assert f"{facts['blocks_evicted']:,} evicted" in text and "hidden from the model" in text
    # Text that no store has is "not stored"; text that an answer was made without is "hidden".
    assert "not stored" in await page.evaluate("document.querySelector('#where').innerText")
    assert "hidden" in await page.evaluate("document.querySelector('#books').textContent")
    assert "omitted" not in await page.evaluate("document.body.textContent")


async def _set_budgets(page: Page, running: RunningProxy) -> None:
    """Check that the budget fields accept what the API accepts, and display errors beside them."""
    for typed, field, expected in (
        ("auto", "budget", "auto"),
        ("off", "budget", None),
        ("4,096", "budget", 4096),
        ("many", "budget", 4096),
        ("7", "budget", 4096),
    ):
        await page.evaluate(f"document.querySelector('#{field}').select()")
        await page.type_text(typed)
        await page.press_key("Enter")
        error = f"document.querySelector('#{field}-error').innerText"
        if typed in ("many", "7"):
            wanted = "Type a number of tokens" if typed == "many" else "budget"
            await page.wait_for(f"{error}.includes({json.dumps(wanted)})")
        else:
            await page.wait_for(
                f"document.querySelector('#{field}').dataset.current === "
                f"{json.dumps(typed.replace(',', ''))}"
            )
            assert await page.evaluate(error) == ""
        facts = await asyncio.to_thread(admin_call, running, "GET", "overview")
        assert facts["budget"] == expected
    await page.press_key("Escape")
    assert await page.evaluate("document.querySelector('#budget').value") == "4096"
    for typed, own, limit in (("2048", True, 2048), ("off", True, None), ("default", False, 4096)):
        await page.evaluate("document.querySelector('#own').select()")
        await page.type_text(typed)
        await page.press_key("Enter")
        await page.wait_for(
            f"document.querySelector('#own').dataset.current === {json.dumps(typed)}"
        )
        row = await _shown(running)
        assert (row["own_budget"], row["limit"]) == (own, limit)


async def _check_readability(page: Page, script: str) -> None:
    """Check accessibility by axe-core, contrast, sizes of blocks, and the dark colour scheme."""
    assert await violations_in(EVERY_VIEW, page, script) == []
    await page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img>')")
    assert [one for one in await violations(page, script) if "image-alt" in one]
    parts = [
        (f"#books .turn-{kind}", "fill") for kind in ("resident", "recovered", "hidden", "decoded")
    ]
    parts += [(".map .block.omitted", "borderTopColor"), ("#where .bar", "borderTopColor")]
    parts += [
        (".map .block.saved_ram", "borderTopColor"),
        ("#where .bar .saved_ram", "backgroundColor"),
    ]
    colours = []
    for width, least, dark in ((1280, 24, False), (390, 32, True)):
        await page.set_viewport(width, 844, dark)
        for selector, style in parts:
            contrast = await page.evaluate(f"{_CONTRAST}({json.dumps(selector)}, '{style}')")
            assert contrast >= 3, (selector, dark, contrast)
        sizes = """[...document.querySelectorAll('.map .block')].map((block) =>
            block.getBoundingClientRect()).flatMap((box) => [box.width, box.height])"""
        await page.wait_for(f"Math.min(...{sizes}) >= {least}")
        links = """[...document.querySelectorAll('#events a')].map((link) =>
            link.getBoundingClientRect()).flatMap((box) => [box.width, box.height])"""
        # Links in a line of text need no size of their own, except for fingers.
        assert width > 400 or await page.evaluate(f"Math.min(...{links}) >= 24")
        colours.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark_one = (sum(map(int, c[4:-1].split(","))) for c in colours)
    assert light > 600 > 150 > dark_one
    await page.set_viewport(1280, 900)


async def _check_list_order(page: Page, running: RunningProxy) -> None:
    """Check that the list keeps its order while the mouse is on it."""
    order = "[...document.querySelectorAll('#sessions li')].map((row) => row.dataset.key)"
    clients = [ChatClient(running.port, name) for name in ("second", "third")]
    for client in clients:
        await asyncio.to_thread(client.say, "Good morning.")
    await page.wait_for(f"{order}.length === 3")
    await page.evaluate("document.activeElement.blur()")
    latest, middle, oldest = await page.evaluate(order)
    await page.point("#sessions li:nth-child(2) a")
    drawn = await page.evaluate("Number(document.body.dataset.drawn)")
    await asyncio.to_thread(clients[0].say, "And again.")  # the one in the middle
    await page.wait_for(f"Number(document.body.dataset.drawn) > {drawn + 1}")
    assert await page.evaluate(order) == [latest, middle, oldest]
    await page.click("#sessions li:nth-child(2) a")
    await page.wait_for(
        f"document.querySelector('#about').innerText.includes('{middle}') || "
        f"location.hash.endsWith('{middle}')"
    )
    assert await page.evaluate("location.hash") == f"#/{middle}"
    await page.point("h1")
    await page.wait_for(f"{order}[0] === '{middle}'")


def test_the_page_loads_only_its_own_files(patched_proxy: RunningProxy) -> None:
    port = patched_proxy.port
    page = ask(port, "GET", "/evoke/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert ask(port, "GET", "/evoke").headers["location"] == "/evoke/"
    scripts = ("page", "api", "budget", "charts", "dom", "map", "overview", "sessions", "words")
    for name in (*(f"{script}.js" for script in scripts), "style.css", "icon.svg"):
        part = ask(port, "GET", f"/evoke/page/{name}")
        assert part.status == 200 and part.headers["x-content-type-options"] == "nosniff"
        assert b"://" not in part.body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in ("", "other.js", "..%2fguard.py", "index.html/"):
        assert ask(port, "GET", f"/evoke/page/{name}").status == 404
