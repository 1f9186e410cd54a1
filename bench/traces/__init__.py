"""Replays recorded coding-agent conversations on llama-servers that compute nothing."""
