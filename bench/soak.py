"""Do many agents run for a long time without errors and without growing memory?

Agents talk through one proxy to a server with two slots: growing conversations with tool calls,
streamed and not, side requests for titles, invalid requests, and clients that disconnect at any
moment. The token counts of every turn must add up and keep the budget; the proxy must not make a
5xx response of its own. The memory of its process is sampled every second; `slope` is that of the
last two thirds, in MiB a minute. Arms: `patched`, a patched server with a budget, and `stock`, a
stock server with snapshots.

With --faults something breaks every so many seconds (`bench/soak_faults.py`): llama-server is
killed, ended or stands still, stored files are damaged or deleted, clients stay silent. What fails
until 15 s after a fault counts as `during_faults`. With --clock snapshots, records and normalised
dates age faster (`bench/fast_clock.py`). The part `slopes` computes the slopes of memory,
descriptors and times with their intervals from the samples of a run.

*Against* fixed limits. *Fails* on an error of the proxy, counts that do not add up, a turn over the
budget, or growing memory."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
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

from bench import soak_slopes
from bench.driver import Bench, Report, Row, option, run_parts
from bench.llama import ask, process
from bench.soak_faults import Faults, Upstream
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.demo.session import SYSTEM, paragraph
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

BUDGET, LONGEST = 384, 60
_CHAT = "/v1/chat/completions"
# What a minute may add once everything has been in use, in MiB: less than a thousandth of what a
# month would need to hurt.
SLOPE_MOST = 2.0
_COLUMNS = (
    *("arm", "seconds", "requests", "turns", "hung_up", "refused", "own_5xx", "unbalanced"),
    *("over_budget", "during_faults", "rss_start", "rss_end", "slope"),
)
_LOGGED = re.compile(r"(own|after|render|block-plan|first_byte)_ms=([0-9.]+)")


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
        if failure and since is not None and self.faults and self.faults.recent(since):
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

    def work(self, until: float) -> None:
        """Ask and ask, with pauses, until that moment of the monotonic clock."""
        rng = random.Random(self.number)
        acts = [self.turn, self.turn, self.tool, self.turn, self.side, self.hang_up, self.wrong]
        while time.monotonic() < until:
            if not self.messages or len(self.messages) > LONGEST:
                self.n_conversations += 1
                self.messages = [{"role": "system", "content": SYSTEM}]
            self.since = time.monotonic()
            try:
                rng.choice(acts)(rng)
            except (OSError, http.client.HTTPException) as error:
                self.tally.note("own_5xx", f"no answer: {error!r}", self.since)
            time.sleep(rng.random() * 2 * self.pause_s)

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
        content = _text(reply) or "Yes."
        self.messages.append({"role": "assistant", "content": content})
        self._check(_timings(reply).get("evoke") if reply else None)

    def _check(self, usage: Mapping[str, Any] | None) -> None:
        """Check that a budgeted turn reports token counts that add up and keep the budget."""
        if not self.budgeted:
            return
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


def _text(reply: Sequence[Mapping[str, Any]]) -> str:
    choices = [event["choices"][0] for event in reply if event.get("choices")]
    parts = [(item.get("delta") or item.get("message") or {}).get("content") for item in choices]
    return "".join(part for part in parts if part)


def _timings(reply: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = [event["timings"] for event in reply if "timings" in event]
    return dict(found[-1]) if found else {}


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """MiB a minute over the last two thirds, by Theil and Sen: the median of all pairs' slopes."""
    late = samples[len(samples) // 3 :]
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(late) for b in late[i + 1 :: 7]]
    return 60 * statistics.median(pairs) if pairs else 0.0


def sample(proxy: int, upstream: Upstream, log: Path, offset: int) -> tuple[dict[str, Any], int]:
    """What one moment looks like, and how far the log has been read."""
    folder = Path(f"/proc/{proxy}")
    stat = (folder / "stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")
    text = b"\n".join(lines[:-1]).decode(errors="replace").splitlines()
    try:
        server = _resident_mib(upstream.pid)
    except (OSError, ValueError, IndexError):
        server = None
    return {
        "rss": _resident_mib(proxy),
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(stat[17]),
        "cpu_ms": 10 * (int(stat[11]) + int(stat[12])),
        "server_rss": server,
        "load": os.getloadavg()[0],
        "turns": [dict(_LOGGED.findall(line)) for line in text if " own_ms=" in line],
        "requests": sum("POST /v1/chat/completions" in line for line in text),
        "errors": [line[:400] for line in text if " ERROR " in line or "Traceback" in line][:5],
    }, offset + sum(len(line) + 1 for line in lines[:-1])


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2)


def soak(arm: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run one arm; return its row, and its failures in words."""
    patched = arm == "patched"
    folder = arguments.work or Path(tempfile.mkdtemp(prefix="soak"))
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
    config: dict[str, Any] = {"snapshots": kept, "limits": {"sessions": 16, "queue": 256}}
    config["policy"] = {"budget": BUDGET if patched else None}
    config["normalise"] = {"dates_h": 1}
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
        faults.stop()
        upstream.end(signal.SIGTERM)


def _worked(
    arm: str, proxy: int, faults: Faults, folder: Path, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    began = time.monotonic()
    tally, until = Tally(faults=faults), began + arguments.seconds
    agents = [
        Agent(faults.proxy, faults.upstream.port, number, arm == "patched", arguments.pause, tally)
        for number in range(arguments.agents)
    ]
    threads = [threading.Thread(target=agent.work, args=(until,), daemon=True) for agent in agents]
    threads.append(threading.Thread(target=faults.run, daemon=True))
    for thread in threads:
        thread.start()
    samples: list[dict[str, Any]] = []
    offset = 0
    with (folder / f"{arm}-samples.jsonl").open("w", encoding="utf-8") as file:
        try:
            while time.monotonic() < until:
                one, offset = sample(proxy, faults.upstream, folder / "proxy.log", offset)
                one |= {"at": round(time.monotonic() - began, 2), "faults": len(faults.done)}
                one |= {"counts": dict(tally.counts)}
                samples.append(one)
                file.write(json.dumps(one) + "\n")
                file.flush()
                time.sleep(arguments.every)
        except (KeyboardInterrupt, OSError) as error:
            tally.failures.append(f"ended early: {error!r}")
    faults.stop()
    for thread in threads:
        thread.join(20)
    counts = tally.counts
    row: dict[str, Any] = {name: counts[name] for name in _COLUMNS[3:10]}
    seconds = round(time.monotonic() - began, 1)
    points = [(one["at"], one["rss"]) for one in samples]
    row |= {"arm": arm, "seconds": seconds, "slope": round(slope(points), 3)}
    row["requests"] = sum(counts[name] for name in ("turns", "side", "hung_up", "refused"))
    row |= {"other_4xx": counts["other_4xx"], "samples": samples, "faults": faults.done}
    row |= {"rss_start": points[len(points) // 3][1], "rss_end": points[-1][1]}
    row |= {"clock": arguments.clock}
    return row, tally.failures


def missed(row: Mapping[str, Any], long: bool) -> list[str]:
    """Return the bars that a run fails; the slope only counts when the run is `long` enough."""
    none = ("own_5xx", "unbalanced", "over_budget", "other_4xx")
    found = [f"{row['arm']}: {name} {row[name]}" for name in none if row[name]]
    if not row["turns"]:
        found.append(f"{row['arm']}: no turn")
    if long and row["slope"] > SLOPE_MOST:
        found.append(f"{row['arm']}: {row['slope']} MiB a minute")
    return found


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for arm in [arguments.arm] if arguments.arm else ["patched", "stock"]:
        row, failures = soak(arm, arguments)
        yield {**row, "failures": failures}


def report(arguments: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report failures and missed bars."""
    found = [bar for row in rows for bar in missed(row, arguments.seconds >= 300)]
    failures = [failure for row in rows for failure in row["failures"]]
    bound = {"slope_most_mib_a_minute": SLOPE_MOST}
    return Report({"missed": found, "failures": failures, **bound}, found)


def of_samples(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the slope of each figure of a run."""
    samples = soak_slopes.read(arguments.samples)
    for name, line in soak_slopes.slopes(samples, arguments.warm_up).items():
        yield {"figure": name, **line}


def of_slopes(arguments: argparse.Namespace, _: Sequence[Row]) -> Report:
    """Report what the run was, with its picture."""
    samples = soak_slopes.read(arguments.samples)
    summary = {"seconds": samples[-1]["at"], "warm_up_s": arguments.warm_up}
    summary |= {"faults": samples[-1]["faults"], "counts": samples[-1]["counts"]}
    return Report(summary, picture=soak_slopes.picture(samples))


_OPTIONS = (
    option("--seconds", 600.0, "of each arm"), option("--agents", 6, "at once"),
    option("--pause", 0.1, "mean seconds between acts"),
    option("--arm", help="only one of them", choices=("patched", "stock")),
    option("--faults", 0.0, "seconds between two, 0: none"),
    option("--clock", 1.0, "how fast stored things age"),
    option("--every", 1.0, "seconds between samples"),
    option("--work", help="the folder of logs and samples", type=Path),
)  # fmt: skip
PARTS = {
    "run": Bench("soak", __doc__, "--seconds 600", measure, report, _COLUMNS, _OPTIONS),
    "slopes": Bench(
        "soak slopes", __doc__, "--samples FOLDER/patched-samples.jsonl", of_samples, of_slopes,
        ("figure", "median", "per_hour", "low", "high"),
        (option("--samples", help="of a run, also while it runs", type=Path, required=True),
         option("--warm-up", 1800.0, "seconds to leave out")),
    ),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["run"]))
