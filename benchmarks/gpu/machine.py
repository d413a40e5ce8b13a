"""The device of the benchmark: its name, and the rates behind all limits."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from benchmarks import REPO
from benchmarks.device_clock import clock_of
from benchmarks.report import device_name
from megatron.training.peaks import peak_tflops

COPY_BYTES, PRODUCT_SIZE = {"cuda": 1 << 31, "cpu": 1 << 22}, {"cuda": 8192, "cpu": 128}


def probe(device: str) -> dict[str, object]:
    """Measure the device in another process, so that this process does not hold it."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine", device]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=REPO)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1])
    figures: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return figures


def measure(device: str) -> dict[str, object]:
    """Name of the device, measured rates of a large copy and of a large product in bf16, and the vendor's peak.

    The peak of a device that :mod:`megatron.training.peaks` does not know is the measured rate of the product.
    """
    clock = clock_of(device, 0.3)
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * COPY_BYTES[device] / clock.time([lambda: target.copy_(source)]).seconds
    n = PRODUCT_SIZE[device]
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    product_rate = 2 * n**3 / clock.time([lambda: a @ b]).seconds
    cuda = device == "cuda"
    name = device_name(device)
    peak = peak_tflops(name, torch.bfloat16)
    return {
        "device": name if cuda else f"{name}, toy sizes",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "copy_bytes_per_s": copy_rate,
        "product_flops": product_rate,
        "peak_flops": peak * 1e12 if peak else product_rate,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
