"""Builds state files of llama-server byte by byte, for tests."""

from __future__ import annotations

import struct


def cache(
    positions: range, transposed: bool, sizes: tuple[int, ...], streams: int = 1, version: int = 3
) -> bytes:
    """One cache of a state file: each row is its position repeated, with one size per layer."""
    out = struct.pack("<I", streams) + struct.pack("<I", 0) * (streams - 1)
    out += struct.pack("<I", len(positions))
    if not positions:
        return out
    for position in positions:
        out += struct.pack("<iIi", position, 1, 0)
    out += struct.pack("<II", transposed, len(sizes))
    out += struct.pack("<II", 64, 128) if version >= 4 else b""  # rotations of keys and values
    for size in sizes:
        out += struct.pack("<iQ", 8, size)
        out += b"".join(bytes([position]) * size for position in positions)
    for size in sizes:
        if transposed:
            out += struct.pack("<iII", 1, 1, size) + bytes(positions) * size
        else:
            out += struct.pack("<iQ", 1, size)
            out += b"".join(bytes([position]) * size for position in positions)
    return out


def file(*parts: bytes, version: int = 3) -> bytes:
    return struct.pack("<III", 0x67677371, version, 2) + bytes(8) + b"".join(parts)
