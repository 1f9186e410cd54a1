"""The reference: which blocks the oracle evicts."""

from __future__ import annotations

import bench.policies  # noqa: F401 -- registers baselines
from evoke_proxy.divergence.reference import _evicted, _without


def test_the_oracle_evicts_the_blocks_with_least_attention_per_token() -> None:
    blocks = [(0, 64), (64, 128), (128, 192), (192, 200)]
    # The last block is short: per token it has most.
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=120) == [(64, 192)]
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=200) == []
    assert _evicted(blocks, [3.0, 1.0, 2.0, 2.0], room=0) == [(0, 200)]


def test_rows_of_context_checkpoints_are_not_evicted() -> None:
    assert _without([(0, 64), (100, 164)], [(63, 64), (120, 121)]) == [
        (0, 63),
        (100, 120),
        (121, 164),
    ]
    assert _without([(0, 64)], []) == [(0, 64)]
