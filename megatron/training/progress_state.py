"""How far a run has come: the counters that a checkpoint carries besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Progress:
    """Counters of a run.

    Args:
        iteration: optimizer steps attempted, skipped ones included.
        consumed_samples: training samples used.
        skipped: steps whose update was skipped.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0

    def state_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)
