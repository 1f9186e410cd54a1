"""The patched llama-server; `evoke_proxy.server_build` finds it in `bin` beside this file."""
