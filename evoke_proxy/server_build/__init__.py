"""Builds llama-server with our patches and keeps it in a cache.

Other code calls `ensure_server`; `cli` is its command line. The package uses only the standard
library, so that the server can be built where no dependencies are installed.
"""

from __future__ import annotations

from .build import BuildOptions, ensure_server, finished_server_path
from .errors import BuildError
from .series import patches_dir

__all__ = ["BuildError", "BuildOptions", "ensure_server", "finished_server_path", "patches_dir"]
