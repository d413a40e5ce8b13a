"""Safety cards: one-page reports of a compressor's effects on toy models; see ``run.py``."""
