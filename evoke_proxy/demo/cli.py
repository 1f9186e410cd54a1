"""`evoke-proxy demo`: build or find the server, run the session, judge it, say so."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from evoke_proxy.demo import judge, page, report
from evoke_proxy.demo.client import DemoError
from evoke_proxy.demo.processes import stack
from evoke_proxy.demo.runner import ARMS, BUDGET, Start, run_session
from evoke_proxy.demo.table import Table
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import BuildError, ensure_server

_EXAMPLES = """examples:
  evoke-proxy demo                          a fresh session, all four arms
  evoke-proxy demo --seed 7                 the same session again
  evoke-proxy demo --arms evoke,no_eviction only these (the exit status is then never 0)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `evoke-proxy demo`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument("--seed", type=int, help="repeat this session (default: a fresh one)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of the reports and the logs"
    )
    parser.add_argument(
        "--arms", type=_arms, default=ARMS, metavar="A,B", help=f"from {','.join(ARMS)} (all)"
    )
    parser.add_argument(
        "--keep-logs", action="store_true", help="do not delete the logs of earlier runs in --out"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every condition holds, 1 when one does not, 2 when it could not run."""
    table = Table(sys.stdout)
    try:
        with _terminable():
            return _demo(args, table)
    except (DemoError, BuildError) as error:
        table.line(f"\nThe demo could not run: {error}")
        return 2


def _demo(args: argparse.Namespace, table: Table) -> int:
    _clear(args.out, args.keep_logs)
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    script, runs = run_session(seed, args.arms, _starter(args.out), table)
    failures = judge.failures(runs, BUDGET)
    made = report.build(script, runs, failures)
    report.write(args.out / "report.json", made)
    page.write(args.out / "report.html", made)
    table.verdict(list(runs.values()), failures, judge.logical_tokens(runs))
    table.line(f"pictures: {args.out / 'report.html'}  numbers: {args.out / 'report.json'}")
    table.line(f"repeat: evoke-proxy demo --seed {script.seed}")
    return 1 if failures else 0


def _clear(out: Path, keep_logs: bool) -> None:
    """Remove what an earlier run left, so that nothing old is taken for this run's result."""
    old = [] if keep_logs else list(out.glob("*.log"))
    for path in [*old, out / "report.json", out / "report.html"]:
        path.unlink(missing_ok=True)


def _starter(out: Path) -> Start:
    binary, model = ensure_server(patched=True, progress=True), bundled_model()
    return lambda seed, arm: stack(binary, model, out, f"{seed}-{arm}")


def _arms(text: str) -> tuple[str, ...]:
    chosen = tuple(arm for arm in ARMS if arm in text.split(","))
    unknown = set(text.split(",")) - set(ARMS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm: {', '.join(sorted(unknown))}")
    return chosen


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that both processes are stopped."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
