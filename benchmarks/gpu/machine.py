"""The device of the benchmark: its name, and the rates that all limits come from."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from benchmarks import REPO
from benchmarks.device_clock import clock_of
from benchmarks.record import device_name

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""FLOP/s of dense bf16 products, by the vendor; of other devices the measured rate is taken."""
COPY_BYTES, PRODUCT = {"cuda": 1 << 31, "cpu": 1 << 22}, {"cuda": 8192, "cpu": 128}


def probe(device: str) -> dict[str, object]:
    """Queries the device, in a process that does not keep it."""
    words = [sys.executable, "-m", "benchmarks.gpu.machine", device]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, cwd=REPO)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(device: str) -> dict[str, object]:
    """Name of the device, and measured rates of a large copy and of a large product in bf16."""
    clock = clock_of(device, 0.3)
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * COPY_BYTES[device] / clock.time([lambda: target.copy_(source)]).seconds
    n = PRODUCT[device]
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    product = 2 * n**3 / clock.time([lambda: a @ b]).seconds
    cuda = device == "cuda"
    name = device_name(device) + ("" if cuda else ", toy sizes")
    return {
        "device": name,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "copy_bytes_per_s": copied,
        "product_flops": product,
        "peak_flops": next((peak for word, peak in PEAKS.items() if word in name), product),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
    }


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
