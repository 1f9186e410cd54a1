"""Answers which positions have rows when an answer begins: in this process, or on real servers.

In this process the whole engine of the proxy runs in front of a server that exists only as numbers
(`bench/traces/patched.py`), in virtual time. On servers the proxy runs in front of the patched
llama-server, with random weights and a real vocabulary, and llama-server reports the rows. Both
count tokens by the vocabulary of Qwen2."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.driver import listed, numbers, option
from bench.llama import Llama, running, settle
from bench.llama import proxied as proxied_server
from bench.policies import breadcrumb
from bench.policies.breadcrumb import quote_evicted
from bench.random_models import SHAPES, ensure
from bench.slot_rows import spans_of
from bench.traces.patched import Limits, PatchedServer
from bench.traces.proxied import proxied
from bench.traces.replay import NO_COSTS, run
from bench.traces.texts import Scale
from bench.vocabulary import Renderer
from evoke_proxy.adapters.embedders.onnx_encoder import OnnxEncoder
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.config import EmbedderConfig
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.retrieval.encoding import Encoder, Vectors
from evoke_proxy.demo.client import chat
from evoke_proxy.server_build import ensure_server

_REQUEST_FIELDS = {"recovery": "evoke_recovery", "recall": "evoke_recall"}
# Of the server in this process: tokens are not scaled, and there is room for all of them.
_SCALE, _N_CELLS = Scale(64), 1 << 20
_ANSWER = np.zeros(1, np.int32)
# Virtual seconds after each answer, in which the proxy saves and embeds.
_PAUSE_S = 5.0
Message = Mapping[str, str]
Ranges = Sequence[tuple[int, int]]
Spans = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration of the proxy."""

    arm: str  # what tables call it
    # Fields of `policy` that differ from the default.
    policy: Mapping[str, str | int] = field(default_factory=dict)
    # What ranks by meaning: `built-in`, `encoder` (of a directory) or `none`.
    embedder: str = "built-in"
    on_demand: bool = False  # whether it is measured only when --arms names it

    @property
    def on_servers(self) -> bool:
        """Whether a request can ask for it, and its rows stay at the positions of the chat."""
        return self.embedder == "built-in" and self.policy.keys() <= _REQUEST_FIELDS.keys()


DEFAULT = Setting("default")
SETTINGS = (
    DEFAULT,
    Setting("default + encoder", embedder="encoder"),
    Setting("words only", embedder="none"),
    Setting("breadcrumb", {"name": "breadcrumb"}),
    Setting("no recall", {"recall": "none"}),
    Setting("discard", {"recovery": "discard"}),
    Setting("infllm", {"name": "infllm"}),
    *(Setting(f"infllm {k}", {"name": f"infllm_k{k}"}, on_demand=True) for k in (2, 4, 16)),
    *(Setting(f"blocks of {n}", {"block_tokens": n}, on_demand=True) for n in (32, 128)),
)


# The options of benches that look at what is in the cache.
OPTIONS = (
    option("--shares", "4,8,16", "budgets, as 1/share of a conversation", type=numbers),
    option("--arms", "", "separated by commas (all)", type=listed),
    option("--embedder", help="directory of an encoder: more arms", type=Path),
    option("--misses", 0, "print so many missed questions"),
    option("--server", False, "real servers instead of this process, without fills"),
)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return the settings that were asked for and can be measured in this form."""
    return [
        setting
        for setting in SETTINGS
        if (setting.on_servers or not args.server)
        and (setting.embedder != "encoder" or args.embedder)
        and (setting.arm in args.arms if args.arms else not setting.on_demand)
    ]


def _remembered(
    embed: Callable[[Sequence[str]], Vectors], cache: dict[str, Vectors], texts: Sequence[str]
) -> Vectors:
    """Return the vectors of texts; those that the cache lacks are embedded."""
    missing = list(dict.fromkeys(text for text in texts if text not in cache))
    if missing:
        cache |= zip(missing, embed(missing), strict=True)
    return np.stack([cache[text] for text in texts])


class CachedEncoder:
    """An encoder that remembers the vector of each text."""

    def __init__(self, encoder: Encoder) -> None:
        self.name, self.is_immediate = encoder.name, encoder.is_immediate
        self.fingerprint, self.describe = encoder.fingerprint, encoder.describe
        self.similar_words, self.is_english = encoder.similar_words, encoder.is_english
        self.queries = partial(_remembered, encoder.queries, dict[str, Vectors]())
        self.documents = partial(_remembered, encoder.documents, dict[str, Vectors]())


class InProcess:
    """The engine of the proxy in this process, in front of a server without arithmetic."""

    def __init__(self, directory: Path | None = None, renderer: Renderer | None = None) -> None:
        """Load the encoders; `directory` has that of the settings with an encoder."""
        self._renderer = renderer or Renderer()
        self.encoders: dict[str, Encoder] = {"built-in": WordVectorEncoder()}
        if directory is not None:
            encoder = OnnxEncoder(EmbedderConfig(directory=str(directory)))
            self.encoders["encoder"] = CachedEncoder(encoder)

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Return the positions of each message, by its index."""
        ends = self._renderer(messages).ends
        return dict(enumerate(zip([0, *ends], ends, strict=False)))

    def resident(
        self, setting: Setting, budget: int | None, name: str, chats: Iterable[Sequence[Message]]
    ) -> list[Ranges]:
        """Send the chats of a new conversation one after the other.

        Returns for each the positions that have rows when the answer begins. Text that is quoted in
        the request counts as rows of its messages. Without a budget nothing is evicted. `name` is
        unique to the conversation.
        """
        quotes: list[QuotedRequest] = []

        def watched(*turn: Any) -> QuotedRequest | None:
            quote = quote_evicted(*turn)
            quotes[:] = [] if quote is None else [quote]
            return quote

        async def converse() -> list[Ranges]:
            limits = Limits(1, _N_CELLS, _N_CELLS, ram=_N_CELLS)
            server = PatchedServer(limits, _SCALE, NO_COSTS, self._renderer)
            settings: dict[str, object] = {"policy.budget": budget}
            settings |= {f"policy.{key}": value for key, value in setting.policy.items()}
            settings |= {"embedder.model": "none"} if setting.embedder == "none" else {}
            encoder, found = self.encoders.get(setting.embedder), list[Ranges]()
            async with proxied(server, settings, NO_COSTS, encoder=encoder) as proxy:
                for messages in chats:
                    quotes.clear()
                    body = {"messages": messages, "max_tokens": 1, "stream": True}
                    rows = (await proxy.chat(body, {"X-Evoke-Session": "bench"}, _ANSWER)).rows
                    if len(rows) > len(self._renderer(messages).tokens):  # it was used
                        for block in (block for quote in quotes for block in quote.blocks):
                            rows[block.span.start : block.span.end] = True
                    found.append([(span.start, span.end) for span in spans_of(rows)])
                    await asyncio.sleep(_PAUSE_S)
            if server.refusals:
                raise RuntimeError(f"{name}: calls were refused: {server.refusals}")
            return found

        with patch.object(breadcrumb, "quote_evicted", watched):
            return run(converse())


class OnServers:
    """The proxy in front of the patched server."""

    def __init__(self, llama: Llama, proxy: int) -> None:
        self._llama = llama
        self._proxy = proxy

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Return the positions of each message, by its index."""
        spans = self._llama.rendered({"messages": list(messages)})["spans"]
        return {span["index"]: (span["p0"], span["p1"]) for span in spans}

    def resident(
        self, setting: Setting, budget: int | None, name: str, chats: Iterable[Sequence[Message]]
    ) -> list[Ranges]:
        """See InProcess."""
        fields: dict[str, Any] = {_REQUEST_FIELDS[k]: v for k, v in setting.policy.items()}
        if budget is not None:
            fields["evoke_budget"] = budget
        # A tenant of its own: a session takes no copies over from another one's.
        id = name.replace(" ", "-")
        headers, found = {"X-Evoke-Session": id, "Authorization": f"Bearer {id}"}, list[Ranges]()
        for messages in chats:
            body = {"messages": list(messages), "max_tokens": 1, "temperature": 0, **fields}
            reply = chat(self._proxy, body, headers)
            accounting = reply.timings.get("evoke")
            if not isinstance(accounting, Mapping) or accounting.get("marker") != "ok":
                raise RuntimeError(f"the proxy did not plan this turn: {reply}")
            answer = self._llama.call("GET", "/slots/0/blocks")
            settle(self._proxy)
            found.append([(start, end) for start, end in answer["resident"]])
        return found


@contextmanager
def servers(length: int) -> Iterator[OnServers]:
    """Run a patched server and a proxy for conversations of up to about `length` tokens."""
    model, context = ensure(SHAPES["qwen2-vocabulary"]), length + length // 4 + 2048
    options = ("-c", str(context), "-np", "1", "-t", "1", "--evoke-ram", "512")
    with running(ensure_server(), model, *options, "--chat-template", "chatml") as llama:
        with proxied_server(llama.port) as proxy:
            yield OnServers(llama, proxy.port)


Engine = InProcess | OnServers


def engine(
    on_servers: bool, length: int, directory: Path | None = None
) -> AbstractContextManager[Engine]:
    """Run an engine for conversations of up to about `length` tokens."""
    return servers(length) if on_servers else nullcontext(InProcess(directory))


def history_of(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the last answer, which are the request that asked for it."""
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:last]


def share_resident(span: tuple[int, int], resident: Ranges) -> float:
    """Return which share of a span of positions has rows, 0 to 1."""
    start, end = span
    rows = sum(max(0, min(end, b) - max(start, a)) for a, b in resident)
    return rows / (end - start)
