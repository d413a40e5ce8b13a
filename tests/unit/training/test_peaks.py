"""Peak rates by device name."""

from __future__ import annotations

import pytest
import torch

from megatron.training.peaks import DEVICE_PEAKS, peak_tflops
from megatron.training.report import known_peak
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0, 19.5),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.5, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA L40", 181.0, 90.5),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A40", 149.7, 37.4),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71.0, 35.6),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("Tesla V100-PCIE-16GB", None, 14.0),
        ("Tesla V100S-PCIE-32GB", None, 16.4),
        ("Tesla T4", None, 8.1),
        ("AMD Instinct MI250X", 191.5, 47.9),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)
def test_devices_by_name(name: str, bf16: float | None, fp32: float) -> None:
    assert peak_tflops(name, torch.bfloat16) == bf16
    assert peak_tflops(name, torch.float32) == fp32


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100",
        "NVIDIA H20",
        "Some Future GPU 200",
        "",
    ],
)
def test_devices_with_similar_names_are_unknown(name: str) -> None:
    assert peak_tflops(name, torch.float16) is None


def test_the_precision_decides() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert peak_tflops(name, torch.float16) == 989.4
    assert peak_tflops(name, torch.float32, tf32=True) == 494.7
    assert peak_tflops("Tesla T4", torch.float32, tf32=True) == 8.1  # without TF32
    assert peak_tflops(name, torch.float64) is None


def test_halves_are_never_slower_than_single_precision() -> None:
    for _, peaks in DEVICE_PEAKS:
        assert peaks.fp16 == (peaks.bf16 or peaks.fp16)
        assert peaks.fp16 >= 2 * (peaks.tf32 or 0) * 0.98
        assert (peaks.tf32 or peaks.fp32) >= peaks.fp32
        assert peaks.fp16 > peaks.fp32


@pytest.mark.parametrize(
    ("flag", "device", "precision", "expected"),
    [
        (None, "cpu", "bf16", None),
        (0.5, "cpu", "bf16", 0.5),
        (None, "cuda", "bf16", 312.0),
        (None, "cuda", "fp64", None),
        (77.0, "cuda", "bf16", 77.0),
    ],
)
def test_the_peak_of_a_run(
    flag: float | None, device: str, precision: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    config = tiny_config({"precision": {precision: True}, "logging": {"peak_tflops": flag}}, 1)
    assert known_peak(config, torch.device(device)) == expected
