"""The calls of an unpatched llama-server: rendering, slots, saving and restoring them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.core.prompt.rendered import TokenListLimit, Tokens
from evoke_proxy.core.snapshots.fingerprint import ModelFile, fingerprint
from evoke_proxy.core.snapshots.slot_contents import SlotStatus
from evoke_proxy.errors import PromptTooLong, UpstreamProtocolError, UpstreamRejected
from evoke_proxy.regular_files import open_regular

# A chat body with more bytes per token of context is not rendered, because its text would occupy
# the event loop for too long, and no prompt that fits the context is expected to be as long.
_MAX_BYTES_PER_TOKEN, _ALWAYS_RENDERED_BYTES = 64, 1024 * 1024
# Tokens that become an array in one step, which holds the interpreter's lock.
_TOKENS_PER_STEP = 65536


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt that was decoded without generating an answer."""

    # The slot it was decoded in.
    slot: int
    # Tokens that the cache had, and tokens that were decoded.
    cached: int
    decoded: int
    seconds: float
    # The `timings` object of the answer.
    timings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A slot that was saved to a file or restored from one."""

    n_tokens: int
    n_bytes: int
    # Seconds during which the server decoded nothing.
    seconds: float


# Bytes hashed at each end: the head has metadata and tensor names, the tail has tensor values.
_SAMPLE_BYTES = 1024 * 1024


class ModelFiles:
    """Caches the hash of a file while its size and modification time stay the same."""

    def __init__(self) -> None:
        self._cache: dict[str, ModelFile] = {}

    def identify(self, path: str) -> ModelFile | None:
        """The identity of a file.

        None when it cannot be read here: llama-server may run on another machine.
        """
        try:
            stat = Path(path).stat()
            cached = self._cache.get(path)
            if cached and (cached.n_bytes, cached.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return cached
            sample = _sample(Path(path), stat.st_size)
        except OSError:
            return None
        self._cache[path] = ModelFile(stat.st_size, stat.st_mtime_ns, sample)
        return self._cache[path]


def _sample(path: Path, n_bytes: int) -> str:
    with open_regular(path) as file:
        digest = hashlib.sha256(file.read(_SAMPLE_BYTES))
        file.seek(max(0, n_bytes - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@dataclass(slots=True)
class _ServerFacts:
    """What `StockApi.fingerprint` has read of a server."""

    # Context of one slot in tokens; None before the first call.
    n_ctx: int | None = None
    # Hashes of its model file.
    files: ModelFiles = field(default_factory=ModelFiles)


class StockApi:
    """Typed calls, which raise UpstreamError as `LlamaClient` does.

    An answer in an unknown format raises UpstreamProtocolError. Calls that return tokens raise
    PromptTooLong when there are more than `n_ctx`.
    """

    def __init__(self, client: LlamaClient) -> None:
        self._client = client
        self._facts = _ServerFacts()

    def bound_to(self, client: LlamaClient) -> StockApi:
        """The same calls through another client of the same server; `n_ctx` is shared."""
        bound = copy(self)
        bound._client = client
        return bound

    @property
    def n_ctx(self) -> int | None:
        """Context of one slot in tokens, from the latest `fingerprint`; None before it."""
        return self._facts.n_ctx

    def check_size(self, body: bytes) -> None:
        """Raise PromptTooLong for a body far longer than any prompt that the context holds."""
        if self.n_ctx is not None:
            max_bytes = max(_ALWAYS_RENDERED_BYTES, self.n_ctx * _MAX_BYTES_PER_TOKEN)
            if len(body) > max_bytes:
                raise PromptTooLong(self.n_ctx)

    async def render(self, body: bytes) -> Tokens:
        """Return the tokens of a chat request, as llama-server would decode them."""
        return await self.tokenize(await self.apply_template(body), True)

    async def render_with_history(self, body: bytes, past: bytes) -> tuple[Tokens, int]:
        """Return the tokens of a chat request and how many of them are its history.

        `past` is the request without the beginning of an answer. The number is 0 where the history
        is not a prefix of the prompt, in text or in tokens, or is all of it: a recurrent state
        cannot go back, and decodes such a prompt again.
        """
        text = await self.apply_template(body)
        history = await self.apply_template(past)
        tokens = await self.tokenize(text, True)
        if not text.startswith(history) or text == history:
            return tokens, 0
        rest = await self.tokenize(text[len(history) :], False)
        n_history = len(tokens) - len(rest)
        return tokens, n_history if np.array_equal(tokens[n_history:], rest) else 0

    async def apply_template(self, body: bytes) -> str:
        """Return the text of a chat request."""
        answer = await self._client.call("POST", "/apply-template", body, CallOptions("render"))
        return str(answer.get("prompt"))

    async def count_tokens(self, path: str, body: bytes) -> int:
        """Return how many tokens llama-server counts in a request; -1 when it does not say."""
        answer = await self._client.call("POST", path, body, CallOptions("render"))
        count = answer.get("input_tokens")
        return count if isinstance(count, int) else -1

    async def tokenize(self, text: str, special: bool) -> Tokens:
        """Return the tokens of a text; `special` adds the start token of the vocabulary."""
        body = {"content": text, "add_special": special, "parse_special": True}
        check = TokenListLimit(self.n_ctx).feed if self.n_ctx is not None else None
        options = CallOptions("render", check=check)
        answer = await self._client.call("POST", "/tokenize", body, options)
        try:
            tokens = answer["tokens"]
            if isinstance(tokens, list) and len(tokens) > _TOKENS_PER_STEP:
                return await asyncio.to_thread(_token_array, tokens)
            return np.asarray(tokens, dtype=np.int32)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError("/tokenize answered without tokens") from error

    async def list_slots(self) -> Sequence[SlotStatus] | None:
        """Return the status of every slot; None when the server does not show them."""
        async with self._client.open("GET", "/slots", self._client.own_headers()) as reply:
            raw = await reply.read()
        if reply.status in (403, 404, 501):
            return None
        if reply.status != 200:
            raise UpstreamRejected(reply.status, raw)
        try:
            return [SlotStatus.parse(item) for item in orjson.loads(raw)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UpstreamProtocolError("/slots answered in an unknown format") from error

    async def prefill(
        self, tokens: Tokens, slot: int | None, epoch: int | None = None
    ) -> PrefillResult:
        """Decode a prompt and generate nothing, in `slot` or where llama-server chooses.

        With an `epoch` the holes of the slot stay. May take minutes. Cancelling closes the
        connection: llama-server stops within a second or a batch.
        """
        body: dict[str, Any] = {
            "prompt": tokens.tolist(),
            "n_predict": 0,
            "cache_prompt": True,
            "response_fields": ["id_slot", "timings"],
        }
        if slot is not None:
            body["id_slot"] = slot
        if epoch is not None:
            body["evoke"] = {"epoch": epoch}
        options = CallOptions("prefill", is_long=True)
        answer = await self._client.call("POST", "/completion", body, options)
        try:
            timings = answer["timings"]
            cached, decoded = int(timings["cache_n"]), int(timings["prompt_n"])
            seconds = float(timings["prompt_ms"]) / 1000
            return PrefillResult(int(answer["id_slot"]), cached, decoded, seconds, timings)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError("/completion answered without timings") from error

    async def save(self, slot: int, name: str) -> SlotCopy:
        """Save a slot to a file of this name in the server's --slot-save-path."""
        answer = await self._slot_action(slot, "save", {"filename": name})
        return _slot_copy(answer, "n_saved", "n_written", "save_ms")

    async def restore(self, slot: int, name: str) -> SlotCopy:
        """Restore a slot from a file of this name; a refusal has emptied the slot."""
        answer = await self._slot_action(slot, "restore", {"filename": name})
        return _slot_copy(answer, "n_restored", "n_read", "restore_ms")

    async def erase(self, slot: int) -> None:
        """Empty a slot."""
        await self._slot_action(slot, "erase", {})

    async def _slot_action(self, slot: int, action: str, body: Mapping[str, str]) -> dict[str, Any]:
        target = f"/slots/{slot}?action={action}"
        return await self._client.call("POST", target, body, CallOptions(action))

    async def fingerprint(self) -> str:
        """Return a digest of everything that a new snapshot depends on; updates `n_ctx`."""
        props = await self._client.call("GET", "/props")
        self._facts.n_ctx = _n_ctx(props)
        models = await self._client.call("GET", "/v1/models")
        adapters = await self._adapters()
        path = str(props.get("model_path") or "")
        file = await asyncio.to_thread(self._facts.files.identify, path) if path else None
        return fingerprint(props, models, adapters, file)

    async def _adapters(self) -> list[Any]:
        """The LoRA adapters of the server; none where it does not list them.

        A server that fails may have adapters: raises UpstreamRejected then.
        """
        own = self._client.own_headers()
        async with self._client.open("GET", "/lora-adapters", own) as reply:
            raw = await reply.read()
        if reply.status >= 500 and reply.status != 501:
            raise UpstreamRejected(reply.status, raw)
        try:
            adapters = orjson.loads(raw) if reply.status == 200 else []
        except orjson.JSONDecodeError as error:
            message = "llama-server answered /lora-adapters with no JSON"
            raise UpstreamProtocolError(message) from error
        if not isinstance(adapters, list):
            return []
        if not all(isinstance(adapter, dict) for adapter in adapters):
            raise UpstreamProtocolError("/lora-adapters answered in an unknown format")
        return adapters


def _slot_copy(answer: Mapping[str, Any], n_tokens: str, n_bytes: str, ms: str) -> SlotCopy:
    """Parse the answer of a slot action by the names of its fields."""
    try:
        seconds = float(answer["timings"][ms]) / 1000
        return SlotCopy(int(answer[n_tokens]), int(answer[n_bytes]), seconds)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UpstreamProtocolError("a slot action answered in an unknown format") from error


def _n_ctx(props: Mapping[str, Any]) -> int | None:
    settings = props.get("default_generation_settings")
    n_ctx = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    return n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None


def _token_array(tokens: list[Any]) -> Tokens:
    """Make an array of a long list of tokens, in steps."""
    starts = range(0, len(tokens), _TOKENS_PER_STEP)
    pieces = [np.asarray(tokens[at : at + _TOKENS_PER_STEP], dtype=np.int32) for at in starts]
    return np.concatenate(pieces)
