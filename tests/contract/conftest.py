"""Fixtures of the contract tests: tests with the same options share a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from images import projector
from llama import Llama, running
from mode_calls import evicting

CONTEXT = ("-c", "4096", "--evoke-ram", "64")


@pytest.fixture(scope="session")
def stock() -> Iterator[Llama]:
    with running(False, "-c", "4096", "-np", "2") as server:
        yield server


@pytest.fixture(scope="session")
def plain() -> Iterator[Llama]:
    """The patched server without any option of the patches."""
    with running(True, "-c", "4096", "-np", "2") as server:
        yield server


@pytest.fixture(scope="session")
def one() -> Iterator[Llama]:
    """The patched server with one slot."""
    with running(True, *CONTEXT, "-np", "1", "-fa", "on") as server:
        yield server


@pytest.fixture(scope="session")
def two() -> Iterator[Llama]:
    """The patched server with two slots, each with cells of its own."""
    with running(True, *CONTEXT, "-np", "2", "-no-kvu", "-fa", "on") as server:
        yield server


@pytest.fixture(scope="session")
def shared() -> Iterator[Llama]:
    """The patched server with two slots that share their cells, and no flash attention."""
    with running(True, *CONTEXT, "-np", "2", "-kvu", "-fa", "off") as server:
        yield server


@pytest.fixture(scope="session")
def sighted() -> Iterator[Llama]:
    """As `one`, with a projector of images."""
    options = (*CONTEXT, "-np", "1", "-fa", "on", "--mmproj", projector())
    with running(True, *options) as server:
        yield server


@pytest.fixture(params=["one", "two", "shared"])
def server(request: pytest.FixtureRequest) -> Llama:
    """A server of each layout of slots and cells, with empty slots and no saved blocks."""
    chosen: Llama = request.getfixturevalue(request.param)
    for slot in range(1 if request.param == "one" else 2):
        chosen.erase(slot)
    chosen.post("/slots/0?action=block-drop", {"all": True})
    return chosen


@pytest.fixture(scope="module")
def scored() -> Iterator[Llama]:
    """The patched server with --kv-eviction 2: blocks unused for longest are evicted first."""
    with evicting(2, "-np", "1") as server:
        yield server
