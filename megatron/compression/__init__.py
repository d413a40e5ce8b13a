"""Compression algorithms: torch only, never ``torch.distributed``."""
