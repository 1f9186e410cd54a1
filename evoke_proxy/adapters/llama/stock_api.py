"""The calls that also an unpatched llama-server answers: rendering, prefill, saving slots."""

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
from evoke_proxy.thread_pools import DISK, run_in

# A chat body with more bytes per token of context than this is not rendered, unless it is short:
# no prompt that fits the context is expected to be so long, and its text would keep the event loop
# busy for too long.
_MAX_BYTES_PER_TOKEN, _ALWAYS_RENDERED_BYTES = 64, 1024 * 1024
# Tokens that are converted to an array in one step, during which no other thread runs (GIL).
_TOKENS_PER_STEP = 65536


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The result of decoding a prompt without generating an answer.

    Attributes:
        slot: The slot in which it was decoded.
        cached: Tokens that were reused from the cache.
        decoded: Tokens that were decoded.
        seconds: Time of the decoding.
        timings: The `timings` object of the reply.
    """

    slot: int
    cached: int
    decoded: int
    seconds: float
    timings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The result of saving a slot to a file or restoring it from one.

    Attributes:
        n_tokens: Tokens that were saved or restored.
        n_bytes: Bytes that were written or read.
        seconds: Time of the action; the server decoded nothing meanwhile.
    """

    n_tokens: int
    n_bytes: int
    seconds: float


# Bytes that are hashed at each end of a model file: its head contains metadata and names of
# tensors, its end values of tensors.
_SAMPLE_BYTES = 1024 * 1024


class ModelFiles:
    """Identifies model files; caches a hash until size or modification time of the file change."""

    def __init__(self) -> None:
        self._cache: dict[str, ModelFile] = {}

    def identify(self, path: str) -> ModelFile | None:
        """Return size, modification time and hash of both ends of a file.

        None when it cannot be read, for example because llama-server runs on another machine.
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
    """What `StockApi.fingerprint` has learned about a server.

    Attributes:
        n_ctx: Context of one slot in tokens; None before the first call.
        files: Hashes of its model file.
    """

    n_ctx: int | None = None
    files: ModelFiles = field(default_factory=ModelFiles)


class StockApi:
    """The calls of one llama-server that need no patches, with typed results.

    They raise UpstreamError as `LlamaClient.call` does, and UpstreamProtocolError for a reply in an
    unknown format. Calls that return tokens raise PromptTooLong for more than `n_ctx` tokens.
    """

    def __init__(self, client: LlamaClient) -> None:
        self._client = client
        self._facts = _ServerFacts()

    def bound_to(self, client: LlamaClient) -> StockApi:
        """Return the same calls through another client of the same server; both share `n_ctx`."""
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
        """Return the tokens of a chat request, and how many of them are its history.

        `body` is the request, `past` the same request rendered without the start of an answer
        (generation prompt). The number is 0 if the history is not a prefix of the prompt, as text
        and as tokens, or is the whole prompt: a recurrent state cannot be cut to a shorter prefix,
        so such a prompt is decoded again.
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
        """Return the prompt text of a chat request, as the chat template renders it."""
        answer = await self._client.call("POST", "/apply-template", body, CallOptions("render"))
        return str(answer.get("prompt"))

    async def count_tokens(self, path: str, body: bytes) -> int:
        """Return how many tokens llama-server counts in a request; -1 when it does not say."""
        answer = await self._client.call("POST", path, body, CallOptions("render"))
        count = answer.get("input_tokens")
        return count if isinstance(count, int) else -1

    async def tokenize(self, text: str, special: bool) -> Tokens:
        """Return the tokens of a text, int32; `special` adds the model's start token (BOS)."""
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
        """Return the status of every slot; None when the server does not list its slots."""
        async with self._client.open("GET", "/slots", self._client.own_headers()) as reply:
            raw = await reply.read()
        if reply.status in (403, 404, 501):
            return None
        if reply.status != 200:
            raise UpstreamRejected(reply.status, raw)
        try:
            return [SlotStatus.parse(item) for item in orjson.loads(raw)]
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UpstreamProtocolError("/slots answered in an unknown format") from error

    async def prefill(
        self, tokens: Tokens, slot: int | None, epoch: int | None = None
    ) -> PrefillResult:
        """Decode a prompt without generating an answer.

        With `slot` None, llama-server chooses the slot. `epoch` is the epoch of a slot with evicted
        blocks on a patched server; the blocks then stay evicted. The call may take minutes. If it
        is cancelled, the connection is closed, and llama-server stops within a second or a batch.
        """
        body: dict[str, Any] = {
            "prompt": tokens,
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
        """Restore a slot from a file of this name in the server's --slot-save-path.

        Raises UpstreamRejected when llama-server refuses the file; the slot is then empty.
        """
        answer = await self._slot_action(slot, "restore", {"filename": name})
        return _slot_copy(answer, "n_restored", "n_read", "restore_ms")

    async def erase(self, slot: int) -> None:
        """Empty a slot."""
        await self._slot_action(slot, "erase", {})

    async def _slot_action(self, slot: int, action: str, body: Mapping[str, str]) -> dict[str, Any]:
        target = f"/slots/{slot}?action={action}"
        return await self._client.call("POST", target, body, CallOptions(action))

    async def fingerprint(self) -> str:
        """Return a digest of all server properties that snapshots depend on; updates `n_ctx`.

        These are model, adapters and cache; see core/snapshots/fingerprint.py.
        """
        props = await self._client.call("GET", "/props")
        self._facts.n_ctx = _n_ctx(props)
        models = await self._client.call("GET", "/v1/models")
        adapters = await self._adapters()
        path = str(props.get("model_path") or "")
        file = await run_in(DISK, self._facts.files.identify, path) if path else None
        return fingerprint(props, models, adapters, file)

    async def _adapters(self) -> list[Any]:
        """Return the LoRA adapters of the server; [] when it does not list adapters.

        Raises UpstreamRejected when the server fails, because it may have adapters.
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
    """Convert a long list of tokens to an int32 array, in steps."""
    starts = range(0, len(tokens), _TOKENS_PER_STEP)
    pieces = [np.asarray(tokens[at : at + _TOKENS_PER_STEP], dtype=np.int32) for at in starts]
    return np.concatenate(pieces)
