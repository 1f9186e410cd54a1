"""Whether the session went as it must: the value recalled, the budget held, the books summing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from evoke_proxy.demo.records import ArmRun, Turn

MUST_RECALL: Mapping[str, bool] = {
    "evoke": True,
    "discard": False,
    "no_eviction": True,
    "truncate": False,
}
LOGICAL_SHARE = 4  # the conversation is at least this many budgets long, or it proves nothing


def recalled(answer: str, value: str) -> bool:
    """Return whether the answer ends with exactly the value, a final full stop allowed."""
    text = answer.strip().removesuffix(".")
    if not text.endswith(value):
        return False
    before = text[: -len(value)]
    return not before[-1:].isalnum() and before[-1:] not in {"-", "_"}


def spoilt(run: ArmRun) -> str | None:
    """Return why the model, not the cache, ruined this session; None when it did not."""
    if run.arm == "no_eviction" and not run.recalled:
        return f"with everything in the cache the model answered {run.answer!r}"
    for turn in run.turns[:-1]:
        if run.expected in turn.answer:
            return f"the model repeated the value in turn {turn.number}"
    return None


def failures(runs: Mapping[str, ArmRun], budget: int) -> list[str]:
    """Return every condition that does not hold, in words; an empty list means the demo passed."""
    found = [f"{arm}: was not run" for arm in MUST_RECALL if arm not in runs]
    for arm, run in runs.items():
        found.extend(_recall_failures(run, MUST_RECALL[arm]))
    if "evoke" in runs:
        for turn in runs["evoke"].turns:
            found.extend(f"evoke: turn {turn.number}: {what}" for what in _turn(turn, budget))
    logical = logical_tokens(runs)
    if logical < LOGICAL_SHARE * budget:
        found.append(f"the session has {logical} tokens, less than {LOGICAL_SHARE} budgets")
    return found


def logical_tokens(runs: Mapping[str, ArmRun]) -> int:
    """Return the length of the last prompt of an arm whose prompt nobody shortened, 0 if none."""
    lengths = (runs[arm].turns[-1].prompt for arm in ("no_eviction", "evoke") if arm in runs)
    return next(lengths, 0)


def _recall_failures(run: ArmRun, must: bool) -> Iterator[str]:
    last = run.turns[-1].number
    if must and not run.recalled:
        yield f"{run.arm}: turn {last}: answered {run.answer!r}, the value is {run.expected!r}"
    if run.recalled and not must:
        yield f"{run.arm}: turn {last}: recalled {run.expected!r}, which it cannot have seen"


def _turn(turn: Turn, budget: int) -> Iterator[str]:
    if not turn.from_engine:
        yield "the server sent no books (timings.evoke)"
        return
    if turn.resident_peak > budget:
        yield f"peak resident {turn.resident_peak} is over the budget of {budget}"
    total = turn.resident_before + turn.recovered + turn.decoded + turn.omitted
    if total != turn.prompt:
        yield (
            f"resident {turn.resident_before} + recovered {turn.recovered} + decoded "
            f"{turn.decoded} + omitted {turn.omitted} = {total}, the prompt has {turn.prompt}"
        )
