"""Generators of the pages of docs/reference."""
