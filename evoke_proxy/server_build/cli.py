"""The command `build-server`: its options, and what it prints."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from .build import ensure_server
from .errors import BuildError
from .toolchain import SANITIZERS

DESCRIPTION = """\
Build llama-server from the pinned llama.cpp source, with our patches, and print where it is.
Done once: later calls find the finished server in the cache ($EVOKE_CACHE, by default
~/.cache/evoke-proxy). Needs g++, cmake, make (or ninja) and git.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command on `parser`."""
    parser.add_argument("--stock", action="store_true", help="without our patches")
    parser.add_argument("--cuda", action="store_true", help="for NVIDIA GPUs; needs nvcc")
    parser.add_argument(
        "--sanitize", nargs="?", const="address", default="", choices=tuple(SANITIZERS),
        help="with a sanitizer in what is ours and around it: address (default) or thread",
    )  # fmt: skip
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="build this llama.cpp checkout, not the pin"
    )
    parser.add_argument(
        "--print-path", action="store_true", help="print only the path of the server on stdout"
    )
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="parallel compilers (default: one a core)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Builds what `args` asks for; returns the exit status: 0, 1 after a failure, 130 if stopped.

    Progress and errors go to stderr, the result to stdout.
    """
    signal.signal(signal.SIGTERM, _stop)
    try:
        server = ensure_server(
            patched=not args.stock,
            cuda=args.cuda,
            sanitize=args.sanitize,
            source=args.source,
            jobs=args.jobs,
        )
    except BuildError as error:
        print(f"\nbuild-server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbuild-server: stopped; running it again resumes the build", file=sys.stderr)
        return 130
    variant = "stock" if args.stock else "patched"
    print(server if args.print_path else f"llama-server ({variant}): {server}")
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    """A polite kill ends the compilers too, as Ctrl-C does."""
    raise KeyboardInterrupt
