"""Files that earlier versions wrote are read, migrated or refused with a reason.

The rule is the same for each kind of file. If it is read or migrated, the conversation continues
and only its new text is decoded. If it is refused, the log names the version, key or model that
differs, and the conversation is decoded again. There must be no crash, no 5xx and no answer from
wrong rows.
The README.md of each version in tests/fixtures describes how the fixtures were written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stack
import yaml

FIXTURES = Path(__file__).parents[1] / "fixtures"
# A commit before the first release, and each release.
VERSIONS = ("043861e", "0.1.0", "0.2.0", "0.3.0")
# The name and time of the model's file are part of a snapshot's fingerprint.
MODEL_NAME, MODEL_TIME = "model.gguf", 1_700_000_000
# More tokens than a question with its template, fewer than one message of the history.
MAX_NEW_TOKENS = 40
# Rows of another processor differ by rounding; wrong rows differ by whole units.
TOLERANCE = 0.25
# The fixtures may not be deleted for their age.
NO_MAX_AGE = {"snapshots__max_age_h": 10_000_000}
REASON = re.compile(
    r"(version|another (key|model|build)|set aside|put aside|not used|cannot be recorded)",
    re.IGNORECASE,
)
KINDS = ("decoded", "recovered", "resident_before", "omitted")


@pytest.fixture(scope="module", autouse=True)
def forked_proxies() -> Iterator[None]:
    """Fork the hundred processes of this file, which tests what they read."""
    with stack.forked_proxies():
        yield


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """The version that wrote the files."""
    return str(request.param)


def unpack_fixture(version: str, name: str, folder: Path) -> dict[str, Any]:
    """Unpack a fixture and the model into a folder; returns the fixture's description."""
    folder.mkdir()
    with tarfile.open(FIXTURES / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    shutil.copy(stack.MODEL, folder / MODEL_NAME)
    os.utime(folder / MODEL_NAME, (MODEL_TIME, MODEL_TIME))
    fixture: dict[str, Any] = json.loads((FIXTURES / version / f"{name}.json").read_text("utf-8"))
    return fixture


@contextmanager
def server(fixture: dict[str, Any], patched: bool, folder: Path | None) -> Iterator[stack.Process]:
    """Start a server with the options of a fixture, and without its files if `folder` is None."""
    options = list(fixture["options"])
    if folder is None:
        for name in ("--evoke-disk", "--slot-save-path"):
            if name in options:
                index = options.index(name)
                del options[index : index + 2]
    model = MODEL_NAME if folder else str(stack.MODEL)
    with stack.server(*options, patched=patched, folder=folder, model=model) as running:
        yield running
        assert running.alive, running.output[-4000:]


def assert_refused_with_a_reason(*logs: str) -> None:
    """Assert that a log names the reason why a file is not used."""
    lines = [line for log in logs for line in log.splitlines()]
    reasons = [line for line in lines if REASON.search(line)]
    assert reasons, (
        "files of an earlier version are neither read nor refused with a reason: log a warning that"
        " names what differs (format version, key, model) and what happens instead\n"
        + "\n".join(lines[-40:])
    )


def was_restored(proxy: stack.Process) -> bool:
    """Return whether a snapshot was restored with use; it is counted soon after the answer."""
    for _ in range(50):
        scrape = stack.request(proxy.admin_port, "GET", "/metrics").body.decode()
        if stack.sample(scrape, "evoke_snapshot_restores_total", result="useful"):
            return True
        if REASON.search(proxy.output):
            return False
        time.sleep(0.1)
    return False


def probabilities(port: int, prompt: list[int]) -> dict[int, float]:
    """Return the likeliest next tokens after a prompt, with their log probabilities."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 10, "temperature": 0, "id_slot": 0}
    answer = stack.request(port, "POST", "/completion", {**body, "cache_prompt": True})
    assert answer.status == 200, answer.body
    (step,) = answer.json["completion_probabilities"]
    return {token["id"]: token["logprob"] for token in step["top_logprobs"]}


def assert_equally_likely(actual: dict[int, float], expected: dict[int, float]) -> None:
    """Assert that the log probabilities of likely tokens differ by no more than rounding."""
    shared = actual.keys() & expected.keys()
    assert len(shared) >= 8, (actual, expected)
    for token in shared:
        assert actual[token] == pytest.approx(expected[token], abs=TOLERANCE)


def test_block_files_are_adopted_or_refused_with_a_reason(version: str, tmp_path: Path) -> None:
    fixture = unpack_fixture(version, "blocks", tmp_path / "f")
    tokens, names = fixture["tokens"], fixture["names"]
    end = len(names) * fixture["block"]
    with server(fixture, True, None) as empty:
        expected = probabilities(empty.port, tokens)
    with server(fixture, True, tmp_path / "f") as reader:
        epoch = stack.request(reader.port, "GET", "/slots/0/blocks").json["epoch"]
        body = {"epoch": epoch, "tokens": tokens[:end], "names": names}
        adopted = stack.request(reader.port, "POST", "/slots/0?action=block-adopt", body)
        if adopted.status == 200:
            assert adopted.json["n_loaded"] == end
            body = {"prompt": tokens, "n_predict": 1, "n_probs": 10, "temperature": 0, "id_slot": 0}
            epoch = stack.request(reader.port, "GET", "/slots/0/blocks").json["epoch"]
            body |= {"cache_prompt": True, "evoke": {"epoch": epoch}}
            answer = stack.request(reader.port, "POST", "/completion", body)
            assert answer.status == 200, answer.body
            accounting = answer.json["timings"]["evoke"]
            assert accounting["recovered"] == end and accounting["decoded"] == len(tokens) - end
            (step,) = answer.json["completion_probabilities"]
            assert_equally_likely({t["id"]: t["logprob"] for t in step["top_logprobs"]}, expected)
        else:
            assert 400 <= adopted.status < 500, adopted.body
            assert_refused_with_a_reason(reader.output, adopted.body.decode())
            assert_equally_likely(probabilities(reader.port, tokens), expected)


@pytest.mark.parametrize("name", ["session", "session-encrypted"])
def test_a_budgeted_session_continues_from_its_record_and_block_files(
    version: str, name: str, tmp_path: Path
) -> None:
    fixture = unpack_fixture(version, name, tmp_path / "f")
    settings = fixture["settings"] | NO_MAX_AGE
    chat = stack.Chat(fixture["session"], {}, fixture["messages"])
    with server(fixture, True, tmp_path / "f") as upstream:
        with stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy:
            listed = stack.request(proxy.admin_port, "GET", "/evoke/sessions").json["sessions"]
            if fixture["session"] not in [session["name"] for session in listed]:
                assert_refused_with_a_reason(proxy.output)
            reply = chat.say(proxy.port, fixture["question"])
            assert fixture["value"] in stack.text_of(reply)
            accounting = stack.accounting(reply)
            assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
            assert accounting["n_resident_peak"] <= settings["policy__budget"]
            print({kind: accounting[kind] for kind in KINDS})
            if accounting["decoded"] > MAX_NEW_TOKENS:
                assert_refused_with_a_reason(upstream.output, proxy.output)
            else:
                assert accounting["recovered"] > 0
            # The session continues, and its files of the current format can be read.
            chat.say(proxy.port, "Go on.")
            assert proxy.stop() == 0
        with stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy:
            accounting = stack.accounting(chat.say(proxy.port, "And once more?"))
            assert accounting["decoded"] <= MAX_NEW_TOKENS


def test_vectors_of_a_session_are_read_or_recomputed_with_a_warning(
    version: str, tmp_path: Path
) -> None:
    fixture = unpack_fixture(version, "session", tmp_path / "f")
    settings = fixture["settings"] | NO_MAX_AGE
    chat = stack.Chat(fixture["session"], {}, fixture["messages"])
    with (
        server(fixture, True, tmp_path / "f") as upstream,
        stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy,
    ):
        reply = chat.say(proxy.port, fixture["question"])
        scrape = stack.request(proxy.port, "GET", "/metrics")
        if scrape.status != 200:
            scrape = stack.request(proxy.admin_port, "GET", "/metrics")
        exposition = scrape.body.decode()
        assert stack.sample(exposition, "evoke_embedded_total", kind="question") > 0
        embedded = stack.sample(exposition, "evoke_embedded_total", kind="block")
        if stack.accounting(reply)["decoded"] <= MAX_NEW_TOKENS and embedded > 4:
            assert_refused_with_a_reason(proxy.output)


@pytest.mark.parametrize("name", ["stock", "stock-encrypted"])
def test_a_snapshot_of_a_stock_server_is_restored_or_refused(
    version: str, name: str, tmp_path: Path
) -> None:
    fixture = unpack_fixture(version, name, tmp_path / "f")
    settings = fixture["settings"] | NO_MAX_AGE
    fields = {"logprobs": True, "top_logprobs": 10, "max_tokens": 12}
    replies = []
    for folder in (None, tmp_path / "f"):
        chat = stack.Chat(fixture["session"], {}, list(fixture["messages"]))
        overrides = settings if folder else {}
        with (
            server(fixture, False, folder) as upstream,
            stack.proxy(upstream.port, folder=folder, **overrides) as proxy,
        ):
            replies.append(chat.say(proxy.port, fixture["question"], **fields))
            if folder and not was_restored(proxy):
                assert_refused_with_a_reason(proxy.output)
    fresh, continued = replies
    assert fixture["value"] in stack.text_of(fresh) and fixture["value"] in stack.text_of(continued)
    steps = [reply["choices"][0]["logprobs"]["content"][0] for reply in replies]
    assert_equally_likely(
        *({t["id"]: t["logprob"] for t in step["top_logprobs"]} for step in steps)
    )


def test_an_encrypted_directory_is_refused_without_its_key(version: str, tmp_path: Path) -> None:
    fixture = unpack_fixture(version, "stock-encrypted", tmp_path / "f")
    left_out = {"snapshots__key_file", *stack.TUNING}
    settings = {key: value for key, value in fixture["settings"].items() if key not in left_out}
    env = {f"EVOKE_{key.replace('__', '_').upper()}": str(value) for key, value in settings.items()}
    env["EVOKE_SNAPSHOTS_DIRECTORY"] = str(tmp_path / "f/slots")
    completed = stack.command_line(
        *("serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"), **env
    )
    assert completed.returncode == 2, completed.stderr
    assert "snapshots.key_file" in completed.stderr and "Traceback" not in completed.stderr


def test_a_configuration_file_is_accepted_or_each_key_refused_with_its_replacement(
    version: str, tmp_path: Path
) -> None:
    fixture = unpack_fixture(version, "configuration", tmp_path / "f")
    tree = yaml.safe_load((tmp_path / "f/evoke.yaml").read_text("utf-8"))
    for _ in range(len(list(_leaves(tree))) + 1):
        (tmp_path / "f/current.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        completed = _check_config(tmp_path / "f", ["--config", "current.yaml"])
        if completed.returncode == 0:
            break
        _drop(tree, _refused_key(completed, list(_leaves(tree))))
    assert completed.returncode == 0
    lines = set(completed.stdout.splitlines())
    untouched = {"listen", "upstream"} & tree.keys()
    for line in fixture["described"]:
        if line.split()[0] in untouched:
            assert line in lines, completed.stdout


def test_an_environment_is_accepted_or_each_variable_refused_with_its_replacement(
    version: str, tmp_path: Path
) -> None:
    unpack_fixture(version, "configuration", tmp_path / "f")
    lines = (tmp_path / "f/environment").read_text("utf-8").splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    keys = {_key_of(name): name for name in variables}
    for _ in range(len(variables) + 1):
        completed = _check_config(tmp_path / "f", [], **variables)
        if completed.returncode == 0:
            break
        refused = _refused_key(completed, [*keys, *variables])
        del variables[keys.get(refused, refused)]
    assert completed.returncode == 0
    from_file = _check_config(tmp_path / "f", ["--config", "evoke.yaml"])
    if from_file.returncode == 0:
        assert completed.stdout == from_file.stdout


def _check_config(folder: Path, options: list[str], **env: str) -> Any:
    """Run check-config; returns the completed process."""
    completed = stack.command_line("check-config", *options, folder=folder, **env)
    assert completed.returncode in (0, 2), completed.stderr
    assert "Traceback" not in completed.stderr
    return completed


def _refused_key(completed: Any, keys: list[str]) -> str:
    """Return the key that check-config refuses; its message must say what to write instead."""
    named = [
        key for key in keys if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", completed.stderr)
    ]
    assert named, f"no key of the file is named: {completed.stderr}"
    hint = re.search(
        r"did you mean|instead|renamed|is now|replaced|removed|must be", completed.stderr
    )
    assert hint, f"no replacement is named: {completed.stderr}"
    return max(named, key=len)


def _key_of(variable: str) -> str:
    """Return the key of a variable: `policy.budget` for `EVOKE_POLICY_BUDGET`."""
    section, _, rest = variable.removeprefix("EVOKE_").lower().partition("_")
    return f"{section}.{rest}" if rest else section


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values in a tree."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _drop(tree: dict[str, Any], dotted: str) -> None:
    """Remove the value of a dotted key from a tree."""
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree[parent]
    del tree[last]
