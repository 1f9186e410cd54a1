"""Loading the configuration: precedence, validation, error messages."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.secret_files import read_secret
from evoke_proxy.config import Config, keys, load
from evoke_proxy.config.reference import example
from evoke_proxy.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "config/evoke.example.yaml"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "evoke.yaml"
    path.write_text(text)
    return path


def test_the_example_is_written_from_the_schema() -> None:
    """If this fails: python -m evoke_proxy.config.reference example > config/evoke.example.yaml"""
    assert EXAMPLE.read_text() == example()


def test_the_example_contains_every_default() -> None:
    assert load(EXAMPLE) == Config()
    tree = yaml.safe_load(EXAMPLE.read_text())
    leaves = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in tree.items() if isinstance(value, dict)}
    dotted = [f"{section}.{name}" for section, values in sections.items() for name in values]
    assert [*leaves, *dotted] == list(keys())


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy.nothing: unknown key"):
        load(None, {}, {"policy.nothing": 3})


def test_all_wrong_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    text = "polcy: {}\nupstream: {connect_timeout_s: 1, ulr: a}\npool: 3\n"
    with pytest.raises(ConfigError) as raised:
        load(_file(tmp_path, text))
    assert [line.partition(": ")[0] for line in str(raised.value).split("\n")] == [
        *("polcy", "upstream.connect_timeout_s", "upstream.ulr", "pool")
    ]


def test_all_wrong_variables_are_named_at_once_and_with_the_wrong_keys_of_the_file(
    tmp_path: Path,
) -> None:
    env = {"EVOKE_POLICY_BUDGT": "1", "EVOKE_LISTN": "a", "EVOKE_LIMITS_QUEUE": "["}
    with pytest.raises(ConfigError) as raised:
        load(_file(tmp_path, "polcy: {}\n"), env)
    assert [line.partition(": ")[0] for line in str(raised.value).split("\n")] == [
        *("polcy", "limits.queue", "EVOKE_LISTN", "EVOKE_POLICY_BUDGT")
    ]


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    text = "limits: {queue: -1}\npolicy: {budget: huge, recall: txt}\n"
    env = {"EVOKE_LOG_LEVEL": "loud", "EVOKE_POLICY_BLOCK_TOKENS": "x"}
    with pytest.raises(ConfigError) as raised:
        load(_file(tmp_path, text), env)
    assert {line.partition(": ")[0] for line in str(raised.value).split("\n")} == {
        *("limits.queue", "policy.budget", "policy.recall", "log.level", "policy.block_tokens")
    }


def test_without_a_file_the_defaults_apply() -> None:
    assert load() == Config()


def test_with_an_empty_file_the_defaults_apply(tmp_path: Path) -> None:
    assert load(_file(tmp_path, "# nothing\n")) == Config()
    assert load(_file(tmp_path, "policy:\n")) == Config()


def test_the_command_line_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path,
) -> None:
    path = _file(tmp_path, "policy: {budget: 201, block_tokens: 32, reserve_tokens: 5}\n")
    env = {"EVOKE_POLICY_BUDGET": "202", "EVOKE_POLICY_BLOCK_TOKENS": "48", "UNRELATED": "x"}
    policy = load(path, env, {"policy.budget": 203, "policy.block_tokens": None}).policy
    assert (policy.budget, policy.block_tokens, policy.reserve_tokens) == (203, 48, 5)


def test_a_variable_is_read_with_the_type_of_its_setting() -> None:
    env = {
        "EVOKE_LISTEN": "127.0.0.1:1, [::1]:2",
        "EVOKE_UPSTREAM_API_KEY": "0123",
        "EVOKE_UPSTREAM_CALL_TIMEOUT_S": "7",
        "EVOKE_POLICY_BUDGET": "null",
        "EVOKE_EMBEDDER_QUERY_INSTRUCTION": "a text, not YAML: ",
        "EVOKE_EMBEDDER_DOCUMENT_INSTRUCTION": "null",
    }
    config = load(None, env, {})
    assert config.listen == ("127.0.0.1:1", "[::1]:2")
    assert config.upstream.api_key == "0123"
    assert config.upstream.call_timeout_s == 7.0
    assert config.policy.budget is None
    assert config.embedder.query_instruction == "a text, not YAML: "
    assert config.embedder.document_instruction is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: {}", "polcy: unknown key; did you mean policy?"),
        ("policy: {budgte: 3}", "policy.budgte: unknown key; did you mean policy.budget?"),
        ("budget: 3", "budget: unknown key; did you mean policy.budget?"),
        ("policy: {zzz: 3}", "policy.zzz: unknown key; known: name, recovery"),
        (
            "security.keys_file: /keys",
            "security.keys_file: unknown key; write keys_file as a key of the mapping security",
        ),
        (
            "policy: {budget: many}",
            "policy.budget: must be a whole number, auto or off, not 'many'",
        ),
        ("policy: {budget: true}", "policy.budget: must be a whole number, auto or off, not True"),
        ("policy: {budget: 1.5}", "policy.budget: must be a whole number, auto or off, not 1.5"),
        (
            "snapshots: {max_mib: off}",
            "snapshots.max_mib: must be a whole number or auto, not False",
        ),
        (
            "snapshots: {max_mib: null}",
            "snapshots.max_mib: must be a whole number or auto, not None",
        ),
        ("policy: {budget: 0}", "policy.budget: must be more than 0, not 0"),
        (
            "policy: {budget: 90, block_tokens: 11}",
            "policy.budget: 90 is too small: it must be at least 91, for the first 16 and",
        ),
        ("limits: {queue: -1}", "limits.queue: must be 0 or more, not -1"),
        ("snapshots: {stall_share: 2}", "snapshots.stall_share: must be at most 1"),
        ("policy: {name: lru}", "policy.name: 'lru' must be one of evoke"),
        ("policy: 3", "policy: must be a mapping, not 3"),
        ("upstream: {url: 'http://a b'}", "upstream.url: 'http://a b' is not http://HOST:PORT"),
        ("upstream: {url: 'http://a:1?x'}", "upstream.url: 'http://a:1?x' is not http://HOST:PORT"),
        ("upstream: {url: localhost}", "upstream.url: 'localhost' is not http://HOST:PORT"),
        (
            "upstream: {url: 'http://a:1/v1'}",
            "upstream.url: 'http://a:1/v1' contains a path of the API; write http://a:1",
        ),
        (
            "upstream: {url: 'http://a:1/prefix/v1/chat/completions'}",
            "upstream.url: 'http://a:1/prefix/v1/chat/completions' contains a path of the API;"
            " write http://a:1/prefix",
        ),
        (
            "pool: {upstreams: ['http://a:1', 'http://b:1/v1/']}",
            "pool.upstreams: 'http://b:1/v1' contains a path of the API; write http://b:1",
        ),
        ("listen: 3", "listen: must be a list of texts, not 3"),
        ("listen: []", "listen: must name at least one HOST:PORT"),
        ("listen: [nowhere]", "listen: 'nowhere' is not HOST:PORT"),
        ("embedder: {device: tpu}", "embedder.device: 'tpu' is not one of auto, cpu, cuda"),
        ("embedder: {cache_mib: 0}", "embedder.cache_mib: must be more than 0, not 0"),
        ("log: {level: 3}", "log.level: must be a text, not 3"),
        ("log: {level: info}\nlog: {level: info}", "log: given twice (line 2)"),
        ("? [a]\n: 1", "a key must be a word, not a list or a mapping (line 1)"),
        ("- 1", "the top level must be a mapping of keys"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(_file(tmp_path, text))
    assert message in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_an_override_does_not_hide_an_invalid_section_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy: must be a mapping"):
        load(_file(tmp_path, "policy: 3"), {}, {"policy.budget": 3})


def test_a_variable_that_is_not_valid_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match="EVOKE_POLICY_BUDGET"):
        load(None, {"EVOKE_POLICY_BUDGET": "["})


@pytest.mark.parametrize(
    ("text", "budget"), (("010000", 10000), ("1e4", 10000), ("10_000", 10000), (" 3000 ", 3000))
)
def test_numbers_are_decimal_in_files_and_variables(text: str, budget: int, tmp_path: Path) -> None:
    assert load(None, {"EVOKE_POLICY_BUDGET": text}).policy.budget == budget
    assert load(_file(tmp_path, f"policy: {{budget: {text}}}\n")).policy.budget == budget


@pytest.mark.parametrize(
    ("text", "budget"), (("auto", "auto"), ("off", None), ('"off"', None), ("null", None))
)
def test_a_budget_may_be_a_word(text: str, budget: str | None, tmp_path: Path) -> None:
    assert load(None, {"EVOKE_POLICY_BUDGET": text}).policy.budget == budget
    assert load(_file(tmp_path, f"policy: {{budget: {text}}}\n")).policy.budget == budget
    word = text.strip('"')
    if word != "null":  # an override of None means that there is none
        assert load(None, {}, {"policy.budget": word}).policy.budget == budget
    assert load(None, {}, {}).policy.budget == "auto"


@pytest.mark.parametrize(
    "text", ("1:30", "0o17", "1e-1", "12.5", "9" * 5000, "[", "1e400", "&a [*a]")
)
def test_values_that_are_not_whole_numbers_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(None, {"EVOKE_POLICY_BUDGET": text})
    with pytest.raises(ConfigError):
        load(_file(tmp_path, f"policy: {{budget: {text}}}\n"))


@pytest.mark.parametrize(
    ("name", "near"),
    (
        ("EVOKE_POLICY_BUDJET", "EVOKE_POLICY_BUDGET"),
        ("EVOKE_BUDGET", "EVOKE_POLICY_BUDGET"),
        ("EVOKE_UPSTREAM_URI", "EVOKE_UPSTREAM_URL"),
        ("EVOKE_LIMIT_QUEUE", "EVOKE_LIMITS_QUEUE"),
        ("EVOKE_77777777777777777777", "evoke.example.yaml"),
    ),
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{near}"):
        load(None, {name: "1"})


def test_variables_of_other_programs_are_ignored() -> None:
    for name in ("EVOKE_CACHE", "EVOKE_KEY", "LLAMA_ARG_EVOKE_RAM", "EVOKEX", "EVOKE_SERVICE_HOST"):
        assert load(None, {name: "x"}) == load(None, {})
    for name in ("EVOKE_PORT", "EVOKE_PORT_8090_TCP_ADDR", "EVOKE_PROXY_SERVICE_PORT_HTTP"):
        assert load(None, {name: "x"}) == load(None, {})


def test_the_api_key_is_stripped_of_line_ends() -> None:
    assert load(None, {"EVOKE_UPSTREAM_API_KEY": "secret\n"}).upstream.api_key == "secret"


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("upstream.api_key", "two\nlines"),
        ("upstream.api_key", "schlüssel"),
        ("policy.budget", 2**30 + 1),
        ("limits.messages", 2**64),
        ("limits.queue", 2**64),
        ("limits.json_depth", 5000),
        ("limits.drain_timeout_s", float("inf")),
        ("limits.drain_timeout_s", float("nan")),
        ("embedder.directory", "a\0b"),
        ("snapshots.directory", "a\0b"),
        ("security.keys_file", "a\0b"),
        ("listen", ["127.0.0.1:²"]),
        ("listen", ["127.0.0.1:٣"]),
        ("listen", ["127.0.0.1:" + "9" * 5000]),
        ("listen", ["a b:80"]),
        ("listen", ["[::1:80"]),
        ("listen", ["http://127.0.0.1:80"]),
        ("embedder.store", "a\ud800"),
        ("pool.upstreams", ["h:1"]),
        ("pool.upstreams", ["a=http://h:1", "a=http://h:2"]),
    ),
)
def test_values_that_would_fail_later_are_refused_at_start(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        load(None, {}, {key: value})


@pytest.mark.parametrize(
    "text", ['limits: {queue: "\\ud800"}', 'listen: ["\\ud800"]', '"\\ud800": 1']
)
def test_half_of_a_surrogate_pair_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"surrogate pair \(line 1\)"):
        load(_file(tmp_path, text))


def test_a_secret_that_cannot_be_read_is_refused() -> None:
    """The file opens, and reading it fails."""
    with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
        read_secret(Path("/proc/self/mem"), "security.keys_file")


def test_a_deeply_nested_recursive_or_exploding_file_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 5000, "a: " + "{a: " * 3000, "listen: &a [*a]\n"):
        with pytest.raises(ConfigError):
            load(_file(tmp_path, text))
    bomb = "a: &a [x, x]\n" + "".join(
        f"{after}: &{after} [{','.join([f'*{name}'] * 9)}]\n"
        for name, after in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    with pytest.raises(ConfigError):
        load(_file(tmp_path, bomb + "listen: [*k]\n"))


_YAML = st.sampled_from(
    ["policy:", "budget:", " ", "\n", "- ", "&a", "*a", "<<:", "1e9", "0x", "!!", "{", "]", "|"]
)


@given(st.lists(_YAML | st.text(max_size=4), max_size=12).map("".join))
def test_any_file_is_loaded_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ConfigError):
        path = Path(folder) / "evoke.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert isinstance(load(path, {}), Config)


@pytest.mark.parametrize("text", ("off", '"off"'))
def test_off_needs_no_quotes_where_it_is_one_of_several_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text(f"policy: {{past: {text}}}\n")
    assert load(path, {}, {}).policy.past == "off"
