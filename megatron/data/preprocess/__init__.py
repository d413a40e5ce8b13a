"""Preprocessing: reads lines of text, encodes them in parallel, and writes token files; and trains vocabularies."""
