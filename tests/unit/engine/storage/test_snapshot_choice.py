"""The snapshot that a slot is filled from, by how llama-server has taken it before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from snapshot_fixtures import snapshot, tokens

from evoke_proxy.engine.storage.snapshot_choice import SnapshotChoice

PROMPT = tokens(1, 2, 3, 4)


def _choice(*items: Any) -> SnapshotChoice:
    repository: Any = SimpleNamespace(snapshots=items)
    return SnapshotChoice(repository)


def test_a_refused_snapshot_is_not_restored_and_need_not_be_saved_again() -> None:
    short, long = snapshot("short", [1, 2]), snapshot("long", [1, 2, 3])
    choice = _choice(short, long)
    match = choice.to_restore([short, long], PROMPT)
    assert match is not None and match.snapshot == long
    choice.record_refusal(long)
    assert not choice.may_restore(long)
    match = choice.to_restore([short, long], PROMPT)
    assert match is not None and match.snapshot == short
    assert choice.n_saved([short, long], PROMPT) == 3
    assert choice.n_saved([], PROMPT) == 0


def test_a_snapshot_that_is_being_restored_is_chosen_only_if_it_was_of_use_before() -> None:
    item = snapshot("s", [1, 2], suspect=True)
    choice = _choice(item)
    assert choice.to_restore([item], PROMPT) is None and not choice.was_useful(item)
    choice.record_use(item)
    match = choice.to_restore([item], PROMPT)
    assert match is not None and (match.snapshot.id, match.snapshot.suspect) == ("s", False)


def test_only_a_memory_that_can_be_cut_back_begins_with_a_part_of_a_snapshot() -> None:
    item = snapshot("s", [1, 2, 9])
    assert _choice(item).to_restore([item], PROMPT) is None
    match = _choice(item).to_restore([item], PROMPT, partial=True)
    assert match is not None and match.shared == 2


def test_what_was_learned_of_a_deleted_snapshot_is_forgotten() -> None:
    old, new = snapshot("old", [1]), snapshot("new", [1, 2])
    items = [old]
    repository: Any = SimpleNamespace(snapshots=items)
    choice = SnapshotChoice(repository)
    choice.record_use(old)
    items[:] = [new]
    choice.record_use(new)
    assert choice.was_useful(new) and not choice.was_useful(old)
