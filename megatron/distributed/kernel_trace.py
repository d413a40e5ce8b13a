"""Kernels and copies on a CUDA device, recorded for a trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

FIRST_STREAM = 1
"""Track of a device's stream 0; spans are on track 0."""
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LONGEST_NAME = 200
"""Maximum length of kernel names; template names can fill pages."""


class DeviceKernels:
    """Recorder of kernels with torch's profiler, without host activity."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        """Start recording."""
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self) -> list[dict[str, Any]]:
        """Stop; return Chrome trace events (name, cat, tid, ts, dur), with times since 1970."""
        assert self._profile is not None
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.json"
            self._profile.export_chrome_trace(str(path))
            content = json.loads(path.read_text(errors="replace"))
        self._profile = None
        return extract_kernels(content)


def extract_kernels(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Extract the device events of a torch profiler trace, with a track for each stream."""
    base = content.get("baseTimeNanoseconds", 0) / 1e3
    return [
        {
            "name": str(event["name"])[:_LONGEST_NAME],
            "cat": event["cat"],
            "tid": FIRST_STREAM + int(event["tid"]),
            "ts": round(base + event["ts"], 1),
            "dur": round(event["dur"], 1),
        }
        for event in content["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _CATEGORIES
    ]
