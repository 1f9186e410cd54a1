"""Gateways over several servers: a pool of llama-servers, and the models behind a router."""
