"""Cleaning of web texts: from URLs and JSON lines to training data."""
