"""The task of a session: how its focus vector follows the topics."""

from __future__ import annotations

import numpy as np
import pytest

from evoke_proxy.core.policy.view import Task

EAST = np.array([1.0, 0.0], np.float32)
NORTH = np.array([0.0, 1.0], np.float32)
BETWEEN = np.array([0.6, 0.8], np.float32)


def test_the_focus_moves_by_0_3_towards_the_topic_and_has_unit_length() -> None:
    focus = Task(EAST).after(BETWEEN, None).focus
    mixed = 0.7 * EAST + 0.3 * BETWEEN
    assert focus == pytest.approx(mixed / np.linalg.norm(mixed))


def test_another_topic_or_a_boundary_replaces_the_focus() -> None:
    assert Task(EAST).after(NORTH, None).focus is NORTH
    snapped = Task(EAST).after(BETWEEN, 70)
    assert snapped.focus is BETWEEN and snapped.start == 70


def test_without_a_topic_the_focus_is_kept_unless_there_is_a_boundary() -> None:
    assert Task(EAST, 5).after(None, None).focus is EAST
    cleared = Task(EAST, 5).after(None, 90)
    assert cleared.focus is None and cleared.start == 90
    assert Task(EAST, 5).after(EAST, None).start == 5


def test_a_vector_of_another_length_replaces_the_focus() -> None:
    longer = np.array([0.0, 0.0, 1.0], np.float32)
    assert Task(EAST).after(longer, None).focus is longer
