"""The arms: a policy, a compression, and further settings of the request or of the proxy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import bench.policies  # noqa: F401 -- registers what is compared with
from evoke_proxy.config.policy_names import policy_names

CEILING, OURS = "no_eviction", "evoke"
RATIOS = (3.6, 8.0, 16.0)
# What every claim needs beside them: one that must fail, and one that must not.
FAILS, BEST = "discard", "oracle"
CONTROLS = (FAILS, BEST)
# The other policies of the proxy and of bench.policies, without their variants.
OTHERS = (
    "infllm", "recency", "streaming", "truncate", "h2o", "snapkv", "tova", "scored", "arkvale",
)  # fmt: skip
# The model itself is asked what it looks for: alone, and beside what text finds.
RECALLS = ("model", "fused")


@dataclass(frozen=True, slots=True)
class Arm:
    """`ratio` is session tokens over budget, None without a budget. `label` says what is changed,
    one word a change, joined by "+". `fields` are what the requests carry beside policy and
    budget."""

    policy: str
    ratio: float | None = None
    label: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the arm in tables and in the journal."""
        policy = f"{self.policy}+{self.label}" if self.label else self.policy
        return policy if self.ratio is None else f"{policy}@{self.ratio:g}x"

    @property
    def registered_policy(self) -> str:
        """The name of the policy in requests; a variant of `policy` has a name of its own."""
        return str(self.fields.get("evoke_policy", self.policy))

    def budget(self, tokens: int) -> int | None:
        """The budget in tokens for a session of that many."""
        return None if self.ratio is None else int(tokens / self.ratio)

    def body(self, tokens: int) -> dict[str, Any]:
        """Our fields of a request, for a session of that many tokens."""
        body: dict[str, Any] = {"evoke_policy": self.policy, **self.fields}
        budget = self.budget(tokens)
        return body if budget is None else {**body, "evoke_budget": budget}


def recalling(recall: str, ratio: float, label: str = "") -> Arm:
    """Our policy with one of RECALLS, `label` being what else is changed, before that."""
    labels = f"{label}+{recall}" if label else recall
    return Arm(OURS, ratio, labels, {"evoke_recall": recall})


@dataclass(frozen=True, slots=True)
class Variant:
    """An arm with one thing changed, by what it sends or by `settings`, keys of the proxy's
    configuration file. It is run on the sessions of `cells` that are there for variants, and held
    against the arm without the last change, see `plain_of`."""

    arm: Arm
    cells: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)


def plain_of(name: str) -> str | None:
    """The name of the arm without the last change: evoke+embedder@8x of evoke+embedder+block32@8x,
    and evoke@8x of that; None where nothing is changed."""
    arm, _, ratio = name.partition("@")
    plain, changed, _ = arm.rpartition("+")
    return f"{plain}@{ratio}" if changed else None


def ladder(policies: Sequence[str], ratios: Sequence[float] = RATIOS) -> list[Arm]:
    """Return the ceiling, and at every compression each other policy that the proxy can run."""
    chosen = [name for name in policies if name in policy_names() and name != CEILING]
    return [Arm(CEILING), *(Arm(name, ratio) for name in chosen for ratio in ratios)]
