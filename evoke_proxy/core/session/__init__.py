"""One conversation: its state between turns, its token accounting and its identity."""
