"""What a stock server reuses of a restored slot with sliding windows.

core/snapshots/state_file.py works around the first of these behaviours of upstream. If that test
fails, upstream has changed and the module is no longer needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llama import Llama, running, sample_text

from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.snapshot_files import SnapshotFiles


def best_logprobs(answer: Any) -> list[float]:
    """The highest log probabilities of each token of an answer."""
    return [
        top["logprob"]
        for item in answer["completion_probabilities"]
        for top in item["top_logprobs"]
    ]


def restored(server: Llama, name: str, prompt: list[int]) -> Any:
    server.erase()
    server.post("/slots/0?action=restore", {"filename": name})
    return server.complete(prompt, marker=False, n_predict=3, n_probs=4)


WINDOWS = pytest.mark.parametrize(
    ("shape", "attention"), [("tiny-gemma", "on"), ("tiny-gemma", "off"), ("tiny-gpt-oss", "on")]
)


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A slot with 300 tokens that was saved as `whole`, and went on with 20 more.

    Attributes:
        folder: The directory of the file.
        server: The server of the slot.
        cut: The saved tokens.
        more: The tokens behind them.
        live: The answer to both in the slot itself.
    """

    folder: Path
    server: Llama
    cut: list[int]
    more: list[int]
    live: Any

    def cached(self, prompt: list[int]) -> int:
        """The tokens of a prompt that are reused after the file was restored."""
        return int(restored(self.server, "whole", prompt)["timings"]["cache_n"])

    def check_completed(self) -> None:
        """Complete the file; all its tokens are reused, and the answer is that of the slot."""
        assert SnapshotFiles(self.folder).complete("whole")
        repeated = restored(self.server, "whole", self.cut + self.more)
        assert repeated["timings"]["cache_n"] == len(self.cut)
        assert best_logprobs(repeated) == pytest.approx(best_logprobs(self.live), abs=1e-3)


@contextmanager
def saved_slot(shape: str, attention: str, *more_options: str) -> Iterator[SavedSlot]:
    """A stock server of a model with windows, whose slot was saved."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("-np", "1", "-fa", attention, "--cache-ram", "0", "--slot-save-path", folder)
        with running(False, *options, *more_options, model=ensure(SHAPES[shape])) as server:
            tokens = server.tokens(sample_text(250))
            cut, more = tokens[:300], tokens[300:320]
            server.complete(cut, marker=False, n_predict=0)
            server.post("/slots/0?action=save", {"filename": "whole"})
            live = server.complete(cut + more, marker=False, n_predict=3, n_probs=4)
            yield SavedSlot(Path(folder), server, cut, more, live)


@WINDOWS
def test_a_restored_window_lacks_only_a_row_that_no_token_uses(shape: str, attention: str) -> None:
    with saved_slot(shape, attention, "--ctx-checkpoints", "0") as slot:
        assert slot.live["timings"]["cache_n"] == len(slot.cut)
        assert slot.cached(slot.cut + slot.more) == 0  # the file as upstream wrote it
        slot.check_completed()
        # a prompt that diverges earlier is decoded whole
        assert slot.cached(slot.cut[:-9] + slot.more) == 0


@WINDOWS
def test_the_checkpoints_of_a_slot_file_end_before_its_last_tokens(
    shape: str, attention: str
) -> None:
    with saved_slot(shape, attention) as slot:
        with_checkpoints = Path(slot.folder, "whole").read_bytes()[4] >= 4  # the version
        reused = slot.cached(slot.cut + slot.more)
        assert 0 < reused < len(slot.cut) if with_checkpoints else reused == 0
        slot.check_completed()
        # a prompt that diverges after the last checkpoint continues from there
        assert slot.cached(slot.cut[: reused + 2] + slot.more) == reused


@pytest.mark.parametrize("kept", ["in a file", "in RAM"])
def test_with_swa_full_a_restored_window_is_treated_as_complete(kept: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ram = "64" if kept == "in RAM" else "0"
        options = ("-np", "1", "--swa-full", "--cache-ram", ram, "--slot-save-path", folder)
        with running(False, *options, model=ensure(SHAPES["tiny-gemma"])) as server:
            tokens = server.tokens(sample_text(250))
            cut, diverged = tokens[:300], tokens[:260] + tokens[300:320]
            fields = {"marker": False, "n_predict": 3, "n_probs": 4}
            server.complete(cut, marker=False, n_predict=0)
            live = server.complete(diverged, **fields)
            server.erase()
            server.complete(cut, marker=False, n_predict=0)
            if kept == "in RAM":
                server.complete(server.tokens(sample_text(250, seed=5)), marker=False, n_predict=0)
                wrong = server.complete(diverged, **fields)
            else:
                server.post("/slots/0?action=save", {"filename": "whole"})
                wrong = restored(server, "whole", diverged)
            assert live["timings"]["cache_n"] == wrong["timings"]["cache_n"] == 260
            assert best_logprobs(wrong) != pytest.approx(best_logprobs(live), abs=0.02)
