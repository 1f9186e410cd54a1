"""Downloads the model of `evoke-proxy up -hf` by llama-server, before its memory is planned."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from evoke_proxy.adapters.model_cache import cached_model, downloading_bytes
from evoke_proxy.cli.plan import ServerOptions
from evoke_proxy.cli.supervision import Child, Stop, describe, say
from evoke_proxy.demo.processes import free_port, healthy

# Seconds between messages about a download whose progress bar cannot be shown.
_REPORT_S = 10.0
_STOP_S = 5.0
_ADVICE = (
    "check the network (HF_ENDPOINT names another model hub) and the free space of the disk, then"
    " start it again: the download continues. Or download the GGUF file and name it with -m"
)


@dataclass(slots=True)
class ModelDownload:
    """The download of a model into llama-server's cache.

    Attributes:
        repo: Value of llama-server's option `-hf`.
        options: The user's options for llama-server.
        binary: llama-server.
        log: File for what it prints while it downloads.
        was_stopped: Whether a signal has ended the download.
    """

    repo: str
    options: ServerOptions
    binary: Path
    log: Path
    was_stopped: bool = False
    _reported_at: float = field(default_factory=time.monotonic)

    def cached(self) -> Path | None:
        """Return the file of the model if it was downloaded before."""
        file = self.options.value("--hf-file") or os.environ.get("LLAMA_ARG_HF_FILE")
        return cached_model(self.repo, file, os.environ)

    def run(self) -> Path | None:
        """Download the model and return its file.

        Returns None when it cannot be downloaded, which is printed with the reason, or when a
        signal asks to stop (`was_stopped`). llama-server has no option that only downloads: it is
        stopped as soon as the file is complete.
        """
        port = free_port()
        command = [str(self.binary), "-hf", self.repo, "--ctx-size", "256", *self.options.words]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        server = Child("llama-server", command, os.environ, self.log, _STOP_S, signal.SIGKILL)
        server.prints_output = sys.stdout.isatty()
        stop = Stop(on_second=[server.kill])
        stop.install()
        say(f"llama-server downloads {self.repo} first; the plan follows. Its log: {self.log}")
        self.log.unlink(missing_ok=True)
        server.start()
        try:
            while not stop.wait():
                code = server.exit_code
                file = self.cached() or (_loaded(port) if healthy(port) else None)
                if file is not None:
                    return file
                if code is not None:
                    say(f"llama-server ended with {describe(code)}. Its last lines:")
                    print(server.tail(), file=sys.stderr, flush=True)
                    say(f"if it could not download the model: {_ADVICE}")
                    return None
                self._report()
        finally:
            server.stop()
        self.was_stopped = True
        return None

    def _report(self) -> None:
        """Print the size of the incomplete file every ten seconds, where no bar shows it."""
        now = time.monotonic()
        if sys.stdout.isatty() or now - self._reported_at < _REPORT_S:
            return
        self._reported_at = now
        if n_bytes := downloading_bytes(self.repo, os.environ):
            say(f"{n_bytes / (1 << 20):.0f} MiB of {self.repo} are downloaded")


def _loaded(port: int) -> Path | None:
    """Return the file of the model that a llama-server has loaded; None if it names none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/props")
        path = json.loads(connection.getresponse().read()).get("model_path")
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return Path(path) if isinstance(path, str) and Path(path).is_file() else None
