"""Reads replies while they stream: message, timings, usage, errors and token accounting."""
