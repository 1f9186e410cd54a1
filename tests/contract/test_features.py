"""The features that llama-server reports in /props."""

from __future__ import annotations

from llama import Llama, running

from bench.random_models import SHAPES, ensure

FEATURES = (
    "adopt attention behind blocks compact find plan probe render reuse runs share stream".split()
)


def test_a_patched_server_reports_its_features_and_limits(two: Llama) -> None:
    table = two.get("/props")["evoke"]
    assert table["version"] == 1 and table["memory"] == "dense"
    assert sorted(table["features"]) == sorted(FEATURES)
    limits = table["limits"]
    assert limits["ram_bytes"] == 64 * 1024 * 1024 and limits["n_slots"] == 2
    # 4 layers, 2 KV heads of 64, K and V at two bytes
    assert limits["row_bytes"] == 4 * 2 * 64 * 2 * 2
    assert limits["n_cells"] == two.slot(0)["n_cells"]


def test_each_server_process_has_its_own_constant_instance_id(two: Llama) -> None:
    def instances(server: Llama) -> set[str]:
        prompt = {"messages": [{"role": "user", "content": "Hello."}]}
        rendered = server.post("/evoke/render", {"dialect": "chat", "body": prompt})
        return {server.get("/props")["evoke"]["instance"], rendered["instance"]}

    first = instances(two)
    two.complete(two.tokens("The river. "), 0)
    assert instances(two) == first and len(first) == 1
    (instance,) = first
    assert len(instance) == 16 and not set(instance) - set("0123456789abcdef")
    with running(True, "-c", "512", "--evoke-ram", "8") as another:
        assert len(instances(another)) == 1 and instances(another) != first


def test_a_stock_server_reports_no_evoke_features(stock: Llama) -> None:
    assert "evoke" not in stock.get("/props")


def test_the_ram_cache_and_context_shift_are_off_with_blocks() -> None:
    """The RAM cache would copy slots with holes, and a context shift renumbers positions."""
    options = ("-c", "512", "-np", "2", "-kvu", "--evoke-ram", "8", "--context-shift")
    with running(True, *options, "--cache-ram", "100") as server:
        first = server.complete(server.tokens("The river. " * 20), 0)
        server.complete(server.tokens("A machine. " * 20), 1)
        # an idle slot keeps its rows when another one starts
        assert server.slot(0)["n_resident"] == server.slot(0)["n_tokens"] > 0
        epoch = server.epoch(0)
        prompt = server.tokens("The river. " * 20) + first["tokens"]
        answer = server.complete(prompt, 0, n_predict=2000)
        assert answer["timings"]["predicted_n"] < 2000 and answer["stop_type"] == "limit"
        assert server.epoch(0) == epoch


def test_a_draft_model_with_a_recurrent_state_is_refused_with_a_reason() -> None:
    draft = ("-md", str(ensure(SHAPES["tiny-lfm2"])), "--spec-type", "draft-simple")
    with running(True, "-c", "512", "-np", "1", "--evoke-ram", "8", *draft) as server:
        table = server.get("/props")["evoke"]
        assert table["features"] == [] and "speculative" in table["unsupported"]
        assert "draft model that has a recurrent state" in table["unsupported"]
        assert len(table["instance"]) == 16
        status, answer = server.ask("GET", "/slots/0/blocks")
        assert (status, answer["error"]["type"]) == (501, "not_supported_error")
        assert table["unsupported"] in answer["error"]["message"]
