"""Running a plan: the calls it takes, and what llama-server's answers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.core.conversation.plan import Plan
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens
from evoke_proxy.errors import UpstreamProtocolError


async def run_plan(
    upstream: Upstream,
    plan: Plan,
    view: SlotView,
    tenant: str,
    client: Mapping[str, str],
    tokens: Tokens | None = None,
    more: Sequence[dict[str, Any]] = (),
) -> int:
    """Have llama-server run a plan; the epoch of the slot after it. Adopting needs `tokens`; `more`
    are ops besides those of the plan.

    Raises PlanRefused, and other EvokeErrors for what llama-server does.
    """
    epoch, owner = view.epoch, {"tenant": tenant}
    if plan.adopt is not None and tokens is not None:
        prefix, names = tokens[: plan.adopt.n_tokens].tolist(), list(plan.adopt.labels)
        adopt = {"tokens": prefix, "names": names, "epoch": epoch} | owner
        epoch = _epoch(await upstream.run(view.id, "block-adopt", adopt, client))
    ops = [*plan.ops(), *more]
    if ops:
        call = {"epoch": epoch, "ops": ops} | owner
        epoch = _epoch(await upstream.run(view.id, "block-plan", call, client))
    return epoch


def slot_in(rendered: Rendered, slot: int) -> SlotView:
    """What a rendering says about a slot; UpstreamProtocolError when it says nothing."""
    view = rendered.slot(slot)
    if view is None:
        raise UpstreamProtocolError(f"llama-server says nothing about slot {slot}")
    return view


def _epoch(answer: Mapping[str, Any]) -> int:
    epoch = answer.get("epoch")
    if not isinstance(epoch, int):
        raise UpstreamProtocolError("a block call was answered without an epoch")
    return epoch
