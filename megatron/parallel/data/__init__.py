"""Data parallelism: gradient buckets, their reduction, and the all-gather of updated parameters."""
