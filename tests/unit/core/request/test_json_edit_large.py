"""Editing large bodies: other threads run between short steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from thread_steps import longest_step

from evoke_proxy.core.request.json_edit import edit_top_level

_MIB = 1024 * 1024
_MESSAGE = b'{"role":"user","content":"%s"}'
# The longest CPU time of a thread without releasing the interpreter.
_LONGEST_S = 0.02
BODIES: dict[str, Callable[[], bytes]] = {
    "one string": lambda: _MESSAGE % (b"a" * (63 * _MIB)),
    "4,000 strings": lambda: b",".join([_MESSAGE % (b"a" * (63 * _MIB // 4000))] * 4000),
}


@pytest.mark.parametrize("name", BODIES)
def test_other_threads_run_during_an_edit(name: str) -> None:
    messages = BODIES[name]()
    body = b'{"id_slot":0,"evoke":false,"messages":[%s]}' % messages
    edited: list[bytes] = []

    def edit() -> None:
        edited[:] = [edit_top_level(body, {"id_slot": b"1"}, ("evoke",), ("evoke_keep",))]

    # The shortest of several runs: in any one of them this thread may lack a processor.
    assert min(longest_step(edit) for _ in range(5)) < _LONGEST_S
    assert edited == [b'{"id_slot":1,"messages":[%s]}' % messages]
