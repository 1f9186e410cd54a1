"""Limits how many requests other than chats llama-server computes at a time, fair between tenants.

llama-server begins every request at once, in a thread of its own or as a task before the next chat.
Without a limit, a client with hundreds of requests would delay the chats of others by as many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count

from aiohttp import web

from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.engine.parsing.request import tenant_of
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.engine.server.slot_queue import SlotQueue, finished
from evoke_proxy.web import endpoints
from evoke_proxy.web.client_access import ACCESS

# Most text requests, such as tokenizing and applying a template, that run at a time. Each takes a
# CPU core of llama-server.
_N_TEXTS = 4


class RelayQueue:
    """Opens requests at llama-server, a few at a time; the others wait as chats do.

    With one llama-server, requests that are computed in its slots wait in the queue of the chats.
    With several they wait in a queue for all of them, and text requests always wait in one of their
    own. In these two queues `limits.connections` replaces `limits.queue`.
    """

    def __init__(self, gateway: ProxyGateway) -> None:
        self._gateway = gateway
        self._texts = SlotQueue(gateway.config.limits)
        self._tasks = SlotQueue(gateway.config.limits)
        self._numbers = count()

    @asynccontextmanager
    async def open(
        self, request: web.Request, target: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[Reply]:
        """Wait for a place, send the request and yield its reply.

        The place is free again when the head of the reply has arrived: llama-server has computed
        it then. A text that it still processes keeps its place when the client disconnects. Raises
        SlotsBusy like `SlotQueue.acquire`.
        """
        takes_slots = request.path in endpoints.TASK_PATHS
        self._adjust(self._texts, _N_TEXTS)
        queue = self._queue_of_tasks() if takes_slots else self._texts
        name = f"relay {next(self._numbers)}"
        tenant = tenant_of(request.app[ACCESS].client(request))
        async with AsyncExitStack() as stack:
            with await queue.acquire(name, tenant, ephemeral=True):
                opening = stack.enter_async_context(
                    self._gateway.upstream.open(request.method, target, headers, body)
                )
                if takes_slots:  # llama-server cancels it when the connection is closed
                    reply = await opening
                else:
                    reply = await finished(asyncio.get_running_loop().create_task(opening))
            yield reply

    def _queue_of_tasks(self) -> SlotQueue:
        """The queue for the slots of the server; one for all servers where there are several."""
        slots = [served.server.slots for served in self._gateway.served_models]
        if len(slots) == 1:
            return slots[0]
        self._adjust(self._tasks, sum(len(queue.pool) for queue in slots))
        return self._tasks

    def _adjust(self, queue: SlotQueue, n_parallel: int) -> None:
        limits = self._gateway.config.limits
        queue.adjust(replace(limits, queue=limits.connections))
        if len(queue.pool) != n_parallel:
            queue.restart(n_parallel)


RELAY_QUEUE = web.AppKey("relay_queue", RelayQueue)
