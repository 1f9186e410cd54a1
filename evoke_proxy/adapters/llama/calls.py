"""The calls of one llama-server, bound to the key of one caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi


@dataclass(frozen=True, slots=True)
class ServerCalls:
    """All calls of one llama-server, with one key.

    A request binds the key of its client once, with `as_caller`; all work for it, also after its
    reply, makes its calls through that value. Work for no client uses the value that `of` returns.
    """

    # Opens requests, and makes the calls that any llama-server answers.
    client: LlamaClient
    # Makes the calls that only a patched llama-server answers.
    blocks: BlockApi
    # Makes the calls that snapshots of slots need.
    stock: StockApi

    @classmethod
    def of(cls, client: LlamaClient) -> ServerCalls:
        """The calls of a client, with the configured key or none."""
        return cls(client, BlockApi(client), StockApi(client))

    def as_caller(self, headers: Mapping[str, str]) -> ServerCalls:
        """The same calls with the key in the headers of a request; a configured key is kept."""
        client = self.client.as_caller(headers)
        return ServerCalls(client, BlockApi(client), self.stock.bound_to(client))
