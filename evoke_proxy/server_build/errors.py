"""The one error of a server build."""

from __future__ import annotations


class BuildError(Exception):
    """llama-server could not be built; the message is for a person: what failed, and what to do."""
