"""The names of policies that a configuration accepts."""

from __future__ import annotations

import subprocess
import sys

from evoke_proxy.config.policy_names import BUILT_IN


def test_the_built_in_policies_are_those_that_the_package_registers() -> None:
    code = (
        "import evoke_proxy.core.policy\n"
        "from evoke_proxy.core.policy.registry import _POLICIES\n"
        "print(*_POLICIES)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(done.stdout.split()) == BUILT_IN
