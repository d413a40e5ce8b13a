"""Compression algorithms. They compute with torch and the kernels, and leave all communication to ``comm``."""
