"""Blocks kept for every question: system prompt, standing instructions, rules, live results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from policy_fixtures import FILLER, block_view

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.standing import (
    essential_tokens,
    live_blocks,
    question_start,
    rule_blocks,
    task_blocks,
)
from evoke_proxy.core.policy.view import PolicyView


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


def kept(view: PolicyView, capacity: int) -> list[int]:
    return np.flatnonzero(rule_blocks(view, capacity) | live_blocks(view, capacity)).tolist()


def test_the_system_prompt_is_kept_within_half_of_the_budget() -> None:
    view = view_of(FILLER[:8], {0: Role.SYSTEM, 1: Role.SYSTEM, 2: Role.SYSTEM})
    assert kept(view, 640) == [0, 1, 2, 6]
    assert kept(view, 256) == [0, 1]


def test_an_old_standing_instruction_of_the_user_is_kept() -> None:
    texts = [FILLER[0], "From now on, always answer in French.", *FILLER[2:8]]
    assert 1 in kept(view_of(texts, {}), 640)
    assert 1 not in kept(view_of(texts, {1: Role.TOOL}), 640)


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


def test_the_essential_tokens_are_system_prompt_task_and_question() -> None:
    chat = view_of(FILLER[:6], {0: Role.SYSTEM, 1: Role.SYSTEM})
    lengths = chat.blocks.lengths
    n_generation = chat.n_tokens - int(chat.blocks.ends[-1])
    assert essential_tokens(chat) == lengths[[0, 1, 5]].sum() + n_generation
    roles = {0: Role.SYSTEM, 3: Role.ASSISTANT, 4: Role.TOOL, 5: Role.ASSISTANT, 6: Role.TOOL}
    task = view_of(FILLER[:7], roles)
    lengths = task.blocks.lengths
    n_generation = task.n_tokens - int(task.blocks.ends[-1])
    assert essential_tokens(task) == lengths[[0, 2, 3, 4, 5, 6]].sum() + n_generation


def test_system_prompt_and_task_stay_as_a_whole_or_not_at_all() -> None:
    roles = {0: Role.SYSTEM, 3: Role.ASSISTANT, 4: Role.TOOL, 5: Role.ASSISTANT, 6: Role.TOOL}
    view = view_of(FILLER[:7], roles)
    n_tokens = int(view.blocks.lengths[[0, 2, 3, 4, 5]].sum())
    assert np.flatnonzero(task_blocks(view, n_tokens * 8 // 7 + 1)).tolist() == [0, 2, 3, 4, 5]
    assert not task_blocks(view, n_tokens).any()
