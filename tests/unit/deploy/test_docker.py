"""The Dockerfiles and Compose stacks, checked on their text: no container engine is needed."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_mirror import Hub, serving

from evoke_proxy.adapters.embedders import catalogue
from evoke_proxy.cli.main import build_parser
from evoke_proxy.config import Config, env_name, keys, load, parse_listen
from evoke_proxy.server_build import patches_dir
from evoke_proxy.server_build.build import build_spec
from evoke_proxy.server_build.cache import cache_dir, finished_server
from evoke_proxy.server_build.toolchain import find_toolchain
from evoke_proxy.web import admin

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
EVOKE_NAMES = {env_name(key) for key in keys()}


class _Compose(yaml.SafeLoader):
    """YAML as Compose reads it: `!reset` removes a value of the base file."""


RESET = object()
_Compose.add_constructor("!reset", lambda loader, node: RESET)


def merged(base: Any, override: Any) -> Any:
    """A compose file with an override: mappings are merged by key, other values replaced."""
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    both = base | {key: merged(base.get(key), value) for key, value in override.items()}
    return {key: value for key, value in both.items() if value is not RESET}


def _read(name: str) -> Any:
    return yaml.load((DOCKER / name).read_text("utf-8"), _Compose)


GPU = _read("compose.yaml")
CPU = merged(GPU, _read("compose.cpu.yaml"))
FILES = {"gpu": ("compose.yaml",), "cpu": ("compose.yaml", "compose.cpu.yaml")}
STACKS = pytest.mark.parametrize("stack", [GPU, CPU], ids=["gpu", "cpu"])
BUILT = ("llama-server", "proxy")


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile as pairs (instruction, arguments), without comments, with lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in found]


def _dockerfile(service: dict[str, Any]) -> Path:
    build = service["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    return ROOT / str(build["dockerfile"])


def _arguments_of(path: Path, name: str) -> list[str]:
    return [rest for found, rest in instructions(path.read_text("utf-8")) if found == name]


def _copied(path: Path) -> Iterator[tuple[list[str], str]]:
    """The sources and the target of every COPY from the build context."""
    for rest in _arguments_of(path, "COPY"):
        if not rest.startswith("--from="):
            *sources, target = rest.split()
            yield sources, target


def _context(scratch: Path, dockerfile: Path) -> Path:
    """Copies what `dockerfile` copies into `scratch`, as in the image's working directory."""
    for sources, target in _copied(dockerfile):
        for source in (path for pattern in sources for path in ROOT.glob(pattern)):
            destination = scratch / target.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, destination, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                destination = destination / source.name if target.endswith("/") else destination
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, destination)
    return scratch


# --- Dockerfiles


def test_the_dockerfile_parser_joins_lines_and_drops_comments() -> None:
    text = "FROM a\n# no\nRUN x \\\n    # no\n    && y\n"
    assert instructions(text) == [("FROM", "a"), ("RUN", "x && y")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_copied_file_exists_and_is_not_ignored(path: Path) -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [pattern for sources, _ in _copied(path) for pattern in sources]
    assert copied
    for pattern in copied:
        assert pattern.endswith("*") or list(ROOT.glob(pattern)), f"{pattern} does not exist"
        plain = pattern.rstrip("*")
        assert any(plain == name or plain.startswith(f"{name}/") for name in allowed), pattern


def test_the_build_context_has_only_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    assert rules[-1] == "**/__pycache__", "the last matching rule wins"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {p.rstrip("*") for d in DOCKERFILES for sources, _ in _copied(d) for p in sources}
    unused = {name for name in allowed if not any(path.startswith(name) for path in copied)}
    assert unused == set()


def test_the_server_image_can_run_the_build_module_from_what_it_copies(tmp_path: Path) -> None:
    """The module is the one that `make build` runs; -S hides site-packages, as in the image."""
    dockerfile = _dockerfile(GPU["services"]["llama-server"])
    (run,) = [rest for rest in _arguments_of(dockerfile, "RUN") if "apt-get" not in rest]
    module = "evoke_proxy.server_build"
    assert f"python3 -m {module} ${{CUDA:+--cuda}} --print-path" in run
    assert f"python -m {module}" in (ROOT / "Makefile").read_text("utf-8")
    for word in ("cmake -", "cmake --build", "git apply", "nvcc"):
        assert word not in run, "the build steps must be in the module only"
    context = _context(tmp_path, dockerfile)
    command = [sys.executable, "-S", "-m", module]
    done = subprocess.run([*command, "--help"], cwd=context, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--cuda" in done.stdout and "--print-path" in done.stdout
    pin = "from evoke_proxy.server_build.build import *;print(read_pin(patches_dir()).commit)"
    pin += ";print(len(read_series(patches_dir()).patches))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", pin], cwd=context, capture_output=True, text=True
    )
    count = len(list((ROOT / "patches").glob("0*.patch")))
    assert done.stdout.split()[1:] == [str(count)], done.stderr


def test_the_server_image_installs_the_build_tools_of_the_makefile() -> None:
    install = _arguments_of(_dockerfile(GPU["services"]["llama-server"]), "RUN")[0]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    needs = re.search(r"apt-get install -y (.+)", makefile)
    assert needs is not None
    # The container needs no virtual environment, because nothing is installed into its Python.
    required = set(needs[1].split()) - {"python3-venv"}
    assert {"git", "cmake", "g++"} <= required, "the Makefile was read wrongly"
    assert required <= set(install.split())


def test_the_proxy_image_copies_the_contents_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    dockerfile = _dockerfile(GPU["services"]["proxy"])
    copied = [pattern for sources, _ in _copied(dockerfile) for pattern in sources]
    required = [path.lstrip("/") for path in wheel] + ["pyproject.toml", "LICENSE"]
    required += [project["project"][key] for key in ("readme",) if key in project["project"]]
    for path in required:
        assert any(fnmatch.fnmatch(path, pattern) for pattern in copied), path


def _install_line() -> str:
    lines = [
        rest for rest in _arguments_of(DOCKER / "proxy.Dockerfile", "RUN") if "pip install" in rest
    ]
    assert len(lines) == 1
    return lines[0]


def test_images_install_exactly_one_existing_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    assert '--require-hashes -r "release/requirements/$EXTRA.txt"' in _install_line()
    assert GPU["services"]["proxy"]["build"]["args"]["EXTRA"] == "gpu"
    assert CPU["services"]["proxy"]["build"]["args"]["EXTRA"] == "cpu"
    assert any("onnxruntime-gpu" in line for line in extras["gpu"])
    assert any(re.match("onnxruntime[>=]", line) for line in extras["cpu"])


@pytest.mark.parametrize(
    ("extra", "code"), [("cpu", 0), ("gpu", 0), ("cpu,gpu", 1), ("", 1), ("dev", 1)]
)
def test_the_image_refuses_unknown_extras(extra: str, code: int) -> None:
    check = re.search(r"case .*? esac", _install_line())
    assert check is not None
    done = subprocess.run(["sh", "-c", check[0]], env={"EXTRA": extra}, capture_output=True)
    assert done.returncode == code


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_final_stage_runs_as_another_user(path: Path) -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions(path.read_text("utf-8")):
        if name == "FROM":
            stage = stages.setdefault(rest, [])
        elif name != "ARG" or stages:
            stage.append((name, rest))
    run = {title: found for title, found in stages.items() if "ENTRYPOINT" in dict(found)}
    assert len(run) == 1
    for title, found in run.items():
        names = [name for name, _ in found]
        assert dict(found)["USER"] == "10001:10001", title
        assert names.index("USER") > max(i for i, n in enumerate(names) if n in ("RUN", "COPY"))


def _linter(name: str) -> str:
    """The path of a linter of the extra `docker`; skips the test if it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[docker]'")
    return found


def _hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    config = str(DOCKER / ".hadolint.yaml")
    command = [_linter("hadolint"), "--no-color", "--config", config, str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_accepts_the_dockerfiles(path: Path, tmp_path: Path) -> None:
    assert _hadolint(path).stdout == ""
    # hadolint also checks the shell code of RUN lines.
    worse = tmp_path / "Dockerfile"
    worse.write_text(path.read_text("utf-8") + "RUN cd $SOMEWHERE && sudo ls\n")
    findings = _hadolint(worse).stdout
    assert "SC2086" in findings and "DL3004" in findings


# --- the stacks


def _is_valid_compose(stack: Any, folder: Path) -> bool:
    file = folder / "compose.json"
    plain = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", json.dumps(stack))
    file.write_text(plain)
    command = [_linter("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@STACKS
def test_the_stacks_match_the_compose_schema(stack: Any, tmp_path: Path) -> None:
    assert _is_valid_compose(stack, tmp_path)
    for name in stack["services"]:
        misspelled = merged(stack, {"services": {name: {"depend_on": []}}})
        assert not _is_valid_compose(misspelled, tmp_path), name


@STACKS
def test_no_service_runs_as_root_or_gains_privileges(stack: Any) -> None:
    for name, service in stack["services"].items():
        user, _, group = service["user"].partition(":")
        assert int(user) > 0 and int(group) > 0, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name


@STACKS
def test_health_checks_allow_time_to_start(stack: Any) -> None:
    units = {"s": 1, "m": 60}
    long_enough = {"llama-server": 600, "proxy": 60, "prometheus": 60, "grafana": 60}
    for name, seconds in long_enough.items():
        check = stack["services"][name]["healthcheck"]
        start = check["start_period"]
        assert int(start[:-1]) * units[start[-1]] >= seconds, name
        assert check["test"][0] == "CMD" and len(check["test"]) > 1
    assert set(stack["services"]) - set(long_enough) == {"fetch-embedder", "admin-token"}


@STACKS
def test_health_checks_use_existing_paths_and_ports(stack: Any) -> None:
    services = stack["services"]
    served = {route.path for route in admin.routes(None)}  # type: ignore[arg-type]
    _, port = parse_listen(services["proxy"]["environment"]["EVOKE_LISTEN"])
    command = services["proxy"]["healthcheck"]["test"][-1]
    url = re.search(r'http://127\.0\.0\.1:(\d+)(/[^"]*)"', command)
    assert url is not None and int(url[1]) == port and url[2] in served
    llama = services["llama-server"]
    port_of_llama = llama["environment"]["LLAMA_ARG_PORT"]
    assert llama["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port_of_llama}/health"


def test_the_health_command_of_the_proxy_reports_readiness(tmp_path: Path) -> None:
    command = GPU["services"]["proxy"]["healthcheck"]["test"][1:]
    assert command[0] == "python3"
    fake = tmp_path / "urllib"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    for body, code in (("return None", 0), ("raise OSError('503')", 1)):
        (fake / "request.py").write_text(f"def urlopen(url, timeout):\n    {body}\n")
        env = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True)
        assert done.returncode == code


@STACKS
def test_ports_are_published_on_loopback_only_and_none_of_the_server(stack: Any) -> None:
    services = stack["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"proxy", "prometheus", "grafana"}
    for name, ports in published.items():
        assert len(ports) == (2 if name == "proxy" else 1)
        for port in ports:
            assert re.fullmatch(r"\$\{[A-Z_]+:-127\.0\.0\.1:\d+\}:\d+", port), name
    admin = parse_listen(Config().security.admin_listen[0])[1]
    assert published["proxy"][1].endswith(f":{admin}")
    inside = int(published["proxy"][0].rpartition(":")[2])
    assert parse_listen(services["proxy"]["environment"]["EVOKE_LISTEN"]) == ("0.0.0.0", inside)
    assert services["llama-server"]["networks"] == ["backend"]
    assert stack["networks"]["backend"] == {"internal": True}


@STACKS
def test_the_proxy_has_the_address_of_the_server_and_waits_for_it(stack: Any) -> None:
    services = stack["services"]
    environment = services["proxy"]["environment"]
    config = load(env=environment)
    port = services["llama-server"]["environment"]["LLAMA_ARG_PORT"]
    assert config.upstream.url == f"http://llama-server:{port}"
    assert set(environment) <= EVOKE_NAMES
    assert services["proxy"]["depends_on"]["llama-server"]["condition"] == "service_healthy"
    assert set(services["proxy"]["networks"]) & set(services["llama-server"]["networks"])


def test_the_stop_timeout_exceeds_the_drain_timeout() -> None:
    grace = GPU["services"]["proxy"]["stop_grace_period"]
    assert grace.endswith("s") and int(grace[:-1]) > Config().limits.drain_timeout_s


def test_the_stack_uses_the_gpu_and_the_cpu_override_does_not() -> None:
    for name in BUILT:
        devices = GPU["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
        assert "deploy" not in CPU["services"][name]
    gpu, cpu = (s["services"]["llama-server"]["build"]["args"] for s in (GPU, CPU))
    assert gpu["CUDA"] and not cpu["CUDA"]
    for stack in (GPU, CPU):
        for name in BUILT:
            assert not set(stack["services"][name]["build"]["args"]) - _declared(name)


def _declared(service: str) -> set[str]:
    return {
        rest.split("=")[0] for rest in _arguments_of(_dockerfile(GPU["services"][service]), "ARG")
    }


@STACKS
def test_build_and_run_images_have_the_same_distribution(stack: Any) -> None:
    """A server linked with another libc or CUDA version does not start."""
    args = stack["services"]["llama-server"]["build"]["args"]
    strip = re.compile("-(devel|runtime)-")
    assert strip.sub("-", args["BUILD_IMAGE"]) == strip.sub("-", args["RUN_IMAGE"])
    cuda = "nvidia/cuda:" in args["BUILD_IMAGE"]
    assert cuda == bool(args["CUDA"])
    base = stack["services"]["proxy"]["build"]["args"]["BASE_IMAGE"]
    assert ("-cudnn-" in base) == cuda, "onnxruntime-gpu needs cuDNN"
    for image in (args["BUILD_IMAGE"], base, GPU["services"]["prometheus"]["image"]):
        assert re.search(r":v?\d", image), f"{image} is not pinned to a version"


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def _example() -> dict[str, str]:
    text = (DOCKER / ".env.example").read_text("utf-8")
    return dict(re.findall(r"^#?([A-Z][A-Z_]+)=(.*)$", text, re.M))


def test_the_env_example_has_every_variable_with_its_default() -> None:
    used = dict(re.findall(r"\$\{([A-Z_]+):-([^${}]*)\}", "\n".join(_texts(GPU))))
    assert len(used) >= 6
    example = _example()
    assert {name: example.get(name) for name in used} == used


def test_other_variables_of_the_env_example_are_settings() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+):-", "\n".join(_texts(GPU))))
    others = {name: value for name, value in _example().items() if name not in used}
    of_proxy = {name: value for name, value in others.items() if name.startswith("EVOKE_")}
    assert "EVOKE_POLICY_BUDGET" in of_proxy
    assert set(of_proxy) <= EVOKE_NAMES
    assert load(env=of_proxy) == Config(), "the example must show the defaults"
    assert {name.split("_")[0] for name in others} <= {"EVOKE", "LLAMA"}
    assert [line for line in (DOCKER / ".gitignore").read_text().splitlines() if line == ".env"]


def test_both_services_read_the_env_file() -> None:
    for name in BUILT:
        assert GPU["services"][name]["env_file"] == [{"path": ".env", "required": False}]


def _built_server() -> Path | None:
    """The patched server if it is built; a unit test does not build it."""
    named = os.environ.get("EVOKE_PATCHED_SERVER")
    cache = cache_dir()
    spec = build_spec(True, find_toolchain(), None, patches_dir(), cache)
    if named:
        return Path(named)
    # With the web UI or without it.
    built = (finished_server(cache, spec.server_key(has_ui)) for has_ui in (True, False))
    return next((server for server in built if server is not None), None)


def test_llama_variables_are_options_of_the_patched_server() -> None:
    """The LLAMA_* variables of all files are compared with the help of the built server."""
    server = _built_server()
    if server is None:
        pytest.skip("no patched server was built yet: make build")
    help_text = subprocess.run([server, "--help"], capture_output=True, text=True).stdout
    documented = set(re.findall(r"LLAMA_[A-Z_]+", help_text))
    image = _arguments_of(_dockerfile(GPU["services"]["llama-server"]), "ENV")[0]
    files = [*DOCKER.glob(".env.example"), *(ROOT / "deploy").glob("llama-server.*")]
    used = set(GPU["services"]["llama-server"]["environment"])
    used |= set(re.findall(r"LLAMA_[A-Z_]+(?==)", image))
    for path in files:
        used |= set(re.findall(r"LLAMA_[A-Z_]+(?==)", path.read_text("utf-8")))
    assert {"LLAMA_ARG_EVOKE_RAM", "LLAMA_ARG_MODEL", "LLAMA_API_KEY"} <= used <= documented


def test_the_default_model_exists() -> None:
    service = GPU["services"]["llama-server"]
    (volume,) = [item for item in service["volumes"] if isinstance(item, dict)]
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^${}]*)\}", "\n".join(_texts(service))))
    assert (DOCKER / defaults["MODELS_DIR"] / defaults["MODEL_FILE"]).is_file()
    assert service["environment"]["LLAMA_ARG_MODEL"].startswith(volume["target"] + "/")
    assert volume["read_only"] and volume["bind"] == {"create_host_path": False}


def test_prometheus_scrapes_the_proxy() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    # At the admin address no token is needed for metrics, with or without client keys.
    environment = GPU["services"]["proxy"]["environment"]
    _, port = parse_listen(environment["EVOKE_SECURITY_ADMIN_LISTEN"])
    assert job["static_configs"] == [{"targets": [f"proxy:{port}"]}]
    path = job.get("metrics_path", "/metrics")
    assert path in {route.path for route in admin.routes(None)}  # type: ignore[arg-type]
    rules = [mounted.split(":")[1] for mounted in GPU["services"]["prometheus"]["volumes"]]
    assert [f"/etc/prometheus/{name}" for name in config["rule_files"]] == rules[1:2]
    assert set(GPU["services"]["prometheus"]["networks"]) <= set(
        GPU["services"]["proxy"]["networks"]
    )


@STACKS
def test_mounted_files_exist_and_are_read_only(stack: Any) -> None:
    mounted = [
        volume.split(":")
        for service in stack["services"].values()
        for volume in service.get("volumes", ())
        if isinstance(volume, str) and volume.startswith(".")
    ]
    assert len(mounted) == 5
    for source, _, mode in mounted:
        assert (DOCKER / source).is_file() and mode == "ro", source


def test_grafana_is_provisioned_with_the_dashboard() -> None:
    service = GPU["services"]["grafana"]
    target_of = {
        Path(volume.split(":")[0]).name: volume.split(":")[1] for volume in service["volumes"]
    }
    grafana = ROOT / "deploy/grafana"
    (provider,) = yaml.safe_load((grafana / "dashboards.yml").read_text())["providers"]
    assert str(Path(target_of["dashboard.json"]).parent) == provider["options"]["path"]
    assert service["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == target_of["dashboard.json"]
    (source,) = yaml.safe_load((grafana / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    used = set(re.findall(r'"uid": "(prometheus[^"]*)"', (grafana / "dashboard.json").read_text()))
    assert used == {source["uid"]}


@STACKS
def test_volumes_are_owned_by_the_user_of_their_services(stack: Any) -> None:
    """A new volume gets the owner of the image's directory at its mount point."""
    server, proxy = (stack["services"][name] for name in BUILT)
    for service, names in ((server, ("blocks", "slots")), (proxy, ("slots", "state"))):
        targets = next(
            line
            for line in _dockerfile(service).read_text("utf-8").splitlines()
            if "install -d -m 0700 -o 10001 -g 10001" in line
        )
        mounted = [item.split(":") for item in service["volumes"] if isinstance(item, str)]
        for name in names:
            assert name in stack["volumes"]
            (target,) = [target_of for source, target_of, *_ in mounted if source == name]
            assert target in targets.split()
    assert server["environment"]["LLAMA_ARG_EVOKE_DISK"].count("/blocks/") == 1
    assert server["command"] == ["--slot-save-path", "/slots"]
    assert proxy["environment"]["EVOKE_SNAPSHOTS_DIRECTORY"] == "/slots"


@STACKS
def test_the_admin_token_is_created_before_the_proxy_starts(stack: Any) -> None:
    creating, proxy = stack["services"]["admin-token"], stack["services"]["proxy"]
    assert creating["build"] == proxy["build"] and creating["restart"] == "no"
    assert proxy["depends_on"]["admin-token"]["condition"] == "service_completed_successfully"
    arguments = build_parser(creating["command"]).parse_args(creating["command"])
    assert arguments.action == "token" and arguments.keep
    named = proxy["environment"]["EVOKE_SECURITY_ADMIN_TOKEN_FILE"]
    assert named == str(arguments.file)
    assert "state:/state" in creating["volumes"] and "state:/state:ro" in proxy["volumes"]


@STACKS
def test_the_encoder_is_fetched_before_the_proxy_service_starts(stack: Any) -> None:
    fetching, proxy = stack["services"]["fetch-embedder"], stack["services"]["proxy"]
    assert fetching["build"] == proxy["build"], "both services must use one image"
    assert fetching["restart"] == "no" and "profiles" not in fetching
    assert proxy["depends_on"]["fetch-embedder"]["condition"] == "service_completed_successfully"
    (volume,) = fetching["volumes"]
    assert f"{volume}:ro" in proxy["volumes"]
    target = volume.split(":")[1]
    dockerfile = _dockerfile(proxy).read_text("utf-8")
    assert f"EVOKE_EMBEDDER_STORE={target}\n" in dockerfile
    assert f"install -d -o 10001 -g 10001 {target} " in dockerfile
    assert not {"EVOKE_EMBEDDER_STORE"} & set(fetching.get("environment", {}))
    words = fetching["command"]
    arguments = build_parser(words).parse_args(words)
    assert arguments.action == "fetch" and arguments.optional


@pytest.mark.parametrize("network", [True, False])
def test_the_fetch_command_exits_with_0_even_if_nothing_can_be_fetched(
    network: bool, tmp_path: Path
) -> None:
    """With a mirror whose files differ from the pins, and without a network."""
    encoder = catalogue.ENCODERS[0]
    files = {file.path: b"not it" for file in encoder.files}
    with serving(Hub(encoder, files)) as hub:
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        env |= {"EVOKE_LISTEN": "0.0.0.0:8090", "EVOKE_EMBEDDER_STORE": str(tmp_path / "store")}
        env["EVOKE_EMBEDDER_MIRROR"] = hub.url if network else "http://127.0.0.1:9"
        command = [
            sys.executable,
            "-m",
            "evoke_proxy",
            *GPU["services"]["fetch-embedder"]["command"],
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("the network" in done.stderr) is not network
    assert "continuing without it: the proxy will use built-in word vectors" in done.stderr
    assert not (tmp_path / "store" / encoder.name).exists()


def _compose_program() -> list[str]:
    """The Compose command of this machine, version 2; skips the test if there is none.

    It may be that of the extra `docker`, which needs no Docker Engine to read a stack.
    """
    of_extra = str(Path(sys.executable).with_name("docker-compose"))
    for command in (["docker", "compose"], ["docker-compose"], [of_extra]):
        if shutil.which(command[0]) is None:
            continue
        found = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
        if found.returncode == 0 and not found.stdout.startswith("1."):
            return command
    pytest.skip("no Docker Compose on this machine")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("", ""),
        ("LLAMA_API_KEY=secret\n", "secret"),
        ("LLAMA_API_KEY=one,two\nEVOKE_UPSTREAM_API_KEY=two\n", "two"),
    ],
)
def test_docker_compose_gives_the_proxy_the_key_of_llama_server(
    settings: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "env").write_text(settings, "utf-8")
    command = [*_compose_program(), "--env-file", str(tmp_path / "env")]
    command += ["-f", str(DOCKER / "compose.yaml"), "config", "--format", "json"]
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    services = json.loads(done.stdout)["services"]
    assert services["proxy"]["environment"]["EVOKE_UPSTREAM_API_KEY"] == key


@pytest.mark.parametrize("settings", ["", "all"])
@pytest.mark.parametrize("name", FILES)
def test_docker_compose_reads_the_stack_as_these_tests_do(
    name: str, settings: str, tmp_path: Path
) -> None:
    """With the default settings, and with every line of .env.example as a setting."""
    command = _compose_program()
    lines = (DOCKER / ".env.example").read_text("utf-8")
    values = re.sub(r"^#(?=[A-Z_]+=)", "", lines, flags=re.MULTILINE) if settings else ""
    (tmp_path / "env").write_text(values, "utf-8")
    command += ["--env-file", str(tmp_path / "env")]
    for file in FILES[name]:
        command += ["-f", str(DOCKER / file)]
    env = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
    done = subprocess.run(
        [*command, "config", "--format", "json"], capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    stack = GPU if name == "gpu" else CPU
    services = json.loads(done.stdout)["services"]
    assert services.keys() == stack["services"].keys()
    for service, read in services.items():
        assert ("deploy" in read) == ("deploy" in stack["services"][service]), service
        build = stack["services"][service].get("build", {}).get("args", {})
        values_read = read.get("build", {}).get("args", {})
        assert {key: values_read[key] for key in build if "$" not in build[key]} == {
            key: value for key, value in build.items() if "$" not in value
        }
    assert services["llama-server"]["environment"]["LLAMA_ARG_EVOKE_DISK"] == "/blocks/kv:8192"
