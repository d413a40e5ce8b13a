"""Checkpoints: global tensors that any layout saves and any layout loads, complete or absent, never half."""
