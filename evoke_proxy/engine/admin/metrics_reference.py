"""Writes docs/metrics.md: `python -m evoke_proxy.engine.admin.metrics_reference > FILE`."""

from __future__ import annotations

from collections.abc import Iterator

from evoke_proxy.adapters.metrics import MetricDescription, Metrics

_HEAD = """\
# Metrics reference

This page is generated from `evoke_proxy/adapters/metrics.py`. `GET /metrics` returns these metrics
in the text format of Prometheus, after those of llama-server. It is served at the admin address,
which needs no token for it, and without `security.keys_file` also at the addresses for clients.

No label contains a session, a user or a path of a client. Counters begin at 0 at the start.
Label values in a row are those that exist from the start; others appear with their first event.
[Operating](operate.md#monitoring) says how to read the most important metrics, and which alerts use
them.
"""


def reference() -> str:
    """The text of the page: a table for each section."""
    return _HEAD + "\n".join(_lines(Metrics())) + "\n"


def _lines(metrics: Metrics) -> Iterator[str]:
    section = None
    for item in metrics.descriptions:
        if item.section != section:
            section = item.section
            yield from ("", f"## {section}", "", "| metric | kind | labels | meaning |")
            yield "|---|---|---|---|"
        labels = "; ".join(_label(metrics, item, name) for name in item.labels)
        yield f"| `{item.name}` | {item.kind} | {labels} | {item.about} |"


def _label(metrics: Metrics, item: MetricDescription, name: str) -> str:
    values = _values(metrics, item, name)
    return f"`{name}`" + (f": {', '.join(values)}" if values else "")


def _values(metrics: Metrics, item: MetricDescription, name: str) -> list[str]:
    """The values of a label that exist from the start, in order."""
    samples = [
        sample
        for family in metrics.registry.collect()
        if family.name == item.name.removesuffix("_total")
        for sample in family.samples
    ]
    return [value for value in dict.fromkeys(it.labels.get(name, "") for it in samples) if value]


if __name__ == "__main__":
    print(reference(), end="")
