"""Fingerprints of what a server serves, and whether two servers serve one model."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.core.snapshots.fingerprint import ModelFile, fingerprint, same_model

PROPS = {
    "build_info": "b1",
    "model_path": "/m",
    "total_slots": 1,
    "chat_template": "x",
    "media_marker": "changes with every start",
    "default_generation_settings": {"n_ctx": 4096},
}


MODELS = {"data": [{"created": 12, "meta": {"n_params": 7, "size": 9}}]}


def test_a_fingerprint_survives_a_restart_and_differs_for_other_servers() -> None:
    file = ModelFile(9, 5, "abc")
    base = fingerprint(PROPS, MODELS, [], file)
    restarted = PROPS | {"media_marker": "another", "is_sleeping": True}
    later = {"data": [MODELS["data"][0] | {"created": 13}]}
    assert fingerprint(restarted, later, [], file) == base
    others = [
        fingerprint(PROPS | {"build_info": "b2"}, MODELS, [], file),
        fingerprint(PROPS | {"chat_template": "y"}, MODELS, [], file),
        fingerprint(PROPS | {"default_generation_settings": {"n_ctx": 1}}, MODELS, [], file),
        fingerprint(PROPS, {"data": [{"meta": {"n_params": 8, "size": 9}}]}, [], file),
        fingerprint(PROPS, MODELS, [{"id": 0, "path": "/l", "scale": 1.0}], file),
        fingerprint(PROPS, MODELS, [{"id": 0, "path": "/l", "scale": 0.5}], file),
        fingerprint(PROPS, MODELS, [], replace(file, sample="abd")),
        fingerprint(PROPS, MODELS, [], replace(file, mtime_ns=6)),
        fingerprint(PROPS, MODELS, [], None),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert fingerprint({}, {}, [], None)


def test_a_fingerprint_includes_the_cache_layout_where_it_is_stated() -> None:
    def of_router(*args: str, port: str = "1") -> str:
        status = {"args": [*args, "--port", port]}
        return fingerprint(PROPS, {"data": [{"status": status}]}, [], None)

    fingerprints = [
        fingerprint(PROPS | {"cache_type_k": "q8_0"}, {}, [], None),
        fingerprint(PROPS | {"flash_attn": True}, {}, [], None),
        fingerprint(PROPS | {"evoke": {"limits": {"row_bytes": 2048}}}, {}, [], None),
        fingerprint(PROPS | {"evoke": {"limits": {"row_bytes": 1088}}}, {}, [], None),
        of_router("llama-server", "--cache-type-k", "q8_0"),
        of_router("llama-server", "--cache-type-k", "f16"),
        of_router("llama-server", "-fa", "off"),
    ]
    assert len({*fingerprints, fingerprint(PROPS, {}, [], None)}) == 1 + len(fingerprints)
    assert of_router("x", "-ctk", "f16", port="1") == of_router("x", "-ctk", "f16", port="2")


def test_servers_of_one_model_share_a_digest_whatever_their_paths_and_options() -> None:
    base = same_model(PROPS, MODELS)
    assert base and same_model(PROPS | {"model_path": "/n", "total_slots": 4}, MODELS) == base
    assert same_model(PROPS | {"chat_template": "y"}, MODELS) != base
    assert same_model(PROPS, {"data": [{"meta": {"n_params": 8, "size": 9}}]}) != base
    assert same_model(PROPS, {"data": []}) == "" and same_model({"role": "router"}, {}) != ""
