"""`evoke-proxy up`: runs a patched llama-server and the proxy in front of it."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evoke_proxy.adapters.model_file import read_shape
from evoke_proxy.adapters.port_owner import listen_obstacle
from evoke_proxy.cli import plan as planning
from evoke_proxy.cli import serve
from evoke_proxy.cli.model_download import ModelDownload
from evoke_proxy.cli.supervision import Child, Stop, describe, say
from evoke_proxy.config import Config, env_name, load, parse_listen
from evoke_proxy.config.own_address import own_address
from evoke_proxy.demo.processes import free_port, healthy
from evoke_proxy.errors import ConfigError
from evoke_proxy.server_build import BuildError, BuildOptions, ensure_server, finished_server_path
from evoke_proxy.server_build.build import first_build_notice, n_cores
from evoke_proxy.server_build.toolchain import BACKENDS

DESCRIPTION = """\
Start a patched llama-server and the proxy in front of it. By default the KV cache gets as many
cells as the free memory holds, and a conversation may be as long as the context that the model was
trained for. Both processes are stopped together, and one that crashes is started again. Options
after `--` are passed to llama-server."""

EXAMPLES = """examples:
  evoke-proxy up -m model.gguf
      serve a model at http://127.0.0.1:8090
  evoke-proxy up -m model.gguf --cells 16384 --context 65536
      accept conversations of up to 65,536 tokens and keep 16,384 of them in the KV cache
  evoke-proxy up -hf ggml-org/gemma-3-4b-it-GGUF -- -ngl 20 --jinja
      let llama-server download the model, and pass it two more options"""

# Seconds that llama-server may take to stop: it writes its blocks to disk.
_SERVER_STOP_S = 20.0
# Seconds after which a start is slow enough to say where llama-server reports its progress.
_SLOW_START_S = 10.0
# Values of llama-server's --host with which it also listens at 127.0.0.1, where `up` reaches it.
_REACHABLE_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::")
# Seconds that the proxy may take to stop, in addition to `limits.drain_timeout_s`.
_PROXY_STOP_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the model, the plan, llama-server and the proxy."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("-m", "--model", type=Path, metavar="FILE", help="GGUF file of the model")
    model.add_argument(
        "-hf", "--hf-repo", metavar="REPO", help="Hugging Face model that llama-server downloads"
    )
    planning.add_plan_options(parser)
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="directory for the blocks on disk and the log of llama-server (default: one for each"
        " model in ~/.local/state/evoke-proxy)",
    )
    parser.add_argument(
        "--server",
        type=Path,
        metavar="FILE",
        help="patched llama-server to run (default: $EVOKE_PATCHED_SERVER, else the one that"
        " `evoke-proxy build-server` has built)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "cpu", *BACKENDS),
        default="auto",
        help="backend that llama-server is built for; auto (default): cuda if this machine has nvcc"
        " and a GPU, else cpu",
    )
    parser.add_argument(
        "--build", action="store_true", help="build llama-server without asking if it is missing"
    )
    serve.add_proxy_arguments(parser)
    planning.add_server_options(parser)


@dataclass(frozen=True, slots=True)
class Stack:
    """The two processes that `up` runs.

    Attributes:
        server: llama-server.
        proxy: The proxy.
        port: Port of 127.0.0.1 at which llama-server listens.
    """

    server: Child
    proxy: Child
    port: int


def run(arguments: argparse.Namespace) -> int:
    """Run both processes until a signal and return 0.

    Returns 1 when something cannot be built or started, and 2 for a `--host` that cannot be used.
    """
    options = planning.ServerOptions(tuple(arguments.server_options))
    port = options.number("--port") or free_port()
    config = _config(arguments, port)
    host = options.value("--host")
    if host is not None and host not in _REACHABLE_HOSTS:
        say(
            f"--host {host}: evoke-proxy up reaches llama-server at 127.0.0.1; leave --host out,"
            " because clients connect to the address of --listen"
        )
        return 2
    shape = read_shape(arguments.model) if arguments.model else None
    try:
        binary = _server(arguments)
    except BuildError as error:
        say(str(error))
        return 1
    if binary is None or not _ports_are_free(config, port):
        return 1
    name = str(arguments.model.resolve()) if arguments.model else arguments.hf_repo
    state = arguments.state or planning.default_state(name)
    claim(state)
    model = ["-m", str(arguments.model)]
    if shape is None:
        download = ModelDownload(arguments.hf_repo, options, binary, state / "download.log")
        model, file = ["-hf", arguments.hf_repo], download.cached() or download.run()
        if file is None:
            return 0 if download.was_stopped else 1
        shape = read_shape(file)
    plan = planning.plan_for(shape, arguments, options, binary, state)
    command = planning.server_command(str(binary), model, options, state, plan)
    for name, value in (("--host", "127.0.0.1"), ("--port", str(port))):
        command += [name, value] if options.value(name) is None else []
    # The blocks of a dense model are all of its state; those of others are not.
    keeps_slots = plan.shape.kind != "dense"
    if keeps_slots and options.value("--slot-save-path") is None:
        command += ["--slot-save-path", str(state / "slots")]
        make_private(state / "slots")
    print(
        "\n".join([*planning.table(plan, config.policy.budget), "", shlex.join(command)]),
        flush=True,
    )
    env = _proxy_environment(options, config, state / "slots" if keeps_slots else None)
    stack = Stack(
        server=Child(
            "llama-server",
            command,
            os.environ,
            state / "llama-server.log",
            _SERVER_STOP_S,
            # SIGTERM while the proxy waits for a call would let both wait for each other.
            orphan_signal=signal.SIGKILL,
        ),
        proxy=Child(
            "the proxy",
            _proxy_command(arguments, port),
            env,
            None,
            config.limits.drain_timeout_s + _PROXY_STOP_S,
        ),
        port=port,
    )
    return keep(stack)


def keep(stack: Stack) -> int:
    """Start both, keep them running until a signal, and stop both; returns the exit code."""
    stop = Stop(on_second=[stack.proxy.kill, stack.server.kill])
    stop.install()
    try:
        if stack.server.log is not None:
            stack.server.log.unlink(missing_ok=True)
        stack.server.start()
        if not _is_ready(stack, stop):
            return 0 if stop.requested else 1
        stack.proxy.start()
        while not stop.wait():
            code = stack.proxy.exit_code
            # An address in use or an invalid setting: the next start would fail as well.
            if code in (1, 2) and stack.proxy.ended_early:
                say(f"the proxy ended with {describe(code)}")
                return code
            stack.proxy.keep_running()
            stack.server.keep_running()
    finally:
        if stop.requested:
            say("stopping: running answers may finish")
        stack.proxy.stop()
        stack.server.stop()
    return 0


def _is_ready(stack: Stack, stop: Stop) -> bool:
    """Wait until llama-server answers; False when it ends before that, or a signal comes."""
    slow_at: float | None = time.monotonic() + _SLOW_START_S
    while not healthy(stack.port):
        if slow_at is not None and time.monotonic() > slow_at:
            say(f"llama-server is loading the model; its log is {stack.server.log}")
            slow_at = None
        code = stack.server.exit_code
        if code is not None:
            _say_why(stack.server, code)
            return False
        if stop.wait():
            return False
    return True


def _say_why(server: Child, code: int) -> None:
    """Print why llama-server has ended while it started: its last lines, and what they mean."""
    lines = server.tail() or "  | (it wrote nothing)"
    say(f"llama-server ended with {describe(code)} while it started. Its last lines:\n{lines}")
    if "invalid argument: --ctx-logical" in lines or "invalid argument: --evoke-" in lines:
        say(
            f"{server.command[0]} is not patched, or an older build: leave out --server, so that"
            " the patched llama-server is used (evoke-proxy build-server builds it)"
        )


def _config(arguments: argparse.Namespace, port: int) -> Config:
    """Load and check the settings of the proxy, before anything is started."""
    arguments.upstream = [f"http://127.0.0.1:{port}"]
    config = load(arguments.config, os.environ, serve.overrides(arguments))
    if found := own_address(config, config.upstream.url):
        setting, address = found
        raise ConfigError(
            f"-- --port {port}: the proxy listens at {address} ({setting}): name another port"
        )
    return config


def _server(arguments: argparse.Namespace) -> Path | None:
    """Return the patched llama-server, which is built if needed and if the user agrees.

    Returns None if the user does not agree or cannot be asked. Raises ConfigError when `--server`
    is no program, and BuildError when the build fails.
    """
    named = arguments.server or os.environ.get("EVOKE_PATCHED_SERVER")
    if named:
        path = shutil.which(str(named))
        if path is None:
            raise ConfigError(f"--server: {named} is not an executable program")
        return Path(path)
    options = BuildOptions(backend=_backend(arguments.backend))
    built = finished_server_path(options)
    if built is not None:
        return built
    say("the patched llama-server is not built yet")
    say(first_build_notice(n_cores(), n_cores()))
    if not arguments.build:
        if not sys.stdin.isatty():
            say("run it again with --build, or build it with: evoke-proxy build-server")
            return None
        if input("Build it now? [Y/n] ").strip().lower() not in ("", "y", "yes"):
            return None
    return ensure_server(options=options)


def _backend(wanted: str) -> str:
    """Return the backend to build for; "auto" is CUDA if nvcc and nvidia-smi exist, else CPU."""
    if wanted != "auto":
        return "" if wanted == "cpu" else wanted
    return "cuda" if shutil.which("nvidia-smi") and shutil.which("nvcc") else ""


def _ports_are_free(config: Config, port: int) -> bool:
    """Whether every address can be listened at; prints why the others cannot."""
    is_free = True
    named = config.security.admin_listen != type(config.security)().admin_listen
    addresses = [(*parse_listen(address), "--listen") for address in config.listen]
    if named:
        admin = map(parse_listen, config.security.admin_listen)
        addresses += [(*address, "--admin-listen") for address in admin]
    for host, number, option in [*addresses, ("127.0.0.1", port, "-- --port")]:
        obstacle = listen_obstacle(host, number, option)
        if obstacle is not None:
            say(obstacle)
            is_free = False
    return is_free


def claim(state: Path) -> None:
    """Create the directory of the blocks and the log, and lock it until this process ends.

    Two servers that write to one directory would delete each other's blocks. Raises ConfigError
    when the directory cannot be used, or another `up` uses it.
    """
    make_private(state)
    try:
        lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"--state: another `evoke-proxy up` uses {state}: stop it, or name another directory"
            " with --state DIR"
        ) from error
    except OSError as error:
        raise _unusable(state, error) from error


def make_private(folder: Path) -> None:
    """Create a directory and its missing parents, accessible only for their owner.

    Raises ConfigError when that fails.
    """
    try:
        for path in (*reversed(folder.absolute().parents), folder):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    text = f"--state: {folder} cannot be used: {error.strerror}; name a directory with --state DIR"
    return ConfigError(text)


def _proxy_command(arguments: argparse.Namespace, port: int) -> list[str]:
    words = [sys.executable, "-m", "evoke_proxy", "serve", "--upstream", f"http://127.0.0.1:{port}"]
    for name in ("config", "budget", "policy", "log_level", "log_format"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    for name in ("listen", "admin_listen"):
        for value in getattr(arguments, name) or ():
            words += [f"--{name.replace('_', '-')}", value]
    return words


def _key_of_the_server(options: planning.ServerOptions, env: Mapping[str, str]) -> str:
    """Return one of the API keys that llama-server will accept; "" if it needs none.

    Raises ConfigError if its file of keys cannot be read.
    """
    keys: list[str] = []
    for value in (options.value("--api-key"), env.get("LLAMA_API_KEY")):
        keys += (value or "").split(",")
    for file in (options.value("--api-key-file"), env.get("LLAMA_ARG_API_KEY_FILE")):
        if file:
            try:
                lines = Path(file).read_text("utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"--api-key-file: {error}") from error
            keys += [line for line in lines if not line.startswith("#")]
    return next(filter(None, keys), "")


def _proxy_environment(
    options: planning.ServerOptions, config: Config, slots: Path | None
) -> dict[str, str]:
    """Return the environment of the proxy, with the server's API key and directory of slots.

    Settings that the user has made are not replaced.
    """
    env = dict(os.environ)
    key = _key_of_the_server(options, env)
    if key and not config.upstream.api_key:
        env[env_name("upstream.api_key")] = key
    if slots is not None and not config.snapshots.directory:
        env[env_name("snapshots.directory")] = str(slots)
    return env
