"""The engines of tensor, pipeline and data parallelism."""
