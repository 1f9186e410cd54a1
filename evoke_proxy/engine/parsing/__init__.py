"""Turns the bytes of a request body into a parsed request: limits, checks, cache, parser."""
