"""The fact and the question of the recovery tests."""

from __future__ import annotations

import bench.policies  # noqa: F401 -- registers baselines

BUDGET = 320
FACT = "The access code of the Meridian vault is 7741."
QUESTION = "What is the access code of the Meridian vault?"
