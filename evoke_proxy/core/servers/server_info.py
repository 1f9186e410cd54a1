"""Capabilities of a llama-server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# More slots than llama-server allows (LLAMA_MAX_SEQ is 256).
_MAX_SLOTS = 4096
_NEEDED = frozenset(("blocks", "plan", "render", "reuse", "stream"))


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's capabilities, from `GET /props`.

    Attributes:
        obstacle: why it has no block calls: unreachable, unpatched or unsupported; empty
            when patched.
        reason: the same reason as a sentence; empty when patched.
        n_slots: number of slots.
        sleeping: whether the model is unloaded until the next request.
        is_router: whether it is a router, which forwards requests to servers with a model.
        build: build id of llama-server.
        can_adopt: whether saved blocks can be loaded into an emptied slot, so that a session
            returns without decoding.
        can_share: whether it can give a session the complete copies and rows that others of its
            tenant have of the same text.
        has_disk: whether copies can be written to disk, where they survive a restart.
        disk_unusable: why they cannot although it was started with a disk tier; empty otherwise.
        can_find: whether it can list the saved blocks that fit a prompt, and the session of each
            slot.
        can_render_behind: whether it can compare its slots with a prompt of which it renders only
            the last messages.
        needs_full_state: whether copies of blocks lack a part of a slot's state (hybrids and
            models with sliding windows).
        is_recurrent: whether its slots have a recurrent state, which cannot go back to an earlier
            position but to a context checkpoint.
        capturable: layers whose attention can be captured.
        can_probe: whether a request can be decoded just to capture its attention.
        can_rotate: whether rows can be moved to other positions: their keys can be rotated.
        can_hold_media: whether prompts with images or sounds have blocks.
        cuts_runs: whether no text without a break ends it, whatever its vocabulary.
        n_ctx: maximum number of tokens of a slot's context, resident or not; None when unknown.
        n_ctx_train: context that the model was trained for, in tokens; None when unknown.
        n_cells: cells that a slot may use, alone or shared with other slots; None when unknown.
        n_slot_cells: cells that a slot can fill while all others are full: fewer than `n_cells`
            where slots share their cells (unified KV); None when unknown.
        instance: id of the server process; empty when unpatched.
    """

    obstacle: str
    reason: str
    n_slots: int = 1
    sleeping: bool = False
    is_router: bool = False
    build: str = ""
    can_adopt: bool = False
    can_share: bool = False
    has_disk: bool = False
    disk_unusable: str = ""
    can_find: bool = False
    can_render_behind: bool = False
    needs_full_state: bool = False
    is_recurrent: bool = False
    capturable: tuple[int, ...] = ()
    can_probe: bool = False
    can_rotate: bool = False
    can_hold_media: bool = False
    cuts_runs: bool = False
    n_ctx: int | None = None
    n_ctx_train: int | None = None
    n_cells: int | None = None
    n_slot_cells: int | None = None
    instance: str = ""

    def is_other_than(self, before: ServerInfo) -> bool:
        """Whether this is another process than the one that answered before.

        Instance ids decide. Without them the descriptions are compared, so a restarted process
        with the same description is not detected.
        """
        if self.instance or before.instance:
            return self.instance != before.instance
        return replace(self, sleeping=False) != replace(before, sleeping=False)

    @property
    def patched(self) -> bool:
        """Whether it has all features that a budget needs."""
        return not self.obstacle

    @property
    def answers_block_calls(self) -> bool:
        """Whether it answers block calls now without loading its model first."""
        return self.patched and not self.sleeping

    @property
    def n_cells_in_all(self) -> int:
        """Cells that all its slots can fill at the same time; 0 when unpatched or unknown."""
        return (self.n_slot_cells or 0) * self.n_slots if self.patched else 0

    @property
    def has_slots(self) -> bool:
        """Whether its number of slots is known: it has answered, and a router has none."""
        return self is not UNKNOWN_SERVER and not self.is_router

    @property
    def can_exceed_cells(self) -> bool:
        """Whether a context can exceed the cells: llama-server then evicts when they are full."""
        return self.n_ctx is not None and self.n_cells is not None and self.n_ctx > self.n_cells

    @property
    def n_bounding_cells(self) -> int | None:
        """Cells of a slot where a prompt can exceed them, so that no budget may; else None."""
        return self.n_cells if self.patched and self.can_exceed_cells else None

    @property
    def has_trained_length(self) -> bool:
        """Whether the context of a slot is known to be all that the model was trained for."""
        return self.n_ctx is not None and self.n_ctx == self.n_ctx_train

    @property
    def exceeds_training(self) -> bool:
        """Whether the context of a slot is longer than the model's training: RoPE is scaled."""
        return self.n_ctx is not None and self.n_ctx > (self.n_ctx_train or self.n_ctx)

    @classmethod
    def parse(cls, props: Mapping[str, Any]) -> ServerInfo:
        """Read the answer of `GET /props`; missing members get defaults."""
        obstacle, reason = _obstacle(props.get("evoke"))
        return cls(
            obstacle=obstacle,
            reason=reason,
            n_slots=_n_slots(props.get("total_slots")),
            is_router=props.get("role") == "router",
            sleeping=bool(props.get("is_sleeping")),
            build=str(props.get("build_info") or ""),
            can_adopt="adopt" in _features(props.get("evoke")),
            can_share="share" in _features(props.get("evoke")),
            has_disk="disk" in _features(props.get("evoke")),
            can_find="find" in _features(props.get("evoke")),
            can_render_behind="behind" in _features(props.get("evoke")),
            needs_full_state=_memory(props.get("evoke")) in ("hybrid", "iswa", "dsa-iswa"),
            is_recurrent=_memory(props.get("evoke")) == "hybrid",
            capturable=_capturable(props.get("evoke")),
            can_probe="probe" in _features(props.get("evoke")),
            can_rotate="compact" in _features(props.get("evoke")),
            can_hold_media="media" in _features(props.get("evoke")),
            cuts_runs="runs" in _features(props.get("evoke")),
            n_ctx=_limit(props.get("evoke"), "n_ctx_logical"),
            n_cells=_limit(props.get("evoke"), "n_cells"),
            n_slot_cells=_slot_cells(props.get("evoke")),
            instance=_instance(props.get("evoke")),
        )


def trained_context(models: Mapping[str, Any]) -> int | None:
    """The context that the model of `GET /v1/models` was trained for; None when it does not say."""
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    meta = first.get("meta") if isinstance(first, dict) else None
    n_ctx = meta.get("n_ctx_train") if isinstance(meta, dict) else None
    return n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None


# The value before the first answer, and after the server has become unreachable.
UNKNOWN_SERVER = ServerInfo("unreachable", "llama-server has not answered yet")


def _n_slots(number: object) -> int:
    """The number of slots; 1 when it is none that llama-server can have."""
    return number if isinstance(number, int) and 0 < number <= _MAX_SLOTS else 1


def _limit(evoke: object, name: str) -> int | None:
    """A positive number among the limits that the server reports; None when there is none."""
    limits = evoke.get("limits") if isinstance(evoke, dict) else None
    number = limits.get(name) if isinstance(limits, dict) else None
    return number if isinstance(number, int) and number > 0 else None


def _slot_cells(evoke: object) -> int | None:
    # A server of an earlier version does not report the share of a slot.
    return _limit(evoke, "n_slot_cells") or _limit(evoke, "n_cells")


def _instance(evoke: object) -> str:
    instance = evoke.get("instance") if isinstance(evoke, dict) else None
    return instance if isinstance(instance, str) else ""


def _memory(evoke: object) -> object:
    return evoke.get("memory") if isinstance(evoke, dict) else None


def _obstacle(evoke: object) -> tuple[str, str]:
    if not isinstance(evoke, dict):
        return "unpatched", "it is not patched, or runs without --evoke-ram"
    missing = _NEEDED.difference(_features(evoke))
    if not missing:
        return "", ""
    named = evoke.get("unsupported") or f"it lacks {', '.join(sorted(missing))}"
    return "unsupported", str(named)


def slots_in_words(n_slots: int) -> str:
    """Return a number of slots with its noun: "1 slot", "2 slots"."""
    return f"{n_slots} slot{'' if n_slots == 1 else 's'}"


def _features(evoke: object) -> Sequence[str]:
    features = evoke.get("features") if isinstance(evoke, dict) else None
    if not isinstance(features, list):
        return ()
    return [feature for feature in features if isinstance(feature, str)]


def _capturable(evoke: object) -> tuple[int, ...]:
    limits = evoke.get("limits") if isinstance(evoke, dict) else None
    attention = limits.get("attention") if isinstance(limits, dict) else None
    layers = attention.get("layers") if isinstance(attention, dict) else None
    if not isinstance(layers, list):
        return ()
    return tuple(layer for layer in layers if isinstance(layer, int))
