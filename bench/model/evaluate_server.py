"""Recall by scenario and length through llama-server's chat endpoint, temperature 0.

A chat's probes are asked one after another; earlier ones stand in the history with their expected
answers. A value is exact when the answer ends with it, a final full stop allowed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.model import vocab
from bench.model.evaluate import Cell, Score, Scores, select, show
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.judge import recalled
from evoke_proxy.demo.processes import free_port, server_command, serving

_EXAMPLES = """examples:
  python -m bench.model.evaluate_server build/bin/llama-server \\
      evoke_proxy/models/tiny-recall-f16.gguf out/model/heldout.json --chats 20
"""


def grade(port: int, cases: Sequence[Mapping[str, Any]]) -> dict[Cell, Score]:
    """Return the scores of all probes of all cases, asked on that port."""
    cells: dict[Cell, Score] = {}
    for case in cases:
        score = cells.setdefault((case["scenario"], case["length"]), Score())
        for probe in case["probes"]:
            messages = case["messages"][: probe["message"]]
            body = {"messages": messages, "temperature": 0, "max_tokens": 40}
            said = chat(port, body, {}).text
            score.questions += 1
            score.unknown += said.startswith(vocab.UNKNOWN.removesuffix("."))
            known = probe["known"]
            score.value += recalled(said, probe["value"]) if known else said == probe["text"]
            if said != probe["text"]:
                print("not as expected:", case["scenario"], repr(probe["text"]), repr(said))
    return cells


def main() -> None:
    """Grade one model on one held-out set."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model.evaluate_server",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", type=Path, help="a llama-server binary")
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("cases", type=Path, help="made by bench.model.heldout")
    parser.add_argument("--scenarios", default="", help="only these, comma-separated")
    parser.add_argument("--chats", type=int, default=20, help="at most so many a cell (20)")
    args = parser.parse_args()
    port = free_port()
    command = server_command(args.server, args.model, port, blocks=False)
    cases = select(args.cases, args.scenarios, args.chats)
    with tempfile.TemporaryDirectory() as folder:
        with serving(command, port, Path(folder) / "server.log"):
            show(Scores(0, {"llama-server": grade(port, cases)}))


if __name__ == "__main__":
    main()
