"""Kills the processes that tests start when the test run ends, even if it is killed."""

from __future__ import annotations

import gc
import os
import secrets
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

_BUILD_SETTINGS = (
    "EVOKE_CACHE",
    "EVOKE_PATCHED_SERVER",
    "EVOKE_STOCK_SERVER",
    "EVOKE_SERVER_ARGS",
    "EVOKE_INTERLEAVINGS",
)
_REAPER = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """Marks all processes started from here on, and starts the reaper that kills them."""
    for name in [name for name in os.environ if name.startswith("EVOKE_")]:
        if (
            name not in _BUILD_SETTINGS
        ):  # a setting of this machine would change what a test expects
            del os.environ[name]
    # An encoder that was fetched on this machine must not become the default.
    os.environ["XDG_DATA_HOME"] = str(Path(__file__).with_name("no-data"))
    # Threads of a llama-server that has several would spin while they wait for each other.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["TESTED_BY"] = f"{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, str(Path(__file__).with_name("reaper.py"))]
    # In its own session, so that a signal to our process group does not end it.
    config.stash[_REAPER] = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while tests are collected: what is made then lasts."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Excludes modules and collected tests from garbage collections: they last as long as the run.

    There are 670,000 such objects, so that each full collection takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes the reaper's input, upon which it kills what is left, and waits for it."""
    if reaper := config.stash.get(_REAPER, None):
        reaper.communicate()
