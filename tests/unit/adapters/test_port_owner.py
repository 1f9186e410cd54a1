"""The process that listens on a port."""

from __future__ import annotations

import os
import socket

from evoke_proxy.adapters.port_owner import owner_of, taken_by


def test_the_owner_of_a_port_in_use_is_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        owner = taken_by("127.0.0.1", port)
        assert owner is not None and owner.startswith(f"process {os.getpid()} (")
    assert taken_by("127.0.0.1", port) is None
    assert owner_of(port) == "another process"


def test_port_0_is_free() -> None:
    assert taken_by("127.0.0.1", 0) is None
