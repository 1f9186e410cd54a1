"""Property tests have no deadline: how long one takes depends on who else uses the machine, and so
does how long their examples take to be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from server_build_project import write_llama, write_patches

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A checkout small enough to compile in a second."""
    return write_llama(tmp_path / "llama")


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A series that fits it."""
    return write_patches(tmp_path / "patches")
