"""Blocks kept for every question: system prompt, standing instructions, rules, live results."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fixtures import FILLER, block_view

from evoke_proxy.core.model.block_table import ROLES, BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.planner import required_blocks
from evoke_proxy.core.policy.standing import (
    Room,
    _newest_readings,
    essential_blocks,
    file_blocks,
    leading_blocks,
    live_blocks,
    most_essential_tokens,
    rule_blocks,
    running_task,
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


def room_of(view: PolicyView, n_tokens: int) -> Room:
    return Room(view.blocks.lengths, required_blocks(view, 0), n_tokens, n_tokens)


def room_for(view: PolicyView, indexes: list[int]) -> int:
    """Return the tokens of these blocks and of those that stay in any case."""
    wanted = required_blocks(view, 0)
    wanted[indexes] = True
    return int(view.blocks.lengths[wanted].sum())


def kept(view: PolicyView, n_tokens: int) -> list[int]:
    room = room_of(view, n_tokens)
    rules = rule_blocks(view, room)
    return np.flatnonzero(rules | live_blocks(view, room, rules)).tolist()


def test_a_system_prompt_is_kept_whole_if_it_fits_and_else_within_half_of_the_budget() -> None:
    view = view_of(FILLER[:8], dict.fromkeys(range(3), Role.SYSTEM))
    n_tokens = room_for(view, [0, 1, 2])
    assert kept(view, 640) == [0, 1, 2, 6]
    assert kept(view, n_tokens) == [0, 1, 2]
    assert kept(view, n_tokens - 1) == [0]


def test_a_system_prompt_within_its_share_takes_no_room_from_others() -> None:
    view = view_of(FILLER[:8], dict.fromkeys(range(3), Role.SYSTEM))
    system = view.blocks.messages < 3
    n_system = int(view.blocks.lengths[system].sum())
    assert room_of(view, 2 * n_system).shared_beside(system) == 2 * n_system
    assert room_of(view, 2 * n_system - 20).shared_beside(system) == 2 * n_system - 40


def test_an_old_standing_instruction_of_the_user_is_kept() -> None:
    texts = [FILLER[0], "From now on, always answer in French.", *FILLER[2:8]]
    assert 1 in kept(view_of(texts, {}), 640)
    assert 1 not in kept(view_of(texts, {1: Role.TOOL}), 640)


def test_the_newest_rules_file_of_the_project_is_kept() -> None:
    roles = {2: Role.TOOL, 5: Role.TOOL}
    rules = {2: ("docs/AGENTS.md", "AGENTS.md"), 5: ("docs/AGENTS.md", "AGENTS.md")}
    assert kept(view_of(FILLER[:9], roles, rules), 640) == [5, 7]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({2: ("/r/AGENTS.md",), 5: ("/r/sub/AGENTS.md",)}, [5, 2]),
        ({2: ("AGENTS.md",), 5: ("/r/AGENTS.md",)}, [5]),
        ({2: ("./AGENTS.md",), 5: ("AGENTS.md",)}, [5]),
        ({2: ("/h/AGENTS.md", "/r/AGENTS.md"), 5: ("/h/AGENTS.md",)}, [5, 2]),
        ({2: ("/r/AGENTS.md",), 3: ("/r/AGENTS.md",), 5: ("/r/agents.md",)}, [5]),
    ],
)
def test_the_newest_reading_of_each_rules_file_is_kept(
    files: dict[int, tuple[str, ...]], expected: list[int]
) -> None:
    """A relative path may be of the same file, and a message may have several files."""
    named = {at: (*paths, "AGENTS.md") for at, paths in files.items()}
    view = view_of(FILLER[:9], dict.fromkeys(files, Role.TOOL), named)
    found = view.index.named("agents.md", view.blocks, 9)
    assert _newest_readings(found, view.blocks, "agents.md").tolist() == expected


def test_the_newest_of_very_many_rules_files_are_told_apart() -> None:
    """Each path is compared with all newer ones."""
    roles = dict.fromkeys(range(200), Role.TOOL)
    named = {at: (f"/r/{at}/AGENTS.md", "AGENTS.md") for at in roles}
    view = view_of([f"{FILLER[0]} {at}" for at in range(200)], roles, named)
    found = view.index.named("agents.md", view.blocks, 200)
    assert _newest_readings(found, view.blocks, "agents.md").tolist() == found[::-1][:32].tolist()


def test_names_of_rules_files_that_many_blocks_have_take_little_time() -> None:
    """A message that calls tools with many paths has many blocks, each with all of the names."""
    paths = (*(f"d{n}/AGENTS.md" for n in range(31)), "AGENTS.md")
    blocks = BlockTable(
        Block(f"a#{i}", f"{i}", Span(i, i + 1), Role.ASSISTANT, 1, i // 64, "x", paths)
        for i in range(1024)
    )
    started = time.thread_time()
    found = _newest_readings(np.arange(1024), blocks, "agents.md")
    assert time.thread_time() - started < 0.05
    assert found.tolist() == list(range(960, 1024))


def test_a_running_task_keeps_its_question_and_its_newest_results() -> None:
    roles = dict.fromkeys((3, 5, 7), Role.ASSISTANT) | dict.fromkeys((4, 6, 8), Role.TOOL)
    view = view_of([*FILLER[:9]], roles)
    assert view.blocks.question_start == 8
    assert kept(view, 640) == [2, 5, 6, 7]


def test_the_question_starts_at_the_first_of_several_tool_results() -> None:
    roles = {3: Role.ASSISTANT, 4: Role.TOOL, 5: Role.TOOL}
    assert view_of(FILLER[:6], roles).blocks.question_start == 4
    assert BlockTable().question_start == 0
    assert not BlockTable().is_step
    assert kept(view_of(FILLER[:1], {}), 640) == []


def test_reminders_after_results_of_tools_neither_ask_nor_begin_a_task() -> None:
    roles = dict.fromkeys((3, 5, 8), Role.ASSISTANT) | dict.fromkeys((4, 6, 9, 10), Role.TOOL)
    view = view_of(FILLER[:12], roles)
    reminders = {7, 11}
    blocks = [replace(b, is_reminder=i in reminders) for i, b in enumerate(view.blocks)]
    reminded = replace(view, blocks=BlockTable(blocks))
    assert reminded.blocks.is_step and reminded.blocks.question_start == 9
    assert np.flatnonzero(running_task(reminded.blocks)).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert not view.blocks.is_step and view.blocks.question_start == 11
    alone = BlockTable(replace(block, is_reminder=True) for block in view.blocks)
    assert alone.question_start == 9, "a result of a tool may have nothing else"


def test_files_that_a_client_adds_after_results_of_tools_are_part_of_the_step() -> None:
    roles = dict.fromkeys((3, 5, 8), Role.ASSISTANT) | dict.fromkeys((4, 6, 9, 10), Role.TOOL)
    view = view_of(FILLER[:12], roles)
    blocks = [replace(block, is_added=i in (7, 11)) for i, block in enumerate(view.blocks)]
    table = BlockTable(blocks)
    assert table.is_step and table.question_start == 9
    assert np.flatnonzero(running_task(table)).tolist() == [2, 3, 4, 5, 6, 7, 8]
    authors = [ROLES[code] for code in table.authors.tolist()]
    assert [authors[i] for i in (2, 7, 11)] == [Role.USER, Role.TOOL, Role.TOOL]


def test_a_file_that_a_client_adds_after_an_answer_or_at_the_beginning_is_of_the_user() -> None:
    view = view_of(FILLER[:5], {1: Role.ASSISTANT, 3: Role.ASSISTANT})
    table = BlockTable(replace(block, is_added=i in (0, 2)) for i, block in enumerate(view.blocks))
    assert table.of_user.tolist() == [True, False, True, False, True]
    assert table[:3].question_start == 2 and not table[:3].is_step


def test_results_with_the_role_of_the_user_are_steps_of_the_task() -> None:
    view = view_of(FILLER[:9], dict.fromkeys((3, 5, 7), Role.ASSISTANT))
    blocks = [replace(block, is_result=i in (4, 6, 8)) for i, block in enumerate(view.blocks)]
    table = BlockTable(blocks)
    assert table.is_step and table.question_start == 8
    assert np.flatnonzero(table.results).tolist() == [4, 6, 8]
    assert np.flatnonzero(running_task(table)).tolist() == [2, 3, 4, 5, 6, 7]
    assert [ROLES[code] for code in table.authors[4:6].tolist()] == [Role.TOOL, Role.ASSISTANT]
    commented = BlockTable([*blocks[:8], replace(blocks[8], is_result=False)])
    assert not commented.is_step and commented.question_start == 8


def test_a_file_beside_words_of_the_user_is_part_of_their_message() -> None:
    view = view_of(FILLER[:4], {1: Role.ASSISTANT})
    blocks = [replace(block, message=min(block.message, 2)) for block in view.blocks]
    table = BlockTable([*blocks[:2], replace(blocks[2], is_added=True), blocks[3]])
    assert table.question_start == 2 and table.of_user.tolist() == [True, False, True, True]


def test_a_reminder_after_an_answer_or_a_system_prompt_is_the_question() -> None:
    for role in (Role.ASSISTANT, Role.SYSTEM):
        blocks = list(view_of(FILLER[:4], {2: role}).blocks)
        table = BlockTable([*blocks[:3], replace(blocks[3], is_reminder=True)])
        assert table.question_start == 3 and not table.is_step
    asked = view_of(FILLER[:4], {}).blocks
    reminded = BlockTable(replace(block, is_reminder=i == 3) for i, block in enumerate(asked))
    assert reminded.question_start == 2 and not reminded.is_step


_TASK = {0: Role.SYSTEM, 3: Role.ASSISTANT, 4: Role.TOOL, 5: Role.ASSISTANT, 6: Role.TOOL}


def test_the_essential_blocks_are_system_prompt_task_rules_and_files() -> None:
    chat = view_of(FILLER[:6], {0: Role.SYSTEM, 1: Role.SYSTEM})
    assert np.flatnonzero(essential_blocks(chat, (), 640)).tolist() == [0, 1]
    roles = _TASK | {1: Role.TOOL}
    task = view_of(FILLER[:7], roles, {1: ("src/a.py",)})
    assert np.flatnonzero(essential_blocks(task, (), 640)).tolist() == [0, 2, 3, 4, 5]
    assert np.flatnonzero(essential_blocks(task, ("src/a.py",), 640)).tolist() == [*range(6)]


def test_a_task_stays_whole_if_it_fits_and_else_the_message_that_began_it() -> None:
    view = view_of(FILLER[:7], _TASK)
    n_tokens = room_for(view, [0, 2, 3, 4, 5])
    room = room_of(view, n_tokens)
    rules = rule_blocks(view, room)
    assert np.flatnonzero(rules).tolist() == [0, 2]
    assert np.flatnonzero(task_blocks(view, room, rules)).tolist() == [2, 3, 4, 5]
    assert not task_blocks(view, room, rules | (view.blocks.messages == 1)).any()
    less = room_of(view, n_tokens - 1)
    assert np.flatnonzero(rule_blocks(view, less)).tolist() == [0, 2]
    assert not task_blocks(view, less, rules).any()


def test_a_file_of_the_turn_has_what_is_left_beside_the_rules() -> None:
    view = view_of(FILLER[:7], _TASK | {1: Role.TOOL}, {1: ("src/a.py",)})
    length = int(view.blocks.lengths[1])
    assert np.flatnonzero(file_blocks(view, ("src/a.py",), length, 640)).tolist() == [1]
    assert not file_blocks(view, ("src/a.py",), length - 1, 640).any()
    assert not file_blocks(view, ("src/a.py",), length, 2 * length - 1).any()


@given(st.integers(0, 5000), st.randoms(use_true_random=False))
def test_essential_blocks_have_at_most_the_tokens_of_the_limit(room: int, random: Random) -> None:
    texts = [random.choice(["Always answer in French.", "Read `CLAUDE.md` now.", FILLER[0]])
             for _ in range(12)]  # fmt: skip
    roles = {i: random.choice(list(Role)) for i in range(12)}
    names = {i: (random.choice(["CLAUDE.md", "agents.md", "a.py"]),) for i in range(12)}
    view, files = view_of(texts, roles, names), random.choice([(), ("a.py",)])
    essential = essential_blocks(view, files, room)
    most = most_essential_tokens(view.blocks, files, room)
    assert int(view.blocks.lengths[essential].sum()) <= most


def leading(
    texts: list[str], roles: dict[int, Role] | None = None, answer_tokens: int = 0
) -> list[int]:
    """Return which messages before the last one only lead up to it."""
    view = view_of(texts, roles or dict.fromkeys(range(1, len(texts), 2), Role.ASSISTANT))
    view.index.update(view.blocks)
    return np.flatnonzero(leading_blocks(view, answer_tokens)).tolist()


def test_questions_and_answers_directly_before_the_question_lead_up_to_it() -> None:
    exchange = ["Who wrote the song?", "Two of them did.", "Really?", "Yes, both."]
    assert leading([*exchange, "And when was it released?"]) == [0, 1, 2, 3]
    assert leading([*exchange, *exchange, "And when was it released?"]) == [4, 5, 6, 7]


def test_the_answer_before_the_question_does_not_lead_up_to_it_up_to_a_length() -> None:
    exchange = ["Who wrote the song?", "Two of them did.", "Really?", "Yes, both."]
    asked = [*exchange, "And when was it released?"]
    length = int(view_of(asked, {}).blocks.lengths[3])
    assert leading(asked, answer_tokens=length) == [0, 1, 2]
    assert leading(asked, answer_tokens=length - 1) == [0, 1, 2, 3]


def test_a_statement_of_the_user_does_not_lead_up_to_the_question() -> None:
    told = ["Who wrote the song?", "Two of them.", "My landlord forbids pets.", "Noted."]
    assert leading([*told, "Could I adopt a kitten?"]) == [3]
    assert leading(["Who wrote it?", "Two.", FILLER[2], "Noted.", "And when?"]) == [3]
    assert leading(["Run it.", "ok", "Who?"], {1: Role.TOOL}) == []
