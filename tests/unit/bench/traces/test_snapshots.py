"""The proxy in front of the model of an unpatched server, with files of slots."""

from __future__ import annotations

import numpy as np

from bench.traces.replay import Replay, Served, run
from bench.traces.snapshots import FileServer, file_bytes_of, text_of, with_snapshots
from bench.traces.texts import Agent, Request, Scale


def _agents() -> list[Agent]:
    found = []
    for number in range(2):
        prompts = [list(range(30 + 3 * at)) for at in range(5)]
        requests = [Request(200.0, 64, np.array(ids, np.int64)) for ids in prompts]
        found.append(Agent(f"c{number}", 64, 64, requests))
    return found


def _decoded(max_tokens: int) -> tuple[int, int]:
    """Tokens that the server decoded, and tokens that it had not seen before."""
    scale = Scale(64)

    async def work() -> tuple[list[Served], int]:
        server = FileServer(1, None, scale)
        async with with_snapshots(server, max_tokens, scale) as arm:
            return await Replay(_agents(), scale).run(arm, 2), server.n_decoded

    record, n_decoded = run(work())
    assert len(record) == 10
    assert n_decoded >= sum(each.counts.decoded for each in record)
    return n_decoded, sum(each.fresh for each in record)


def test_a_conversation_that_lost_its_slot_is_restored_from_its_file() -> None:
    assert file_bytes_of(100_000) > 1 << 20
    decoded, fresh = _decoded(100_000)
    assert fresh <= decoded < 1.1 * fresh


def test_the_template_marks_where_answers_begin() -> None:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "x c d"}]
    assert text_of({"messages": messages}) == "a b <answer> c d <answer>"
    without = text_of({"messages": messages, "add_generation_prompt": False})
    assert without == "a b <answer> c d"
