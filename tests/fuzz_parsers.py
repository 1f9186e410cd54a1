"""Fuzzes the parsers of the proxy: whatever the bytes, only the documented errors are raised.

python tests/fuzz_parsers.py [--seconds N] [TARGET...]

runs each target (default: all) for some seconds with atheris, whose inputs are guided by the code
that they cover. Needs `pip install atheris`, which has wheels for Linux. A failing input is kept in
out/fuzz. `tests/unit/house/test_parsers_fuzzed.py` runs the same targets on random inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out/fuzz"
# Seconds after which an input counts as a hang; and the memory of a process, MiB.
SLOW_S, MEMORY_MIB = 10, 2048


@dataclass(frozen=True, slots=True)
class Target:
    """A parser to fuzz.

    Attributes:
        run: Parses bytes; raises only what is allowed.
        covers: The parsers that it calls, as MODULE:FUNCTION below `evoke_proxy`.
        seeds: Valid inputs, which are changed at random.
    """

    run: Callable[[bytes], object]
    covers: Sequence[str]
    seeds: Sequence[bytes]


def _get(name: str) -> Any:
    """Return a function of the proxy by MODULE:FUNCTION; imported late, to be instrumented."""
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(f"evoke_proxy.{module}")
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _of_object(name: str, *allowed: str, more: Sequence[Any] = ()) -> Callable[[bytes], None]:
    """Run a parser of JSON objects; `allowed` names errors, those of `errors` or built-in."""

    def run(data: bytes) -> None:
        value = _json(data)
        if isinstance(value, dict):
            try:
                _get(name)(value, *more)
            except _errors(allowed):
                pass

    return run


def _errors(names: Iterable[str]) -> tuple[type[BaseException], ...]:
    errors: Any = importlib.import_module("evoke_proxy.errors")
    builtin = vars(importlib.import_module("builtins"))
    return tuple(builtin.get(name) or getattr(errors, name) for name in names)


def _of_file(name: str, *allowed: str) -> Callable[[bytes], None]:
    """Run a parser of files."""

    def run(data: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
            file.write(data)
            file.flush()
            try:
                _get(name)(Path(file.name))
            except _errors(allowed):
                pass

    return run


def _pieces(data: bytes) -> list[bytes]:
    """Divide data; its first byte says into pieces of which size."""
    size = data[0] % 17 + 1 if data else 1
    return [data[at : at + size] for at in range(1, len(data), size)]


def _request(data: bytes) -> None:
    """A body of any dialect, as for a client with a key."""
    from evoke_proxy.config import LimitsConfig, NormaliseConfig
    from evoke_proxy.errors import RequestError

    dialects = ("chat", "responses", "messages", "completions")
    dialect, body = dialects[data[0] % 4 if data else 0], data[1:]
    try:
        _get("engine.parsing.body_checks:check_body")(body, "application/json", LimitsConfig())
        parsed = _get("engine.parsing.body_parsing:parse_object")(body)
        chat = _get("core.request.chat:parse_chat")(dialect, parsed)
    except RequestError:
        return
    _get("core.retrieval.query:query_of")(chat)
    _get("core.request.chat:strip_own_fields")(body)
    _get("core.session.identity:hint_of")({}, parsed)
    settings = NormaliseConfig(billing=True, dates_h=1.0, tools=True)
    normalizer = _get("engine.parsing.parser:Normalizer")
    normalizer(settings, _get("adapters.metrics:Metrics")()).apply(body, dialect, "")


def _grammar(data: bytes) -> None:
    from evoke_proxy.config import LimitsConfig
    from evoke_proxy.errors import RequestError

    try:
        _get("core.request.parameters:check_grammar")(data, LimitsConfig())
    except RequestError:
        pass
    text = data.decode("utf-8", "replace")
    _get("core.request.grammar_cost:grammar_cost")(text)
    _get("core.request.grammar_cost:pattern_cost")(text)


def _reply(data: bytes) -> None:
    """A reply of llama-server in pieces, through everything that reads it."""
    readers = [
        _get("core.reply.answer:AnswerReader")(),
        _get("core.reply.observer:ReplyObserver")(),
        _get("core.reply.event_stream:LineReader")(1000),
        _get("core.reply.event_stream:EventReader")(1000),
        _get("core.reply.reply_edit:UsageEditor")({}),
    ]
    for reader in readers:
        for piece in _pieces(data):
            reader.feed(piece)
        if hasattr(reader, "close"):
            reader.close()
    readers[0].message(True)
    _get("core.reply.reply_edit:with_accounting")(data[1:], {})
    _get("core.reply.reply_edit:with_context_advice")(data[1:])
    value = _json(data[1:])
    if isinstance(value, dict):
        _get("core.session.accounting:TokenAccounting.parse")(value.get("timings"))
        _get("core.request.forced_answer:read_steps")(value, [1, 2])


def _limits(data: bytes) -> None:
    from evoke_proxy.errors import PromptTooLong

    for name in ("RenderingLimit", "TokenListLimit"):
        limit = _get(f"core.prompt.rendered:{name}")(5)
        try:
            for piece in _pieces(data):
                limit.feed(piece)
        except PromptTooLong:
            pass


def _headers(data: bytes) -> None:
    from evoke_proxy.errors import RequestError

    text = data.decode("utf-8", "surrogateescape")
    name, _, value = text.partition(":")
    try:
        _get("core.request.request_head:check_head")(name[:8], value, {name: value}, False)
    except RequestError:
        pass
    _get("core.session.identity:hint_of")({"X-Evoke-Session": value, name: value}, {})
    _get("adapters.tracing:trace_id_of")(value)


def _record(data: bytes) -> None:
    """Decode a record, and register its session, as a proxy does when it starts."""
    from evoke_proxy.config import PolicyConfig

    try:
        record = _get("core.session.codec:decode")(data)
        _get("engine.server.conversations:Conversations")(PolicyConfig(), 2).recall(record)
    except ValueError:
        pass


def _vectors(data: bytes) -> None:
    try:
        _get("core.retrieval.vectors:decode_vectors")(data, b"\1\2")
    except ValueError:
        pass


def _state_file(data: bytes) -> None:
    def read(at: int, n_bytes: int) -> bytes:
        assert at + n_bytes <= len(data), "memory is allocated beyond the file"
        return data[at : at + n_bytes]

    _get("core.snapshots.state_file:caches")(read, len(data))
    _get("core.snapshots.state_file:frame")(read, len(data))


def _keys(data: bytes) -> None:
    from evoke_proxy.errors import ConfigError

    try:
        _get("core.tenants.api_keys:Keys.parse")(data.decode("utf-8", "surrogateescape"))
    except ConfigError:
        pass


def _attention(data: bytes) -> None:
    """Answers with floats; a wrong one raises built-in errors, which a turn counts and survives."""
    value = _json(data)
    allowed = (KeyError, TypeError, ValueError, IndexError, OverflowError)
    for name in ("core.policy.attention:Queries.parse",):
        try:
            _get(name)(value, 1)
        except allowed:
            pass
    try:
        _get("core.policy.attention:decode_floats")(data.decode("latin-1"))
    except allowed:
        pass


def _status(data: bytes) -> None:
    value = _json(data)
    if isinstance(value, dict):
        try:
            _get("core.snapshots.slot_contents:SlotStatus.parse")(value)
        except (KeyError, TypeError, ValueError, OverflowError):
            pass


def _block_file(data: bytes) -> None:
    try:
        _get("adapters.block_files:parse_head")(data)
    except ValueError:
        pass
    try:
        _get("adapters.block_files:read_own_head")(io.BytesIO(data), "other")
    except ValueError:
        pass


def _session_archive(data: bytes) -> None:
    """Read an archive that is not encrypted."""
    plain = SimpleNamespace(decrypting=lambda source, aad: open(source, "rb"))
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name) / "blocks", Path(name) / "archive"
        folder.mkdir()
        source.write_bytes(data)
        module = "engine.storage.session_archive"
        archives = _get(f"{module}:SessionArchives")(folder, plain)
        try:
            archives.read(source, "m", set())
        except _errors(["ConfigError"]):
            pass


def _block_head() -> bytes:
    """The first bytes of a block file with one name."""
    text = b"".join(len(text).to_bytes(8, "little") + text for text in (b"t",))
    names = b"".join(len(text).to_bytes(8, "little") + text for text in (b"s/0-4-a", b"s"))
    head = bytes(40) + text + (1).to_bytes(8, "little") + names
    fixed = b"evokeKVB" + (3).to_bytes(4, "little") + (0x01020304).to_bytes(4, "little")
    return fixed + (48 + len(head)).to_bytes(8, "little") + bytes(24) + head


def _archive() -> bytes:
    """An archive of one session without a readable record, which is found last."""
    out, record = io.BytesIO(), b"record"
    entry = {"name": "record-0", "n_bytes": 6, "sha256": hashlib.sha256(record).hexdigest()}
    manifest = {"version": 1, "session": "s", "tenant": "", "model": "m"}
    manifest |= {"entries": [entry | {"id": "s"}]}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in (("record-0", record), ("manifest.json", _dump(manifest))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _gguf(*values: tuple[str, int, bytes]) -> bytes:
    """The bytes of a GGUF file with these values: name, type, encoded."""
    text = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + len(values).to_bytes(8, "little")
    for name, kind, encoded in values:
        text += len(name).to_bytes(8, "little") + name.encode() + kind.to_bytes(4, "little")
        text += encoded
    return text


_CHAT: Mapping[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}], "evoke_keep": "pin"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "evoke_budget": 512,
    "stream": True,
}
_SLOT: Mapping[str, Any] = {
    "id": 0, "epoch": 3, "n_tokens": 9, "n_common": 4, "resident": [[0, 4]], "n_free": 100,
    "is_processing": False, "held": [], "n_reusable": 4, "tenant": "", "session": "s",
    "blocks": [{"name": "s/0-4-a", "p0": 0, "p1": 4, "tier": "disk"}],
    "ram": {"budget": 1, "used": 0, "n_dropped": 0}, "disk": {"budget": 5, "used": 1},
    "row_bytes": 64,
}  # fmt: skip
_RENDERED = {
    "tokens": [1, 2, 3, 4, 5], "generation": 4, "spans": [["user", 0, 4]], "slots": [_SLOT],
    "sentence_starts": [0, 2], "media": [[1, 2]], "edges": [[4, "a"]], "instance": "i",
}  # fmt: skip
_PROPS = {
    "total_slots": 2, "build_info": "b1", "is_sleeping": False,
    "evoke": {"version": 1, "features": ["blocks", "plan", "adopt"], "memory": "dense",
              "limits": {"n_cells": 4096, "attention": {"layers": [0, 1]}}, "instance": "i"},
}  # fmt: skip
_RECORD: Mapping[str, Any] = {
    "version": 2, "id": "s", "tenant": "t", "turns": 1,
    "hint": {"text": "chat", "source": "user", "weak": True},
    "edges": {"head": 3, "last_user_end": 3, "n_users": 1},
    "slot": {"id": 0, "epoch": 1, "server": ""},
    "tokens": "AQAAAAIAAAADAAAABAAAAA==", "generation": 3,
    "copied": [True], "ranges": [{"label": "s/3-4-b", "span": [3, 4]}], "stale": ["s/0-1-c"],
    "resident": [[0, 3]], "task": {"focus": "AACAPw==", "begins": 0},
    "marks": [{"turn": 1, "pinned": True, "priority": 1.0}], "recovered": {"s/0-3-a": 1},
    "overrides": {"pinned": False, "own_budget": True, "budget": 64, "pins": [[0, 3]]},
    "block_fields": ["display_name", "label", "start", "end", "role", "turn", "message", "text",
                     "aliases", "pinned", "preferred", "priority"],
    "blocks": [["user#0", "s/0-3-a", 0, 3, "user", 1, 0, "Hello", ["a.py"], False, False, 1.0]],
    "past": [["user#0", "s/0-3-d", 0, 3, "user", 1, 0, "Before", [], False, False, 1.0]],
}  # fmt: skip
_TIMINGS = {
    "prompt_n": 4, "cache_n": 2,
    "evoke": {"decoded": 1, "recovered": 0, "omitted": 2, "auto_evicted": [[0, 4, "a"]]},
}  # fmt: skip
_ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}],
    "usage": {"prompt_tokens": 5}, "timings": _TIMINGS,
}  # fmt: skip
_EVENTS = b'\7: wait\n\ndata: {"choices":[{"delta":{"content":"hi"}}]}\n\ndata: [DONE]\n\n'


def _dump(value: object, first: bytes = b"") -> bytes:
    return first + json.dumps(value).encode()


TARGETS: Mapping[str, Target] = {
    "block-file": Target(
        _block_file,
        [
            "adapters.block_files:parse_head",
            "adapters.block_files:read_head",
            "adapters.block_files:read_own_head",
        ],
        [_block_head()],
    ),
    "session-archive": Target(
        _session_archive,
        [
            "engine.storage.session_archive:SessionArchives.read",
            "engine.storage.session_archive:_Forward.read",
        ],
        [_archive()],
    ),
    "request": Target(
        _request,
        [
            "engine.parsing.body_parsing:parse_object",
            "core.request.json_parsing:parsed_json",
            "core.request.json_parsing:parse_in_pieces",
            "core.request.chat:parse_chat",
            "core.request.options:parse_options",
            "core.model.blocks:parse_role",
        ],
        [_dump(_CHAT, bytes([dialect])) for dialect in range(4)],
    ),
    "grammar": Target(
        _grammar,
        [],
        [b'root ::= ("a" | [b-c]+ )* x{2,3} # end\nx ::= "\\"" root?', b"^(a|b)[0-9]{1,3}$"],
    ),
    "headers": Target(
        _headers,
        [],
        [b"Session:abc", b"traceparent:00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"],
    ),
    "reply": Target(
        _reply,
        [
            "core.reply.answer:AnswerReader.feed",
            "core.reply.observer:ReplyObserver.feed",
            "core.reply.event_stream:LineReader.feed",
            "core.reply.event_stream:EventReader.feed",
            "core.reply.reply_edit:UsageEditor.feed",
            "core.session.accounting:TokenAccounting.parse",
            "core.request.forced_answer:read_steps",
        ],
        [_dump(_ANSWER, b"\7"), _EVENTS],
    ),
    "rendered": Target(
        _of_object("core.prompt.rendered:Rendered.parse", "UpstreamProtocolError"),
        ["core.prompt.rendered:Rendered.parse"],
        [_dump(_RENDERED)],
    ),
    "rendering_limit": Target(
        _limits,
        [
            "core.prompt.rendered:RenderingLimit.feed",
            "core.prompt.rendered:TokenListLimit.feed",
        ],
        [b'\7{"tokens_b64":"AAAAAAAAAAAA","from":3}', b"\3[1,2,3,4]"],
    ),
    "slot": Target(
        _of_object("core.prompt.rendered:SlotView.parse", "UpstreamProtocolError"),
        ["core.prompt.rendered:SlotView.parse"],
        [_dump(_SLOT)],
    ),
    "slot_status": Target(
        _status,
        ["core.snapshots.slot_contents:SlotStatus.parse"],
        [_dump({"id": 0, "id_task": 7, "n_prompt_tokens": 5, "is_processing": True})],
    ),
    "props": Target(
        _of_object("core.servers.server_info:ServerInfo.parse", "UpstreamProtocolError"),
        ["core.servers.server_info:ServerInfo.parse"],
        [_dump(_PROPS)],
    ),
    "attention": Target(
        _attention,
        [
            "core.policy.attention:Queries.parse",
            "core.policy.attention:decode_floats",
        ],
        [_dump({"pos": [1], "n_head": 1, "data": "AACAPw=="}), b"AACAPw=="],
    ),
    "record": Target(_record, ["core.session.codec:decode"], [_dump(_RECORD), b"{}"]),
    "vectors": Target(
        _vectors,
        ["core.retrieval.vectors:decode_vectors"],
        [b'["0102", [["s/0-4-a", 1, 2]]]\n' + bytes(8)],
    ),
    "state_file": Target(_state_file, [], [b"qsgg" + bytes([3, 0, 0, 0]) + bytes(40)]),
    "keys": Target(
        _keys,
        ["core.tenants.api_keys:Keys.parse"],
        [b"alice team sha256:" + b"a" * 64 + b" # a comment\n"],
    ),
    "settings": Target(
        _of_file("config.loader:read_file", "ConfigError"),
        ["config.loader:read_file"],
        [(ROOT / "config/evoke.example.yaml").read_bytes(), b"policy: {budget: 512}\n"],
    ),
    "gguf": Target(
        _of_file("adapters.model_file:read_shape", "ConfigError"),
        ["adapters.model_file:read_shape"],
        [
            _gguf(
                ("general.architecture", 8, (5).to_bytes(8, "little") + b"llama"),
                ("llama.block_count", 4, (2).to_bytes(4, "little")),
                ("llama.list", 9, (4).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(4)),
            )
        ],
    ),
    "log": Target(
        _of_file("divergence.conversations:read_log", "ConfigError"),
        ["divergence.conversations:read_log"],
        [_dump({"messages": _CHAT["messages"]}), b'{"role":"user","content":"a"}\n'],
    ),
}


def fuzz(name: str, seconds: int) -> int:
    """Fuzz one target in this process, which atheris ends; a crash has an exit code that is not 0.

    Its code is instrumented while it is imported.
    """
    import atheris

    target = TARGETS[name]
    with atheris.instrument_imports(include=["evoke_proxy"]):
        for seed in target.seeds:
            target.run(seed)
    corpus = OUT / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MEMORY_MIB}"]
    options += ["-max_len=4096", "-print_final_stats=1", f"-artifact_prefix={OUT}/{name}-"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()
    return 0


def main() -> int:
    """Fuzz the named targets, each in a process of its own; 1 when one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=" ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=30, help="for each target (30)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris is missing: make .venv/clients installs it", file=sys.stderr)
        return 2
    unknown = set(arguments.targets).difference(TARGETS)
    if unknown:
        parser.error(f"no targets: {', '.join(sorted(unknown))}")
    if arguments.inside:
        return fuzz(arguments.targets[0], arguments.seconds)
    failed = []
    for name in arguments.targets or TARGETS:
        command = [sys.executable, __file__, "--inside", "--seconds", str(arguments.seconds), name]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
        words = [line for line in done.stderr.splitlines() if "executed_units" in line]
        n_inputs = words[-1].rpartition(" ")[2] if words else "?"
        print(
            f"{name:16} {n_inputs:>9} inputs  {'FAILED' if done.returncode else 'ok'}", flush=True
        )
        if done.returncode:
            failed.append(name)
            print("\n".join(done.stderr.splitlines()[-40:]), file=sys.stderr, flush=True)
    print(f"{len(failed)} of {len(arguments.targets or TARGETS)} targets failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
