"""Processes that tests start end with the tests, even when these are killed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

_FOR_BUILDS = (
    "EVOKE_CACHE",
    "EVOKE_PATCHED_SERVER",
    "EVOKE_STOCK_SERVER",
    "EVOKE_SERVER_ARGS",
)
_REAPER = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """All processes that are started from here on have a mark, and somebody watches over us."""
    for name in [name for name in os.environ if name.startswith("EVOKE_")]:
        if name not in _FOR_BUILDS:  # settings of the machine are not those that a test expects
            del os.environ[name]
    # An encoder that was fetched on this machine is not in use by default.
    os.environ["XDG_DATA_HOME"] = str(Path(__file__).with_name("no-data"))
    os.environ["TESTED_BY"] = f"{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, str(Path(__file__).with_name("reaper.py"))]
    # In a session of its own: what ends us all does not end it.
    config.stash[_REAPER] = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """It does its work, and is gone."""
    if reaper := config.stash.get(_REAPER, None):
        reaper.communicate()
