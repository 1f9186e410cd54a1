"""The block calls of a patched llama-server, and their replies (patches/API.md)."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.core.prompt.rendered import Rendered, RenderingLimit, SlotView, Tokens
from evoke_proxy.errors import PlanRefused, UpstreamProtocolError, UpstreamRejected

# A value of `since` for which `slot` lists no saved blocks.
LATEST = "latest"
# The type of llama-server's error for a call that would keep other slots waiting (patches/API.md).
TOO_MUCH_WORK = "too_much_work"
# Names that llama-server accepts in one call (patches/API.md, "How much one call may have").
MAX_NAMES = 16_384


@dataclass(frozen=True, slots=True)
class PlanCall:
    """A plan to run on a slot.

    Attributes:
        plan: what to evict, load, save and adopt.
        view: the slot as the plan expects it.
        owner: `tenant` and `session` (Conversation.owner). A partial copy loads only for the
            session that saved it.
        tokens: the prompt; needed where the plan adopts copies.
        more_ops: further operations, after those of the plan.
    """

    plan: Plan
    view: SlotView
    owner: Mapping[str, str]
    tokens: Tokens | None = None
    more_ops: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class RenderCall:
    """A request to render.

    Attributes:
        dialect: one that `parse_chat` accepts.
        body: the request body as it will be forwarded.
        previous: the rendering that this one probably extends; the reply is shorter then.
        n_ctx: context size in tokens. A longer prompt is not read to its end.
    """

    dialect: str
    body: bytes
    previous: Rendered | None = None
    n_ctx: int | None = None


class BlockApi:
    """The block calls of one llama-server.

    The calls are made with the key of `client`, and raise UpstreamError when llama-server fails.
    """

    def __init__(self, client: LlamaClient) -> None:
        self._client = client

    async def render(self, call: RenderCall) -> Rendered:
        """The tokens llama-server would decode for a request, and the state of its slots.

        Raises PromptTooLong once the reply has more than `n_ctx` tokens.
        """
        previous = call.previous
        edges = orjson.dumps(previous.message_hashes if previous is not None else ())
        # The body is inserted unparsed, because llama-server must see the bytes that are forwarded.
        head = b'{"compact":true,"dialect":%b,"known":%b,"body":' % (
            orjson.dumps(call.dialect),
            edges,
        )
        check = RenderingLimit(call.n_ctx).feed if call.n_ctx is not None else None
        options = CallOptions("render", check=check)
        body = (head, call.body, b"}")
        answer = await self._client.call("POST", "/evoke/render", body, options)
        return Rendered.parse(answer, previous)

    async def run(self, slot: int, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Run one block call on a slot; PlanRefused when it is refused and nothing has changed."""
        target = f"/slots/{slot}?action={action}"
        try:
            return await self._client.call("POST", target, body, CallOptions(action))
        except UpstreamRejected as error:
            raise PlanRefused.of(error) from error

    async def slot(self, slot: int, tenant: str, since: str = "") -> dict[str, Any]:
        """The state of one slot, and the saved blocks of a tenant from any slot.

        `since` is the `version` of an earlier reply: only blocks that changed after it are listed;
        with LATEST none are.
        """
        target = f"/slots/{slot}/blocks?tenant={tenant}" + (f"&since={since}" if since else "")
        return await self._client.call("GET", target)

    async def is_processing(self, slot: int, tenant: str) -> bool:
        """Whether llama-server works on a request in a slot."""
        answer = await self.slot(slot, tenant, LATEST)
        return bool(answer.get("is_processing"))

    async def run_plan(self, call: PlanCall) -> int:
        """Run a plan; returns the epoch of the slot after it.

        Raises PlanRefused when llama-server refuses it; nothing has changed then.
        """
        plan, view, owner = call.plan, call.view, call.owner
        epoch = view.epoch
        if plan.adopt is not None and call.tokens is not None:
            prefix, names = call.tokens[: plan.adopt.n_tokens].tolist(), list(plan.adopt.labels)
            adopt = {"tokens": prefix, "names": names, "epoch": epoch, **owner}
            epoch = _epoch(await self.run(view.id, "block-adopt", adopt))
        ops = [*plan.ops(), *call.more_ops]
        if ops:
            body = {"epoch": epoch, "ops": ops, **owner}
            try:
                epoch = _epoch(await self.run(view.id, "block-plan", body))
            except PlanRefused as refused:
                if refused.op is not None and 0 <= refused.op < len(ops):
                    refused.operation = str(ops[refused.op].get("op"))
                raise
        return epoch

    async def attention(self, slot: int, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The answer of an `attention` call with `body`, which is split if it is too much work.

        `key` names the list of ranges in the body that takes the most work: "bounds" or
        "products". The list is split into several calls when llama-server refuses it as too much
        work; between the calls other slots decode. A range that is refused alone comes back as
        unknown. Raises PlanRefused, and other EvokeErrors when a call fails.
        """
        spans = list(body.get(key) or ())
        size = len(spans)
        first: dict[str, Any] = {}
        parts: list[tuple[int, Mapping[str, Any]]] = []
        rest: Mapping[str, Any] = body
        start = 0
        while not first or start < len(spans):
            part = spans[start : start + size]
            try:
                more = {key: part} if part or key in body else {}
                answer = await self.run(slot, "attention", {**rest, **more})
            except PlanRefused as refused:
                if refused.type != TOO_MUCH_WORK or not part:
                    raise
                if size > 1:
                    size = (size + 1) // 2
                    continue
                parts.append((1, {}))
            else:
                first = first or answer
                parts.append((len(part), answer.get(f"key_{key}") or {}))
                rest = {"ranges": [], "tenant": body.get("tenant", "")}
            start += len(part)
            if start >= len(spans) and not first:
                # Every single range was refused: get the rest of the answer without ranges.
                size, start = 0, len(spans)
        return first if len(parts) < 2 else first | {f"key_{key}": _joined(parts)}

    async def drop_copies(self, labels: Collection[str], tenant: str) -> None:
        """Delete saved blocks of a tenant; PlanRefused when llama-server refuses."""
        for names in batches_of_names(sorted(labels)):
            await self.run(0, "block-drop", {"names": names, "tenant": tenant})


def batches_of_names(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split names into batches that llama-server accepts in one call each."""
    for start in range(0, len(names), MAX_NAMES):
        yield names[start : start + MAX_NAMES]


def copies_in(answer: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The saved blocks that a reply about a slot lists, by label."""
    try:
        return {str(copy["name"]): copy for copy in answer.get("blocks") or ()}
    except (KeyError, TypeError) as error:
        raise UpstreamProtocolError("llama-server lists a copy without a name") from error


def copies_of(answer: Mapping[str, Any], session: str) -> Mapping[str, Mapping[str, Any]]:
    """The saved blocks of one session, also those that the session no longer lists."""
    prefix = f"{wire_name(session)}/"
    return {label: it for label, it in copies_in(answer).items() if label.startswith(prefix)}


def slot_in(rendered: Rendered, slot: int) -> SlotView:
    """The state of a slot that a rendering reports; UpstreamProtocolError when it has none."""
    view = rendered.slot(slot)
    if view is None:
        raise UpstreamProtocolError(f"llama-server says nothing about slot {slot}")
    return view


def _joined(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Join partial answers, each with its number of ranges; ranges without data are unknown."""
    first = next((part for _, part in parts if part), {})
    has_rows = [it for count, part in parts for it in part.get("known", [False] * count)]
    data = b"".join(base64.b64decode(part.get("data", "")) for _, part in parts)
    return {**first, "known": has_rows, "data": base64.b64encode(data).decode()}


def _epoch(answer: Mapping[str, Any]) -> int:
    epoch = answer.get("epoch")
    if not isinstance(epoch, int):
        raise UpstreamProtocolError("a block call was answered without an epoch")
    return epoch
