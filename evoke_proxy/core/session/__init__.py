"""One conversation: its state from turn to turn, its token accounting and its identity."""
