"""`evoke-proxy plan`: prints the KV cells and the memory that the sessions of a model would get.

`up` makes the same plan and then starts llama-server with it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evoke_proxy.adapters.machine import measure
from evoke_proxy.adapters.model_file import read_shape
from evoke_proxy.config import AUTO, PolicySettings
from evoke_proxy.core.servers.memory_plan import (
    KV_TYPES,
    LEAST_CELLS_OF_A_SLOT,
    KvTypes,
    MemoryPlan,
    ModelShape,
    PlanOptions,
    make_plan,
    mib_in_words,
)
from evoke_proxy.errors import ConfigError
from evoke_proxy.server_build import BuildError, finished_server_path

DESCRIPTION = """\
Read a model file and the free memory of this machine, and print how many KV cells (tokens in the KV
cache) a session gets, and how much memory conversations take on the device, in host memory and on
disk. Nothing is started."""

EXAMPLES = """examples:
  evoke-proxy plan model.gguf
      print what `evoke-proxy up -m model.gguf` would start on this machine
  evoke-proxy plan model.gguf --vram 16GiB --context 131072 --sessions 4
      plan for another device, longer conversations, and four of them at a time"""

_MIB = 1 << 20
# Why a model without layers of full attention has no cells in the plan, by its kind.
_WITHOUT_ROWS = {
    "recurrent": "none: the model has only a recurrent state, so nothing is evicted",
    "other": "unknown: its attention is of another kind than the plan computes, such as to"
    " compressed rows, so nothing is evicted (see patches/SUPPORT.md)",
}
# What llama-server takes for --evoke-disk without a number.
_DISK_MIB_OF_THE_SERVER = 4096
_UNITS = {"": _MIB, "k": 1 << 10, "m": _MIB, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
# Long names of the llama-server options that change the plan, by their short names.
_ALIASES = {
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-md": "--model-draft",
    "--spec-draft-model": "--model-draft",
    "-ctkd": "--cache-type-k-draft",
    "--spec-draft-type-k": "--cache-type-k-draft",
    "-ctvd": "--cache-type-v-draft",
    "--spec-draft-type-v": "--cache-type-v-draft",
    "-mm": "--mmproj",
}
# Options with which a context may be longer than the model was trained for.
_ROPE_SCALING = ("--rope-scaling", "--rope-scale", "--rope-freq-scale", "--yarn-orig-ctx")


def size(text: str) -> int:
    """Return the bytes of a size such as 16GiB, 512M, or 4096 (MiB).

    Raises ArgumentTypeError for other texts.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def count(text: str) -> int:
    """Return a whole number above 0; ArgumentTypeError for any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="FILE", help="GGUF file of the model"
    )
    parser.add_argument(
        "-m", "--model", dest="named", type=Path, metavar="FILE", help="the same, as for `up`"
    )
    add_plan_options(parser)
    add_server_options(parser)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for llama-server, which follow `--`."""
    parser.add_argument(
        "server_options",
        nargs="*",
        default=[],  # without it the message on a missing argument names this one as well
        metavar="-- OPTION",
        help="options for llama-server",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options with which a user changes the plan; `plan_options` reads them."""
    parser.add_argument(
        "--context",
        type=count,
        metavar="N",
        help="longest conversation, tokens (default: the context that the model was trained for)",
    )
    parser.add_argument(
        "--sessions",
        type=count,
        metavar="N",
        help="number of conversations at the same time (default: 1)",
    )
    parser.add_argument(
        "--cells",
        type=count,
        metavar="N",
        help="KV cells of a session: tokens in the cache (default: as many as the memory holds)",
    )
    parser.add_argument(
        "--vram",
        type=size,
        metavar="SIZE",
        help="free memory of the device, such as 16GiB (default: as measured); a number without"
        " a unit is MiB, here and below",
    )
    parser.add_argument(
        "--ram", type=size, metavar="SIZE", help="host memory for evicted blocks, such as 4GiB"
    )
    parser.add_argument(
        "--disk",
        type=size,
        metavar="SIZE",
        help="disk space for evicted blocks, such as 32GiB; 0 for none",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and the command line of llama-server; ConfigError for an unreadable model."""
    model = arguments.model or arguments.named
    if model is None or (arguments.model and arguments.named):
        raise ConfigError("plan: name one GGUF file")
    options = ServerOptions(tuple(arguments.server_options))
    try:
        server = finished_server_path()
    except BuildError:
        server = None
    state = default_state(str(model.resolve()))
    plan = plan_for(read_shape(model), arguments, options, server, state)
    program = str(server) if server is not None else "llama-server"
    command = server_command(program, ["-m", str(model)], options, state, plan)
    print("\n".join([*table(plan), "", shlex.join(command)]))
    return 0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options that the user gives to llama-server.

    Attributes:
        words: The options and their values as words of a command line.
    """

    words: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """Return the last value of an option, by its long name; None when it is not given."""
        latest = None
        for i, word in enumerate(self.words):
            option, equals, value = word.partition("=")
            if _ALIASES.get(option, option) == name:
                latest = value if equals else "".join(self.words[i + 1 : i + 2])
        return latest

    def number(self, name: str) -> int | None:
        """Return the last value of an option as a number; None when it is not a number above 0."""
        text = self.value(name)
        return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def plan_for(
    shape: ModelShape,
    arguments: argparse.Namespace,
    options: ServerOptions,
    server: Path | None,
    state: Path,
) -> MemoryPlan:
    """Make the plan for a model on this machine.

    `arguments` are those of `add_plan_options`; `options` override them. `server` is a built
    llama-server, which lists its devices, or None; `state` is a directory on the disk that stores
    blocks. Raises ConfigError when a draft model or a projector cannot be read.
    """
    machine = measure(server, state)
    if arguments.vram is not None:
        machine = replace(machine, device=arguments.vram)
    return make_plan(shape, machine, plan_options(arguments, options))


def plan_options(arguments: argparse.Namespace, options: ServerOptions) -> PlanOptions:
    """Return what the user asks for; options of llama-server override those of `add_plan_options`.

    Raises ConfigError for an unknown type of the KV cache.
    """
    sessions = options.number("--parallel") or arguments.sessions or 1
    cells = options.number("--ctx-size")
    draft, projector = options.value("--model-draft"), options.value("--mmproj")
    return PlanOptions(
        sessions=sessions,
        context=options.number("--ctx-logical") or arguments.context,
        is_context_passed_on=options.number("--ctx-logical") is not None,
        scales_rope=any(options.value(it) not in (None, "none") for it in _ROPE_SCALING),
        cells=cells // sessions if cells else arguments.cells,
        ram_mib=_ram_mib(arguments, options),
        disk_mib=_disk_mib(arguments, options),
        kv=_kv_types(options),
        draft=read_shape(Path(draft)) if draft else None,
        draft_kv=_kv_types(options, "-draft"),
        projector_bytes=_file_bytes(Path(projector)) if projector else 0,
    )


def _kv_types(options: ServerOptions, suffix: str = "") -> KvTypes:
    """Return the types of K and V; ConfigError for one that llama-server does not have."""
    types = [options.value(f"--cache-type-{name}{suffix}") or "f16" for name in "kv"]
    for name in types:
        if name not in KV_TYPES:
            raise ConfigError(
                f"{name} is not a type of the KV cache; the types are {', '.join(KV_TYPES)}"
            )
    return KvTypes(*types)


def _file_bytes(path: Path) -> int:
    """Return the size of a file; ConfigError when it cannot be read."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"--mmproj: {path} cannot be read: {error.strerror}") from error


def _ram_mib(arguments: argparse.Namespace, options: ServerOptions) -> int | None:
    """MiB of host memory for blocks; ConfigError for a `--ram` that holds no block."""
    named = options.value("--evoke-ram")
    if named is not None and named.removeprefix("-").isdecimal():
        return max(0, int(named))  # a negative number disables block calls, like 0
    if arguments.ram is None:
        return None
    if arguments.ram < _MIB:
        raise ConfigError("--ram: blocks need at least 1 MiB; to evict nothing, use --budget off")
    return int(arguments.ram) // _MIB


def _disk_mib(arguments: argparse.Namespace, options: ServerOptions) -> int | None:
    """MiB of disk for blocks; llama-server's option is `DIRECTORY` or `DIRECTORY:MIB`."""
    named = options.value("--evoke-disk")
    if named is not None:
        mib = named.rpartition(":")[2]
        return int(mib) if ":" in named and mib.isdecimal() else _DISK_MIB_OF_THE_SERVER
    return None if arguments.disk is None else int(arguments.disk) // _MIB


def default_state(model: str) -> Path:
    """Return the default directory for the blocks of a model and the log of its server.

    `model` is the absolute path of its file, or its name on the hub.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    key = hashlib.sha256(model.encode()).hexdigest()[:8]
    return Path(base).expanduser() / "evoke-proxy" / f"{Path(model).stem[:60]}-{key}"


def server_command(
    program: str,
    model: Sequence[str],
    options: ServerOptions,
    state: Path,
    plan: MemoryPlan,
) -> list[str]:
    """Return the command line of llama-server without its address.

    Options that the user gives replace those of the plan.
    """
    wanted = {"--ctx-size": str(plan.cells * plan.sessions), "--parallel": str(plan.sessions)}
    if plan.ram_mib:
        wanted["--ctx-logical"] = str(plan.context)
        wanted["--evoke-ram"] = str(plan.ram_mib)
    if plan.disk_mib:
        wanted["--evoke-disk"] = f"{state / 'blocks'}:{plan.disk_mib}"
    words = [
        word
        for name, value in wanted.items()
        if options.value(name) is None
        for word in (name, value)
    ]
    return [program, *model, *words, *options.words]


def table(plan: MemoryPlan, wanted: int | str | None = AUTO) -> list[str]:
    """Format the plan as lines of text; `wanted` is `policy.budget`."""
    shape = plan.shape
    weights = f"weights {_bytes(shape.weight_bytes)}"
    if plan.other_bytes:
        weights += f", {_bytes(plan.other_bytes)} beside it (-md, --mmproj)"
    rows = [
        ("model", f"{shape.architecture}, {shape.kind}, {weights}"),
        ("sessions", str(plan.sessions)),
        ("context", f"{plan.context} tokens ({'--ctx-logical' if plan.ram_mib else '-c'})"),
        ("cells", f"{plan.cells} for each session (-c {plan.cells * plan.sessions})"),
        ("budget", _budget(plan, wanted)),
        ("on the device", f"{_bytes(plan.device_bytes)} for each session"),
        *(_savings(plan) if plan.can_evict else ()),
        ("host memory", f"{_shared(plan.ram_mib, plan)} (--evoke-ram)" if plan.ram_mib else "none"),
        ("disk", f"{_shared(plan.disk_mib, plan)} (--evoke-disk)" if plan.disk_mib else "none"),
    ]
    if not shape.layers:
        rows = [
            *rows[:2],
            ("context", f"{plan.context} tokens (-c {plan.cells * plan.sessions})"),
            ("cells", _WITHOUT_ROWS[shape.kind]),
        ]
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:{width}}  {text}" for name, text in rows), *plan.notes]


def _savings(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Rows on what eviction saves on the device, and where it puts it."""
    saved = max(0, plan.whole_bytes - plan.device_bytes)
    outside = int(plan.row_bytes * max(0, plan.context - plan.cells))
    return [
        (
            "whole context",
            f"would take {_bytes(plan.whole_bytes)} there: eviction saves {_bytes(saved)} for each"
            " session",
        ),
        ("evicted blocks", f"at most {_bytes(outside)} for each session"),
    ]


def _shared(mib: int, plan: MemoryPlan) -> str:
    """Describe MiB that all sessions share."""
    total, share = mib_in_words(mib), mib_in_words(mib // plan.sessions)
    each = share.removesuffix(f" {total.split()[1]}")  # the same unit is written once
    return f"{total} for all sessions" + (f", {each} for each" if plan.sessions > 1 else "")


def _budget(plan: MemoryPlan, wanted: int | str | None) -> str:
    """Describe the budget of a session: the configured one, or the automatic one."""
    automatic = plan.budget(PolicySettings().reserve_tokens)
    if automatic is None:
        return _without_budget(plan)
    if wanted is None:
        return "off: no limit is configured; leave policy.budget (--budget) out to evict"
    if isinstance(wanted, int) and wanted > plan.cells:
        return f"{wanted} tokens have no effect, a session has fewer cells: --budget {automatic}"
    return f"{automatic if wanted == AUTO else wanted} tokens for each session"


def _without_budget(plan: MemoryPlan) -> str:
    """Say why nothing is evicted, and which option would change it."""
    if plan.shape.layers and not plan.ram_mib:
        return "off: --evoke-ram 0 disables block calls; leave it out to evict"
    quarter = plan.context // 4
    can_change = plan.shape.layers and quarter >= LEAST_CELLS_OF_A_SLOT
    change = f"; --cells {quarter} keeps a quarter of it in cells" if can_change else ""
    return f"off: the whole context fits the cells{change}"


def _bytes(number: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number / 1024:.0f} KiB"
