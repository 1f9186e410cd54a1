"""BM25 over the blocks of a session."""

from __future__ import annotations

from evoke_proxy.core.retrieval.bm25 import terms_of


def test_the_terms_of_an_identifier_are_the_whole_and_its_parts() -> None:
    assert terms_of("Set API_PORT=8080 in src/config.py!") == [
        "set", "api_port", "api", "port", "8080", "in", "src/config.py", "src", "config", "py",
    ]  # fmt: skip
