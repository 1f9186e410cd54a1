"""The CPU time that the server of the growth bench reports."""

from __future__ import annotations

import threading
import time

from bench.growth_server import cpu_s


def test_the_cpu_time_includes_worker_threads() -> None:
    def work() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    start = cpu_s()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert cpu_s() - start >= 0.02
