"""The command `build-server`: its options and its output."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from .build import BuildOptions, ensure_server
from .errors import BuildError
from .toolchain import SANITIZERS

DESCRIPTION = """\
Build llama-server from the pinned llama.cpp source with our patches, and print its path.
A finished server is kept in the cache ($EVOKE_CACHE, by default ~/.cache/evoke-proxy) and reused.
Needs g++, cmake, make (or ninja) and git."""

EXAMPLES = """examples:
  evoke-proxy build-server
      build the patched server
  $(evoke-proxy build-server --print-path) -m model.gguf -c 32768 --evoke-ram 4096
      build it if necessary and run it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--stock", action="store_true", help="build without our patches")
    parser.add_argument("--cuda", action="store_true", help="build for NVIDIA GPUs; needs nvcc")
    parser.add_argument(
        "--sanitize", nargs="?", const="address", default="", choices=tuple(SANITIZERS),
        help="build our code with a sanitizer: address (default) or thread",
    )  # fmt: skip
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="build this llama.cpp checkout instead of the pin",
    )
    parser.add_argument(
        "--print-path", action="store_true", help="print only the path of the server"
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="number of parallel compilers (default: one per core)",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Build the server; returns the exit code: 0, 1 after a failure, 130 when interrupted.

    Progress and errors go to stderr, the result to stdout.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server = ensure_server(
            patched=not args.stock,
            options=BuildOptions(cuda=args.cuda, sanitize=args.sanitize, source=args.source),
            jobs=args.jobs,
        )
    except BuildError as error:
        print(f"\nbuild-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbuild-server: interrupted; run it again to resume the build", file=sys.stderr)
        return 130
    variant = "stock" if args.stock else "patched"
    print(server if args.print_path else f"llama-server ({variant}): {server}")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Make SIGTERM end the compilers as Ctrl-C does."""
    raise KeyboardInterrupt
