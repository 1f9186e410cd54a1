"""Requests as they come in: read, freed of our fields, known from the one before."""
