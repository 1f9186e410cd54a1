"""`evoke-proxy demo`: finds or builds the server, runs the session, reports the result."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from evoke_proxy.demo import report
from evoke_proxy.demo.client import DemoError
from evoke_proxy.demo.console import Terminal
from evoke_proxy.demo.processes import stack
from evoke_proxy.demo.runner import ARMS, BUDGET, Start, failures, run_session
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import BuildError, BuildOptions, ensure_server

DESCRIPTION = """\
Run the same conversation on the bundled model under each of four policies: its first turn states a
fact, the fact is evicted, and its last turn asks for it. The patched llama-server is built first if
it is missing, which takes minutes.
Exit codes: 0 passed, 1 failed or not all policies were run, 2 could not run."""

EXAMPLES = """examples:
  evoke-proxy demo
      run a new conversation under all four policies
  evoke-proxy demo --seed 7
      repeat the conversation of an earlier run by its seed
  evoke-proxy demo --arms evoke,no_eviction
      run only these policies; the exit code is then never 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `evoke-proxy demo`."""
    parser.add_argument(
        "--seed", type=int, metavar="N", help="number of the conversation (default: a new one)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="directory for reports and logs (default: out/demo)",
    )
    parser.add_argument(
        "--arms",
        type=_arms,
        default=ARMS,
        metavar="A,B",
        help=f"policies to run, of {', '.join(ARMS)} (default: all)",
    )
    parser.add_argument(
        "--keep-logs", action="store_true", help="do not delete the logs of earlier runs in --out"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code, see DESCRIPTION."""
    terminal = Terminal(sys.stdout)
    try:
        with _terminable():
            return _demo(args, terminal)
    except (DemoError, BuildError) as error:
        terminal.line(f"\nThe demo could not run: {error}")
        return 2


def _demo(args: argparse.Namespace, terminal: Terminal) -> int:
    _clear(args.out, args.keep_logs)
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    script, runs = run_session(seed, args.arms, _starter(args.out), terminal)
    result = report.build(script, runs, failures(runs, BUDGET))
    report.write(args.out, result)
    terminal.verdict(result)
    terminal.line(f"\npictures: {args.out / 'report.html'}  numbers: {args.out / 'report.json'}")
    terminal.line(f"to repeat: evoke-proxy demo --seed {script.seed}")
    return 0 if result["passed"] else 1


def _clear(out: Path, keep_logs: bool) -> None:
    """Delete the files of an earlier run, so that they are not taken for results of this one."""
    old = [] if keep_logs else list(out.glob("*.log"))
    for path in [*old, out / "report.json", out / "report.html"]:
        path.unlink(missing_ok=True)


def _starter(out: Path) -> Start:
    binary, model = ensure_server(options=BuildOptions(ui=False)), bundled_model()
    return lambda seed, arm: stack(binary, model, out, f"{seed}-{arm}")


def _arms(text: str) -> tuple[str, ...]:
    chosen = tuple(arm for arm in ARMS if arm in text.split(","))
    unknown = set(text.split(",")) - set(ARMS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown arm: {', '.join(sorted(unknown))}; the arms are {', '.join(ARMS)}"
        )
    return chosen


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that both processes are stopped."""

    def exit_on_signal(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
