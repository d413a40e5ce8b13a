"""The communication points: what the engines call and the compressors serve."""
