"""The error that a build of llama-server raises."""

from __future__ import annotations


class BuildError(Exception):
    """llama-server could not be built; the message says what failed and what to do."""
