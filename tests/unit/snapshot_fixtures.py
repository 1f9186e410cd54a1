"""Snapshot values, for tests."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.core.snapshots.snapshots import (
    Snapshot,
)

NOW = 1_000_000.0


def snapshot(id: str, tokens: list[int], **fields: object) -> Snapshot:
    """A snapshot with default values for all but these fields."""
    defaults: dict[str, object] = {
        "tenant": "t",
        "fingerprint": "f",
        "branch": "b",
        "kind": USER,
        "n_bytes": 1000,
        "checksum": "c",
        "prefill_s": 1.0,
        "created": NOW,
        "used": NOW,
    }
    values = defaults | fields
    return Snapshot(id=id, tokens=np.array(tokens, dtype=np.int32), **values)  # type: ignore[arg-type]


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)
