"""The setting of the GPU benchmark, the interface of its sections, and what they claim."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column


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
        """Whether sizes are such that a CPU computes them in seconds."""
        return self.device == "cpu"


def setting_text(setting: Setting) -> str:
    """The setting as JSON, for a section's process."""
    return json.dumps({**asdict(setting), "out": str(setting.out)})


def setting_of(text: str) -> Setting:
    """The setting of a text of ``setting_text``."""
    values = json.loads(text)
    return Setting(**{**values, "out": Path(values["out"])})


@dataclass(frozen=True)
class Claim:
    """A claim about some rows, and their values.

    Args:
        what: the claim, in words.
        least: smallest value at which the claim holds.
        values: measured values.
    """

    what: str
    least: float
    values: tuple[float, ...]

    @property
    def met(self) -> int:
        """Number of the values that meet the claim."""
        return sum(value >= self.least for value in self.values)


class Section(Protocol):
    """The interface of a section's module."""

    TITLE: str
    NOTE: str
    """Explanation of the table's columns."""
    COLUMNS: Sequence[Column]
    WEIGHT: float
    """Share of a call's time, beside those of the other sections."""
    PATIENCE_SECONDS: float
    """Longest silence of a section before it counts as hung."""

    def keys(self, setting: Setting) -> list[str]:
        """The rows, the most important ones first."""
        ...

    def measure(self, setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
        """Measures some of the rows."""
        ...

    def tidy(self) -> None:
        """Removes what a killed process of the section leaves behind."""
        ...

    def claims(self, rows: Mapping[str, Cells]) -> list[Claim]:
        """Claims about the rows."""
        ...
