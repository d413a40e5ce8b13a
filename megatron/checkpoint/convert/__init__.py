"""Checkpoints to and from other formats, tensor by tensor."""
