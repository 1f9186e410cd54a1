"""Metrics of several servers as one exposition: every sample says whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

# A sample of the Prometheus text format 0.0.4: name, maybe labels, value and maybe a time.
_SAMPLE = re.compile(rb"\A([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s+[-+]?(?:[0-9.]|Inf|NaN).*)")
_ABOUT = re.compile(rb"# (?:HELP|TYPE) (\S+)")


def labelled(texts: Mapping[str, bytes]) -> bytes:
    """Texts of the Prometheus format, by server, as one in which each sample has its `server`.

    What is said about a metric is said once, before all of its samples, as the format wants it;
    comments go, and lines that are none of it.
    """
    about: dict[bytes, dict[bytes, bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for server, text in texts.items():
        family = b""
        for line in text.splitlines():
            if said := _ABOUT.match(line):
                family = said[1]
                # The first server's words count for all: two of a kind would be refused.
                about.setdefault(family, {}).setdefault(line[:7], line)
            elif sample := _SAMPLE.fullmatch(line):
                family = family if family and sample[1].startswith(family) else sample[1]
                samples.setdefault(family, []).append(_with_server(sample, server))
    lines = []
    for family, found in samples.items():
        lines += [*about.get(family, {}).values(), *found]
    return b"".join(line + b"\n" for line in lines)


def _with_server(sample: re.Match[bytes], server: str) -> bytes:
    name, labels, value = sample.groups()
    mine = b'server="%s"' % server.encode()
    return name + b"{" + (mine + b"," + labels if labels else mine) + b"}" + value
