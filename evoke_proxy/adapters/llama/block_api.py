"""The block calls of a patched llama-server, and their replies (patches/API.md)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Evict, Plan
from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.core.prompt.rendered import Rendered, RenderingLimit, SlotView, Tokens
from evoke_proxy.errors import PlanRefused, UpstreamProtocolError, UpstreamRejected

# The value of `since` with which `BlockApi.slot` lists no saved blocks.
LATEST = "latest"
# The type of llama-server's error for a call that would keep other slots waiting (patches/API.md).
TOO_MUCH_WORK = "too_much_work"
# Names that llama-server accepts in one call (patches/API.md, "How much one call may have").
MAX_NAMES = 16_384
# Selecting among more saved blocks than this, or encoding a plan for them, takes milliseconds.
_FEW_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class EncodedOps:
    """The operations of a plan, and the same as JSON."""

    ops: Sequence[Mapping[str, Any]]
    data: bytes


@dataclass(frozen=True, slots=True)
class PlanCall:
    """A plan to run on a slot.

    Attributes:
        plan: what to evict, load, save and adopt.
        view: the state of the slot for which the plan was made; its epoch is sent.
        owner: `tenant` and `session` (Conversation.owner). llama-server loads a partial copy only
            for the session that saved it.
        tokens: the prompt; needed if the plan adopts copies of another slot.
        more_ops: operations to run after those of the plan.
        encoded: the operations, if they are encoded already, see `encode`.
    """

    plan: Plan
    view: SlotView
    owner: Mapping[str, str]
    tokens: Tokens | None = None
    more_ops: Sequence[dict[str, Any]] = ()
    encoded: EncodedOps | None = None


@dataclass(frozen=True, slots=True)
class RenderCall:
    """A request to render.

    Attributes:
        dialect: one that `parse_chat` accepts.
        body: the request body as it will be forwarded.
        previous: the rendering that this one probably extends: the reply then omits the messages
            that both have in common.
        n_ctx: context of a slot in tokens; the reply for a longer prompt is not read to its end.
            None for no limit.
        tenant: for whom llama-server keeps the rendering until the body is forwarded; None: it does
            not keep it.
        behind: where the answer begins in a longer prompt, and how many of the first messages of
            the body are its last ones. The slots are then compared with that prompt and what
            follows it, but the prompt itself is taken as equal. None: they are compared with this
            rendering.
    """

    dialect: str
    body: bytes
    previous: Rendered | None = None
    n_ctx: int | None = None
    tenant: str | None = None
    behind: tuple[int, int] | None = None


class BlockApi:
    """The block calls of one llama-server.

    The calls are made with the key of the client given to the constructor. They raise UpstreamError
    when llama-server fails.
    """

    def __init__(self, client: LlamaClient) -> None:
        self._client = client

    async def render(self, call: RenderCall) -> Rendered:
        """Return the tokens that llama-server would decode for a request, and the state of its
        slots.

        Raises PromptTooLong once the reply has more than `n_ctx` tokens.
        """
        previous = call.previous
        edges = orjson.dumps(previous.message_hashes if previous is not None else ())
        # The body is inserted unparsed, because llama-server must see the bytes that are forwarded.
        more = b'"behind":[%d,%d],' % call.behind if call.behind is not None else b""
        if call.tenant is not None:
            more += b'"keep":true,"tenant":%b,' % orjson.dumps(call.tenant)
        head = b'{"compact":true,"dialect":%b,"known":%b,%b"body":' % (
            orjson.dumps(call.dialect),
            edges,
            more,
        )
        check = RenderingLimit(call.n_ctx).feed if call.n_ctx is not None else None
        options = CallOptions("render", check=check)
        body = (head, call.body, b"}")
        answer = await self._client.call("POST", "/evoke/render", body, options)
        return Rendered.parse(answer, previous)

    async def run(self, slot: int, action: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """Make one block call for a slot and return the reply; bytes are JSON already.

        Raises PlanRefused when llama-server refuses the call, which then has changed nothing.
        """
        target = f"/slots/{slot}?action={action}"
        try:
            return await self._client.call("POST", target, body, CallOptions(action))
        except UpstreamRejected as error:
            raise PlanRefused.of(error) from error

    async def slot(
        self,
        slot: int,
        tenant: str,
        since: str = "",
        keep: Callable[[str], bool] | None = None,
    ) -> dict[str, Any]:
        """Return the state of one slot, and the saved blocks of a tenant, whatever their slot was.

        `since` is the `version` in an earlier reply: only blocks that have changed since then are
        listed. With LATEST no block is listed, with "" all are. Of these, `blocks` in the result
        has those whose label `keep` accepts; without `keep` it has all. As a tenant may have tens
        of thousands, `keep` may be called in another thread.
        """
        target = f"/slots/{slot}/blocks?tenant={tenant}" + (f"&since={since}" if since else "")
        answer = await self._client.call("GET", target)
        copies = answer.get("blocks")
        if keep is not None and isinstance(copies, list):
            if len(copies) > _FEW_BLOCKS:
                answer["blocks"] = await asyncio.to_thread(_select, copies, keep)
            else:
                answer["blocks"] = _select(copies, keep)
        return answer

    async def is_processing(self, slot: int, tenant: str) -> bool:
        """Whether llama-server is processing a request in a slot."""
        answer = await self.slot(slot, tenant, LATEST)
        return bool(answer.get("is_processing"))

    async def run_plan(self, call: PlanCall) -> int:
        """Run a plan, and return the epoch of the slot after it.

        Raises PlanRefused when llama-server refuses a call. Operations of the refused call have
        changed nothing; copies that were adopted before it stay adopted.
        """
        plan, view, owner = call.plan, call.view, call.owner
        epoch = view.epoch
        if plan.adopt is not None and call.tokens is not None:
            prefix, names = call.tokens[: plan.adopt.n_tokens], list(plan.adopt.labels)
            adopt = {"tokens": prefix, "names": names, "epoch": epoch, **owner}
            epoch = _epoch(await self.run(view.id, "block-adopt", adopt))
        encoded = call.encoded or await encode(call)
        ops = encoded.ops
        if ops:
            head = orjson.dumps({"epoch": epoch, **owner})
            body = b'%b,"ops":%b}' % (head[:-1], encoded.data)
            try:
                epoch = _epoch(await self.run(view.id, "block-plan", body))
            except PlanRefused as refused:
                if refused.op is not None and 0 <= refused.op < len(ops):
                    refused.operation = str(ops[refused.op].get("op"))
                raise
        return epoch

    async def empty(self, view: SlotView, owner: Mapping[str, str]) -> int:
        """Evict all rows of a slot except the last, which llama-server needs; returns its epoch.

        The next request decodes its whole prompt. Raises PlanRefused when llama-server refuses it.
        """
        rows = list(view.resident)
        if rows:
            rows[-1] = Span(rows[-1].start, rows[-1].end - 1)
        evicts = tuple(Evict(row) for row in rows if len(row))
        # Without `reuse=0` the next request could continue the tokens of the slot, all omitted.
        plan = Plan(evicts=evicts, reuse=0, reason="deleted")
        return await self.run_plan(PlanCall(plan, view, owner))

    async def attention(self, slot: int, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return the reply to an `attention` call, which is split if it is too much work.

        `key` names the list of ranges in `body` that takes the most work: "bounds" or "products".
        When llama-server refuses the call as too much work, the list is divided between several
        calls, so that other slots decode between them, and their replies are joined. A range that
        is too much work alone is marked as unknown in the result. Raises PlanRefused when a call is
        refused for another reason, and UpstreamError when a call fails.
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
                # Each range was refused: make one call without ranges for the rest of the reply.
                size, start = 0, len(spans)
        return first if len(parts) < 2 else first | {f"key_{key}": _joined(parts)}

    async def load_at(self, view: SlotView, label: str, at: int, owner: Mapping[str, str]) -> int:
        """Insert the rows and tokens of a copy at position `at`; returns the epoch of the slot.

        Later rows move up, and keys are rotated to their new positions. Raises PlanRefused.
        """
        body = {"epoch": view.epoch, "names": [label], "at": at, **owner}
        return _epoch(await self.run(view.id, "block-load", body))

    async def drop_copies(self, labels: Collection[str], tenant: str) -> None:
        """Delete saved blocks of a tenant by label; PlanRefused when llama-server refuses."""
        for names in batches_of_names(sorted(labels)):
            await self.run(0, "block-drop", {"names": names, "tenant": tenant})


def batches_of_names(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split names into batches that llama-server accepts in one call each."""
    for start in range(0, len(names), MAX_NAMES):
        yield names[start : start + MAX_NAMES]


def copies_in(answer: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the saved blocks in a reply of `BlockApi.slot`, by label.

    Raises UpstreamProtocolError when one has no label.
    """
    try:
        return {str(copy["name"]): copy for copy in answer.get("blocks") or ()}
    except (KeyError, TypeError) as error:
        raise UpstreamProtocolError("llama-server lists a saved block without a name") from error


def _n_blocks(plan: Plan) -> int:
    """Return how many blocks the operations of a plan name."""
    n_ordered = len(plan.stream.order) if plan.stream is not None else 0
    return n_ordered + len(plan.saves) + len(plan.evicts) + len(plan.loads) + len(plan.drops)


async def encode(call: PlanCall) -> EncodedOps:
    """Encode the operations of a call: in a thread when they name many blocks."""
    if _n_blocks(call.plan) > _FEW_BLOCKS:
        return await asyncio.to_thread(_encoded, call)
    return _encoded(call)


def _encoded(call: PlanCall) -> EncodedOps:
    ops = [*call.plan.ops(), *call.more_ops]
    return EncodedOps(ops, orjson.dumps(ops))


def of_session(session: str) -> Callable[[str], bool]:
    """Return whether a label names a saved block of this session, for `BlockApi.slot`.

    These are found by the session in their label, also if the session does not use them any more.
    """
    prefix = f"{wire_name(session)}/"
    return lambda label: label.startswith(prefix)


def _select(copies: list[Any], keep: Callable[[str], bool]) -> list[Any]:
    """Return the saved blocks to keep, and those without a label, in their order.

    Empties the list step by step: to free a long one at once holds the interpreter's lock.
    """
    selected = []
    copies.reverse()
    while copies:
        copy = copies.pop()
        if not isinstance(copy, dict) or "name" not in copy or keep(str(copy["name"])):
            selected.append(copy)
    return selected


def slot_in(rendered: Rendered, slot: int) -> SlotView:
    """Return the state of a slot in a rendering; UpstreamProtocolError when it is not there."""
    view = rendered.slot(slot)
    if view is None:
        raise UpstreamProtocolError(f"llama-server did not report the state of slot {slot}")
    return view


def _joined(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Join partial replies, each with its number of ranges; ranges without data are unknown."""
    first = next((part for _, part in parts if part), {})
    has_rows = [it for count, part in parts for it in part.get("known", [False] * count)]
    data = b"".join(base64.b64decode(part.get("data", "")) for _, part in parts)
    return {**first, "known": has_rows, "data": base64.b64encode(data).decode()}


def _epoch(answer: Mapping[str, Any]) -> int:
    epoch = answer.get("epoch")
    if not isinstance(epoch, int):
        raise UpstreamProtocolError("llama-server answered a block call without an epoch")
    return epoch
