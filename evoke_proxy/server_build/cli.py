"""The command `build-server`: its options and its output."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path
from types import FrameType

from .applies import choose_series
from .build import BuildOptions, ensure_server
from .errors import BuildError
from .fetch import pin_directory
from .series import patches_dir
from .toolchain import SANITIZERS, find_toolchain

DESCRIPTION = """\
Build llama-server from the pinned llama.cpp source with the patches of evoke-proxy, and print its
path. A finished server is kept in the cache ($EVOKE_CACHE, by default ~/.cache/evoke-proxy) and
reused. Needs g++, cmake, make (or ninja) and git. Without npm the server has no web UI, without
libssl-dev no HTTPS."""

_BACKENDS = {
    "cuda": "build for NVIDIA GPUs; needs nvcc",
    "vulkan": "build for GPUs with a Vulkan driver; needs glslc and the Vulkan headers",
    "hip": "build for AMD GPUs; needs ROCm (not tested by this project)",
    "metal": "build for Apple GPUs, on macOS (not tested by this project)",
}

EXAMPLES = """examples:
  evoke-proxy build-server
      build the patched server
  $(evoke-proxy build-server --print-path) -m model.gguf -c 32768 --evoke-ram 4096 --port 8080
      build the patched server if necessary, and run it where `evoke-proxy serve` expects it
  evoke-proxy build-server --source ~/llama.cpp
      say which patches apply to a checkout, and build it if all do
  evoke-proxy build-server --vulkan --cmake-arg GGML_NATIVE=OFF
      build for any GPU with a Vulkan driver and any x86-64 CPU with the default instruction set"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--stock", action="store_true", help="build without the patches")
    backend = parser.add_mutually_exclusive_group()
    for name, text in _BACKENDS.items():
        backend.add_argument(
            f"--{name}", dest="backend", action="store_const", const=name, default="", help=text
        )
    parser.add_argument(
        "--cmake-arg",
        action="append",
        default=[],
        type=_cmake_flag,
        metavar="NAME=VALUE",
        help="add a flag of llama.cpp's build, such as GGML_NATIVE=OFF; may be repeated",
    )
    parser.add_argument("--no-ui", action="store_true", help="build without the web UI and npm")
    parser.add_argument(
        "--sanitize", nargs="?", const="address", default="", choices=tuple(SANITIZERS),
        help="build the code of the patches with a sanitizer: address (default) or thread",
    )  # fmt: skip
    parser.add_argument(
        "--pin",
        default="",
        metavar="NAME",
        help="build this supported version of llama.cpp, such as 0c1e57098 (default: b11549)",
    )
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="build this llama.cpp checkout instead, if the patches for a supported version apply",
    )
    parser.add_argument(
        "--print-path", action="store_true", help="print only the path of the server"
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="number of compilers that run in parallel (default: one per core)",
    )


def _cmake_flag(text: str) -> str:
    """Return the flag of cmake for `NAME=VALUE` or `-DNAME=VALUE`."""
    flag = text if text.startswith("-D") else f"-D{text}"
    if not re.fullmatch(r"-D[A-Za-z_][A-Za-z0-9_]*(:[A-Z]+)?=.*", flag):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return flag


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
            options=BuildOptions(
                backend=args.backend,
                sanitize=args.sanitize,
                flags=tuple(args.cmake_arg),
                source=args.source,
                patches=_series(args),
                ui=not args.no_ui,
                retry_ui=True,
            ),
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


def _series(args: argparse.Namespace) -> Path | None:
    """Return the directory of the series to apply, and of the pin to build without --source.

    None for the default: a server that the package evoke-proxy-server contains is used for it.
    """
    if args.source is None or args.stock:
        return pin_directory(patches_dir(), args.pin) if args.pin else None
    git = find_toolchain(args.backend).git
    return choose_series(args.source, patches_dir(), args.pin, git, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM as Ctrl-C, which stops the compilers as well."""
    raise KeyboardInterrupt
