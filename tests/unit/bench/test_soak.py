"""The agents of the soak bench: what they count."""

from __future__ import annotations

import random

from bench.listening import Quiet, listening
from bench.soak import Agent, Tally


def test_a_turn_that_fails_is_counted_once() -> None:
    class Failing(Quiet):
        def do_POST(self) -> None:
            self.body()
            self.send_response(500)
            self.end_headers()

    tally = Tally()
    with listening(Failing) as port:
        Agent(port, port, 0, budgeted=True, pause_s=0.0, tally=tally).turn(random.Random(1))
    assert tally.counts == {"turns": 1, "own_5xx": 1}
    assert len(tally.failures) == 1
