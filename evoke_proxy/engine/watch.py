"""What llama-server is and whether it is there: asked at start, and again after it went away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.errors import EvokeError, UpstreamRejected, UpstreamTimeout

_log = logging.getLogger(__name__)


class ServerWatch:
    """The last known answer of `GET /props`; `on_start` is called with each server that appears.

    `config` may be replaced by another one of the same server.
    """

    def __init__(
        self, upstream: Upstream, config: Config, on_start: Callable[[ServerInfo], None]
    ) -> None:
        self.server = UNKNOWN_SERVER
        self._upstream = upstream
        self.config = config
        self._on_start = on_start
        self._again_at = 0.0

    async def ask(self, client: Mapping[str, str] | None = None) -> None:
        """Ask now; raises UpstreamError when there is no answer."""
        self._learn(await self._upstream.info(client))

    async def look(self, client: Mapping[str, str] | None = None) -> None:
        """Ask when nothing is known, with the credentials of a client; failures are only logged.

        A server that says no says so at once and is asked every time. One that keeps silent holds
        up a request for the connect timeout, and is left alone for the probe interval.
        """
        now = asyncio.get_running_loop().time()
        if self.server is not UNKNOWN_SERVER or now < self._again_at:
            return
        try:
            await self.ask(client)
        except UpstreamTimeout as error:
            self._again_at = now + self.config.upstream.probe_interval_s
            _log.warning("%s", error)
        except EvokeError as error:
            _log.warning("%s", error)

    async def check(self) -> dict[str, Any]:
        """Whether requests can be answered: `ok`, and a `detail` for a person."""
        try:
            await self.ask()
        except UpstreamRejected as error:
            wants_key = error.status in (401, 403)
            detail = "answers, to clients with a key; see upstream.api_key" if wants_key else error
            return {"ok": wants_key, "detail": str(detail)}
        except EvokeError as error:
            return {"ok": False, "detail": str(error)}
        return {"ok": True, "detail": f"{self._upstream.url} answers"}

    def lost(self) -> None:
        """Its connection broke: what comes back may be another one."""
        self.server = UNKNOWN_SERVER
        self._again_at = 0.0

    def described(self) -> str:
        """One line for a person: what requests through this proxy get."""
        url = self._upstream.url
        if not self.server.patched:
            helped = self.config.snapshots.directory
            what = "Chats keep their slots on disk" if helped else "Every request passes through"
            return (
                f"llama-server at {url}: {self.server.reason}. {what}, nothing is evicted;"
                " evoke-proxy build-server builds one that can"
            )
        budget = self.config.policy.budget
        length = f" of up to {self.server.n_ctx}" if self.server.n_ctx else ""
        none = "no budget: nothing is evicted but where a request or an operator sets one"
        kept = f"sessions keep {budget} tokens{length}" if budget else none
        back = "" if self.server.adopts else "; a session that loses its slot is decoded again"
        return f"llama-server at {url} is patched, {self.server.n_slots} slots; {kept}{back}"

    def _learn(self, server: ServerInfo) -> None:
        before, self.server = self.server, server
        if before is UNKNOWN_SERVER:
            self._on_start(server)
            _log.log(logging.INFO if server.patched else logging.WARNING, "%s", self.described())
