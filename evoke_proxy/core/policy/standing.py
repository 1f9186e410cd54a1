"""Chooses blocks to keep whatever the query finds: rules for every answer, and current work.

Each kind of block may use a share of the room, so that none displaces what the question needs.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import ROLES, BlockTable, Mask, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.view import PolicyView

# Shares of the room: the system prompt with its tools, the user's standing instructions, the newest
# rules of the project, the tool results of a running task, and the last messages of a chat.
_SYSTEM_SHARE, _INSTRUCTION_SHARE, _RULES_SHARE = 0.5, 0.1, 0.15
_TASK_SHARE, _RECENT_SHARE = 0.3, 0.1
# Share of the room that stays for other blocks where system prompt and task stay as a whole.
_LEFT_SHARE = 0.125
# Names of files with rules for agents; the newest reading of each applies to the whole project.
_RULE_FILES = ("claude.md", "agents.md")
_SYSTEM, _USER, _TOOL = (ROLES.index(role) for role in (Role.SYSTEM, Role.USER, Role.TOOL))


def question_start(blocks: BlockTable) -> int:
    """Return the index of the first block of the question: of the last message.

    When the last message is a tool result, the question begins with the first of the tool results
    that directly precede it. 0 without blocks.
    """
    if not len(blocks):
        return 0
    last = int(blocks.messages[-1])
    first = int(blocks.messages.searchsorted(last))
    while first and blocks.roles[-1] == _TOOL and blocks.roles[first - 1] == _TOOL:
        first = int(blocks.messages.searchsorted(blocks.messages[first - 1]))
    return first


def essential_tokens(view: PolicyView) -> int:
    """Return the tokens of system prompt, tools, running task and question of a prompt.

    The running task begins with the user's last message, which in a chat is the question itself.
    """
    blocks = view.blocks
    start = min(_task_start(blocks), question_start(blocks))
    before = np.arange(len(blocks)) < start
    n_system = int(blocks.lengths[before & (blocks.roles == _SYSTEM)].sum())
    first = int(blocks.starts[start]) if start < len(blocks) else view.n_tokens
    return n_system + view.n_tokens - first


def _task_start(blocks: BlockTable) -> int:
    """Return the index of the first block of the user's last message; `len(blocks)` without one."""
    users = np.flatnonzero(blocks.roles == _USER)
    return (
        int(blocks.messages.searchsorted(blocks.messages[users[-1]])) if len(users) else len(blocks)
    )


def task_blocks(view: PolicyView, capacity: int) -> Mask:
    """Return the blocks [n] of system prompt, tools and running task, if they fit `capacity`.

    They fit when an eighth of it stays for other blocks; otherwise none are returned. Blocks of the
    question are not among them.
    """
    blocks = view.blocks
    indexes = np.arange(len(blocks))
    is_task = (indexes >= _task_start(blocks)) | (blocks.roles == _SYSTEM)
    stays: Mask = is_task & (indexes < question_start(blocks))
    n_tokens = int(blocks.lengths[stays].sum())
    return stays if n_tokens <= (1 - _LEFT_SHARE) * capacity else np.zeros(len(blocks), np.bool_)


def rule_blocks(view: PolicyView, capacity: int) -> Mask:
    """Return the blocks [n] with rules for every answer, in shares of `capacity` tokens.

    These are the system prompt, standing instructions of the user, the clearest first, and the
    newest reading of each rules file. Blocks of the question are not among them.
    """
    blocks = view.blocks
    stays = np.zeros(len(blocks), np.bool_)
    end = question_start(blocks)
    if not end:
        return stays
    is_system = np.flatnonzero(blocks.roles[:end] == _SYSTEM)
    _take(stays, blocks, is_system, int(_SYSTEM_SHARE * capacity))
    points = view.index.instruction_points(blocks)[:end]
    instructions = np.flatnonzero(points)[::-1]
    instructions = instructions[np.argsort(-points[instructions], kind="stable")]
    _take(stays, blocks, instructions, int(_INSTRUCTION_SHARE * capacity))
    for name in _RULE_FILES:
        rules = view.index.named(name, blocks, end)
        if len(rules):
            newest = rules[blocks.messages[rules] == blocks.messages[rules[-1]]]
            _take(stays, blocks, newest, int(_RULES_SHARE * capacity))
    return stays


def live_blocks(view: PolicyView, capacity: int) -> Mask:
    """Return the blocks [n] of current work, in shares of `capacity` tokens.

    In a task, where the last message is a tool result, these are the user's last message and the
    newest messages after it; in a chat, the newest messages. Blocks of the question are not among
    them.
    """
    blocks = view.blocks
    stays = np.zeros(len(blocks), np.bool_)
    end = question_start(blocks)
    users = np.zeros(0, np.int64)
    if end and blocks.roles[-1] == _TOOL:
        users = np.flatnonzero(blocks.roles[:end] == _USER)
    is_task = len(users) > 0
    if is_task:
        asked = users[blocks.messages[users] == blocks.messages[users[-1]]]
        _take(stays, blocks, asked, int(_RECENT_SHARE * capacity))
    start = int(users[-1]) + 1 if is_task else 0
    share = _TASK_SHARE if is_task else _RECENT_SHARE
    _take_newest(stays, blocks, range(start, end), int(share * capacity))
    return stays


def asked_blocks(view: PolicyView, capacity: int) -> Mask:
    """Return the blocks [n] of the question that are not decoded again, as of a repeated request.

    Of a question of more than `capacity` tokens, its last blocks.
    """
    stays = np.zeros(len(view.blocks), np.bool_)
    indexes = np.arange(question_start(view.blocks), view.first_new_block)[::-1]
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
