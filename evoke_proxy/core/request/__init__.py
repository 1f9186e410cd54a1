"""Requests of clients: dialects, the proxy's own fields, limits, and edits of their JSON."""
