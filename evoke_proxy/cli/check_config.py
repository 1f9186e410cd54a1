"""`evoke-proxy check-config`: validates the configuration and prints its main settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from evoke_proxy.cli import serve
from evoke_proxy.config import Config

DESCRIPTION = "Validate the configuration that `serve` would use, and the files that it names."

EXAMPLES = """examples:
  evoke-proxy check-config --config evoke.yaml
      print the main settings; exit code 2 and the name of the setting when one is wrong"""

add_arguments = serve.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Print the main settings; raises ConfigError when one of them cannot be used."""
    print(_summary(serve.load_config(arguments)))
    return 0


def _summary(config: Config) -> str:
    budget = f"{config.policy.budget} tokens" if config.policy.budget else "none (never evicts)"
    return (
        f"listen    {', '.join(config.listen)}\n"
        f"upstream  {_upstreams(config)}\n"
        f"policy    {config.policy.name}\n"
        f"budget    {budget}\n"
        f"embedder  {_embedder(config)}\n"
        f"snapshots {config.snapshots.directory or 'none'}\n"
        f"keys      {_keys(config)}\n"
        f"admin     {_admin(config)}\n"
        "the configuration is valid"
    )


def _upstreams(config: Config) -> str:
    servers = config.pool.servers
    return ", ".join(f"{name} at {url}" for name, url in servers.items()) or config.upstream.url


def _keys(config: Config) -> str:
    """Number of client keys and tenants; ConfigError when the key file cannot be used."""
    if not config.security.keys_file:
        return "none required"
    from evoke_proxy.adapters.secret_files import KeyFile

    callers = KeyFile(Path(config.security.keys_file)).keys.callers.values()
    return f"{len(callers)} of {len({caller.tenant for caller in callers})} tenants"


def _admin(config: Config) -> str:
    """Admin addresses and whether they need a token; ConfigError when it cannot be read."""
    security = config.security
    addresses = ", ".join(security.admin_listen or config.listen)
    if not security.admin_token_file:
        return f"{addresses}, without a token"
    from evoke_proxy.adapters.secret_files import read_token

    read_token(Path(security.admin_token_file), "security.admin_token_file")
    return f"{addresses}, with a token"


def _embedder(config: Config) -> str:
    """The encoder in the embedder's directory; ConfigError when it does not load."""
    if not config.embedder.directory:
        return "none (blocks are ranked by words alone)"
    from evoke_proxy.adapters.embedder import Embedder

    return Embedder(config.embedder).describe()
