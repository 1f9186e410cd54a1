"""Two tenants at one real server, each with a key: equal words, different markers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import RunningProxy, ask, proxy
from stock_deployment import Deployment

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of
from evoke_proxy.demo.session import SYSTEM, paragraph
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository

BUDGET = 256
PEOPLE = {"alice": "20011", "bob": "48579"}
KEYS = {name: key_of(name.encode().ljust(32, b".")) for name in PEOPLE}


def _turns(name: str) -> list[str]:
    """Word for word what the other says, but for the marker."""
    rng = random.Random(4)
    fact = f"My badge number is {PEOPLE[name]}."
    return [fact, *[paragraph(rng, 11) for _ in range(2)], "What is my badge number?"]


def _say(port: int, name: str, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "evoke_session": "same"}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[name]}"}
    answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    content: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return content


def _interleaved(running: RunningProxy, seed: int) -> None:
    """All turns of both, in another order for each seed; each hears of its own marker alone."""
    how, said = (
        random.Random(seed),
        {name: [{"role": "system", "content": SYSTEM}] for name in PEOPLE},
    )
    left = {name: _turns(name) for name in PEOPLE}
    last = dict.fromkeys(PEOPLE, "")
    while any(left.values()):
        name = how.choice([name for name in PEOPLE if left[name]])
        other = next(marker for known, marker in PEOPLE.items() if known != name)
        said[name].append({"role": "user", "content": left[name].pop(0)})
        last[name] = _say(running.port, name, said[name])
        said[name].append({"role": "assistant", "content": last[name]})
        assert other not in last[name]
    assert all(PEOPLE[name] in last[name] for name in PEOPLE), last


@contextmanager
def keyed(port: int, folder: Path, **settings: object) -> Iterator[RunningProxy]:
    lines = [line_of(Caller(name, name), key) for name, key in KEYS.items()]
    write_secret(folder / "keys", "\n".join(lines))
    with proxy(port, security__keys_file=str(folder / "keys"), **settings) as running:
        yield running


def test_tenants_with_budgets_in_one_slot_do_not_mix(patched_port: int, tmp_path: Path) -> None:
    with keyed(patched_port, tmp_path, policy__budget=BUDGET) as running:
        for seed in range(4):
            _interleaved(running, seed)
        assert running.metric("evoke_blocks_recovered_total") > 0
        assert running.metric("evoke_degraded_total", stage="plan") == 0
        known = {known.tenant for known in running.gateway.conversations}
        assert known == set(PEOPLE)
        for name in PEOPLE:
            listed = ask(patched_port, "GET", f"/slots/0/blocks?tenant={name}").body
            assert json.loads(listed)["blocks"], "each has copies of its own"


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
    named = {f"snapshots__{key}": value for key, value in settings.items()}
    with (
        deployment.server() as port,
        keyed(port, tmp_path, snapshots__min_tokens=32, **named) as running,
    ):
        for seed in range(3):
            _interleaved(running, seed)
            running.wait_for_background()
        look = SnapshotRepository(
            SnapshotsConfig(directory=str(folder), key_file=settings["key_file"])
        )
        look.open(claim=False)
        assert {item.tenant for item in look.snapshots} == set(PEOPLE)
        look.close()
        # Both files and index are encrypted; what llama-server read in the clear is gone again.
        kept = list(folder.glob("*.evoke-*"))
        # A slot file in the clear begins with llama.cpp's magic number.
        assert kept and not any(path.read_bytes().startswith(b"qsgg") for path in kept)
        assert running.metric("evoke_snapshot_restores_total", result="useful") > 0
