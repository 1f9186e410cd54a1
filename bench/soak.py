"""Do many agents run for a long time without errors and without growing memory?

Agents talk through one proxy to a server with two slots: growing conversations with tool calls,
streamed and not, side requests for titles, invalid requests, and clients that disconnect at any
moment. The token counts of every turn must add up and keep the budget; the proxy must not make a
5xx response of its own. The memory of its process is sampled every second; `slope` is that of the
last two thirds, in MiB a minute, which begin with `rss_start`. Arms: `patched`, a patched server
with a budget, and `stock`, a stock server with snapshots.

With --faults something breaks every so many seconds: llama-server is killed, ended or stands still,
stored files are damaged or deleted, clients stay silent. What fails until 15 s after a fault counts
as `during_faults`, and errors in the log of the proxy are no bar. With --clock snapshots, records
and normalised dates age faster (`bench/fast_clock.py`). The part `slopes` computes the slopes of
memory, descriptors and times with their intervals (`bench/stats.py`, of the medians of each minute)
from the samples of a run; the beginning, when caches fill, is left out.

*Against* fixed limits. *Fails* on an error of the proxy, counts that do not add up, a turn over the
budget, growing memory, or an early end."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.charts import chart
from bench.driver import Bench, Report, Row, option, run_parts
from bench.llama import ask, process, rss_mib
from bench.stats import slope, theil_sen
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.demo.client import DemoError
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.demo.session import SYSTEM, paragraph
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

BUDGET, LONGEST = 384, 60
_CHAT = "/v1/chat/completions"
# What a minute may add, in MiB. In short runs caches still fill, so this finds large leaks only;
# the part `slopes` measures small ones.
SLOPE_MOST = 2.0
_COUNTED = ("turns", "hung_up", "refused", "own_5xx", "other_4xx", "unbalanced", "over_budget",
            "during_faults")  # fmt: skip
_COLUMNS = ("arm", "seconds", "requests", *_COUNTED, "errors", "rss_start", "rss_end", "slope")
_LOGGED = re.compile(r"(own|first_byte)_ms=([0-9.]+)")
_MINUTE_S, _BLOCK_MINUTES = 60.0, 10
# Times of turns, by their names in the log of the proxy.
_TIMES = ("own", "first_byte")
Sample = Mapping[str, Any]
# Seconds after a fault in which its consequences may be seen by clients.
GRACE_S = 15.0
_PAUSE_S, _SILENT_S = 8.0, 5.0


@dataclass(slots=True)
class Upstream:
    """A llama-server that is killed and started again on the same port."""

    command: Sequence[str]
    port: int
    log: Path
    _running: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        self._running.enter_context(serving(self.command, self.port, self.log))

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait for its end; nothing if it has ended."""
        with contextlib.suppress(LookupError):
            os.kill(self.pid, number)
        self._running.close()

    @property
    def pid(self) -> int:
        """Its process ID; LookupError when it has ended."""
        return int(process(self.port).name)


@dataclass(slots=True)
class Faults:
    """Causes one fault every `every_s` seconds; one thread."""

    upstream: Upstream
    proxy: int
    admin: int
    folders: Sequence[Path]
    every_s: float
    done: list[tuple[float, str, str]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    felt_until: float = 0.0  # monotonic: requests that began before may feel a fault
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def run(self, stop: threading.Event) -> None:
        """Cause faults in turn until `stop` is set."""
        kinds = itertools.cycle((
            self.kill, self.silent_clients, self.pause, self.flip, self.terminate, self.delete,
            self.burst, self.unread_admin,
        ))  # fmt: skip
        while self.every_s and not stop.wait(self.every_s):
            kind, self.felt_until = next(kinds), float("inf")
            try:
                what = kind() or ""
            except (OSError, LookupError, DemoError) as error:
                what = f"failed: {error!r}"
            finally:
                self.felt_until = time.monotonic() + GRACE_S
            self.done.append((round(time.monotonic() - self._began, 1), kind.__name__, what))

    def kill(self) -> None:
        """llama-server is killed and started again."""
        self.upstream.end(signal.SIGKILL)
        self.upstream.start()

    def terminate(self) -> None:
        """llama-server is asked to end, is away for three seconds and starts again."""
        self.upstream.end(signal.SIGTERM)
        time.sleep(3)
        self.upstream.start()

    def pause(self) -> None:
        """llama-server stands still for some seconds."""
        os.kill(self.upstream.pid, signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        os.kill(self.upstream.pid, signal.SIGCONT)

    def flip(self) -> str:
        """One bit of each of three stored files is inverted."""
        chosen = self._some(3)
        for path in chosen:
            with contextlib.suppress(OSError), path.open("r+b") as file:
                where = self._random.randrange(max(1, path.stat().st_size))
                file.seek(where)
                byte = file.read(1)
                file.seek(where)
                file.write(bytes([byte[0] ^ 1]) if byte else b"")
        return f"{len(chosen)} files"

    def delete(self) -> str:
        """Half of the stored files are deleted."""
        chosen = self._some(1000)
        chosen = chosen[: len(chosen) // 2]
        for path in chosen:
            path.unlink(missing_ok=True)
        return f"{len(chosen)} files"

    def silent_clients(self) -> None:
        """Forty clients send half a request, are silent for some seconds and disconnect."""
        half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        self._connections(self.proxy, 40, half)

    def unread_admin(self) -> None:
        """Ten admin pages do not read their events."""
        self._connections(self.admin, 10, b"GET /evoke/events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def burst(self) -> None:
        """Twelve clients ask at once and disconnect without reading."""
        body = b'{"messages":[{"role":"user","content":"Hello."}],"max_tokens":4}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._connections(self.proxy, 12, head + body)

    def _connections(self, port: int, n: int, data: bytes) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(n):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                connection.sendall(data)
            time.sleep(_SILENT_S)

    def _some(self, most: int) -> list[Path]:
        files = [path for folder in self.folders for path in folder.rglob("*") if path.is_file()]
        self._random.shuffle(files)
        return files[:most]


@dataclass(slots=True)
class Tally:
    """What all agents have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    faults: Faults | None = None

    def note(self, what: str, failure: str = "", since: float | None = None) -> None:
        """One more of these; the first few failures are kept in words.

        A failure of a request that began at `since` may be the consequence of a fault.
        """
        if failure and since is not None and self.faults and since < self.faults.felt_until:
            what = "during_faults"
        with self.lock:
            self.counts[what] += 1
            if failure and what != "during_faults" and len(self.failures) < 100:
                self.failures.append(f"{time.strftime('%H:%M:%S')} {what}: {failure}")


@dataclass(slots=True)
class Agent:
    """A client with conversations of its own, one after the other."""

    port: int
    upstream: int
    number: int
    budgeted: bool
    pause_s: float
    tally: Tally
    messages: list[dict[str, Any]] = field(default_factory=list)
    n_conversations: int = 0
    since: float = 0.0  # when the current act began, monotonic

    def work(self, stop: threading.Event) -> None:
        """Ask and ask, with pauses, until `stop` is set."""
        rng = random.Random(self.number)
        acts = [self.turn, self.turn, self.tool, self.turn, self.side, self.hang_up, self.wrong]
        while not stop.is_set():
            if not self.messages or len(self.messages) > LONGEST:
                self.n_conversations += 1
                self.messages = [{"role": "system", "content": SYSTEM}]
            self.since = time.monotonic()
            try:
                rng.choice(acts)(rng)
            except (OSError, http.client.HTTPException) as error:
                self.tally.note("own_5xx", f"no answer: {error!r}", self.since)
            stop.wait(rng.random() * 2 * self.pause_s)

    def turn(self, rng: random.Random) -> None:
        """Continue the conversation with a message of the user."""
        self.messages.append({"role": "user", "content": paragraph(rng, rng.randint(1, 6))})
        self._answered(rng)

    def tool(self, rng: random.Random) -> None:
        """Call a tool and send its result."""
        name = f"file{rng.randrange(5)}.py"
        self.messages.append({"role": "user", "content": f"Read {name}."})
        call = {"name": "read", "arguments": json.dumps({"path": name})}
        calls = [{"id": f"call{rng.randrange(1 << 30)}", "type": "function", "function": call}]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        said = paragraph(rng, rng.randint(2, 10))
        self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": said})
        self._answered(rng)

    def side(self, rng: random.Random) -> None:
        """A title, as chat clients want one beside the conversation."""
        words = f"Write a short title for: {paragraph(rng, 1)}"
        self._send({"messages": [{"role": "user", "content": words}], "max_tokens": 8}, {})

    def wrong(self, rng: random.Random) -> None:
        """What no server can answer: it is refused, by llama-server as it would do it directly."""
        body = rng.choice((b"{", b'{"messages":1}', b'{"messages":[],"evoke_budget":-1}', b""))
        status, said = ask(self.port, "POST", _CHAT, body)
        wanted = 400 if b"evoke" in body else ask(self.upstream, "POST", _CHAT, body)[0]
        fault = "" if status == wanted else f"{body!r} was answered {status}: {said[:200]!r}"
        self.tally.note("own_5xx" if fault else "refused", fault, self.since)

    def hang_up(self, rng: random.Random) -> None:
        """Disconnect before the answer, or in the middle of it."""
        body = self._body([*self.messages, {"role": "user", "content": paragraph(rng, 3)}], 64)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", **self._headers()}
        connection.request("POST", _CHAT, json.dumps(body).encode(), headers)
        if rng.random() < 0.5:
            connection.getresponse().read1(rng.randint(1, 200))
        else:
            time.sleep(rng.random() * 0.1)
        connection.close()
        self.tally.note("hung_up")

    def _answered(self, rng: random.Random) -> None:
        body = self._body(self.messages, rng.randint(1, 24))
        body["stream"] = rng.random() < 0.5
        reply = self._send(body, self._headers())
        choices = [event["choices"][0] for event in reply if event.get("choices")]
        parts = [each.get("delta") or each.get("message") or {} for each in choices]
        said = "".join(part.get("content") or "" for part in parts)
        self.messages.append({"role": "assistant", "content": said or "Yes."})
        if reply and self.budgeted:  # a failure is counted already
            timings = [event["timings"] for event in reply if "timings" in event]
            self._check(timings[-1].get("evoke") if timings else None)

    def _check(self, usage: Mapping[str, Any] | None) -> None:
        """Check that a budgeted turn reports token counts that add up and keep the budget."""
        if usage is None or sum(usage[kind] for kind in TOKEN_KINDS) != usage["n_prompt"]:
            self.tally.note("unbalanced", f"token counts {usage}", self.since)
        elif usage["n_resident_peak"] > BUDGET or usage["marker"] != "ok":
            self.tally.note("over_budget", f"token counts {usage}", self.since)

    def _body(self, messages: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any]:
        return {"messages": list(messages), "max_tokens": most, "temperature": 0}

    def _headers(self) -> dict[str, str]:
        return {"X-Evoke-Session": f"agent-{self.number}-{self.n_conversations}"}

    def _send(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """The JSON objects of the answer; none when it is no answer."""
        status, said = ask(self.port, "POST", _CHAT, json.dumps(body), headers)
        self.tally.note("turns" if headers else "side")
        if status != 200:
            what = "own_5xx" if status >= 500 else "other_4xx"
            self.tally.note(what, f"{status}: {said[:300]!r}", self.since)
            return []
        lines = said.split(b"\n") if said.startswith(b"data:") else [b"data: " + said]
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def growth(samples: Sequence[Sample]) -> float:
    """MiB a minute over the last two thirds."""
    late = samples[len(samples) // 3 :: 1 + len(samples) // 1000]
    at, rss = (np.array([sample[name] for sample in late], np.float64) for name in ("at", "rss"))
    return 60 * theil_sen(at, rss) if len(late) > 1 else 0.0


def sample(proxy: int, log: Path, offset: int) -> tuple[dict[str, Any], int]:
    """What one moment looks like, and how far the log has been read."""
    folder = Path(f"/proc/{proxy}")
    stat = (folder / "stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")
    text = b"\n".join(lines[:-1]).decode(errors="replace").splitlines()
    return {
        "rss": round(rss_mib(proxy), 2),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(stat[17]),
        "cpu_ms": 10 * (int(stat[11]) + int(stat[12])),
        "load": os.getloadavg()[0],
        "turns": [dict(_LOGGED.findall(line)) for line in text if " own_ms=" in line],
        "requests": sum("POST /v1/chat/completions" in line for line in text),
        "errors": [line[:400] for line in text if " ERROR " in line or "Traceback" in line][:5],
    }, offset + sum(len(line) + 1 for line in lines[:-1])


def soak(arm: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in a folder of its own; return its row."""
    patched = arm == "patched"
    slots, disk = folder / "slots", folder / "disk"
    for path in (slots, disk):
        path.mkdir(parents=True, exist_ok=True)
    port, front, admin = free_port(), free_port(), free_port()
    command = [str(ensure_server(patched=patched, progress=False)), "-m", str(bundled_model())]
    template = Path(__file__).parents[1] / "tests/proxy/tools.jinja"
    command += ["--port", str(port), "-t", "1", "-c", "16384", "-np", "2", "--jinja"]
    command += ["--chat-template-file", str(template), "--slot-save-path", str(slots)]
    if patched:
        command += ["--evoke-ram", "24", "--evoke-disk", f"{disk}:64"]
    settings = folder / "evoke.yaml"
    kept = {"directory": str(slots), "min_free_mib": 1, "max_mib": 64, "max_age_h": 4}
    config = {"snapshots": kept, "limits": {"sessions": 16, "queue": 256}}
    config |= {"policy": {"budget": BUDGET if patched else None}, "normalise": {"dates_h": 1}}
    settings.write_text(json.dumps(config))
    upstream = Upstream(command, port, folder / "server.log")
    faults = Faults(upstream, front, admin, (slots, disk), arguments.faults)
    options = ["--config", str(settings), "--admin-listen", f"127.0.0.1:{admin}"]
    proxy = [sys.executable, "-m", "bench.fast_clock", str(arguments.clock), "serve"]
    proxy += ["--upstream", f"http://127.0.0.1:{port}", "--listen", f"127.0.0.1:{front}", *options]
    upstream.start()
    try:
        with serving(proxy, front, folder / "proxy.log"):
            return _worked(arm, int(process(front).name), faults, folder, arguments)
    finally:
        upstream.end()


def _worked(
    arm: str, proxy: int, faults: Faults, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    began, stop = time.monotonic(), threading.Event()
    tally, until = Tally(faults=faults), began + arguments.seconds
    agents = [
        Agent(faults.proxy, faults.upstream.port, number, arm == "patched", arguments.pause, tally)
        for number in range(arguments.agents)
    ]
    threads = [
        threading.Thread(target=work, args=(stop,), daemon=True)
        for work in (*(agent.work for agent in agents), faults.run)
    ]
    for thread in threads:
        thread.start()
    samples: list[dict[str, Any]] = []
    offset = 0
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        try:
            while not samples or time.monotonic() < until:
                one, offset = sample(proxy, folder / "proxy.log", offset)
                one |= {"at": round(time.monotonic() - began, 2), "faults": len(faults.done)}
                one |= {"counts": dict(tally.counts)}
                samples.append(one)
                file.write(json.dumps(one) + "\n")
                file.flush()
                time.sleep(arguments.every)
        except (KeyboardInterrupt, OSError) as error:
            tally.note("ended_early", repr(error))
        finally:
            stop.set()
    row = {"arm": arm, "seconds": round(time.monotonic() - began, 1), "clock": arguments.clock}
    for thread in threads:
        thread.join(20)
    counts = tally.counts
    row |= {name: counts[name] for name in (*_COUNTED, "ended_early")}
    row["requests"] = sum(counts[name] for name in ("turns", "side", "hung_up", "refused"))
    row |= {"slope": round(growth(samples), 3), "errors": sum(len(s["errors"]) for s in samples)}
    row |= {"rss_start": samples[len(samples) // 3]["rss"], "rss_end": samples[-1]["rss"]}
    return row | {"samples": samples, "faults": faults.done, "failures": tally.failures}


def missed(row: Mapping[str, Any], long: bool) -> list[str]:
    """Return the bars that a run fails; the slope only counts when the run is `long` enough."""
    none = ["own_5xx", "unbalanced", "over_budget", "other_4xx", "ended_early"]
    none += [] if row["faults"] else ["errors"]
    found = [f"{row['arm']}: {name} {row[name]}" for name in none if row[name]]
    if not row["turns"]:
        found.append(f"{row['arm']}: no turn")
    if long and row["slope"] > SLOPE_MOST:
        found.append(f"{row['arm']}: {row['slope']} MiB a minute")
    return found


def samples_of(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file; the last line of a running bench may be incomplete."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def by_minute(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]]:
    """Return minutes and values by figure: medians of each minute of the run."""
    found: dict[str, list[tuple[float, float]]] = {}
    before: Sample | None = None
    for minute, group in itertools.groupby(samples, lambda sample: sample["at"] // _MINUTE_S):
        mine = list(group)
        turns = [turn for sample in mine for turn in sample["turns"] if "first_byte" in turn]
        figures = ("rss", "descriptors", "threads", "load")
        values = {name: [float(sample[name]) for sample in mine] for name in figures}
        values |= {f"{name}_ms": [float(turn[name]) for turn in turns] for name in _TIMES}
        requests = sum(sample["requests"] for sample in mine)
        if before is not None and requests:
            values["cpu_ms_a_request"] = [(mine[-1]["cpu_ms"] - before["cpu_ms"]) / requests]
        before = mine[-1]
        for name, each in values.items():
            if each:
                found.setdefault(name, []).append((minute, statistics.median(each)))
    return found


def slopes(samples: Sequence[Sample], warm_up_s: float) -> dict[str, dict[str, float]]:
    """Return the slope of each figure per hour after the first `warm_up_s` seconds."""
    found = by_minute([sample for sample in samples if sample["at"] >= warm_up_s])
    return {
        name: slope([(minute / 60, value) for minute, value in points], _BLOCK_MINUTES)
        for name, points in found.items()
        if len(points) > 2
    }


def picture(samples: Sequence[Sample]) -> str:
    """Draw memory, descriptors and own time over the hours, each in percent of its median."""
    figures = by_minute(samples)
    lines = {}
    for name, label in (
        ("rss", "memory"),
        ("descriptors", "descriptors"),
        ("own_ms", "own time of a turn"),
        ("cpu_ms_a_request", "processor time"),
    ):
        points = figures.get(name, [])
        blocks = [points[at : at + 5] for at in range(0, len(points), 5)]
        middle = statistics.median([value for _, value in points]) if points else 1.0
        lines[label] = [
            (block[0][0] / 60, 100 * statistics.median(value for _, value in block) / middle)
            for block in blocks
        ]
    title = f"One proxy, {samples[-1]['faults']} faults"
    return chart(title, "hours", "% of the median", lines)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for arm in [arguments.arm] if arguments.arm else ["patched", "stock"]:
        with tempfile.TemporaryDirectory(prefix="soak") as temporary:
            yield soak(arm, (arguments.work or Path(temporary)) / arm, arguments)


def report(arguments: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report failures and missed bars."""
    found = [bar for row in rows for bar in missed(row, arguments.seconds >= 300)]
    failures = [failure for row in rows for failure in row["failures"]]
    bound = {"slope_most_mib_a_minute": SLOPE_MOST}
    return Report({"missed": found, "failures": failures, **bound}, found)


def of_samples(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the slope of each figure of a run."""
    samples = samples_of(arguments.samples)
    for name, line in slopes(samples, arguments.warm_up).items():
        yield {"figure": name, "per_hour": line.pop("slope"), **line}


def of_slopes(arguments: argparse.Namespace, _: Sequence[Row]) -> Report:
    """Report what the run was, with its picture."""
    samples = samples_of(arguments.samples)
    summary = {"seconds": samples[-1]["at"], "warm_up_s": arguments.warm_up}
    summary |= {"faults": samples[-1]["faults"], "counts": samples[-1]["counts"]}
    return Report(summary, picture=picture(samples))


_OPTIONS = (
    option("--seconds", 600.0, "of each arm"), option("--agents", 6, "at once"),
    option("--pause", 0.1, "mean seconds between acts"),
    option("--arm", help="only one of them", choices=("patched", "stock")),
    option("--faults", 0.0, "seconds between two, 0: none"),
    option("--clock", 1.0, "how fast stored things age"),
    option("--every", 1.0, "seconds between samples"),
    option("--work", help="where logs and samples stay, in a folder for each arm", type=Path),
)  # fmt: skip
PARTS = {
    "run": Bench("soak", __doc__, "--seconds 600", measure, report, _COLUMNS, _OPTIONS),
    "slopes": Bench(
        "soak slopes", __doc__, "--samples FOLDER/patched/samples.jsonl", of_samples, of_slopes,
        ("figure", "median", "per_hour", "low", "high"),
        (option("--samples", help="of a run, also while it runs", type=Path, required=True),
         option("--warm-up", 1800.0, "seconds to leave out")),
    ),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["run"]))
