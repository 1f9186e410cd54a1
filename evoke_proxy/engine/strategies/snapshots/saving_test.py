"""Tests whether the files of saved slots arrive in the directory of snapshots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import SnapshotUnusable, UpstreamRejected
from evoke_proxy.thread_pools import DISK, run_in

# Seconds after which saving is tried again where it has failed.
RETRY_S = 60.0
# What to do about a saved file that cannot be used, by the reason of it, and for any other reason.
_UNUSABLE_FIXES = {
    "disk": "run llama-server and the proxy as the same user",
    "size": "free space on the disk of the directory; the proxy must see there at once what"
    " llama-server writes",
}
_OTHER_FIX = "name a directory to which only llama-server and the proxy write"


class SavingTest:
    """Saves a slot of one llama-server, and looks for the file."""

    def __init__(self, repository: SnapshotRepository) -> None:
        self._repository = repository
        # One name for all tests: where the proxy does not find the file, nobody deletes it.
        self._part = ""

    async def run(
        self,
        slot: int,
        api: StockApi,
        examine: Callable[[str, SlotCopy], Awaitable[None]] | None = None,
    ) -> None:
        """Save a slot, receive the file, and delete it; the caller has leased the slot.

        `examine` reads the file by its name before it is deleted. Raises UpstreamError, and
        SnapshotUnusable when the file is missing or cannot be used; see `problem_of`.
        """
        if self._part:  # the deletion of the file before could delete this one
            await self._repository.wait_for_deletions()
        part = self._part = self._part or self._repository.new_part()
        try:
            copied = await api.save(slot, part)
            await run_in(DISK, self._repository.files.receive, part, copied.n_bytes)
            if examine is not None:
                await examine(part, copied)
        finally:
            self._repository.discard(part)

    def problem_of(self, error: UpstreamRejected | SnapshotUnusable) -> StrategyProblem:
        """What a failure of the test says about llama-server and the directory, and the fix."""
        return problem_of(self._repository, error)


def problem_of(
    repository: SnapshotRepository, error: UpstreamRejected | SnapshotUnusable
) -> StrategyProblem:
    """What a failed save says about llama-server and the directory, and the fix."""
    directory = repository.files.directory
    if isinstance(error, UpstreamRejected):
        if error.status == 501:
            return StrategyProblem(
                "no_save_path",
                "llama-server runs without --slot-save-path",
                f"start it with --slot-save-path {directory}",
            )
        return StrategyProblem(
            "not_saved",
            f"llama-server cannot save slots ({error})",
            "let it write to the directory of its --slot-save-path, and leave room on the disk of"
            " that; its log has the reason",
        )
    if error.reason != "missing":
        return StrategyProblem(
            "not_readable",
            f"the file that llama-server has saved to {directory} cannot be used ({error})",
            _UNUSABLE_FIXES.get(error.reason, _OTHER_FIX),
        )
    return StrategyProblem(
        "other_directory",
        f"{directory} is not the --slot-save-path of llama-server, which saves slots elsewhere",
        "set snapshots.directory to the directory of llama-server's --slot-save-path, as"
        f" the proxy sees it, or start llama-server with --slot-save-path {directory}",
    )
