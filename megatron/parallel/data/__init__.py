"""Data parallelism: contiguous buckets and their reduction."""
