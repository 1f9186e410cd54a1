"""Merging the metrics of several servers into one exposition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import virtual_time
from prometheus_client.parser import text_string_to_metric_families

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.admin.exposition import UpstreamMetrics, merge_by_server
from evoke_proxy.errors import UpstreamRejected, UpstreamUnavailable

ONE = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
# HELP llamacpp:wait_seconds Time.
# TYPE llamacpp:wait_seconds histogram
llamacpp:wait_seconds_bucket{le="1"} 3
llamacpp:wait_seconds_bucket{le="+Inf"} 4
llamacpp:wait_seconds_count 4
llamacpp:wait_seconds_sum 2.5
"""


@dataclass
class _Proxy:
    """The servers of a proxy."""

    clients: Mapping[str, LlamaClient]
    metrics: Metrics


def _samples(text: bytes) -> dict[tuple[str, str, str], float]:
    return {
        (sample.name, sample.labels["server"], sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_merged_samples_have_the_server_label_and_one_header_per_metric() -> None:
    other = ONE.replace(b" 12\n", b" 7\n").replace(b"Time.", b"Other words.")
    merged = merge_by_server(
        {"gpu-1": ONE, "gpu-2": other, "gpu-3": b"# it sleeps\n", "gpu-4": b""}
    )
    samples = _samples(merged)
    assert samples["llamacpp:prompt_tokens_total", "gpu-1", ""] == 12
    assert samples["llamacpp:prompt_tokens_total", "gpu-2", ""] == 7
    assert samples["llamacpp:wait_seconds_bucket", "gpu-2", "+Inf"] == 4
    assert len(samples) == 10
    for line in (b"# TYPE llamacpp:wait_seconds histogram", b"# HELP llamacpp:wait_seconds Time."):
        assert merged.count(line) == 1
    assert b"Other words" not in merged and b"sleeps" not in merged
    families = [line.split()[2] for line in merged.splitlines() if line.startswith(b"# TYPE")]
    assert len(families) == len(set(families)) == 2


def test_text_that_is_not_an_exposition_is_omitted() -> None:
    assert (
        merge_by_server({"a": b"<html>\nnot one\n{}\n", "b": b"fine 1\n"})
        == b'fine{server="b"} 1\n'
    )


def test_an_error_of_several_lines_is_one_comment() -> None:
    class Gateway(LlamaClient):
        async def info(self, client: object = None) -> ServerInfo:
            raise UpstreamRejected(502, b"<html>\r\n<h1>Bad gateway</h1>\r\n</html>")

    servers = {"": Gateway(UpstreamConfig())}
    text = asyncio.run(UpstreamMetrics(_Proxy(servers, Metrics())).scrape()).text.decode()
    assert text.startswith("# ") and text.endswith("</html>\n") and text.count("\n") == 1


def test_a_server_is_reported_up_while_another_scrape_is_running() -> None:
    metrics, delays = Metrics(), [0.0, 99.0, 0.1]

    class Slow(LlamaClient):
        async def info(self, client: object = None) -> ServerInfo:
            await asyncio.sleep(delays.pop(0))
            return ServerInfo("unpatched", "", sleeping=True)

    def up() -> float | None:
        return metrics.registry.get_sample_value("evoke_upstream_up")

    async def scrapes() -> None:
        servers = {"": Slow(UpstreamConfig())}
        scraper = UpstreamMetrics(_Proxy(servers, metrics))
        scraper.woken_by_scrapes.add("")
        await scraper.scrape()
        assert up() == 1
        async with asyncio.TaskGroup() as tasks:
            abandoned = tasks.create_task(scraper.scrape())
            await asyncio.sleep(0)
            assert up() == 1, "a scrape that has just started must not change it"
            await scraper.scrape()
            assert up() == 1
            abandoned.cancel()
        assert up() == 1

    virtual_time.run(scrapes())


def test_the_counters_of_saved_blocks_stay_while_a_server_does_not_answer() -> None:
    metrics, patched = Metrics(), ServerInfo("", "")
    answers: list[ServerInfo | UpstreamUnavailable] = [
        *(patched, UpstreamUnavailable("closed"), replace(patched, sleeping=True), patched),
        ServerInfo("unpatched", ""),
    ]
    dropped = iter((7, 2))

    class Server(LlamaClient):
        async def info(self, client: object = None) -> ServerInfo:
            answer = answers.pop(0)
            if isinstance(answer, UpstreamUnavailable):
                raise answer
            return answer

        async def call(self, *words: Any, **options: Any) -> dict[str, Any]:
            return {"ram": {"used": 1, "budget": 9, "n_dropped": next(dropped)}}

        @asynccontextmanager
        async def open(self, *words: Any, **options: Any) -> AsyncIterator[Any]:
            raise UpstreamUnavailable("no metrics")
            yield

    async def scrapes() -> list[float | None]:
        scraper, value = UpstreamMetrics(_Proxy({"": Server(UpstreamConfig())}, metrics)), []
        for _ in range(5):
            await scraper.scrape()
            labels = {"server": ""}
            value.append(metrics.registry.get_sample_value("evoke_ram_dropped_total", labels))
        return value

    assert asyncio.run(scrapes()) == [7, 7, 7, 2, 0]
