"""Launchers that start the ranks of a program."""
