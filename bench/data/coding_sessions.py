"""Makes `coding_sessions.json.gz` from the histories of specstoryai/getspecstory.

    git archive HEAD .specstory/history specstory-cli/.specstory/history | tar x -C FOLDER
    python -m bench.data.coding_sessions FOLDER

A history is Markdown that SpecStory writes of a session of Claude Code. What a tool was called with
is partly left out there, as is what edits replace; what is there becomes the arguments of the call.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.vocabulary import qwen2

OUT = Path(__file__).parent / "coding_sessions.json.gz"
N_TOKENS, SEED = 96_000, 26
N_SESSIONS = {"tuning": 4, "reporting": 12}
_LEAST_BYTES, _LEAST_CALLS = 150_000, 40
_HEAD = re.compile(r"^_\*\*(User|Agent)[^\n]*\*\*_\n", re.MULTILINE)
_TOOL = re.compile(r'<tool-use [^>]*data-tool-name="([^"]*)"[^>]*>(.*?)</tool-use>', re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FRAME = re.compile(r"</?details>|<summary>.*?</summary>", re.DOTALL)
# What names a person or their machine.
_HOME = re.compile(r"/Users/\w+|/home/\w+|-Users-[a-z]+(?=-)")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b")
_USER = re.compile(r"^([dlrwx-]{10}@? +\d+ )\w+  \w+", re.MULTILINE)
# What was looked at while the policy was made.
_TUNED_ON = frozenset(
    """
    2026-01-16_16-26-02Z 2026-01-28_14-55-51Z 2026-01-29_16-26-43Z 2026-02-08_22-24-43Z
    2026-02-09_20-36-38Z 2026-02-11_21-30-58Z 2026-02-12_17-20-59Z 2026-02-16_16-27-42Z
    2026-02-20_21-04-48Z 2026-02-22_13-40-18Z 2026-02-22_15-59-39Z 2026-02-23_22-28-34Z
    2026-02-24_14-14-29Z 2026-02-26_09-53-09Z 2026-03-02_23-01-22Z 2026-05-18_13-34-43Z
    2026-06-18_14-52-09Z 2026-06-29_15-25-44Z 2026-06-29_18-33-08Z 2026-06-30_15-24-48Z
    2026-07-16_20-14-28Z 2026-07-20_15-13-10Z
    """.split()
)
Json = dict[str, Any]


def _call(name: str, inner: str) -> tuple[Json, str]:
    """The arguments of a call and its result."""
    inner = _FRAME.sub("", inner).strip()
    fences = list(_FENCE.finditer(inner))
    writes = name in ("Write", "Edit", "MultiEdit") and [f[1] for f in fences] not in ([], ["text"])
    if writes:
        has_result = len(fences) > 1 and fences[-1][1] == "text"
        texts = [fence[2] for fence in (fences[:-1] if has_result else fences)]
        arguments = {"file_path": inner[: fences[0].start()].strip("` \n")}
        return arguments | {"content": "\n".join(texts)}, fences[-1][2] if has_result else "ok"
    said = inner[: fences[-1].start()] if fences else inner
    said = re.sub(r"^```\w*$\n?", "", said, flags=re.MULTILINE).strip()
    key = {"Read": "file_path", "Bash": "command"}.get(name, "input")
    return {key: said.strip("`") if name == "Read" else said}, fences[-1][2] if fences else ""


def messages(text: str) -> list[Json]:
    """The messages of a history."""
    found, number = list[Json](), 0
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=True):
        body = re.sub(r"\n---\s*$", "", text[head.end() : end].strip()).strip()
        if not body or body.startswith("[Request interrupted"):
            continue
        if head[1] == "User":
            found.append({"role": "user", "content": body})
            continue
        said, results = _TOOL.sub("", body).strip(), list[Json]()
        last = found[-1] if found else {}
        if last.get("role") != "assistant" or "tool_calls" in last:
            last = {"role": "assistant", "content": ""}
            found.append(last)
        last["content"] = "\n\n".join(filter(None, [last["content"], said]))
        for tool in _TOOL.finditer(body):
            number += 1
            arguments, result = _call(tool[1], tool[2])
            called = {"name": tool[1], "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": f"call_{number}", "type": "function", "function": called}
            last.setdefault("tool_calls", []).append(call)
            answer = {"role": "tool", "tool_call_id": call["id"], "content": result or "ok"}
            results.append(answer)
        found += results
    return found


def _cut(session: list[Json]) -> list[Json]:
    """The first messages of a session, of about N_TOKENS tokens together."""
    n, kept = 0, list[Json]()
    for message in session:
        n += len(qwen2().encode(json.dumps(message, ensure_ascii=False)).ids)
        if n > N_TOKENS:
            break
        kept.append(message)
    while kept and kept[-1]["role"] != "assistant":
        kept.pop()
    return kept if n > N_TOKENS else []


def sessions(folder: Path) -> Iterator[tuple[str, list[Json]]]:
    """Long sessions of Claude Code, each once, without the names of persons."""
    seen = set[str]()
    for path in sorted(folder.rglob("*.md")):
        text, name = path.read_text("utf-8", "replace"), path.name[:20]
        is_long = path.stat().st_size >= _LEAST_BYTES and "Claude Code Session" in text[:400]
        if name in seen or not is_long:
            continue
        text = _USER.sub(r"\1user  group", _HOME.sub("/home/user", _MAIL.sub("user@host", text)))
        if len(found := messages(text)) and sum("tool_calls" in m for m in found) >= _LEAST_CALLS:
            seen.add(name)
            yield name, found


def main() -> None:
    """Draw the sessions and write them."""
    whole = list(sessions(Path(sys.argv[1])))
    made = list[Json]()
    for split, count in N_SESSIONS.items():
        pool = [one for one in whole if (one[0] in _TUNED_ON) == (split == "tuning")]
        pool = [(name, cut) for name, session in pool if (cut := _cut(session))]
        print(split, len(pool))
        for name, cut in sorted(random.Random(SEED).sample(pool, count)):
            made.append({"id": name, "split": split, "messages": cut})
    data = json.dumps(made, ensure_ascii=False).encode()
    OUT.write_bytes(gzip.compress(data, 9, mtime=0))
    print(len(made), len(data), OUT.stat().st_size)


if __name__ == "__main__":
    main()
