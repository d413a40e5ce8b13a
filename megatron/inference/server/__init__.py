"""The HTTP server of a model."""
