"""The systemd units and deploy/README.md: names exist, settings are valid, units are sandboxed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from evoke_proxy.cli.main import build_parser
from evoke_proxy.config import Config, env_name, keys, load

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text("utf-8")
OPERATE = (ROOT / "docs/operate.md").read_text("utf-8")
UNITS = {path.name: path for path in sorted(DEPLOY.glob("*.service"))}
PROXY, SERVER = "evoke-proxy.service", "llama-server.service"
EACH = pytest.mark.parametrize("name", [PROXY, SERVER])


def unit(name: str) -> dict[str, list[str]]:
    """The values of each `Section.Key` in order; a key may be repeated."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNITS[name].read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def _one(name: str, key: str) -> str:
    (value,) = unit(name)[key]
    return value


def test_there_is_a_unit_for_each_program() -> None:
    assert set(UNITS) == {PROXY, SERVER}


def test_the_unit_starts_the_proxy_with_valid_options() -> None:
    program, *arguments = shlex.split(_one(PROXY, "Service.ExecStart"))
    assert Path(program).name == "evoke-proxy"
    parsed = build_parser(arguments).parse_args(arguments)
    assert parsed.command == "serve"
    assert f"config/evoke.example.yaml {parsed.config}" in README


@EACH
def test_the_unit_runs_the_program_that_the_readme_installs(name: str) -> None:
    program = Path(shlex.split(_one(name, "Service.ExecStart"))[0])
    assert f"python3 -m venv {program.parents[1]}\n" in README
    if name == SERVER:
        assert f'install -m 0755 "$server" {program}\n' in README


def test_the_build_command_of_the_readme_is_valid() -> None:
    line = re.search(r"\$\((?:\w+=\S+ )?\S+/evoke-proxy (build-server .*?)\)", README)
    assert line is not None
    arguments = line[1].split()
    assert build_parser(arguments).parse_args(arguments).print_path


def test_every_file_that_the_readme_installs_exists_and_is_installed() -> None:
    sources = re.findall(r"(?<![\w/])(?:deploy|config|docker)/[\w.-]*\w", README)
    assert "deploy/evoke-proxy.env" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    for path in DEPLOY.iterdir():
        assert path.name == "README.md" or f"deploy/{path.name}" in sources, path


@EACH
def test_the_environment_file_is_installed_where_the_unit_reads_it(name: str) -> None:
    path = Path(_one(name, "Service.EnvironmentFile").lstrip("-"))
    assert (DEPLOY / path.name).is_file()
    line = next(line for line in README.splitlines() if f"deploy/{path.name}" in line)
    assert "-m 0600" in line and line.endswith(f" {path.parent}/")


def test_the_environment_file_of_the_proxy_has_valid_settings() -> None:
    text = (DEPLOY / "evoke-proxy.env").read_text("utf-8")
    settings = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.M))
    assert settings and set(settings) <= {env_name(key) for key in keys()}
    assert load(env=settings).policy.budget


def test_the_server_listens_only_at_the_default_upstream() -> None:
    settings = dict(
        pair.split("=", 1) for pair in " ".join(unit(SERVER)["Service.Environment"]).split()
    )
    host, port = settings["LLAMA_ARG_HOST"], settings["LLAMA_ARG_PORT"]
    assert host == "127.0.0.1"
    assert Config().upstream.url == f"http://{host}:{port}"
    # Without memory for blocks the server refuses every block call.
    assert int(settings["LLAMA_ARG_EVOKE_RAM"]) > 0
    # Conversations may be longer than the cells, and blocks on disk survive restarts.
    assert settings["LLAMA_ARG_KV_EVICTION"] == "1"
    assert settings["LLAMA_ARG_EVOKE_DISK"].startswith("%S/llama-server/")


def test_both_programs_use_the_same_slot_directory() -> None:
    server = shlex.split(_one(SERVER, "Service.ExecStart"))
    folder = server[server.index("--slot-save-path") + 1]
    assert f"EVOKE_SNAPSHOTS_DIRECTORY={folder}" in unit(PROXY)["Service.Environment"]
    for name in UNITS:
        assert Path(folder).name in _one(name, "Service.StateDirectory").split()


def test_the_units_start_in_order_and_restart_on_failure() -> None:
    assert SERVER in _one(PROXY, "Unit.After").split()
    assert _one(PROXY, "Unit.Wants") == SERVER
    assert f"chown {_one(PROXY, 'Service.User')} " in OPERATE, "the proxy's user must own its keys"
    assert "Unit.Requires" not in unit(PROXY), "the proxy must keep running when the server fails"
    for name in UNITS:
        assert _one(name, "Service.Restart") == "on-failure"
        assert _one(name, "Install.WantedBy") == "multi-user.target"
    # 2 is the exit status of an invalid configuration.
    assert _one(PROXY, "Service.RestartPreventExitStatus") == "2"
    drain = Config().limits.drain_timeout_s
    assert int(_one(PROXY, "Service.TimeoutStopSec")) > drain


@EACH
def test_the_unit_is_sandboxed(name: str) -> None:
    expected = {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "CapabilityBoundingSet": "",
        # Both units share the second directory: the server writes slot files, the proxy reads them.
        "StateDirectory": f"{name.removesuffix('.service')} evoke-slots",
        "User": "evoke-proxy",
        "StateDirectoryMode": "0700",
        "UMask": "0077",
    }
    found = {key: unit(name).get(f"Service.{key}") for key in expected}
    assert found == {key: [value] for key, value in expected.items()}


def test_only_the_server_has_access_to_a_gpu() -> None:
    assert _one(PROXY, "Service.PrivateDevices") == "yes"
    assert _one(SERVER, "Service.DevicePolicy") == "closed"
    assert all(rule.startswith("char-nvidia") for rule in unit(SERVER)["Service.DeviceAllow"])


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("no systemd-analyze on this machine")
    return subprocess.run([command, *arguments], capture_output=True, text=True)


@EACH
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    text = UNITS[name].read_text("utf-8")
    # `verify` fails without an installed program and the other unit.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M)
    text = re.sub(rf"^Wants={SERVER}\n", "", text, flags=re.M)
    copy = tmp_path / name
    copy.write_text(text)
    done = _analyze("verify", str(copy))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    copy.write_text(text + "[Service]\nNoSuchKey=1\n")
    assert "NoSuchKey" in _analyze("verify", str(copy)).stderr
