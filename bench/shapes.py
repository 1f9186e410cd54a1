"""What do clients cost and recall that do not send a growing list of messages?

The same conversations, in several shapes: `chat` (a growing list of messages, to compare with),
`transcript` (one message with the whole conversation as text), `clock` (the system prompt begins
with the time of the request), `window` (only the latest messages are sent). Every conversation
states facts, goes on about other things, and asks for each fact.

Arms: `direct` (a stock server without a budget, that is: an unlimited prefix cache) and `evoke`
(the proxy with a budget). `decoded` counts the tokens of all prompts that were decoded; `ratio`
divides it by that of `direct`."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.chat_turns import proxied
from evoke_proxy.demo.client import chat, read_turn
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SENTENCES, Fact, draw_fact, paragraph
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_COLUMNS = ("shape", "arm", "asked", "right", "prompt", "decoded", "ratio", "peak")
_SYSTEM = "You are a small assistant. Be brief."
_FACTS, _FILLERS, _WINDOW_MESSAGES = 6, 18, 31
_REPLY = "Noted."

Message = Mapping[str, str]
Shape = Callable[[Sequence[Message], int], list[Message]]


def _chat(messages: Sequence[Message], number: int) -> list[Message]:
    return [{"role": "system", "content": _SYSTEM}, *messages]


def _transcript(messages: Sequence[Message], number: int) -> list[Message]:
    text = "\n".join(f"### {message['role']}\n{message['content']}" for message in messages)
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]


def _clock(messages: Sequence[Message], number: int) -> list[Message]:
    time = f"{9 + number // 60:02d}:{number % 60:02d}"
    return [{"role": "system", "content": f"The time is {time}. {_SYSTEM}"}, *messages]


def _window(messages: Sequence[Message], number: int) -> list[Message]:
    return _chat(messages[-_WINDOW_MESSAGES:], number)


SHAPES: Mapping[str, Shape] = {
    "chat": _chat,
    "transcript": _transcript,
    "clock": _clock,
    "window": _window,
}


@dataclass(frozen=True, slots=True)
class Script:
    """What the user says, and the fact that each turn asks for, if any."""

    turns: Sequence[tuple[str, Fact | None]]


def script(seed: int, fillers: int = _FILLERS, facts: int = _FACTS) -> Script:
    """Return the conversation of a seed: statements among other texts, then a question for each.

    With the defaults, the window of the shape `window` has all statements when the last question is
    asked.
    """
    rng = random.Random(f"shapes-{seed}")
    drawn: dict[str, Fact] = {}
    while len(drawn) < facts:
        fact = draw_fact(rng)
        drawn[fact.question] = fact
    said = [paragraph(rng, SENTENCES) for _ in range(fillers)]
    for fact in drawn.values():
        said.insert(rng.randrange(fillers // 2, len(said)), fact.statement)
    asked = rng.sample(list(drawn.values()), facts)
    return Script([*((text, None) for text in said), *((f.question, f) for f in asked)])


def converse(
    port: int, shape: str, script: Script, fields: Mapping[str, Any], name: str = ""
) -> dict[str, int]:
    """Send one conversation in a shape, under a name if it has one; return its counts.

    Answers that no fact is asked for are replaced by a fixed text, so that all arms send the same
    prompts.
    """
    messages: list[Message] = []
    counts = {"asked": 0, "right": 0, "prompt": 0, "decoded": 0, "peak": 0}
    for number, (text, fact) in enumerate(script.turns):
        messages.append({"role": "user", "content": text})
        body = {"messages": SHAPES[shape](messages, number), "temperature": 0, "max_tokens": 16}
        reply = chat(port, {**body, **fields}, {"X-Evoke-Session": name} if name else {})
        turn = read_turn(number, reply)
        counts["prompt"] += turn.prompt
        counts["decoded"] += turn.decoded
        counts["peak"] = max(counts["peak"], turn.resident_peak)
        if fact is not None:
            counts["asked"] += 1
            said = reply.text.partition("\n")[0]
            counts["right"] += recalled(said, fact.value)
        answer = f"{fact.value}." if fact is not None else _REPLY
        messages.append({"role": "assistant", "content": answer})
    return counts


@contextmanager
def _served(patched: bool) -> Iterator[int]:
    port = free_port()
    options = ["-c", "16384", "-np", "1", "-t", "1", *(["--evoke-ram", "256"] if patched else [])]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ensure_server(patched=patched)), "--port", str(port)]
        command += ["-m", str(bundled_model()), *options]
        with serving(command, port, Path(folder) / "llama-server.log"):
            yield port


def measure(shapes: Sequence[str], seeds: Sequence[int], budget: int) -> list[dict[str, Any]]:
    """Return one row for each shape and arm."""
    scripts = [script(seed) for seed in seeds]
    rows: list[dict[str, Any]] = []
    with _served(False) as stock, _served(True) as patched, proxied(patched) as proxy:
        arms: Sequence[tuple[str, int, dict[str, Any]]] = (
            ("direct", stock, {}),
            ("evoke", proxy.port, {"evoke_budget": budget}),
        )
        for shape in shapes:
            direct = 0
            for arm, port, fields in arms:
                runs = [converse(port, shape, one, fields) for one in scripts]
                total = {key: sum(run[key] for run in runs) for key in runs[0]}
                total["peak"] = max(run["peak"] for run in runs)
                direct = direct or total["decoded"]
                ratio = round(total["decoded"] / direct, 3)
                rows.append({"shape": shape, "arm": arm, **total, "ratio": ratio})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    parser = record.parser("shapes", __doc__, "--conversations 4")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="shapes, comma-separated")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--budget", type=int, default=640, help="tokens (default: 640)")
    args = parser.parse_args(argv)
    seeds = range(args.seed, args.seed + args.conversations)
    rows = measure(args.shapes.split(","), seeds, args.budget)
    print(record.table(rows, _COLUMNS))
    print(f"written: {record.write('shapes', rows, {'budget': args.budget}, args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
