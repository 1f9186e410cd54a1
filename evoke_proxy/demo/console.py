"""Prints a demo run on the terminal: messages, evicted and recovered tokens, and the result."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span, common, count, merged
from evoke_proxy.demo.client import ArmRun, Turn
from evoke_proxy.demo.report import no_verdict
from evoke_proxy.demo.runner import BUDGET, RunObserver
from evoke_proxy.demo.session import Script

# The arm whose conversation is shown turn by turn; the others get one line each.
_PRINTED_ARM = "evoke"
_ARM_DESCRIPTIONS = {
    "evoke": "evicts to host memory, and recovers what the question needs",
    "discard": "evicts the same way, recovers nothing",
    "no_eviction": "keeps everything in the cache",
    "truncate": "drops the oldest messages",
}
_TEXT_WIDTH, _ARM_WIDTH = 46, 11
_HEAD = (
    f"turn  {'message':<{_TEXT_WIDTH}}  {'prompt':>6}  {'in cache':>8}  {'evicted':>7}"
    f"  {'recovered':>9}"
)
_RED, _GREEN, _DIM, _BOLD, _RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_ERASE_LINE = "\r\x1b[2K"


def turn_line(turn: Turn, text: str) -> str:
    """Format one turn: the beginning of its message, and tokens of its prompt and of the cache."""
    clipped = textwrap.shorten(text, _TEXT_WIDTH, placeholder=" ...")
    return (
        f"{turn.number:>4}  {clipped:<{_TEXT_WIDTH}}  {turn.prompt:>6,}  {turn.resident_end:>8,}"
        f"  {turn.evicted:>7,}  {turn.recovered:>9,}"
    )


def fact_in_cache(turn: Turn, first_prompt: int) -> bool | None:
    """Whether most of the message with the fact is in the cache after a turn; None if unknown.

    `first_prompt` is the length of the first prompt, which ends with that message.
    """
    if turn.resident is None:
        return None
    message = Span(min(PolicyConfig().sink_tokens, first_prompt), first_prompt)
    resident = merged(Span(start, end) for start, end in turn.resident)
    return 2 * count(common(resident, [message])) > len(message)


def gain(arms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield sentences that compare `evoke` with keeping everything; none without both arms."""
    if not {"evoke", "no_eviction"} <= arms.keys():
        return
    ours, whole = arms["evoke"], arms["no_eviction"]
    peak, whole_peak = ours["peak_resident"], whole["peak_resident"]
    answer = "the same answer" if ours["recalled"] == whole["recalled"] else "another answer"
    yield (
        f"KV cache: at most {peak:,} tokens instead of {whole_peak:,}, {whole_peak / peak:.1f}"
        f" times less, with {answer}."
    )
    decoded, whole_decoded = (_sum(arm, "decoded") for arm in (ours, whole))
    yield (
        f"Work: {_sum(ours, 'recovered'):,} tokens were recovered by a copy and {decoded:,} were"
        f" decoded; without a budget {whole_decoded:,} were decoded."
    )
    yield (
        f"Time: {ours['wall_s']:.1f} s; without a budget {whole['wall_s']:.1f} s. With a model as"
        " small as this one, decoding takes almost no time."
    )


def _sum(arm: Mapping[str, Any], name: str) -> int:
    return sum(turn[name] for turn in arm["turns"])


class Terminal(RunObserver):
    """Writes a run to a text stream: in place and in colour on a tty, plain lines elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._colour = self._live and "NO_COLOR" not in os.environ
        self._arm = ""
        self._turns: Sequence[str] = ()
        self._first_prompt = 0
        # Whether the fact was in the cache after the previous turn.
        self._was_in_cache = True

    def arm_started(self, script: Script, arm: str) -> None:
        self._arm, self._turns, self._was_in_cache = arm, script.turns, True
        if arm != _PRINTED_ARM:
            return
        self.line(
            f"\n{self._paint(_BOLD, 'The conversation')} (seed {script.seed}): turn 1 states a"
            f" fact, turn {len(script.turns)} asks for it.\nThe KV cache may hold {BUDGET} tokens"
            f" of it.\nThe policy `{arm}` {_ARM_DESCRIPTIONS[arm]}.\n"
        )
        self.line(self._paint(_DIM, _HEAD))

    def turn_sent(self, number: int) -> None:
        if self._live:
            name = "" if self._arm == _PRINTED_ARM else f"{self._arm:<{_ARM_WIDTH}}  "
            self._write(f"{_ERASE_LINE}{self._paint(_DIM, f'{name}turn {number} ...')}")

    def turn_finished(self, turn: Turn) -> None:
        if self._arm != _PRINTED_ARM:
            return
        if turn.number == 1:
            self._first_prompt = turn.prompt
        self._write(f"{self._erase}{turn_line(turn, self._turns[turn.number - 1])}\n")
        for note, colour in self._notes(turn):
            self.line(f"      {self._paint(colour, note)}")

    def _notes(self, turn: Turn) -> Iterator[tuple[str, str]]:
        """Yield what to point out in a turn, each with its colour."""
        if turn.number == 1:
            yield "^ the fact", _BOLD
        is_in_cache = fact_in_cache(turn, self._first_prompt)
        if is_in_cache is False and self._was_in_cache:
            yield "the fact has left the cache: its rows are saved in host memory", _RED
        if is_in_cache and not self._was_in_cache:
            yield "the fact is back in the cache, by a copy", _GREEN
        self._was_in_cache = self._was_in_cache if is_in_cache is None else is_in_cache
        if turn.number == len(self._turns):
            yield f"Model: {turn.answer}", _BOLD

    def arm_finished(self, run: ArmRun) -> None:
        colour = _GREEN if run.recalled else _RED
        verdict = self._paint(colour, "recalled" if run.recalled else "forgotten")
        if run.arm == _PRINTED_ARM:
            self.line(f"      {verdict}; the value is {run.expected!r}")
            self.line("\nThe same conversation under other policies:")
            return
        about = _ARM_DESCRIPTIONS.get(run.arm, "")
        self._write(self._erase)
        self.line(f"{run.arm:<{_ARM_WIDTH}}  {about}: {verdict} ({run.answer!r})")

    def session_redrawn(self, seed: int, reason: str) -> None:
        self.line(f"\nThe model, not the cache, lost the fact: {reason}. Seed {seed} is dropped.")

    def verdict(self, report: Mapping[str, Any]) -> None:
        """Write the comparison, then PASSED or each condition that failed."""
        self.line(f"\n{self._paint(_BOLD, 'What was gained')}")
        for sentence in gain(report["arms"]):
            self.line(f"  {sentence}")
        for failure in report["failures"]:
            self.line(self._paint(_RED, f"FAILED  {failure}"))
        if report["not_run"]:
            self.line(f"\n{no_verdict(report)}")
        if report["passed"]:
            tokens, budget = report["logical_tokens"], report["budget"]
            summary = (
                f"a conversation of {tokens:,} tokens in a cache of {budget}; the fact was recalled"
            )
            self.line(f"\n{self._paint(_GREEN, f'PASSED  {summary}')}")

    def line(self, text: str) -> None:
        """Write one complete line."""
        self._write(f"{text}\n")

    @property
    def _erase(self) -> str:
        return _ERASE_LINE if self._live else ""

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
