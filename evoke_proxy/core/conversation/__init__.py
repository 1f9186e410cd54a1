"""One conversation and its next turn: what it is about, what is decided for it, what it came to."""
