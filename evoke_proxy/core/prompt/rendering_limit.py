"""Stops an answer with more tokens than a context holds while it arrives."""

from __future__ import annotations

from evoke_proxy.errors import PromptTooLong

_TOKENS = b'"tokens_b64":"'
_BYTES_A_TOKEN = 4


class RenderingLimit:
    """Counts the tokens of a compact rendering, the answer of `POST /evoke/render`, piece by piece.

    A rendering of `limit` tokens is never refused, also when it leaves out what is known already.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._end = b""  # of what has arrived, before the tokens begin
        self._n_characters = 0
        self._inside = False
        self._ended = False

    def feed(self, piece: bytes) -> None:
        """Count the next piece; raises PromptTooLong once there are more tokens than the limit."""
        if self._ended:
            return
        if not self._inside:
            text = self._end + piece
            at = text.find(_TOKENS)
            if at < 0:
                self._end = text[-len(_TOKENS) :]
                return
            self._inside, piece = True, text[at + len(_TOKENS) :]
        end = piece.find(b'"')
        self._ended = end >= 0
        self._n_characters += end if self._ended else len(piece)
        # Four characters of base64 are three bytes, of which the last two may be padding.
        n_bytes = self._n_characters // 4 * 3 - 2
        if n_bytes // _BYTES_A_TOKEN > self._limit:
            raise PromptTooLong(self._limit)


class TokenListLimit:
    """Counts the tokens of a JSON list of them, the answer of `POST /tokenize`, piece by piece.

    A list of `limit` tokens is never refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_commas = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece; raises PromptTooLong once there are more tokens than the limit."""
        self._n_commas += piece.count(b",")
        if self._n_commas > self._limit:
            raise PromptTooLong(self._limit)
