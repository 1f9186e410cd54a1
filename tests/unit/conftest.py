"""Hypothesis settings and the tiny llama.cpp project of the unit tests.

Property tests have no deadline: on a busy machine an example may take any time.
"""

from __future__ import annotations

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
