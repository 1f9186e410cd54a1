"""The choice among the strategies of a server, and what a strategy must implement."""

from __future__ import annotations

import pytest

from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.engine.parsing.request import ParsedRequest
from evoke_proxy.engine.server.strategy import AnyBodyStrategy, CacheStrategy, Strategies
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope


class _Strategy(AnyBodyStrategy):
    async def prepare(self, request: ParsedRequest, scope: TurnScope) -> PreparedTurn:
        return scope.turn


BUDGETED, SNAPSHOTS, PASSTHROUGH = _Strategy(), _Strategy(), _Strategy()
PATCHED = ServerInfo("", "")
UNPATCHED = ServerInfo("unpatched", "it is not patched")
UNSUPPORTED = ServerInfo("unsupported", "it lacks plan")
ROUTER = ServerInfo("unpatched", "it is not patched", is_router=True)


@pytest.mark.parametrize(
    ("server", "with_directory", "without_directory"),
    [
        (PATCHED, BUDGETED, BUDGETED),
        (UNPATCHED, SNAPSHOTS, PASSTHROUGH),
        (UNSUPPORTED, SNAPSHOTS, PASSTHROUGH),
        (ROUTER, PASSTHROUGH, PASSTHROUGH),
        (UNKNOWN_SERVER, PASSTHROUGH, PASSTHROUGH),
    ],
    ids=["patched", "unpatched", "unsupported", "router", "unknown"],
)
def test_the_strategy_is_selected_by_the_capabilities_of_the_server(
    server: ServerInfo, with_directory: CacheStrategy, without_directory: CacheStrategy
) -> None:
    assert Strategies(BUDGETED, SNAPSHOTS, PASSTHROUGH).select(server) is with_directory
    assert Strategies(BUDGETED, None, PASSTHROUGH).select(server) is without_directory


def test_a_strategy_without_prepare_cannot_be_made() -> None:
    class Unfinished(CacheStrategy):
        mode = "unfinished"

    with pytest.raises(TypeError, match="prepare"):
        Unfinished()  # type: ignore[abstract]
