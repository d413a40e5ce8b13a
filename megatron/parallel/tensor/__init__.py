"""Tensor parallelism: sharded layers, keyed randomness, parameter shards."""
