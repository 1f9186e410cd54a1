"""Names settings that are valid and probably not what the operator wants."""

from __future__ import annotations

from evoke_proxy.config.schema import Config, is_loopback, parse_listen


def risks_of(config: Config) -> tuple[str, ...]:
    """One sentence for each risk, with the setting that removes it; () when there is none."""
    open_to_all = [
        address for address in config.listen if not is_loopback(parse_listen(address)[0])
    ]
    if not open_to_all or config.security.keys_file:
        return ()
    return (
        f"listen: other machines can use {', '.join(open_to_all)} without a key: set"
        " security.keys_file (`evoke-proxy keys add NAME --file FILE` makes one), listen on"
        " 127.0.0.1, or allow only trusted networks",
    )
