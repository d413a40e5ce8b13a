"""The setting of the GPU benchmark, and the interface of its sections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.report import Column
from benchmarks.rows import RowLog


@dataclass(frozen=True)
class Setting:
    """The setting of every section.

    Args:
        device: cuda, or cpu with toy sizes, which only show that everything runs.
        out: folder of the results.
        copy_bytes_per_s: bandwidth of a large copy, reads and writes together.
        peak_flops: peak of the device's matrix products in bf16, FLOP/s.
    """

    device: str
    out: Path
    copy_bytes_per_s: float = 0.0
    peak_flops: float = 0.0

    @property
    def toy(self) -> bool:
        """Whether sizes are so small that a CPU computes them in seconds."""
        return self.device == "cpu"

    def to_json(self) -> str:
        """Return the setting as JSON, for a section's process."""
        return json.dumps({**asdict(self), "out": str(self.out)})

    @staticmethod
    def from_json(text: str) -> Setting:
        """Parse a setting that ``to_json`` wrote."""
        values = json.loads(text)
        return Setting(**{**values, "out": Path(values["out"])})


class Section(Protocol):
    """The interface of a section's module."""

    TITLE: str
    NOTE: str
    """Explanation of the table's columns."""
    COLUMNS: Sequence[Column]
    WEIGHT: float
    """Share of a call's time, relative to the other sections."""
    PATIENCE_SECONDS: float
    """Seconds without a sign of life after which a section counts as hung."""

    def keys(self, setting: Setting) -> list[str]:
        """Return the rows, the most important first."""
        ...

    def measure(self, setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
        """Measure some of the rows."""
        ...
