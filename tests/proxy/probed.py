"""Conversations of the tests of the model's probe."""

from __future__ import annotations

from conversation import ChatClient

from evoke_proxy.core.policy.probe import DecodeSpeed

BUDGET = 320
# As long as the story, so that it does not fit into room left over by the ranking by text.
FACT = (
    "My residence is amber falcon. " + "The young painter carries seven green lamps upstairs. " * 4
)
STORY = "The river follows the old bridge slowly. A wolf often watches the quiet harbor. " * 3


def conversation_with_evicted_fact(port: int, name: str, recall: str) -> ChatClient:
    """Return a conversation whose first message, a fact, has been evicted."""
    fields = {"evoke_budget": BUDGET, "evoke_recall": recall}
    client = ChatClient(port, name, fields)
    client.say(FACT, max_tokens=4)
    for _ in range(8):
        client.say(STORY, max_tokens=4)
    return client


class FixedSpeed(DecodeSpeed):
    """A fixed decode speed, in tokens a second, in place of the measured one."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self._speed = speed

    def seconds(self, tail: int, words: int) -> float:
        return (tail + words) / self._speed
