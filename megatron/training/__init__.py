"""Training runs: assembly, the loop, metrics, and saving."""
