"""Native kernels of the hot paths."""
