"""`evoke-proxy up -hf` with a model hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness import ask, server_binary, until

from evoke_proxy.models import bundled_model

MODEL = bundled_model().read_bytes()
COMMIT, OID = "c" * 40, hashlib.sha256(MODEL).hexdigest()
PATH = "tiny-Q8_0.gguf"
_LISTENS = re.compile(r"^evoke-proxy listens on http://127\.0\.0\.1:(\d+)", re.MULTILINE)


@dataclass
class ModelHub:
    """A model hub with one repository, owner/tiny, that has the bundled model.

    Attributes:
        cut_at: Byte of the file at which each of the next connections is closed.
        ranges: The Range header of each request for the file.
        url: Its address.
    """

    cut_at: list[int] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    url: str = ""

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        item = {"type": "file", "path": PATH, "size": len(MODEL), "lfs": {"oid": OID}}
        documents: dict[str, object] = {
            "/api/models/owner/tiny/refs": {"branches": [{"name": "main", "targetCommit": COMMIT}]},
            f"/api/models/owner/tiny/tree/{COMMIT}?recursive=true": [item],
        }
        document = documents.get(request.path)
        is_file = request.path == f"/owner/tiny/resolve/{COMMIT}/{PATH}"
        if document is None and not is_file:
            return request.send_error(404)
        data = MODEL if is_file else json.dumps(document).encode()
        span = request.headers.get("Range", "")
        start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.send_header("Accept-Ranges", "bytes")
        request.end_headers()
        request.close_connection = True
        if request.command == "GET":
            end = len(data)
            if is_file:
                self.ranges.append(span)
                end = self.cut_at.pop(0) if self.cut_at else end
            request.wfile.write(data[start:end])


@contextmanager
def serving(hub: ModelHub) -> Iterator[ModelHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.reply(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def command(folder: Path, *words: str) -> list[str]:
    start = [sys.executable, "-m", "evoke_proxy", "up", "-hf", "owner/tiny"]
    start += ["--server", server_binary(patched=True), "--state", str(folder / "state")]
    return [*start, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *words]


def environment(folder: Path, url: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("EVOKE_")}
    env |= {"LLAMA_CACHE": str(folder / "cache"), "HF_ENDPOINT": url, "no_proxy": "*"}
    return env | {"LLAMA_ARG_THREADS": "1"}  # one is best for so small a model


def test_a_model_is_downloaded_and_planned_before_the_server_starts(tmp_path: Path) -> None:
    """The second start, without the hub, has the same plan."""
    outputs, log = [], tmp_path / "output"
    for url in (None, "http://127.0.0.1:9"):
        with serving(ModelHub()) as hub, log.open("wb") as output:
            process = subprocess.Popen(
                command(tmp_path, "--cells", "1024", "--", "-t", "1"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(tmp_path, url or hub.url),
            )
            try:
                until(lambda: _LISTENS.search(log.read_text()), "the proxy listens", 60)
                match = _LISTENS.search(log.read_text())
                assert match is not None
                body = b'{"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}'
                assert ask(int(match[1]), "POST", "/v1/chat/completions", body).status == 200
            finally:
                process.terminate()
                assert process.wait(60) == 0
            outputs.append(log.read_text())
            assert len(hub.ranges) == (1 if url is None else 0)
    assert "llama-server downloads owner/tiny first" in outputs[0]
    assert "downloads" not in outputs[1]
    for text in outputs:
        assert re.search("budget +768 tokens for each session", text)
        assert "-hf owner/tiny --ctx-size 1024 --parallel 1 --ctx-logical 8192" in text


def test_an_interrupted_download_is_reported_and_continued_by_the_next_start(
    tmp_path: Path,
) -> None:
    """llama-server tries three times; the fourth attempt, of the next start, continues."""
    size = len(MODEL)
    with serving(ModelHub(cut_at=[size // 4, size // 2, size * 3 // 4])) as hub:
        words = command(tmp_path, "--", "-t", "1")
        env = environment(tmp_path, hub.url)
        failed = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
        assert failed.returncode == 1
        assert "download failed after 3 attempts" in failed.stderr
        assert "check the network" in failed.stderr and "the download continues" in failed.stderr
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        try:
            assert process.stdout is not None
            table = b"".join(iter(process.stdout.readline, b"\n"))
            assert re.search(rb"context +8192 tokens", table)
            (file,) = tmp_path.glob("cache/models--owner--tiny/snapshots/*/*.gguf")
            assert file.read_bytes() == MODEL
        finally:
            process.kill()
            process.communicate()
        assert hub.ranges[-1] == f"bytes={size * 3 // 4}-"


def test_a_model_that_no_hub_has_is_reported_with_the_reason_and_the_fix(tmp_path: Path) -> None:
    with serving(ModelHub()) as hub:
        words = ["owner/other" if word == "owner/tiny" else word for word in command(tmp_path)]
        env = environment(tmp_path, hub.url)
        failed = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)
    assert failed.returncode == 1
    assert "  | " in failed.stderr and "404" in failed.stderr
    assert "check the network" in failed.stderr and "with -m" in failed.stderr
