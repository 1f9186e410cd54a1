"""Computes fingerprints of servers; llama-server restores files of other models without error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.snapshots.state_file import Cache

# Members of `GET /v1/models` that stay the same after a restart.
_META = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Identity of a file of weights."""

    # Size of the file.
    n_bytes: int
    # Time of its last change, nanoseconds since the epoch.
    mtime_ns: int
    # Hash of its first and last bytes.
    sample: str


# Settings that decide the layout of a state: names of properties, and command-line options.
_LAYOUT = {
    "cache_type_k": ("-ctk", "--cache-type-k"),
    "cache_type_v": ("-ctv", "--cache-type-v"),
    "flash_attn": ("-fa", "--flash-attn"),
    "swa_full": ("--swa-full",),
    "kv_unified": ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
}


def fingerprint(
    props: Mapping[str, Any],
    models: Mapping[str, Any],
    adapters: Sequence[Mapping[str, Any]],
    file: ModelFile | None,
) -> str:
    """Return a digest; servers with the same digest can restore each other's states.

    Made from `GET /props`, `GET /v1/models`, `GET /lora-adapters`, and the file of the model where
    it is readable. KV types, flash attention and the layout of the cache are included where they
    are stated: in the options that a router lists for its models, in a patched server's `evoke`,
    in properties of later servers. A llama-server of one model states none of them: `with_layout`
    adds what one of its files shows.
    """
    first = _first(models)
    settings = props.get("default_generation_settings")
    identity = {
        "build": props.get("build_info"),
        "model": props.get("model_path"),
        "meta": _meta(first),
        "file": [file.n_bytes, file.mtime_ns, file.sample] if file is not None else None,
        "n_ctx": settings.get("n_ctx") if isinstance(settings, Mapping) else None,
        "slots": props.get("total_slots"),
        "template": _templates(props),
        "lora": [[item.get("path"), item.get("scale")] for item in adapters],
        "media": props.get("modalities"),
    }
    if layout := _layout(props, first):
        identity["layout"] = layout
    return _digest(identity)


def with_layout(stated: str, cache: Cache | None) -> str:
    """Add the cache's types of keys and values, and its layout of values, to a fingerprint.

    `cache` is read from a file that the server wrote. Returns the fingerprint unchanged without a
    file, or when the file has no rows of attention.
    """
    if cache is None or cache.types is None:
        return stated
    return _digest({"told": stated, "types": cache.types, "transposed": cache.transposed})


def same_model(props: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return a digest that two servers share when a request means the same to both.

    It does not depend on paths and start options. "" when a server does not state what it serves.
    """
    meta = _meta(_first(models))
    if meta is None and props.get("role") != "router":
        return ""
    return _digest({"meta": meta, "template": _templates(props), "media": props.get("modalities")})


def _first(models: Mapping[str, Any]) -> Any:
    listed = models.get("data")
    return listed[0] if isinstance(listed, list) and listed else {}


def _meta(listed: Any) -> dict[str, Any] | None:
    meta = listed.get("meta") if isinstance(listed, Mapping) else None
    return {key: meta.get(key) for key in _META} if isinstance(meta, Mapping) else None


def _templates(props: Mapping[str, Any]) -> list[Any]:
    return [props.get("chat_template"), props.get("chat_template_tool_use")]


def _digest(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _layout(props: Mapping[str, Any], listed: Any) -> dict[str, Any]:
    """Return what the server states about KV types, flash attention and the cache; may be empty."""
    layout = {name: props[name] for name in _LAYOUT if name in props}
    evoke = props.get("evoke")
    limits = evoke.get("limits") if isinstance(evoke, Mapping) else None
    if isinstance(limits, Mapping) and "row_bytes" in limits:
        layout["row_bytes"] = limits["row_bytes"]
    status = listed.get("status") if isinstance(listed, Mapping) else None
    listed_args = status.get("args") if isinstance(status, Mapping) else None
    args = listed_args if isinstance(listed_args, list) else []
    for name, options in _LAYOUT.items():
        if positions := [at for at, arg in enumerate(args) if arg in options]:
            layout[name] = args[positions[-1] :][:2]
    return layout
