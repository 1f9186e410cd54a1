"""Saved states of slots: what one belongs to, what it is worth, what is in its file."""
