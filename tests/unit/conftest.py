"""Property tests have no deadline: how long one takes depends on who else uses the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
