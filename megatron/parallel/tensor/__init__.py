"""Tensor and sequence parallelism: sharded layers and their collectives."""
