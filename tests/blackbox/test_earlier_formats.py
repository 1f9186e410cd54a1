"""Files of commit 043861e are read, migrated or refused by the current code.

The rule is the same for each kind of file. Read or migrated: the conversation goes on and only its
new text is decoded. Refused: the log says why, naming the version, key or model that differs, and
the conversation is decoded again. Never: a crash, a 5xx, or an answer from wrong rows. How the
fixtures were written, and how to write them again: tests/fixtures/043861e/README.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stack
import yaml

FIXTURES = Path(__file__).parents[1] / "fixtures/043861e"
# The name and time of the model's file are part of a snapshot's fingerprint.
MODEL_NAME, MODEL_TIME = "model.gguf", 1_700_000_000
# More than the question and what a template puts around it, less than one message of the history.
FEW = 40
# Rows of another processor differ by rounding; wrong rows differ by whole units.
TOLERANCE = 0.25
# The fixtures are as old as they are: nothing of them may go for its age.
AGELESS = {"snapshots__max_age_h": 10_000_000}
REASON = re.compile(
    r"(version|another (key|model|build)|set aside|put aside|not used|made anew|not written down)",
    re.IGNORECASE,
)
KINDS = ("decoded", "recovered", "resident_before", "omitted")


def unpacked(name: str, folder: Path) -> dict[str, Any]:
    """Put a fixture and the model into a folder; returns what was said when it was written."""
    folder.mkdir()
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    shutil.copy(stack.MODEL, folder / MODEL_NAME)
    os.utime(folder / MODEL_NAME, (MODEL_TIME, MODEL_TIME))
    note: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text("utf-8"))
    return note


@contextmanager
def server(note: dict[str, Any], patched: bool, folder: Path | None) -> Iterator[stack.Process]:
    """A server with the options of the fixture; without a folder one that has no files."""
    options = list(note["options"])
    if folder is None:
        for name in ("--evoke-disk", "--slot-save-path"):
            if name in options:
                at = options.index(name)
                del options[at : at + 2]
    model = MODEL_NAME if folder else str(stack.MODEL)
    with stack.server(*options, patched=patched, folder=folder, model=model) as running:
        yield running
        assert running.alive, running.output[-4000:]


def refused_with_a_reason(*logs: str) -> None:
    """Assert that a log says at all why something that was there is not used."""
    lines = [line for log in logs for line in log.splitlines()]
    said = [line for line in lines if REASON.search(line)]
    assert said, (
        "files of an earlier version are neither read nor refused with a reason: log a warning that"
        " names what differs (format version, key, model) and what happens instead\n"
        + "\n".join(lines[-40:])
    )


def probabilities(port: int, prompt: list[int]) -> dict[int, float]:
    """The likeliest next tokens after a prompt, with their log probabilities."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 10, "temperature": 0, "id_slot": 0}
    answer = stack.request(port, "POST", "/completion", {**body, "cache_prompt": True})
    assert answer.status == 200, answer.body
    (step,) = answer.json["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in step["top_logprobs"]}


def assert_alike(found: dict[int, float], wanted: dict[int, float]) -> None:
    """Assert that two lists of likely tokens differ by no more than rounding."""
    shared = found.keys() & wanted.keys()
    assert len(shared) >= 8, (found, wanted)
    for token in shared:
        assert found[token] == pytest.approx(wanted[token], abs=TOLERANCE)


def test_block_files_are_adopted_or_refused_with_a_reason(tmp_path: Path) -> None:
    note = unpacked("blocks", tmp_path / "f")
    tokens, names = note["tokens"], note["names"]
    end = len(names) * note["block"]
    with server(note, True, None) as fresh:
        wanted = probabilities(fresh.port, tokens)
    with server(note, True, tmp_path / "f") as reader:
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
            assert_alike({t["id"]: t["logprob"] for t in step["top_logprobs"]}, wanted)
        else:
            assert 400 <= adopted.status < 500, adopted.body
            refused_with_a_reason(reader.output, adopted.body.decode())
            assert_alike(probabilities(reader.port, tokens), wanted)


@pytest.mark.parametrize("name", ["session", "session-encrypted"])
def test_a_budgeted_session_continues_from_its_record_and_block_files(
    name: str, tmp_path: Path
) -> None:
    note = unpacked(name, tmp_path / "f")
    settings = note["settings"] | AGELESS
    chat = stack.Chat(note["session"], {}, note["messages"])
    with server(note, True, tmp_path / "f") as upstream:
        with stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy:
            reply = chat.say(proxy.port, note["question"])
            assert note["value"] in stack.text_of(reply)
            accounting = stack.accounting(reply)
            assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
            assert accounting["n_resident_peak"] <= settings["policy__budget"]
            print({kind: accounting[kind] for kind in KINDS})
            if accounting["decoded"] > FEW:
                refused_with_a_reason(upstream.output, proxy.output)
            else:
                assert accounting["recovered"] > 0
            # The session goes on, and what is written now can be read.
            chat.say(proxy.port, "Go on.")
            assert proxy.stop() == 0
        with stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy:
            accounting = stack.accounting(chat.say(proxy.port, "And once more?"))
            assert accounting["decoded"] <= FEW


def test_vectors_of_a_session_are_read_or_computed_again_with_a_warning(tmp_path: Path) -> None:
    note = unpacked("session", tmp_path / "f")
    settings = note["settings"] | AGELESS
    chat = stack.Chat(note["session"], {}, note["messages"])
    with (
        server(note, True, tmp_path / "f") as upstream,
        stack.proxy(upstream.port, folder=tmp_path / "f", **settings) as proxy,
    ):
        reply = chat.say(proxy.port, note["question"])
        scrape = stack.request(proxy.port, "GET", "/metrics")
        if scrape.status != 200:
            scrape = stack.request(proxy.admin_port, "GET", "/metrics")
        exposition = scrape.body.decode()
        assert stack.sample(exposition, "evoke_embedded_total", kind="question") > 0
        embedded = stack.sample(exposition, "evoke_embedded_total", kind="block")
        if stack.accounting(reply)["decoded"] <= FEW and embedded > 4:
            refused_with_a_reason(proxy.output)


@pytest.mark.parametrize("name", ["stock", "stock-encrypted"])
def test_a_snapshot_of_a_stock_server_is_restored_or_refused(name: str, tmp_path: Path) -> None:
    note = unpacked(name, tmp_path / "f")
    settings = note["settings"] | AGELESS
    asked = {"logprobs": True, "top_logprobs": 10, "max_tokens": 12}
    replies = []
    for folder in (None, tmp_path / "f"):
        chat = stack.Chat(note["session"], {}, list(note["messages"]))
        given = settings if folder else {}
        with (
            server(note, False, folder) as upstream,
            stack.proxy(upstream.port, folder=folder, **given) as proxy,
        ):
            replies.append(chat.say(proxy.port, note["question"], **asked))
            logs = upstream.output, proxy.output
    fresh, continued = replies
    assert note["value"] in stack.text_of(fresh) and note["value"] in stack.text_of(continued)
    first = [reply["choices"][0]["logprobs"]["content"][0] for reply in replies]
    assert_alike(*({t["id"]: t["logprob"] for t in step["top_logprobs"]} for step in first))
    if continued["timings"]["prompt_n"] > fresh["timings"]["prompt_n"] // 2:
        refused_with_a_reason(*logs)


def test_an_encrypted_directory_without_its_key_is_refused_by_name(tmp_path: Path) -> None:
    note = unpacked("stock-encrypted", tmp_path / "f")
    settings = {key: value for key, value in note["settings"].items() if "key_file" not in key}
    env = {f"EVOKE_{key.replace('__', '_').upper()}": str(value) for key, value in settings.items()}
    env["EVOKE_SNAPSHOTS_DIRECTORY"] = str(tmp_path / "f/slots")
    done = stack.command_line(
        *("serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"), **env
    )
    assert done.returncode == 2, done.stderr
    assert "snapshots.key_file" in done.stderr and "Traceback" not in done.stderr


def test_a_configuration_file_is_accepted_or_each_key_refused_with_its_replacement(
    tmp_path: Path,
) -> None:
    note = unpacked("configuration", tmp_path / "f")
    tree = yaml.safe_load((tmp_path / "f/evoke.yaml").read_text("utf-8"))
    for _ in range(len(list(_leaves(tree))) + 1):
        (tmp_path / "f/now.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        done = _checked(tmp_path / "f", ["--config", "now.yaml"])
        if done.returncode == 0:
            break
        _drop(tree, _refused_key(done, list(_leaves(tree))))
    assert done.returncode == 0
    said = set(done.stdout.splitlines())
    untouched = {"listen", "upstream"} & tree.keys()
    for line in note["described"]:
        if line.split()[0] in untouched:
            assert line in said, done.stdout


def test_an_environment_is_accepted_or_each_variable_refused_with_its_replacement(
    tmp_path: Path,
) -> None:
    unpacked("configuration", tmp_path / "f")
    lines = (tmp_path / "f/environment").read_text("utf-8").splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    keys = {_key_of(name): name for name in variables}
    for _ in range(len(variables) + 1):
        done = _checked(tmp_path / "f", [], **variables)
        if done.returncode == 0:
            break
        named = _refused_key(done, [*keys, *variables])
        del variables[keys.get(named, named)]
    assert done.returncode == 0
    file = _checked(tmp_path / "f", ["--config", "evoke.yaml"])
    if file.returncode == 0:
        assert done.stdout == file.stdout


def _checked(folder: Path, options: list[str], **env: str) -> Any:
    done = stack.command_line("check-config", *options, folder=folder, **env)
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr
    return done


def _refused_key(done: Any, keys: list[str]) -> str:
    """The key that a refusal is about; it must say what to write instead."""
    named = [key for key in keys if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", done.stderr)]
    assert named, f"no key of the file is named: {done.stderr}"
    hint = re.search(r"did you mean|instead|renamed|is now|replaced|removed|must be", done.stderr)
    assert hint, f"nothing is said of what to write instead: {done.stderr}"
    return max(named, key=len)


def _key_of(variable: str) -> str:
    """`EVOKE_POLICY_BUDGET` as `policy.budget`."""
    section, _, rest = variable.removeprefix("EVOKE_").lower().partition("_")
    return f"{section}.{rest}" if rest else section


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _drop(tree: dict[str, Any], dotted: str) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree[parent]
    del tree[last]
