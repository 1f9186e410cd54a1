"""Which file a slot of a patched server is filled from."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from test_snapshots import snapshot

from evoke_proxy.engine.kept.whole_slots import WholeSlots

PROMPT = np.arange(9, dtype=np.int32)
LONG, SHORT = list(range(8)), list(range(6))


def _filled(n_past: int, *items: Any) -> tuple[list[str], int]:
    """What the slot of session `b` is filled from on a server `f`, and how often that is asked what
    it is."""
    filled, asked = [], []

    async def restore(match: Any, *_: object) -> bool:
        filled.append(match.snapshot.id)
        return True

    async def fingerprint(_: object) -> str:
        asked.append(1)
        return "f"

    states = SimpleNamespace(vault=SimpleNamespace(snapshots=items), restore=restore)
    parts: Any = SimpleNamespace(states=states, calls=SimpleNamespace(fingerprint=fingerprint))
    known: Any = SimpleNamespace(tenant="t", id="b")
    slots = WholeSlots(parts, None, None)  # type: ignore[arg-type]
    asyncio.run(slots.bring_back(0, known, PROMPT, n_past, {}))
    return filled, len(asked)


def test_it_is_the_longest_that_this_server_can_use() -> None:
    mine, other = snapshot("mine", SHORT), snapshot("other", LONG, fingerprint="g")
    assert _filled(2, mine, snapshot("longer", LONG)) == (["longer"], 1)
    assert _filled(2, other, mine) == (["mine"], 1)
    assert _filled(6, other, mine) == ([], 1), "no further than what is there"
    assert _filled(2, other) == ([], 1)


def test_nobody_is_asked_where_no_file_helps() -> None:
    foreign = snapshot("tenant", LONG, tenant="u"), snapshot("branch", LONG, branch="c")
    parted = snapshot("parted", [*SHORT, 77])
    assert _filled(2, *foreign, parted) == ([], 0)
    assert _filled(6, snapshot("mine", SHORT)) == ([], 0)
