"""Builds llama-server with our patches and keeps it in a cache.

Other code calls `ensure_server`; `cli` is its command line. Only the standard library is used, so
that an image without the other dependencies can build the server.
"""

from __future__ import annotations

from .build import BuildOptions, ensure_server, finished_server_path
from .errors import BuildError
from .series import patches_dir

__all__ = ["BuildError", "BuildOptions", "ensure_server", "finished_server_path", "patches_dir"]
