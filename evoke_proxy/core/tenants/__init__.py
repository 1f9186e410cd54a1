"""Tenants: API keys, and fair shares of common resources."""
