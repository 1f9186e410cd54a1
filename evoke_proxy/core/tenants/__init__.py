"""Tenants: their API keys and their fair share of what they use together."""
