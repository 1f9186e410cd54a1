"""Watches an agent's requests: token counts, what the model could see, rows that came back.

Arms of the benches of agents:

* `evoke`: with a budget; evicted rows are recovered
* `discard`: with the budget; evicted rows are not recovered
* `below`: as `evoke`, with a budget that is less than the agent's own prompt and tools
* `below_full`: the same with `policy.within_turn: full`, which holds the budget between turns only
* `truncate`: with a budget; the oldest messages are removed from the request
* `no_eviction`: without a budget; the prefix cache stays intact

After each request of `evoke` the slot is saved to a file, and every row is compared bit by bit with
the row that was decoded first. Values are in rows only with flash attention. When a file is edited
or reread, it is counted how many rows of its latest reading were resident (`named`). `checks` are
scripted checks of what the model could see: after each turn, whether system prompt and tools, each
message of the user, which gives a rule, and the project's rules file are whole in the cache; after
an edit, whether the latest reading of the file is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.llama import Llama, Proxy, proxied
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.core.snapshots.state_file import caches


def rows(path: Path) -> dict[int, bytes]:
    """Keys and values of all layers by position; ValueError on a file of another kind."""
    data = path.read_bytes()
    read = caches(lambda at, size: data[at : at + size], len(data))
    if len(read) != 1 or read[0].transposed:
        raise ValueError(f"{path} is no slot file with one cache whose values are in rows")
    (cache,) = read
    found = {}
    for i in range(cache.n_cells):
        cell = cache.at + 4 + i * cache.cell_bytes  # behind the number of cells
        starts = [(part.at + i * part.size, part.size) for part in cache.rows]
        position = int.from_bytes(data[cell : cell + 4], "little")
        found[position] = b"".join(data[at : at + size] for at, size in starts)
    return found


@dataclass(slots=True)
class Witness:
    """Remembers every row as it was first decoded, and compares later copies with it."""

    first: dict[int, bytes] = field(default_factory=dict)
    before: frozenset[int] = frozenset()
    n_returned: int = 0
    unseen: int = 0
    differ: int = 0

    def look(self, now: Mapping[int, bytes], kept: int, until: int) -> frozenset[int]:
        """Compare the rows `now` in the slot after a turn; return the positions that returned.

        The turn decoded nothing in [0, kept), and its prompt ends at `until`. Rows that were absent
        after the previous turn have returned; they, and those that stayed, must equal the rows as
        first decoded. A row that was evicted in the turn that decoded it counts as `unseen` and is
        compared from its first return on.
        """
        for position in [at for at in self.first if at >= kept]:
            del self.first[position]
        back = frozenset(at for at in now if at < kept and at not in self.before)
        self.unseen += sum(at not in self.first for at in back)
        self.differ += sum(row != now.get(at, row) for at, row in self.first.items())
        self.n_returned += len(back)
        self.first |= {at: row for at, row in now.items() if at < until and at not in self.first}
        self.before = frozenset(now)
        return back


ARMS = ("evoke", "discard", "below", "below_full", "truncate", "no_eviction")
# Those that must see system prompt, tools, rules and edited files.
WHOLE_ARMS = ("evoke", "below_full")
LEAST_CHECKS = 0.98
RULE, RULES_FILE = "From now on, ", "AGENTS.md"
COLUMNS = (
    *("arm", "budget", "turns", "prompt", "sent", "decoded", "decoded_share", "recovered"),
    *("omitted", "tools_whole", "checks", "checks_hold", "peak", "over", "unbalanced"),
    "mismatches",
)
_FILE = {"file_rows": 0, "file_there": 0, "file_back": 0}
Json = dict[str, Any]


def front(llama: Llama, arm: str, budget: int) -> AbstractContextManager[Proxy]:
    """Run the proxy with the settings of an arm; the budget counts where the arm has one."""
    policy = {"name": "evoke" if arm.startswith("below") else arm}
    policy["within_turn"] = "full" if arm == "below_full" else "budget"
    settings = {**policy, "budget": None if arm == "no_eviction" else budget}
    return proxied(llama.port, config={"policy": settings})


@dataclass(slots=True)
class Watch:
    """Records the requests of one session, as seen between the agent and the proxy."""

    upstream: int  # port of llama-server
    saved: Path | None  # folder of slot files; None: rows are not read
    compares: bool = True  # whether rows are compared with those that were decoded first
    witness: Witness = field(default_factory=Witness)  # the comparison of rows
    # Token counts of each request; with `saved` also the checks of what the model could see, and
    # with `compares` how many rows of the latest reading of a file were resident.
    turns: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, arm: str, llama: Llama) -> Watch:
        """Return the watch of an arm; `truncate` may shift the messages, so it has no checks."""
        return cls(llama.port, None if arm == "truncate" else llama.folder, arm == "evoke")

    def __call__(self, body: Json, timings: Json, blocks: int) -> None:
        """Record an answered request; `blocks` were recovered for it."""
        usage = timings["evoke"]
        kind, index = latest_call(body["messages"])
        one: Json = {name: int(usage[name]) for name in TOKEN_KINDS}
        one |= {"prompt": int(usage["n_prompt"]), "peak": int(usage["n_resident_peak"])}
        one |= {"kind": kind, "blocks": blocks, **_FILE}
        self.turns.append(one)
        if self.saved is None:
            return
        is_complete = not one["omitted"] and not int(usage["decoded_hidden"])
        there = None
        if self.compares or not is_complete:
            now = saved_rows(self.upstream, self.saved)
            there = None if is_complete else now.keys()
        one |= check(needed(body["messages"]), self.upstream, body, there)
        if not self.compares:
            return
        back = self.witness.look(now, one["prompt"] - one["decoded"], one["prompt"])
        if index is not None:
            wanted = positions(self.upstream, body, [index])
            one |= {"file_rows": len(wanted), "file_there": len(wanted & now.keys())}
            one |= {"file_back": len(wanted & back)}


def saved_rows(upstream: int, folder: Path) -> dict[int, bytes]:
    """The rows of the slot, by position, as the server writes them into its folder."""
    Llama(upstream).call("POST", "/slots/0?action=save", {"filename": "rows"})
    return rows(folder / "rows")


def positions(upstream: int, body: Json, indexes: Sequence[int]) -> set[int]:
    """Where these messages of a chat request are in its prompt."""
    spans = Llama(upstream).rendered(body)["spans"]
    wanted = [range(span["p0"], span["p1"]) for span in spans if span["index"] in indexes]
    return {at for positions in wanted for at in positions}


def _calls(messages: Sequence[Json]) -> Iterator[tuple[int, str, str]]:
    """Yield index, tool and path of each result of a call."""
    called: dict[str, tuple[str, str]] = {}
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            called[call["id"]] = (call["function"]["name"], arguments.get("path", ""))
        if message["role"] == "tool":
            name, path = called.get(message["tool_call_id"], ("", ""))
            yield index, name, path


def latest_call(messages: Sequence[Json]) -> tuple[str, int | None]:
    """Return the tool of the last call, and the index of the latest earlier reading of its file.

    The tool is `asked` when the last message is not the result of a call; the index is None then,
    and when the file was not read before.
    """
    if messages[-1]["role"] != "tool":
        return "asked", None
    *earlier, (_, kind, path) = _calls(messages)
    readings = [index for index, name, read in earlier if (name, read) == ("read", path)]
    return kind, readings[-1] if readings else None


def needed(messages: Sequence[Json]) -> list[tuple[str, int]]:
    """What the model needs to see after these messages: kinds, and indexes of messages.

    These are the system prompt with its tools, each rule of the user, the latest reading of the
    rules file, and after an edit the latest reading of the file that was edited.
    """
    found = [("tools", 0)]
    found += [
        ("rules", index)
        for index, message in enumerate(messages)
        if message["role"] == "user" and RULE in str(message["content"])
    ]
    readings = {path: index for index, name, path in _calls(messages) if name == "read"}
    found += [("rules", at) for path, at in readings.items() if path.endswith(RULES_FILE)]
    kind, reading = latest_call(messages)
    if kind == "edit" and reading is not None:
        found.append(("edited file", reading))
    return found


def check(
    wanted: Sequence[tuple[str, int]], upstream: int, body: Json, rows: Set[int] | None
) -> Json:
    """Count the wanted messages of a request, and those that are whole in these `rows`.

    None as `rows` are all rows.
    """
    missing = [
        kind
        for kind, index in wanted
        if rows is not None and not positions(upstream, body, [index]) <= rows
    ]
    counts = {"checks": len(wanted), "checks_hold": len(wanted) - len(missing)}
    return {**counts, "missing": missing, "tools_whole": "tools" not in missing}


def row(arm: str, budget: int, watch: Watch, log: str) -> Json:
    """Return the row of a session: sums of its turns, and what the log of the proxy says."""
    turns, limit = watch.turns, None if arm == "no_eviction" else budget
    sums = ["decoded", "recovered", "omitted"]
    sums += ["tools_whole", "checks", "checks_hold"] if watch.saved else []
    totals = {name: sum(turn[name] for turn in turns) for name in sums}
    sent = sum(turn["prompt"] for turn in turns)
    may_exceed = limit is None or arm == "below_full"
    found = {
        "arm": arm,
        "budget": limit,
        "turns": len(turns),
        "prompt": max(turn["prompt"] for turn in turns),
        "sent": sent,
        "recovered_blocks": sum(turn["blocks"] for turn in turns),
        **totals,
        "decoded_share": totals["decoded"] / sent,
        "missing": Counter(kind for turn in turns for kind in turn.get("missing", ())),
        "peak": max(turn["peak"] for turn in turns),
        "over": 0 if may_exceed else sum(turn["peak"] > budget for turn in turns),
        "unbalanced": sum(sum(turn[k] for k in TOKEN_KINDS) != turn["prompt"] for turn in turns),
        "mismatches": log.count("refused a plan") + log.count("differs from the plan"),
        "each": turns,
    }
    if watch.compares:
        seen = watch.witness
        found |= {"rows_back": seen.n_returned, "rows_unseen": seen.unseen}
        found |= {"rows_differ": seen.differ}
        found["named"] = {kind: _named(turns, kind) for kind in ("edit", "read")}
    return found


def _named(turns: Sequence[Json], kind: str) -> Json:
    """Count calls on a file that the prompt has already, and the rows of its latest reading.

    `whole` calls had all of these, `there` were resident, and `back` of them had come back.
    """
    mine = [turn for turn in turns if turn["kind"] == kind and turn["file_rows"]]
    total = {key: sum(turn[f"file_{key}"] for turn in mine) for key in ("rows", "there", "back")}
    whole = sum(turn["file_there"] == turn["file_rows"] for turn in mine)
    return {"calls": len(mine), "whole": whole} | total


def summarise(rows: Sequence[Mapping[str, Any]]) -> Json:
    """Return figures by arm; `decoded_over_ARM` is what `evoke` decoded over what the arm did."""
    by = {row["arm"]: row for row in rows}
    summary: Json = {}
    for arm, row in by.items():
        summary[f"{arm}_decoded_share"] = round(row["decoded_share"], 4)
        summary |= {f"{arm}_{key}": row[key] for key in ("peak", "omitted")}
        if row["budget"]:
            summary[f"{arm}_prompt_over_budget"] = round(row["prompt"] / row["budget"], 2)
        if row.get("checks"):
            summary[f"{arm}_tools_whole"] = f"{row['tools_whole']} of {row['turns']}"
            summary[f"{arm}_checks"] = f"{row['checks_hold']} of {row['checks']}"
        if "evoke" in by and arm != "evoke":
            ratio = by["evoke"]["decoded"] / row["decoded"]
            summary[f"decoded_over_{arm}"] = round(ratio, 3)
        for key in ("rows_back", "rows_unseen", "rows_differ", "named"):
            summary |= {f"{arm}_{key}": row[key]} if key in row else {}
    return summary | {key: sum(row[key] for row in rows) for key in ("over", "mismatches")}


def missed(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the bars that are missed, in words.

    Where rows are compared, some are recovered, and every one equals the original; no turn of an
    arm but `below_full` exceeds its budget, token counts add up, no plan was refused, and 98 % of
    the checks hold where system prompt and tools fit or are served whole.
    """
    for row in rows:
        for key in ("over", "unbalanced", "mismatches", "rows_differ"):
            if row.get(key):
                yield f"{row['arm']}: {key} {row[key]}"
        if row.get("rows_back") == 0:
            yield f"{row['arm']}: no row came back"
        if row["arm"] in WHOLE_ARMS and row["checks_hold"] < LEAST_CHECKS * row["checks"]:
            yield f"{row['arm']}: {row['checks_hold']} of {row['checks']} checks"
