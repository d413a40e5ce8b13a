"""The machine of the benchmark: names and versions, and the two rates that all limits come from."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone

import torch

from benchmarks import REPO
from benchmarks.device_clock import clock_of

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
    """Names of the device, and measured rates of a large copy and of a large product in bf16."""
    clock = clock_of(device, 0.3)
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * COPY_BYTES[device] / clock.time([lambda: target.copy_(source)]).seconds
    n = PRODUCT[device]
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    product = 2 * n**3 / clock.time([lambda: a @ b]).seconds
    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, toy sizes"
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 0
    return {
        "device": name,
        "memory_bytes": memory,
        "copy_bytes_per_s": copied,
        "product_flops": product,
        "peak_flops": next((peak for word, peak in PEAKS.items() if word in name), product),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
    }


def sources() -> str:
    """A digest of the sources that are measured, and that measure."""
    digest = hashlib.sha256()
    for folder in ("megatron", "benchmarks"):
        for path in sorted((REPO / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cpp", ".h", ".inl") and path.is_file():
                digest.update(path.relative_to(REPO).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """The commit of git, where the tree is a repository."""
    try:
        head = _printed("git", "rev-parse", "--short=12", "HEAD")
        return head + (" and changes" if _printed("git", "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git tree"


def driver() -> str:
    """Version of the GPU's driver."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    try:
        return _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def today() -> str:
    """The date and the time."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _printed(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=REPO, timeout=60).stdout.strip()


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
