"""Chooses blocks to keep whatever the query finds: rules for every answer, and current work.

Each kind of block may use a share of the room, so that none displaces what the question needs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from evoke_proxy.core.model.block_table import ROLES, BlockTable, Mask, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.view import PolicyView

# Shares of the room: a system prompt with tools that does not fit as a whole, the user's standing
# instructions, the newest rules of the project, the tool results of a running task that does not
# fit as a whole, and the last messages of a chat.
_SYSTEM_SHARE, _INSTRUCTION_SHARE, _RULES_SHARE = 0.5, 0.1, 0.15
_TASK_SHARE, _RECENT_SHARE = 0.3, 0.1
# The files that a turn works on have at most this share of the room.
_MAX_FILE_SHARE = 0.5
# At most this many messages directly before the question only lead up to it; one of them that is
# of the user and has no question mark has at most this many tokens.
_MAX_LEADING, _LEADING_TOKENS = 4, 32
# Names of files with rules for agents; the newest reading of each applies to the whole project.
_RULE_FILES = ("claude.md", "agents.md")
# Paths of a name that are told apart; comparing them takes time in proportion to their number.
_MAX_RULE_PATHS = 32
_SYSTEM, _USER = ROLES.index(Role.SYSTEM), ROLES.index(Role.USER)
_ASSISTANT = ROLES.index(Role.ASSISTANT)


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The room beside the question.

    Attributes:
        lengths: [n] tokens of each block.
        required: [n] blocks that stay in any case.
        n_tokens: Tokens for all blocks; shares are shares of these.
        n_whole: Tokens for blocks that stay whole or not at all: less than `n_tokens` while the
            turn decodes text before its question.
    """

    lengths: Positions
    required: Mask
    n_tokens: int
    n_whole: int

    def left(self, taken: Mask) -> int:
        """Return how many tokens are left for whole messages beside the blocks `taken` [n]."""
        return self.n_whole - int(self.lengths[taken | self.required].sum())

    def shared_beside(self, system: Mask) -> int:
        """Return the tokens that are shared beside a system prompt that is resident as a whole.

        A system prompt within its share takes nothing from the shares of others.
        """
        n_left = self.n_tokens - int(self.lengths[system].sum())
        return min(self.n_tokens, int(n_left / (1 - _SYSTEM_SHARE)))


def system_blocks(blocks: BlockTable) -> Mask:
    """Return the blocks [n] of system prompt and tools before the question."""
    is_system: Mask = blocks.roles == _SYSTEM
    is_system[blocks.question_start :] = False
    return is_system


def running_task(blocks: BlockTable) -> Mask:
    """Return the blocks [n] of the running task before the question.

    The task begins with the user's last message, which in a chat is the question itself.
    """
    indexes = np.arange(len(blocks))
    in_task: Mask = (indexes >= _task_start(blocks)) & (indexes < blocks.question_start)
    return in_task


def essential_blocks(view: PolicyView, files: Sequence[str], room: int) -> Mask:
    """Return the blocks [n] that a turn should see beside its question.

    These are the system prompt with tools, the running task, and, in their shares of `room` tokens,
    the rules and the `files` that the turn's tools were called with.
    """
    essential = system_blocks(view.blocks) | running_task(view.blocks)
    essential |= _rules(view, room, room)
    return essential | file_blocks(view, files, room, room)


def most_essential_tokens(blocks: BlockTable, files: Sequence[str], room: int) -> int:
    """Return a limit that the tokens of `essential_blocks` never exceed; it reads no text."""
    always = system_blocks(blocks) | running_task(blocks)
    n_rules = int(_INSTRUCTION_SHARE * room) + len(_RULE_FILES) * int(_RULES_SHARE * room)
    n_files = int(_MAX_FILE_SHARE * room) if files else 0
    return int(blocks.lengths[always].sum()) + n_rules + n_files


def _task_start(blocks: BlockTable) -> int:
    """Return the index of the first block of the user's last message; `len(blocks)` without one."""
    users = np.flatnonzero(blocks.of_user)
    return (
        int(blocks.messages.searchsorted(blocks.messages[users[-1]])) if len(users) else len(blocks)
    )


def rule_blocks(view: PolicyView, room: Room) -> Mask:
    """Return the blocks [n] with rules for every answer.

    These are the system prompt with tools and the user's message that began the running task, each
    as a whole if it fits, standing instructions of the user, the clearest first, and the newest
    reading of each rules file. Blocks of the question are not among them.
    """
    blocks = view.blocks
    stays = system_blocks(blocks)
    n_left = room.left(stays)
    if n_left < 0:
        indexes, stays = np.flatnonzero(stays), np.zeros(len(blocks), np.bool_)
        n_left = room.n_tokens
        _take(stays, blocks, indexes, int(_SYSTEM_SHARE * n_left))
    stays |= _rules(view, room.n_tokens, n_left)
    asked = stays | (running_task(blocks) & blocks.of_user)
    return asked if room.left(asked) >= 0 else stays


def _rules(view: PolicyView, capacity: int, n_left: int) -> Mask:
    """Return the standing instructions and rules files [n].

    Each kind has a share of `capacity` tokens, and no more than `n_left` tokens.
    """
    blocks = view.blocks
    stays, end = np.zeros(len(blocks), np.bool_), blocks.question_start
    if not end:
        return stays
    wanted, points = list[tuple[Positions, float]](), view.index.instruction_points(blocks)[:end]
    instructions = points.nonzero()[0][::-1]
    if len(instructions):
        order = np.argsort(-points[instructions], kind="stable")
        wanted.append((instructions[order], _INSTRUCTION_SHARE))
    for name in _RULE_FILES:
        rules = _newest_readings(view.index.named(name, blocks, end), blocks, name)
        if len(rules):
            wanted.append((rules, _RULES_SHARE))
    for indexes, share in wanted:
        n_before = int(blocks.lengths[stays].sum())
        _take(stays, blocks, indexes, min(int(share * capacity), n_left - n_before))
    return stays


def _newest_readings(named: Positions, blocks: BlockTable, name: str) -> Positions:
    """Return the blocks of the newest reading of each file of this name, the newest file first.

    `named` are all blocks with the name. A path that another one ends with is of the same file. Of
    more than _MAX_RULE_PATHS paths the newest ones count.
    """
    newest, read = list[int](), set[str]()
    for _, group in groupby(named[::-1].tolist(), key=lambda i: blocks[i].message):
        if len(read) >= _MAX_RULE_PATHS:
            break
        # Most blocks of a message have the same names.
        aliases_of = {i: blocks[i].aliases for i in group}
        found = {aliases: _unread(aliases, name, read) for aliases in set(aliases_of.values())}
        newest += [i for i, aliases in aliases_of.items() if found[aliases]][::-1]
        read = read.union(*found.values())
    return np.array(newest, np.int64)


def _unread(aliases: Sequence[str], name: str, read: Set[str]) -> Set[str]:
    """Return the paths of a file `name` among the names of a block; none if all of them are `read`.

    The paths are those of `_paths`.
    """
    paths = _paths(aliases, name)
    new = (path for path in paths - read if not any(_is_same(path, newer) for newer in read))
    return paths if any(new) else frozenset()


def _paths(aliases: Sequence[str], name: str) -> Set[str]:
    """Return the paths of a file `name` among the names of a block; `name` itself without any.

    Each has a slash before it, also a relative one.
    """
    named = {alias.lower().replace("\\", "/").removeprefix("./") for alias in aliases}
    return {f"/{path}" for path in named if path.endswith(f"/{name}")} or {f"/{name}"}


def _is_same(path: str, other: str) -> bool:
    """Whether two paths with a slash before them may be of one file: one may be relative."""
    return path.endswith(other) or other.endswith(path)


def task_blocks(view: PolicyView, room: Room, others: Mask) -> Mask:
    """Return the blocks of the running task [n] if all of it fits beside `others` [n], or none."""
    task = running_task(view.blocks)
    return task if room.left(task | others) >= 0 else np.zeros(len(task), np.bool_)


def file_blocks(view: PolicyView, files: Sequence[str], n_left: int, room: int) -> Mask:
    """Return the blocks [n] of the files that the turn's tools were called with.

    Retrieval ranks blocks by their words, and most lines of a file share none with the query. But
    a tool call with the file's path shows that the complete file matters: it may be edited, or
    compared with a new reading. Each file's latest reading comes first, then the later messages
    that name the file, the latest first. A message is taken completely or not at all. All of them
    together have at most `n_left` tokens, and half of `room`.
    """
    wanted = np.zeros(len(view.blocks), np.bool_)
    remaining = min(n_left, int(_MAX_FILE_SHARE * room))
    for path in files:
        named = view.index.named(path, view.blocks, view.first_new_block)
        for message in _messages_since_reading(view, named):
            in_message = named[view.blocks.messages[named] == message]
            length = int(view.blocks.lengths[in_message].sum())
            if length <= remaining:
                wanted[in_message] = True
                remaining -= length
    return wanted


def _messages_since_reading(view: PolicyView, named: Positions) -> list[int]:
    """Return the message of a file's latest reading, then the later ones, the latest first.

    A reading is a tool result that is at least half as long as the longest result that names the
    file; the result of an edit is much shorter.
    """
    blocks = view.blocks
    results = named[blocks.results[named]]
    if not len(results):
        return []
    lengths = np.bincount(blocks.messages[results], blocks.lengths[results])
    reading = int(np.flatnonzero(2 * lengths >= lengths.max())[-1])
    messages = np.unique(blocks.messages[named])
    return [reading, *messages[messages > reading][::-1].tolist()]


def live_blocks(view: PolicyView, room: Room, rules: Mask) -> Mask:
    """Return the blocks [n] of current work, in shares of the room beside a whole system prompt.

    In a task, where the last message is a tool result, these are the user's last message and the
    newest messages after it; in a chat, the newest messages. Blocks of the question are not among
    them. `rules` [n] are those of `rule_blocks`.
    """
    blocks = view.blocks
    stays = np.zeros(len(blocks), np.bool_)
    system = system_blocks(blocks)
    is_whole = not (system & ~rules).any()
    capacity = room.shared_beside(system) if is_whole else room.n_tokens
    end = blocks.question_start
    users = np.zeros(0, np.int64)
    if end and blocks.is_step:
        users = np.flatnonzero(blocks.of_user[:end])
    is_task = len(users) > 0
    if is_task:
        asked = users[blocks.messages[users] == blocks.messages[users[-1]]]
        _take(stays, blocks, asked, int(_RECENT_SHARE * capacity))
    start = int(users[-1]) + 1 if is_task else 0
    share = _TASK_SHARE if is_task else _RECENT_SHARE
    _take_newest(stays, blocks, range(start, end), int(share * capacity))
    return stays


def leading_blocks(view: PolicyView, answer_tokens: int = 0) -> Mask:
    """Return the blocks [n] of messages that only lead up to the question.

    These are the messages directly before it in which the user asks something or says a few words,
    and the answers to them. A statement of the user ends them. They are alike the question because
    they are about the same, but rarely have the answer. An answer of at most `answer_tokens` tokens
    directly before the question is not among them, because the question may refer to it.
    """
    blocks, end = view.blocks, view.blocks.question_start
    leads = np.zeros(len(blocks), np.bool_)
    asks, states, authors = view.index.asks(blocks), view.index.statements(blocks), blocks.authors
    for _ in range(_MAX_LEADING):
        if not end:
            break
        first = int(blocks.messages.searchsorted(blocks.messages[end - 1]))
        role, length = authors[first], int(blocks.ends[end - 1] - blocks.starts[first])
        if role == _USER and not asks[first:end].any():
            if length > _LEADING_TOKENS or states[first:end].any():
                break
        elif role not in (_USER, _ASSISTANT):
            break
        is_kept = end == blocks.question_start and role == _ASSISTANT and length <= answer_tokens
        leads[first:end] = not is_kept
        end = first
    return leads


def asked_blocks(view: PolicyView, capacity: int) -> Mask:
    """Return the blocks [n] of the question that are not decoded again, as of a repeated request.

    Of a question of more than `capacity` tokens, its last blocks.
    """
    stays = np.zeros(len(view.blocks), np.bool_)
    indexes = np.arange(view.blocks.question_start, view.first_new_block)[::-1]
    _take(stays, view.blocks, indexes, capacity)
    return stays


def _take(stays: Mask, blocks: BlockTable, indexes: Positions, room: int) -> None:
    """Set `stays` for the blocks at `indexes` that fit into `room` tokens, taken in this order."""
    for i in indexes.tolist():
        if room <= 0:
            return
        length = int(blocks.ends[i] - blocks.starts[i])
        if not stays[i] and length <= room:
            stays[i] = True
            room -= length


def _take_newest(stays: Mask, blocks: BlockTable, indexes: range, room: int) -> None:
    """Set `stays` for the newest messages in a range of blocks, up to the first that is too long.

    Only the blocks of a message that are in the range count.
    """
    starts, messages = blocks.starts, blocks.messages
    end = indexes.stop
    while end > indexes.start:
        first = max(indexes.start, int(messages.searchsorted(messages[end - 1])))
        length = int(blocks.ends[end - 1] - starts[first])
        if length > room:
            return
        stays[first:end] = True
        room -= length
        end = first
