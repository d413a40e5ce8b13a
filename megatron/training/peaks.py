"""Peak rates of devices by name, for MFU."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peaks:
    """Peak TFLOP/s of dense matrix products (without structured sparsity) with fp32 sums, as the vendor states them.

    None if the device has no such unit.
    """

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


_HOPPER_SXM = Peaks(989.4, 989.4, 494.7, 66.9)
_HOPPER_NVL = Peaks(835.5, 835.5, 417.5, 60.0)
_CDNA3 = Peaks(1307.4, 1307.4, 653.7, 163.4)

DEVICE_PEAKS: tuple[tuple[tuple[str, ...], Peaks], ...] = (
    (("GB200",), Peaks(2500.0, 2500.0, 1250.0, 80.0)),
    (("B200",), Peaks(2250.0, 2250.0, 1125.0, 75.0)),
    (("GH200",), _HOPPER_SXM),
    (("H200", "NVL"), _HOPPER_NVL),
    (("H200",), _HOPPER_SXM),
    (("H100", "NVL"), _HOPPER_NVL),
    (("H100", "PCIE"), Peaks(756.5, 756.5, 378.0, 51.2)),
    (("H100", "HBM3"), _HOPPER_SXM),
    (("H100", "SXM5"), _HOPPER_SXM),
    (("A100",), Peaks(312.0, 312.0, 156.0, 19.5)),
    (("A40",), Peaks(149.7, 149.7, 74.8, 37.4)),
    (("A10",), Peaks(125.0, 125.0, 62.5, 31.2)),
    (("L40S",), Peaks(362.0, 362.0, 183.0, 91.6)),
    (("L40",), Peaks(181.0, 181.0, 90.5, 90.5)),
    (("L4",), Peaks(121.0, 121.0, 60.0, 30.3)),
    (("V100S",), Peaks(None, 130.0, None, 16.4)),
    (("V100", "PCIE"), Peaks(None, 112.0, None, 14.0)),
    (("V100", "SXM2"), Peaks(None, 125.0, None, 15.7)),
    (("T4",), Peaks(None, 65.0, None, 8.1)),
    (("RTX", "5090"), Peaks(209.5, 209.5, 104.8, 104.8)),
    (("RTX", "4090"), Peaks(165.2, 165.2, 82.6, 82.6)),
    (("RTX", "3090"), Peaks(71.0, 71.0, 35.6, 35.6)),
    (("MI250X",), Peaks(191.5, 191.5, None, 47.9)),  # of a single die, which is a device
    (("MI300X",), _CDNA3),
    (("MI325X",), _CDNA3),
)
"""Words of a device's name, and its rates; the first entry whose words all occur is used."""

_VARIANT_WORDS = {"MIG", "LAPTOP", "MAX", "MOBILE", "TI", "D", "64GB"}
"""Words that mark variants and partitions of the devices above, which have other rates."""


def peak_tflops(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """The rate of a device at the training precision; None if unknown.

    Args:
        name: torch's name for the device.
        dtype: dtype of the parameters.
        tf32: whether products of fp32 matrices may round their factors.
    """
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    peaks = next((peaks for needed, peaks in DEVICE_PEAKS if words.issuperset(needed)), None)
    if peaks is None or words & _VARIANT_WORDS:
        return None
    fp32 = peaks.tf32 if tf32 and peaks.tf32 is not None else peaks.fp32
    return {torch.bfloat16: peaks.bf16, torch.float16: peaks.fp16, torch.float32: fp32}.get(dtype)
