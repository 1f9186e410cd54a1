"""What a llama-server was found to do, and what to change in how it is started."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.core.request.look_ahead import Stability

# Recurrent layers, and windows, go on from a restored state and cannot go back; recurrent layers
# beside windows do not even go on from one.
DENSE, RECURRENT, WINDOWED, UNKNOWN = "dense", "extend-only", "windowed", "unknown"
NEVER = "never-restored"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a prompt of `n_tokens` in a slot, how many a later request did not decode.

    `extends`: it goes on from all of it. `edited`: from its first `n_shared` tokens. The same after
    a save and a restore; those are None where slots cannot be saved. `windows`: some layers keep
    less than all; `full`: a file of those is of use as llama-server writes it (`--swa-full`).
    """

    n_tokens: int
    n_shared: int
    extends: int
    edited: int
    restored_extends: int | None = None
    restored_edited: int | None = None
    windows: bool = False
    full: bool = False

    @property
    def memory(self) -> str:
        """What kind of memory behaves like that."""
        if self.restored_extends is None or self.restored_edited is None:
            return UNKNOWN
        if 2 * self.restored_extends < self.n_tokens:
            return NEVER
        if self.windows:
            return WINDOWED
        return DENSE if 2 * self.restored_edited >= self.n_shared else RECURRENT


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of one prompt: decoded, saved, verified, restored; and the bytes of its state."""

    n_tokens: int
    prefill_s: float
    save_s: float = 0.0
    verify_s: float = 0.0
    restore_s: float = 0.0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything `doctor` has asked; `no_saves` and `no_files` say why not, where it is so.
    `kv_types` of keys and values and `flash_attention` are read in a file; None without one."""

    build: str
    model: str
    n_slots: int
    n_ctx: int
    media: bool
    native_disk: bool
    no_saves: str
    no_files: str
    ram_cache: bool | None
    clears_idle: bool | None
    plain: Stability
    tools: Stability
    reuse: Reuse
    speeds: Speeds
    kv_types: tuple[str, str] | None = None
    flash_attention: bool | None = None


def advice(found: Findings) -> list[str]:
    """What to change, the most important first; empty when nothing."""
    memory = found.reuse.memory
    rules = (
        (found.native_disk, "it has a disk cache of its own: leave snapshots.directory empty"),
        (bool(found.no_saves), "start it with --slot-save-path DIR, and name DIR in"
         " snapshots.directory: nothing survives a restart as it is"),
        (not found.no_saves and bool(found.no_files), "give the proxy the directory that it saves"
         f" slots to, as snapshots.directory: {found.no_files}"),
        (memory == NEVER, "start it with --swa-full: without, a restore saves nothing"),
        (found.reuse.full, "start it without --swa-full, which snapshots do not need: what it"
         " brings back, from a file or from its RAM cache, has of the windows' layers the latest"
         " tokens only, and it takes a prompt that parts from it there for one that it knows"),
        (found.n_slots > 1 and found.clears_idle is True, "several slots share one cache, and idle"
         " ones are emptied whenever another begins: -no-kvu or --no-cache-idle-slots keeps them"),
        (memory == RECURRENT and not found.plain.ahead, "its template rewrites answers so late that"
         " nothing can be decoded ahead: each turn decodes the last answer again"),
        (not found.plain.boundary, "its template rewrites earlier messages of the user: no snapshot"
         " stays useful"),
        (found.plain.boundary and not found.tools.boundary, "with tools its template rewrites"
         " earlier messages: conversations with tools get no snapshots"),
        (found.media, "it loads a projector: chats with images pass through"),
        (bool(found.speeds.restore_s) and _slow(found.speeds), "restoring is no faster than"
         " decoding here: a faster disk, or no snapshots"),
    )  # fmt: skip
    return [text for holds, text in rules if holds]


def _slow(speeds: Speeds) -> bool:
    return speeds.verify_s + speeds.restore_s >= speeds.prefill_s
