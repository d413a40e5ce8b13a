"""Text to token files: reading lines, encoding them, running that in parallel; and to a vocabulary."""
