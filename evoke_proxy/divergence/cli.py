"""`evoke-proxy divergence`: compares answers under a budget with those of the full cache."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evoke_proxy.demo.client import DemoError
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.divergence.conversations import Conversation, read_log
from evoke_proxy.divergence.llama import Port
from evoke_proxy.divergence.measure import ARMS, Options, arm_names, measure, summarise
from evoke_proxy.errors import ConfigError
from evoke_proxy.server_build import BuildError, BuildOptions, ensure_server

DESCRIPTION = """\
Compare the answers of a model under a token budget with those of the full KV cache, on your own
conversations. llama-server is made to generate the answers of the log, token by token, and reports
the distribution of each token. The table has, for each arm:
  kl        Kullback-Leibler divergence from the full cache in nats: mean, and 95th percentile
  top-1     tokens at which the most probable token is the same, percent, with a 95 % interval
  changed   answers with at least one other most probable token, percent
  logprob   change of the log probability of the given answer, per token
Arms: the defaults of the proxy; `discard`, nothing returns; `truncate`, the oldest messages are
dropped; `random`, blocks chosen by chance; `oracle`, the blocks that the answer itself attends to.
Where `random` is as good as `oracle`, the model says nothing about the choice of blocks. Policies
of the modules that EVOKE_POLICY_MODULES names are further arms for --arms, such as `breadcrumb` of
bench.policies.
The patched llama-server is built first if it is missing, which takes minutes.
Exit codes: 0 measured, 1 could not be measured, 2 wrong arguments."""

EXAMPLES = """examples:
  evoke-proxy divergence --model model.gguf --log chat.jsonl
      measure the last 8 answers of each conversation on a budget of an eighth of it
  evoke-proxy divergence --model model.gguf --log chat.jsonl --budget 6000 --arms default,discard
      compare two arms on a budget of 6000 tokens
  evoke-proxy divergence --model model.gguf --log chat.jsonl --out divergence.json -- -ngl 99
      write every answer to a file, with options for llama-server after --
The log has one JSON object a line: {"messages": [...]} as in requests,
{"conversations": [{"from": "human", "value": "..."}]} as in ShareGPT, or one message,
{"role": "user", "content": "..."}; a system message begins the next conversation."""

_COLUMNS = (
    *("arm", "answers", "tokens", "kl mean", "kl p95", "top-1 %", "95 % interval"),
    *("changed %", "logprob"),
)
_CHARACTERS_A_TOKEN, _FRAME, _LEAST_CONTEXT = 2, 32, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `evoke-proxy divergence`."""
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="GGUF file")
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="conversations, JSON lines"
    )
    parser.add_argument(
        "--budget", type=_count, metavar="N", help="budget of a turn, tokens (default: --share)"
    )
    parser.add_argument(
        "--share",
        type=_count,
        default=8,
        metavar="N",
        help="budget as a part of each conversation, 1/N (default: 8)",
    )
    parser.add_argument(
        "--arms", type=_arms, default=ARMS, metavar="A,B", help=f"of {', '.join(ARMS)} (all)"
    )
    parser.add_argument(
        "--answers", type=_count, default=8, metavar="N", help="last answers of each (default: 8)"
    )
    parser.add_argument(
        "--tokens", type=_count, default=48, metavar="N", help="first tokens of each (default: 48)"
    )
    parser.add_argument(
        "--top",
        type=_count,
        default=128,
        metavar="N",
        help="tokens of each distribution that are compared one by one (default: 128)",
    )
    parser.add_argument(
        "--context", type=_count, metavar="N", help="cells of the cache (default: from the log)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every answer, as JSON")
    parser.add_argument(
        "server_options", nargs="*", metavar="-- OPTION", help="options for llama-server"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the table; 1 when it could not be measured, ConfigError for a bad log."""
    if not arguments.model.is_file():
        raise ConfigError(f"--model: {arguments.model} is not a file")
    talks = read_log(arguments.log)
    if arguments.out is not None:
        _check_writable(arguments.out)
    options = Options(
        arms=arguments.arms,
        budget=arguments.budget,
        share=arguments.share,
        answers=arguments.answers,
        tokens=arguments.tokens,
        n_top=arguments.top,
    )
    try:
        rows = _measured(arguments, talks, options)
    except (DemoError, BuildError) as error:
        print(f"divergence could not be measured: {error}", file=sys.stderr)
        return 1
    summary = summarise(rows)
    if not summary:
        print(
            "nothing to compare: no answer follows a prompt that is longer than the budget;"
            " try a smaller --budget or a larger --share",
            file=sys.stderr,
        )
        return 1
    print(table(summary))
    for arm in set(options.arms) - {line["arm"] for line in summary}:
        print(f"{arm}: not available for this model")
    if arguments.out is not None:
        report = {"model": arguments.model.name, "log": arguments.log.name}
        report |= {"summary": summary, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before measuring takes minutes."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error


def _measured(
    arguments: argparse.Namespace, talks: Sequence[Conversation], options: Options
) -> list[dict[str, Any]]:
    server, port = ensure_server(options=BuildOptions(ui=False)), free_port()
    context = arguments.context or _context(talks, options)
    command = [str(server), "-m", str(arguments.model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "-np", "1", "-c", str(context), "--jinja"]
    command += ["--evoke-ram", str(_ram_mib()), *arguments.server_options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "llama-server.log"
        with serving(command, port, log):
            return measure(Port(port), talks, options, lambda said: print(said, file=sys.stderr))


def _context(talks: Sequence[Conversation], options: Options) -> int:
    """Return enough cells for the longest conversation; a token has two characters or more."""
    longest = max(
        talk.characters // _CHARACTERS_A_TOKEN + _FRAME * len(talk.messages) for talk in talks
    )
    return max(_LEAST_CONTEXT, longest + options.tokens)


def _ram_mib() -> int:
    """Return a quarter of the free host memory, for evicted blocks, at most 8 GiB."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
        return max(64, min(8192, int(free.split()[1]) // 1024 // 4))
    except (OSError, StopIteration, ValueError):
        return 1024


def table(summary: Sequence[dict[str, Any]]) -> str:
    """Format the summary as aligned text."""
    lines = [
        [
            line["arm"],
            str(line["answers"]),
            str(line["tokens"]),
            f"{line['kl_mean']:.4f}",
            f"{line['kl_p95']:.4f}",
            f"{line['top1_percent']:.1f}",
            f"{line['low']:.1f} to {line['high']:.1f}",
            f"{line['answers_changed_percent']:.0f}",
            f"{line['logprob_change']:+.4f}",
        ]
        for line in summary
    ]
    widths = [max(len(row[at]) for row in (_COLUMNS, *lines)) for at in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (_COLUMNS, *lines)
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _arms(text: str) -> tuple[str, ...]:
    names = text.split(",")
    arms = arm_names()
    unknown = [name for name in names if name not in arms]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not an arm; arms: {', '.join(arms)}")
    return tuple(name for name in arms if name in names)
