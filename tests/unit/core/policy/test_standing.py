"""Blocks kept for every question: system prompt, standing instructions, rules, live results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from policy_fixtures import FILLER, block_view

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.standing import Standing, question_start
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.units import Units


def view_of(
    texts: list[str], roles: dict[int, Role], aliases: dict[int, tuple[str, ...]] | None = None
) -> PolicyView:
    view = block_view(texts, "r" * len(texts))
    names = aliases or {}
    blocks = (
        replace(block, message=i, role=roles.get(i, Role.USER), aliases=names.get(i, ()))
        for i, block in enumerate(view.blocks)
    )
    return replace(view, blocks=BlockTable(blocks))


def kept(view: PolicyView, room: int) -> list[int]:
    standing = Standing(view, room, 0)
    standing.add_instructions()
    return np.flatnonzero(standing.rules | standing.live()).tolist()


def test_the_system_prompt_is_kept_within_half_of_the_budget() -> None:
    view = view_of(FILLER[:8], {0: Role.SYSTEM, 1: Role.SYSTEM, 2: Role.SYSTEM})
    assert kept(view, 640) == [0, 1, 2, 6]
    assert kept(view, 256) == [0, 1]


def test_an_old_standing_instruction_of_the_user_is_kept() -> None:
    texts = [FILLER[0], "From now on, always answer in French.", *FILLER[2:8]]
    assert 1 in kept(view_of(texts, {}), 640)
    assert 1 not in kept(view_of(texts, {1: Role.TOOL}), 640)


def test_a_sentence_of_a_document_is_no_instruction() -> None:
    texts = [FILLER[0], "From now on, always answer in French.", *FILLER[2:9]]
    view = view_of(texts, {})
    assert 1 in kept(view, 640)
    messages = [0, 1, 1, 1, 4, 5, 6, 7, 8]
    blocks = (
        replace(block, message=message)
        for block, message in zip(view.blocks, messages, strict=True)
    )
    assert 1 not in kept(replace(view, blocks=BlockTable(blocks)), 640)


def test_the_newest_rules_file_of_the_project_is_kept() -> None:
    roles = {2: Role.TOOL, 5: Role.TOOL}
    rules = {2: ("docs/AGENTS.md", "AGENTS.md"), 5: ("docs/AGENTS.md", "AGENTS.md")}
    assert kept(view_of(FILLER[:9], roles, rules), 640) == [5, 7]


def test_a_running_task_keeps_its_question_and_its_newest_results() -> None:
    roles = dict.fromkeys((3, 5, 7), Role.ASSISTANT) | dict.fromkeys((4, 6, 8), Role.TOOL)
    view = view_of([*FILLER[:9]], roles)
    assert question_start(view.blocks) == 8
    assert kept(view, 640) == [2, 5, 6, 7]


def test_the_question_starts_at_the_first_of_several_tool_results() -> None:
    roles = {3: Role.ASSISTANT, 4: Role.TOOL, 5: Role.TOOL}
    assert question_start(view_of(FILLER[:6], roles).blocks) == 4
    assert question_start(BlockTable()) == 0
    assert kept(view_of(FILLER[:1], {}), 640) == []


def test_the_best_message_leaves_what_stays_only_the_rest() -> None:
    texts = [FILLER[0], "From now on, always answer in French.", *FILLER[2:8]]
    view = view_of(texts, {0: Role.SYSTEM})
    length = int(view.blocks.lengths[0])
    units = Units.of(view.blocks, 768)
    standing = Standing(view, 2 * length, 0)
    best = standing.best(units, np.array([4, 3]), 2)
    standing.add_instructions()
    assert np.flatnonzero(best).tolist() == [4]
    assert np.flatnonzero(standing.rules).tolist() == [0]
    assert not standing.live().any() and standing.left == 0


def test_each_of_several_questions_gets_its_best_message_beside_what_stays() -> None:
    view = view_of(FILLER[:12], {})
    units, length = Units.of(view.blocks, 768), int(view.blocks.lengths[0])
    best = Standing(view, 10 * length, 0).best(units, np.arange(9), 9)
    assert np.flatnonzero(best).tolist() == list(range(8))
    assert int(Standing(view, 10 * length, 0).best(units, np.arange(9), 2).sum()) == 2


def test_a_running_task_comes_before_the_ranking() -> None:
    view = view_of(FILLER[:6], {4: Role.ASSISTANT, 5: Role.TOOL})
    assert not Standing(view, 640, 0).best(Units.of(view.blocks, 768), np.arange(2), 2).any()
