"""`evoke-proxy up` without processes."""

from __future__ import annotations

import os
from pathlib import Path

from evoke_proxy.cli.up import make_private


def test_a_private_directory_and_its_new_parents_are_only_for_their_owner(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        tmp_path.chmod(0o755)
        make_private(tmp_path / "state" / "slots")
        make_private(tmp_path / "state")
    finally:
        os.umask(previous)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "slots").stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_mode & 0o777 == 0o755
