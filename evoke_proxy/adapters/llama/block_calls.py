"""Calls about the blocks of a patched llama-server, and what its answers say."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from evoke_proxy.adapters.llama.client import LATEST, LlamaClient
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens
from evoke_proxy.errors import PlanRefused, UpstreamProtocolError

# Names that llama-server takes in one call (patches/API.md, "How much one call may have").
MOST_NAMES = 16_384


async def run_plan(
    upstream: LlamaClient,
    plan: Plan,
    view: SlotView,
    owner: Mapping[str, str],
    client: Mapping[str, str],
    tokens: Tokens | None = None,
    more: Sequence[dict[str, Any]] = (),
) -> int:
    """Have llama-server run a plan; the epoch of the slot after it.

    `owner` names tenant and session (Conversation.owner): llama-server loads a copy that is not
    whole only for the session that saved it. Adopting needs `tokens`; `more` are ops besides those
    of the plan.

    Raises PlanRefused, and other EvokeErrors for what llama-server does.
    """
    epoch = view.epoch
    if plan.adopt is not None and tokens is not None:
        prefix, names = tokens[: plan.adopt.n_tokens].tolist(), list(plan.adopt.labels)
        adopt = {"tokens": prefix, "names": names, "epoch": epoch, **owner}
        epoch = _epoch(await upstream.run(view.id, "block-adopt", adopt, client))
    ops = [*plan.ops(), *more]
    if ops:
        call = {"epoch": epoch, "ops": ops, **owner}
        try:
            epoch = _epoch(await upstream.run(view.id, "block-plan", call, client))
        except PlanRefused as refused:
            if refused.op is not None and 0 <= refused.op < len(ops):
                refused.operation = str(ops[refused.op].get("op"))
            raise
    return epoch


async def drop_copies(
    upstream: LlamaClient, labels: Collection[str], tenant: str, client: Mapping[str, str]
) -> None:
    """Have llama-server forget these copies of a tenant, which are of no slot.

    Raises PlanRefused, and other EvokeErrors for what llama-server does.
    """
    for names in batches_of_names(sorted(labels)):
        await upstream.run(0, "block-drop", {"names": names, "tenant": tenant}, client)


def batches_of_names(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names in as many parts as llama-server takes in one call each."""
    for start in range(0, len(names), MOST_NAMES):
        yield names[start : start + MOST_NAMES]


async def is_processing(
    upstream: LlamaClient, slot: int, tenant: str, client: Mapping[str, str]
) -> bool:
    """Whether llama-server is at a request in a slot."""
    answer = await upstream.slot(slot, tenant, client, LATEST)
    return bool(answer.get("is_processing"))


def copies_in(answer: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The copies that an answer about a slot tells of, by their labels."""
    try:
        return {str(copy["name"]): copy for copy in answer.get("blocks") or ()}
    except (KeyError, TypeError) as error:
        raise UpstreamProtocolError("llama-server tells of a copy without a name") from error


def copies_of(answer: Mapping[str, Any], session: str) -> Mapping[str, Mapping[str, Any]]:
    """Those of them that were made for a session, if it has forgotten them, too."""
    prefix = f"{wire_name(session)}/"
    return {label: it for label, it in copies_in(answer).items() if label.startswith(prefix)}


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
