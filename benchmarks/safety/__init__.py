"""Safety cards: what a compressor does to a toy model, on a page; ``run.py`` says how to make one."""
