"""Small images, and requests that contain them."""

from __future__ import annotations

import base64
import struct
import zlib

import gguf
import numpy as np
from llama import MODEL, Json, Llama

from bench.random_models import ensure_projector

SIDE = 56


def png(seed: int) -> bytes:
    """A PNG of 56 x 56 pixels, each image in a colour of its own with noise."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, 3) * 0.5 + random.integers(0, 128, (SIDE, SIDE, 3))
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(np.uint8))
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_part(seed: int) -> Json:
    """An image as a part of the content of a chat message."""
    url = f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def projector() -> str:
    """The path of a random projector for the bundled model."""
    fields = gguf.GGUFReader(MODEL).fields
    arch = fields["general.architecture"].contents()
    return str(ensure_projector(int(fields[f"{arch}.embedding_length"].contents())))


def render(server: Llama, messages: list[Json]) -> Json:
    """The rendering of a chat."""
    body: Json = {"messages": messages}
    answer: Json = server.post("/evoke/render", {"dialect": "chat", "body": body})
    return answer
