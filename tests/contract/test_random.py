"""Random operations on two slots: no crash, no lost slot, no wrong hash or row."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapters import write_adapter
from llama import running
from operations import WEIGHTS, run_operations

from bench.random_models import SHAPES, ensure

OPERATIONS = 300


@pytest.mark.parametrize("layout", ["two", "shared"])
def test_random_operations(request: pytest.FixtureRequest, layout: str) -> None:
    model = run_operations(request.getfixturevalue(layout), OPERATIONS)
    assert sum(model.done.values()) == OPERATIONS
    assert set(model.done) == set(WEIGHTS)
    assert model.compared > 1000


@pytest.mark.parametrize("cells", ["-kvu", "-no-kvu"])
def test_random_operations_with_an_adapter_at_changing_scales(cells: str, tmp_path: Path) -> None:
    """A server with another adapter in that file uses no copy; one with the same adapter does."""
    adapter, folder = tmp_path / "adapter.gguf", tmp_path / "blocks"
    usual = ("-c", "4096", "-np", "2", cells, "-fa", "on", "--lora", str(adapter))
    options = (*usual, "--evoke-ram", "2", "--evoke-disk", f"{folder}:64")
    shape = ensure(SHAPES["tiny-dense"])
    write_adapter(adapter, seed=1)
    with running(True, *options, model=shape) as server:
        model = run_operations(server, 150)
        assert model.done["rescale"] > 3 and model.compared > 100
        server.post("/slots/0?action=block-spill", {"all": True})
    write_adapter(adapter, seed=2)
    with running(True, *options, model=shape) as server:
        listed = {block["name"] for block in server.slot()["blocks"]}
        stale = [copy for name, copy in model.saved.items() if name in listed and copy.scale]
        assert stale
        for copy in stale:
            lora = [{"id": 0, "scale": copy.scale}]
            server.complete(list(copy.prefix), 0, n_predict=1, lora=lora)
            found = {block["name"]: block for block in server.slot()["blocks"]}
            assert all(found[n]["stale"] for n, each in model.saved.items() if each is copy)
    write_adapter(adapter, seed=1)
    with running(True, *options, model=shape) as server:
        assert model.compare_after_restart(server) > 100
