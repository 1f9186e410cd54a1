"""The calls of an unpatched llama-server that slots are kept with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.adapters.llama.model_files import ModelFiles
from evoke_proxy.core.prompt.rendered import TokenListLimit, Tokens
from evoke_proxy.core.servers.server_info import saves_itself
from evoke_proxy.core.snapshots.fingerprint import fingerprint
from evoke_proxy.core.snapshots.held import SlotStatus
from evoke_proxy.errors import PromptTooLong, UpstreamProtocolError, UpstreamRejected

# A chat of more bytes for each token of the context is not asked about: its text alone would take
# the event loop for long. No prompt that fits is expected to be as long.
_MOST_BYTES_A_TOKEN, _ALWAYS_ASKED_BYTES = 64, 1024 * 1024
Client = Mapping[str, str] | None
# So many tokens become an array in one step, which holds the interpreter's lock.
_LISTED_AT_ONCE = 65536


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt without an answer: its slot, how many tokens were there and how many decoded, and
    all else that was said about it."""

    slot: int
    cached: int
    decoded: int
    seconds: float
    timings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copied:
    """A slot saved or restored: tokens and bytes, and the time for which nothing decoded."""

    n_tokens: int
    n_bytes: int
    seconds: float


class StockApi:
    """Raises UpstreamError as `LlamaClient` does, UpstreamProtocolError on another shape.

    `n_ctx` is the context of a slot, as the server has said when its fingerprint was made; the
    calls that count tokens raise PromptTooLong when there are more.
    """

    def __init__(self, upstream: LlamaClient) -> None:
        self._upstream = upstream
        self.n_ctx: int | None = None
        self._files = ModelFiles()

    def check_size(self, body: bytes) -> None:
        """Raises PromptTooLong for a body far longer than any prompt that the context holds."""
        if self.n_ctx is not None:
            most_bytes = max(_ALWAYS_ASKED_BYTES, self.n_ctx * _MOST_BYTES_A_TOKEN)
            if len(body) > most_bytes:
                raise PromptTooLong(self.n_ctx)

    async def render(self, body: bytes, client: Client) -> Tokens:
        """The tokens of a chat request, as llama-server would decode them."""
        return await self.tokens(await self.text(body, client), True, client)

    async def boundary(self, body: bytes, past: bytes, client: Client) -> tuple[Tokens, int]:
        """Return the tokens of a chat request and how many of them are its history.

        `past` is the request without what is new in its last turn. The number is 0 where the
        history is not a prefix of the prompt, in text or in tokens, or is all of it: a recurrent
        state cannot go back and decodes such a prompt again.
        """
        text, history = await self.text(body, client), await self.text(past, client)
        tokens = await self.tokens(text, True, client)
        if not text.startswith(history) or text == history:
            return tokens, 0
        begun = await self.tokens(text[len(history) :], False, client)
        n_history = len(tokens) - len(begun)
        return tokens, n_history if np.array_equal(tokens[n_history:], begun) else 0

    async def text(self, body: bytes, client: Client) -> str:
        """The text of a chat request."""
        answer = await self._upstream.call(
            "POST", "/apply-template", body, CallOptions(client, "render")
        )
        return str(answer.get("prompt"))

    async def count(self, path: str, body: bytes, client: Client) -> int:
        """How many tokens llama-server sees in a request; -1 when it does not say."""
        answer = await self._upstream.call("POST", path, body, CallOptions(client, "render"))
        counted = answer.get("input_tokens")
        return counted if isinstance(counted, int) else -1

    async def tokens(self, text: str, special: bool, client: Client) -> Tokens:
        """The tokens of a text; `special` puts what the vocabulary begins every text with first."""
        asked = {"content": text, "add_special": special, "parse_special": True}
        check = TokenListLimit(self.n_ctx).feed if self.n_ctx is not None else None
        options = CallOptions(client, "render", check=check)
        found = await self._upstream.call("POST", "/tokenize", asked, options)
        try:
            listed = found["tokens"]
            if isinstance(listed, list) and len(listed) > _LISTED_AT_ONCE:
                return await asyncio.to_thread(_token_array, listed)
            return np.asarray(listed, dtype=np.int32)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError("/tokenize answered without tokens") from error

    async def looks(self, client: Client) -> Sequence[SlotStatus] | None:
        """Every slot as it is now; None when the server does not show them."""
        headers = self._upstream.own_headers(client)
        async with self._upstream.open("GET", "/slots", headers) as reply:
            raw = await reply.read()
        if reply.status in (403, 404, 501):
            return None
        if reply.status != 200:
            raise UpstreamRejected(reply.status, raw)
        try:
            return [SlotStatus.parse(item) for item in orjson.loads(raw)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamProtocolError("/slots is not as it was") from error

    async def prefill(
        self, tokens: Tokens, slot: int | None, client: Client, epoch: int | None = None
    ) -> Prefilled:
        """Decode a prompt and nothing more, in `slot` or where llama-server likes; takes its time.
        With an `epoch` the holes of the slot stay.

        Cancelling closes the connection: llama-server stops within a second or a batch.
        """
        asked: dict[str, Any] = {
            "prompt": tokens.tolist(),
            "n_predict": 0,
            "cache_prompt": True,
            "response_fields": ["id_slot", "timings"],
        }
        if slot is not None:
            asked["id_slot"] = slot
        if epoch is not None:
            asked["evoke"] = {"epoch": epoch}
        options = CallOptions(client, "prefill", is_long=True)
        answer = await self._upstream.call("POST", "/completion", asked, options)
        try:
            timings = answer["timings"]
            cached, decoded = int(timings["cache_n"]), int(timings["prompt_n"])
            seconds = float(timings["prompt_ms"]) / 1000
            return Prefilled(int(answer["id_slot"]), cached, decoded, seconds, timings)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError("/completion answered without timings") from error

    async def save(self, slot: int, name: str, client: Client) -> Copied:
        """Write a slot to a file of this name."""
        return await self._copy(slot, "save", name, client, ("n_saved", "n_written", "save_ms"))

    async def restore(self, slot: int, name: str, client: Client) -> Copied:
        """Fill a slot from a file of this name; a refusal has emptied the slot."""
        fields = ("n_restored", "n_read", "restore_ms")
        return await self._copy(slot, "restore", name, client, fields)

    async def erase(self, slot: int, client: Client) -> None:
        """Empty a slot."""
        await self._upstream.call(
            "POST", f"/slots/{slot}?action=erase", {}, CallOptions(client, "erase")
        )

    async def _copy(
        self, slot: int, action: str, name: str, client: Client, fields: tuple[str, str, str]
    ) -> Copied:
        target, asked = f"/slots/{slot}?action={action}", {"filename": name}
        answer = await self._upstream.call("POST", target, asked, CallOptions(client, action))
        n_tokens, n_bytes, ms = fields
        try:
            seconds = float(answer["timings"][ms]) / 1000
            return Copied(int(answer[n_tokens]), int(answer[n_bytes]), seconds)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError(f"{action} of a slot answered otherwise") from error

    async def saves_itself(self, client: Client) -> bool:
        """Whether a newer server has a disk cache of its own."""
        return saves_itself(await self._upstream.call("GET", "/props", None, CallOptions(client)))

    async def fingerprint(self, client: Client) -> str:
        """What a state saved now belongs to."""
        props = await self._upstream.call("GET", "/props", None, CallOptions(client))
        self.n_ctx = _n_ctx(props)
        models = await self._upstream.call("GET", "/v1/models", None, CallOptions(client))
        headers = self._upstream.own_headers(client)
        async with self._upstream.open("GET", "/lora-adapters", headers) as reply:
            raw = await reply.read()
        adapters = orjson.loads(raw) if reply.status == 200 else []
        path = str(props.get("model_path") or "")
        file = await asyncio.to_thread(self._files.identify, path) if path else None
        return fingerprint(props, models, adapters if isinstance(adapters, list) else [], file)


def _n_ctx(props: Mapping[str, Any]) -> int | None:
    settings = props.get("default_generation_settings")
    n_ctx = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    return n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None


def _token_array(listed: list[Any]) -> Tokens:
    """A long list of tokens as an array, made in steps."""
    starts = range(0, len(listed), _LISTED_AT_ONCE)
    pieces = [np.asarray(listed[at : at + _LISTED_AT_ONCE], dtype=np.int32) for at in starts]
    return np.concatenate(pieces)
