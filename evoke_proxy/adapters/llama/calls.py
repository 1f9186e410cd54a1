"""Bundles all calls of one llama-server, made with the key of one caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi


@dataclass(frozen=True, slots=True)
class ServerCalls:
    """All calls of one llama-server, with one key.

    For each request, `as_caller` is called once with the key of its client; all work for the
    request, also after its reply, uses the result. Work for no client uses the result of `of`.

    Attributes:
        client: Opens requests, and makes the calls that any llama-server answers.
        blocks: Makes the calls that only a patched llama-server answers.
        stock: Makes the calls for rendering and for snapshots, which any llama-server answers.
    """

    client: LlamaClient
    blocks: BlockApi
    stock: StockApi

    @classmethod
    def of(cls, client: LlamaClient) -> ServerCalls:
        """Make the calls of a server from its client, with the configured key or none."""
        return cls(client, BlockApi(client), StockApi(client))

    def as_caller(self, headers: Mapping[str, str]) -> ServerCalls:
        """Return the same calls with the key in the headers of a request.

        A configured key is sent instead of it.
        """
        client = self.client.as_caller(headers)
        return ServerCalls(client, BlockApi(client), self.stock.bound_to(client))
