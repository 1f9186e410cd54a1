"""Settings of what is done so that no cache is lost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotsConfig:
    """Slots of an unpatched server on disk; without a directory nothing is saved.

    The directory is its --slot-save-path, as the proxy sees it. 0 for `tenant_mib`: no quota.
    """

    directory: str = ""
    key_file: str = ""
    shared: bool = False
    min_tokens: int = 256
    look_ahead: bool = True
    max_mib: int = 32768
    max_count: int = 256
    max_age_h: float = 168.0
    min_free_mib: int = 2048
    tenant_mib: int = 0
    half_life_h: float = 6.0
    stall_share: float = 0.1
    min_gain: float = 2.0
    one_at_a_time: bool = False


@dataclass(frozen=True, slots=True)
class NormaliseConfig:
    """What is made the same at the front of prompts, see `core.request.normalise`.

    0 for `dates_h`: off.
    """

    billing: bool = False
    dates_h: float = 0.0
    tools: bool = False
