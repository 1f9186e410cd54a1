"""The paths of llama-server, by how the proxy handles their requests."""

from __future__ import annotations

# The paths that generate text, and the dialect of each. A raw prompt belongs to no conversation,
# but takes a slot like every other request.
ANSWER_PATHS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "responses",
    "/responses": "responses",
    "/v1/messages": "messages",
    "/v1/completions": "completions",
    "/completions": "completions",
    "/completion": "completions",
    "/infill": "completions",
}
# A call of the proxy itself that clients make, with their keys and at the address of `listen`.
PREFETCH_PATH = "/evoke/prefetch"
# The paths that count the tokens of a request to generate text.
COUNT_PATHS = {
    "/v1/chat/completions/input_tokens": "chat",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages/count_tokens": "messages",
}
# Other paths with JSON bodies, which are read and checked before they are forwarded.
JSON_PATHS = frozenset(
    """
    /tokenize /detokenize /apply-template /embedding /embeddings /v1/embeddings /rerank /reranking
    /v1/rerank /v1/reranking /chat/completions/input_tokens /responses/input_tokens
    """.split()
)

# Paths with forms as bodies.
FORM_PATHS = frozenset(("/v1/audio/transcriptions", "/audio/transcriptions"))
# Of both, those whose requests are computed in slots.
TASK_PATHS = FORM_PATHS | frozenset(
    """
    /embedding /embeddings /v1/embeddings /rerank /reranking /v1/rerank /v1/reranking
    """.split()
)

# Answered without a client key, which load balancers do not have, by a call of the proxy itself.
HEALTH_PATHS = frozenset(("/health", "/v1/health"))

_OTHER_PATHS = COUNT_PATHS.keys() | frozenset(
    """
    / /health /v1/health /metrics /props /models /v1/models
    /embedding /embeddings /v1/embeddings /rerank /reranking
    /v1/rerank /tokenize /detokenize /apply-template /lora-adapters /slots
    /evoke/health /evoke/ready
    """.split()
)


def endpoint_label(path: str) -> str:
    """A path as a metric label: the documented paths by name, the rest as `other`."""
    if path in ANSWER_PATHS or path in _OTHER_PATHS:
        return path
    if path == "/evoke" or path.startswith("/evoke/"):
        return "/evoke/{path}"
    return "/slots/{id}" if path.startswith("/slots/") else "other"
