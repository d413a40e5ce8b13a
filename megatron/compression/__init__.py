"""Compression algorithms. They compute by torch and the kernels, and leave all communication to ``comm``."""
