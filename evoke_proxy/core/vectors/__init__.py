"""Vectors of texts: how they are made, kept and written down."""
