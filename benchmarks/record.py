"""The record of a benchmark: its figures as JSON, with the machine, the versions and the date they were taken with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import REPO
from megatron.base.atomic import atomic_write

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def header(device: str) -> dict[str, object]:
    """What figures are taken with: hardware, versions, sources, date.

    Args:
        device: name of the device.
    """
    return {
        "device": device,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": _printed(*_DRIVER).split("\n")[0] or "none",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "sources": sources(),
    }


def made_by(made_with: Mapping[str, object]) -> dict[str, str]:
    """What of a header figures depend on: rows are kept while it stays the same."""
    return {key: str(made_with[key]) for key in ("device", "torch", "cuda", "sources")}


def device_name(device: str) -> str:
    """Name of a device of this machine."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def write_record(path: Path, made_with: Mapping[str, object], **content: Any) -> None:
    """Writes figures below their header, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write((json.dumps({"header": made_with, **content}, indent=1) + "\n").encode())


def sources() -> str:
    """A digest of the sources that are measured, and that measure."""
    digest = hashlib.sha256()
    for folder in ("megatron", "benchmarks"):
        for path in sorted((REPO / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cpp", ".h", ".inl") and path.is_file():
                digest.update(path.relative_to(REPO).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    """The commit of git, where the tree is a repository."""
    head = _printed("git", "rev-parse", "--short=12", "HEAD")
    changed = _printed("git", "status", "--porcelain", "--untracked-files=no")
    return head + (" and changes" if changed else "") if head else "not a git tree"


def _printed(*words: str) -> str:
    """The output of a command; empty where it is missing or fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=REPO, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
