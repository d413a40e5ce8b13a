"""Data that may lie beside the repository: tests that use it are skipped where it does not."""

from __future__ import annotations

from pathlib import Path

_SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def shared_path(name: str) -> Path | None:
    """The file or folder `name` of a folder of test data that may lie beside the checkout, or None."""
    path = _SHARED / name
    return path if path.exists() else None
