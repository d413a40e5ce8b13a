"""Measurements: training, kernels, memory, networks of other rates, and what compressors do to losses."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
"""Whose programs are measured, and where documents and pictures lie."""
