"""Names the tenant of a request from its credentials."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

# The pseudo header that carries the tenant of a key of ours; no request header has a colon in it.
TENANT = ":tenant"


def tenant_of(headers: Mapping[str, str]) -> str:
    """The tenant that a request belongs to; clients with different keys never share blocks.

    A key of ours names its tenant. Any other key is hashed and kept nowhere; a request without one
    belongs to the tenant "".
    """
    if TENANT in headers:
        return headers[TENANT]
    key = headers.get("Authorization") or headers.get("X-Api-Key") or ""
    # A header may have bytes that are not UTF-8.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""
