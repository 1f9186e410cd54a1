"""Builds the llama-server this project runs with, and keeps it in a cache.

`ensure_server()` is the whole interface for other code; `cli` is the command line around it.
"""

from __future__ import annotations

from .build import ensure_server
from .errors import BuildError
from .series import patches_dir

__all__ = ["BuildError", "ensure_server", "patches_dir"]
