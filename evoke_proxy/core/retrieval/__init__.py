"""Relevance of the blocks of a session to a query: term statistics, vectors and names."""
