"""Two tenants at one real server whose conversations differ only in a number do not mix."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from adapters import write_adapter
from harness import RunningProxy, ask
from stock_deployment import Deployment
from tenant_keys import KEYS, TENANTS, proxy_with_keys

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.demo.session import SYSTEM, paragraph
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

BUDGET = 256
# The fact that each tenant states.
NUMBERS = dict(zip(TENANTS, ("20011", "48579"), strict=True))


def _turns(name: str) -> list[str]:
    """Return the texts of a tenant, which are those of the other except for the number."""
    rng = random.Random(4)
    fact = f"My badge number is {NUMBERS[name]}."
    return [fact, *[paragraph(rng, 11) for _ in range(2)], "What is my badge number?"]


def _say(port: int, name: str, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "evoke_session": "same"}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[name]}"}
    answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    content: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return content


def _run_interleaved(running: RunningProxy, seed: int) -> None:
    """Run both conversations, interleaved by the seed; answers must not have the other's number."""
    rng, messages = (
        random.Random(seed),
        {name: [{"role": "system", "content": SYSTEM}] for name in NUMBERS},
    )
    remaining = {name: _turns(name) for name in NUMBERS}
    replies = dict.fromkeys(NUMBERS, "")
    while any(remaining.values()):
        name = rng.choice([name for name in NUMBERS if remaining[name]])
        other = next(number for tenant, number in NUMBERS.items() if tenant != name)
        messages[name].append({"role": "user", "content": remaining[name].pop(0)})
        replies[name] = _say(running.port, name, messages[name])
        messages[name].append({"role": "assistant", "content": replies[name]})
        assert other not in replies[name]
    assert all(NUMBERS[name] in replies[name] for name in NUMBERS), replies


def test_tenants_with_budgets_in_one_slot_do_not_mix(patched_port: int, tmp_path: Path) -> None:
    with proxy_with_keys(patched_port, tmp_path, policy__budget=BUDGET) as running:
        for seed in range(4):
            _run_interleaved(running, seed)
        assert running.metric("evoke_blocks_recovered_total") > 0
        assert running.metric("evoke_degraded_total", stage="plan") == 0
        tenants = {conversation.tenant for conversation in running.gateway.conversations}
        assert tenants == set(NUMBERS)
        for name in NUMBERS:
            body = ask(patched_port, "GET", f"/slots/0/blocks?tenant={name}").body
            assert json.loads(body)["blocks"], "the tenant has no saved blocks of its own"


def test_tenants_with_encrypted_snapshots_do_not_mix(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    deployment = Deployment(folder, "", ("--cache-ram", "0"))
    settings: dict[str, Any] = {
        "directory": str(folder),
        "min_free_mib": 0,
        "stall_share": 1.0,
        "min_gain": 0.0,
    }
    write_secret(tmp_path / "at-rest", "ab" * 32)
    settings["key_file"] = str(tmp_path / "at-rest")
    overrides = {f"snapshots__{key}": value for key, value in settings.items()}
    with (
        deployment.server() as port,
        proxy_with_keys(port, tmp_path, snapshots__min_tokens=32, **overrides) as running,
    ):
        for seed in range(3):
            _run_interleaved(running, seed)
            running.wait_for_background()
        repository = SnapshotRepository(
            SnapshotsConfig(directory=str(folder), key_file=settings["key_file"])
        )
        repository.open(claim=False)
        assert {item.tenant for item in repository.snapshots} == set(NUMBERS)
        repository.close()
        # No decrypted slot file is left; it would begin with llama.cpp's magic number.
        paths = list(folder.glob("*.evoke-*"))
        assert paths and not any(path.read_bytes().startswith(b"qsgg") for path in paths)
        assert running.metric("evoke_snapshot_restores_total", result="useful") > 0


def _decoded_again(port: int, name: str, **fields: object) -> int:
    """Complete a prompt as a tenant; returns how many of its tokens were decoded."""
    body = {"n_predict": 1, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[name]}"}
    answer = ask(port, "POST", "/completion", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    n_decoded: int = json.loads(answer.body)["timings"]["prompt_n"]
    return n_decoded


def test_no_tenant_leaves_rows_of_another_position_to_prompts_that_begin_alike(
    tmp_path: Path,
) -> None:
    """A stock server would move them there for `n_cache_reuse`, and give them to every tenant."""
    with (
        Deployment(tmp_path).server() as port,
        proxy_with_keys(port, tmp_path, snapshots__directory=str(tmp_path)) as running,
    ):
        common = list(range(300, 500))
        _decoded_again(running.port, "alice", prompt=[1, *range(600, 700), *common])
        moved = _decoded_again(running.port, "alice", prompt=[1, *common], n_cache_reuse=1)
        assert moved >= len(common)


def test_no_tenant_computes_with_adapters_where_others_would_get_the_rows(tmp_path: Path) -> None:
    """A stock server answers a request without `lora` from rows that have those adapters."""
    adapter, chat = tmp_path / "adapter.gguf", "/v1/chat/completions"
    write_adapter(adapter, seed=1)
    options = ("--lora", str(adapter), "--lora-init-without-apply")
    question = {"messages": [{"role": "user", "content": "one two three " * 20}], "max_tokens": 1}
    with (
        Deployment(tmp_path, "tiny-dense", options).server() as port,
        proxy_with_keys(port, tmp_path) as running,
    ):
        for lora, status in (([{"id": 0, "scale": 3.0}], 400), ([], 200)):
            headers = {"Content-Type": "application/json", "X-Api-Key": KEYS["alice"]}
            body = json.dumps({**question, "lora": lora}).encode()
            answer = ask(running.port, "POST", chat, body, headers)
            assert answer.status == status, answer.body
            if status == 400:
                assert json.loads(answer.body)["error"]["code"] == "lora_not_accepted"
