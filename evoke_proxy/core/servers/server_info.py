"""What llama-server says it is and can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_NEEDED = frozenset(("blocks", "plan", "render", "reuse", "stream"))


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The answer of `GET /props`.

    `lacking` is one word for why it has no blocks (unreachable, unpatched, unsupported), `reason`
    says it to a person; both are empty when it is `patched`. `routes`: it has no model itself and
    hands requests to servers that have. `adopts`: saved blocks can be put into an emptied slot, so
    that a session comes back to one without being decoded again. `spills`: copies can be written
    to disk, where a restart leaves them. `whole`: some of a slot is in no copy. `capturable` are
    the layers whose attention it can capture. `probes`: a request can be decoded only to see what
    it looks for. `n_ctx` is how many tokens a slot's context may have, resident or not; None where
    only the server knows. `instance` names its process; empty where it is not patched.
    """

    lacking: str
    reason: str
    n_slots: int = 1
    sleeping: bool = False
    routes: bool = False
    build: str = ""
    adopts: bool = False
    spills: bool = False
    whole: bool = False
    capturable: tuple[int, ...] = ()
    probes: bool = False
    n_ctx: int | None = None
    instance: str = ""

    def is_other_than(self, before: ServerInfo) -> bool:
        """Whether this is another process than the one that answered before.

        Instance ids decide. Without them only another description tells: of two processes that
        describe themselves alike this cannot know.
        """
        if self.instance or before.instance:
            return self.instance != before.instance
        return replace(self, sleeping=False) != replace(before, sleeping=False)

    @property
    def patched(self) -> bool:
        """Whether it has everything a budget needs."""
        return not self.lacking

    @classmethod
    def parse(cls, props: Mapping[str, Any]) -> ServerInfo:
        """From the answer, whatever it lacks."""
        lacking, reason = _lacking(props.get("evoke"))
        return cls(
            lacking=lacking,
            reason=reason,
            n_slots=int(props.get("total_slots") or 1),
            routes=props.get("role") == "router",
            sleeping=bool(props.get("is_sleeping")),
            build=str(props.get("build_info") or ""),
            adopts="adopt" in _features(props.get("evoke")),
            spills="disk" in _features(props.get("evoke")),
            whole=_memory(props.get("evoke")) in ("hybrid", "iswa"),
            capturable=_capturable(props.get("evoke")),
            probes="probe" in _features(props.get("evoke")),
            n_ctx=_n_ctx(props.get("evoke")),
            instance=_instance(props.get("evoke")),
        )


# Before the first answer, and after the server went away.
UNKNOWN_SERVER = ServerInfo("unreachable", "llama-server has not answered yet")


def _n_ctx(evoke: object) -> int | None:
    limits = evoke.get("limits") if isinstance(evoke, dict) else None
    n_ctx = limits.get("n_ctx_logical") if isinstance(limits, dict) else None
    return n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None


def _instance(evoke: object) -> str:
    instance = evoke.get("instance") if isinstance(evoke, dict) else None
    return instance if isinstance(instance, str) else ""


def _memory(evoke: object) -> object:
    return evoke.get("memory") if isinstance(evoke, dict) else None


def _lacking(evoke: object) -> tuple[str, str]:
    if not isinstance(evoke, dict):
        return "unpatched", "it is not patched, or runs without --evoke-ram"
    missing = _NEEDED.difference(_features(evoke))
    if not missing:
        return "", ""
    named = evoke.get("unsupported") or f"it lacks {', '.join(sorted(missing))}"
    return "unsupported", str(named)


def _features(evoke: object) -> Sequence[object]:
    features = evoke.get("features") if isinstance(evoke, dict) else None
    return features if isinstance(features, list) else ()


def _capturable(evoke: object) -> tuple[int, ...]:
    limits = evoke.get("limits") if isinstance(evoke, dict) else None
    attention = limits.get("attention") if isinstance(limits, dict) else None
    layers = attention.get("layers") if isinstance(attention, dict) else None
    return tuple(int(layer) for layer in layers) if isinstance(layers, list) else ()
