"""The demo: states a fact, lets it be evicted, and asks for it, under each of four policies."""
