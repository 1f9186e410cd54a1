"""Calls and files of a server with a disk tier."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama import MODEL, Json, Llama, binary, sample_text

from evoke_proxy.demo.processes import free_port, healthy, plain_environment

SIZE = 64
ROW = 2048  # bytes of one row of the bundled model


def options(folder: Path, mib: int = 64, ram: int = 8) -> tuple[str, ...]:
    return (
        *("-c", "4096", "-np", "2", "-no-kvu", "-fa", "on"),
        *("--evoke-ram", str(ram), "--evoke-disk", f"{folder}:{mib}"),
    )


def blocks(server: Llama, tenant: str = "") -> dict[str, Json]:
    found = server.get(f"/slots/0/blocks?tenant={tenant}")["blocks"]
    return {block["name"]: block for block in found}


def disk(server: Llama) -> Json:
    answer: Json = server.slot()["disk"]
    return answer


def spill(server: Llama, **more: object) -> Json:
    answer: Json = server.post("/slots/0?action=block-spill", {"all": True} | more)
    return answer


def files(folder: Path, kind: str = "kvb") -> list[Path]:
    return sorted(folder.glob(f"*.{kind}"))


def size(folder: Path) -> int:
    """The size of all block files in bytes; the server may be deleting one."""
    total = 0
    for path in files(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def fill_slot(server: Llama) -> list[int]:
    """Decodes a conversation in slot 0; returns the tokens that have a row."""
    history = server.tokens(sample_text(900))
    server.erase()
    first = server.complete(history)
    return history + list(first["tokens"][:-1])


@contextmanager
def killable(
    folder: Path, *before: str, ram: int = 1, mib: int = 64
) -> Iterator[tuple[Llama, subprocess.Popen[bytes]]]:
    """Runs a server that can be killed; `before` is a command that its command is appended to."""
    port = free_port()
    command = [*before, str(binary(patched=True)), "-m", str(MODEL), "-t", "1"]
    command += ["--port", str(port), "--slot-save-path", str(folder.parent)]
    with open(folder.parent / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, *options(folder, mib, ram)],
            stdout=log,
            stderr=log,
            env=plain_environment(),
        )
        try:
            server = Llama(port)
            assert wait_until(lambda: healthy(port) or process.poll() is not None)
            assert process.poll() is None, (folder.parent / "log").read_text()
            yield server, process
        finally:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
