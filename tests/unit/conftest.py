"""Hypothesis settings and fixtures of the unit tests, among them a tiny llama.cpp project.

Property tests have no deadline: on a busy machine an example may take any time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from server_build_project import write_llama, write_patches

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A stand-in for llama.cpp that compiles in a second."""
    return write_llama(tmp_path / "llama")


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A patch series that applies to it."""
    return write_patches(tmp_path / "patches")


@pytest.fixture
def no_full_collections() -> Iterator[None]:
    """In the proxy full collections run only while there is no request."""
    gc.disable()
    yield
    gc.enable()
