"""Reads the counters that a server or the proxy exposes."""

from __future__ import annotations

import http.client


def samples(port: int) -> dict[str, float]:
    """What `GET /metrics` of a local port says now, by name and labels: `name{label="value"}`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}
