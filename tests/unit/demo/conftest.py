"""The model that the tests of the demo ask."""

from __future__ import annotations

import pytest
from demo_fixtures import Model

from evoke_proxy.demo import runner


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    fake = Model()
    monkeypatch.setattr(runner, "chat", lambda *arguments: fake.chat(*arguments))
    return fake
