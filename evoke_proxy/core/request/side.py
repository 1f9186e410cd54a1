"""Side requests: titles, tags, summaries, probes that clients send beside a conversation.

They go on from nothing and nothing goes on from them, so they must cost no conversation its place.
Taking a conversation's first turn for one costs little: its second turn makes it a session.
"""

from __future__ import annotations

import re

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.chat import ChatRequest

# A longer prompt is worth remembering, should it be a conversation after all.
MAX_TOKENS = 2048
# A limit up to here is one for a title, a word, a yes or no.
MAX_ANSWER = 64
# The beginnings of a prompt are where a client says what it wants.
_LOOKED_AT = 600
_TASK = re.compile(
    r"\A\s*### Task:"  # every task prompt of Open WebUI
    r"|\btitle generator\b"
    r"|\b(?:generat\w*|writ\w*|creat\w*|come up with)\b[^.\n]{0,60}"
    r"\b(?:title|tags|commit message)\b"
    r"|\bsummar\w+ this (?:coding )?conversation\b",
    re.IGNORECASE,
)


def is_side_request(request: ChatRequest, n_tokens: int, beside: bool, family: bool) -> bool:
    """Whether a request that goes on from no session is to become none.

    `n_tokens` is the length of its prompt; `beside` says that a conversation of the same client is
    alive, `family` that one of them carries the same id. It is a side request when it is the first
    word of whatever it is, brings no tools, and
    either says it wants a title, tags or a summary,
    or is short, sent beside a conversation, and belongs to it by its id or wants a tiny answer.
    """
    roles = {message.role for message in request.messages}
    if request.has_tools or not roles <= {Role.SYSTEM, Role.USER}:
        return False
    if any(_TASK.search(message.text[:_LOOKED_AT]) for message in request.messages):
        return True
    tiny = request.max_tokens is not None and request.max_tokens <= MAX_ANSWER
    return beside and n_tokens <= MAX_TOKENS and (family or tiny)
