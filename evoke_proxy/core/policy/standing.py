"""Chooses what stays beside the ranking: instructions that hold for every answer, live work.

Each kind has a share of the room, so that none displaces what the question needs.
"""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.block_table import ROLES, BlockTable, Mask, Positions
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.units import Units

# Shares of the room: the system prompt with its tools, the user's standing instructions, the newest
# rules of the project, the tool results of a running task, and the last messages of a chat.
_SYSTEM_SHARE, _INSTRUCTION_SHARE, _RULES_SHARE = 0.5, 0.1, 0.15
_TASK_SHARE, _RECENT_SHARE = 0.3, 0.1
# Files with rules for agents; their newest reading holds for the whole project.
_RULE_FILES = ("claude.md", "agents.md")
_SYSTEM, _USER, _TOOL = (ROLES.index(role) for role in (Role.SYSTEM, Role.USER, Role.TOOL))


def question_start(blocks: BlockTable) -> int:
    """Return the index of the first block of what is asked: the last message or tool results."""
    if not len(blocks):
        return 0
    last = int(blocks.messages[-1])
    first = int(blocks.messages.searchsorted(last))
    while first and blocks.roles[-1] == _TOOL and blocks.roles[first - 1] == _TOOL:
        first = int(blocks.messages.searchsorted(blocks.messages[first - 1]))
    return first


class Standing:
    """Chooses what stays of the blocks before the question, for `room` tokens.

    Each part has a share of the room, and takes no more than the parts before have left: the
    system prompt, the best places of the ranking, rules, live work.

    Attributes:
        rules: [n] blocks that hold for every answer.
        left: Tokens that are left.
    """

    def __init__(self, view: PolicyView, room: int, sink_tokens: int) -> None:
        self._view = view
        self._room = room
        blocks = view.blocks
        self._end = question_start(blocks)
        self._before = np.arange(len(blocks)) < self._end
        self._is_task = len(blocks) > 0 and bool(blocks.roles[-1] == _TOOL)
        self._taken = self._before & (blocks.starts < sink_tokens)
        self.left = room - int(blocks.lengths[self._taken].sum())
        self.rules = np.zeros(len(blocks), np.bool_)
        is_system = np.flatnonzero(self._before & (blocks.roles == _SYSTEM))
        self._add(self.rules, is_system, int(_SYSTEM_SHARE * room))

    def best(self, units: Units, order: Positions, n_questions: int) -> Mask:
        """Take the best unit of the ranking, and of several questions one each; return them [n].

        None of them is displaced by what follows. The first may take all that is left, the others
        leave the shares of the rest.
        """
        found = np.zeros(len(self._taken), np.bool_)
        if self._is_task:
            return found
        spared = int((_INSTRUCTION_SHARE + _RECENT_SHARE) * self._room)
        for place, unit in enumerate(order[:n_questions].tolist()):
            chosen = np.array(units.blocks_of(unit))
            chosen = chosen[~self._taken[chosen]]
            length = int(self._view.blocks.lengths[chosen].sum())
            if length <= self.left - (spared if place else 0):
                found[chosen] = self._taken[chosen] = True
                self.left -= length
        return found

    def add_instructions(self) -> None:
        """Add the user's standing instructions and the newest rules of the project to `rules`."""
        view = self._view
        points = np.where(self._before, view.index.instruction_points(view.blocks), 0.0)
        likely = np.flatnonzero(points)[::-1]
        likely = likely[np.argsort(-points[likely], kind="stable")]
        self._add(self.rules, likely, int(_INSTRUCTION_SHARE * self._room))
        for name in _RULE_FILES:
            rules = view.index.named(name, view.blocks, self._end)
            if len(rules):
                newest = rules[view.blocks.messages[rules] == view.blocks.messages[rules[-1]]]
                self._add(self.rules, newest, int(_RULES_SHARE * self._room))

    def live(self) -> Mask:
        """Take the newest blocks [n] of a running task, or the last messages of a chat."""
        blocks = self._view.blocks
        stays = np.zeros(len(blocks), np.bool_)
        start, share = 0, _RECENT_SHARE
        users = np.flatnonzero(self._before & (blocks.roles == _USER))
        if self._is_task and len(users):
            asked = users[blocks.messages[users] == blocks.messages[users[-1]]]
            self._add(stays, asked, int(_RECENT_SHARE * self._room))
            start, share = int(users[-1]) + 1, _TASK_SHARE
        self._add_newest(stays, range(start, self._end), int(share * self._room))
        return stays

    def _add(self, stays: Mask, indexes: Positions, room: int) -> None:
        """Add the blocks that fit, in this order."""
        lengths = self._view.blocks.lengths[indexes].tolist()
        room = min(room, self.left)
        for i, length in zip(indexes.tolist(), lengths, strict=True):
            if room <= 0:
                return
            if length <= room and not self._taken[i]:
                stays[i] = self._taken[i] = True
                room -= length
                self.left -= length

    def _add_newest(self, stays: Mask, indexes: range, room: int) -> None:
        """Add the newest messages, up to the first that does not fit."""
        blocks = self._view.blocks
        room, end = min(room, self.left), indexes.stop
        while end > indexes.start:
            first = max(indexes.start, int(blocks.messages.searchsorted(blocks.messages[end - 1])))
            is_new = ~self._taken[first:end]
            length = int(blocks.lengths[first:end][is_new].sum())
            if length > room:
                return
            stays[first:end] |= is_new
            self._taken[first:end] = True
            room, self.left, end = room - length, self.left - length, first
