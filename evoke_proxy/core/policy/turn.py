"""One request of a session."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.task import Task
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.query import Query


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of a session on one slot; `config` is the configured one as the request wants it.

    `divergence` is the position where the client's history left the known one, None if it did not.
    """

    number: int
    request: ChatRequest
    rendered: Rendered
    slot: SlotView
    view: PolicyView
    config: PolicyConfig
    divergence: int | None
    question: Query
    task: Task


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """What is shown of the latest turn; its request is not kept, since that may be large."""

    view: PolicyView
    question: Query
    config: PolicyConfig
