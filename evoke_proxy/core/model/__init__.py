"""Blocks of a prompt and the plan of what is moved."""
