"""The recall bench: cuboids of keys."""

from __future__ import annotations

import numpy as np

from bench import recall


def test_a_cuboid_is_centred_on_the_mean_of_its_keys() -> None:
    keys = np.array([[[0.0, 1.0]], [[4.0, 1.0]], [[1.0, 1.0]], [[9.0, 9.0]]], np.float32)
    (cuboid,) = recall.cuboids(keys, [(0, 3)])
    assert np.allclose(cuboid, [[[2 - 5 / 3, 1.0], [2 + 5 / 3, 1.0]]])
