"""Native kernels for hot paths."""
