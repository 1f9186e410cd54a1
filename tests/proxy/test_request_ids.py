"""Every answer says which request it is of."""

from __future__ import annotations

import re

from running import ask, proxy

from evoke_proxy.demo.processes import free_port


def test_a_request_keeps_its_id_where_that_is_sane() -> None:
    with proxy(free_port()) as running:

        def id_of(given: str | None, target: str = "/evoke/health") -> str:
            headers = {"X-Request-Id": given} if given is not None else {}
            return ask(running.port, "GET", target, None, headers).headers["x-request-id"]

        assert id_of("req_01-A.b:c") == "req_01-A.b:c"
        assert id_of("mine", "/v1/models") == "mine"  # nobody is there: an error of ours
        for strange in (None, "", "two words", "x" * 129, 'quote"', "-dash"):
            assert re.fullmatch("[0-9a-f]{16}", id_of(strange)), strange
        assert id_of(None) != id_of(None)
