"""Steps that are skipped if their outputs exist and their inputs have not changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.atomic import atomic_write


def digest(*parts: Any) -> str:
    """Hash any JSON values; for a Path, the contents of the file."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else json.dumps(part, sort_keys=True).encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


@dataclass(frozen=True)
class QuickstartStage:
    """A step, its output files, and a hash of its inputs (``key``).

    The step is up to date while the key and the sizes and times of the outputs equal those in its stamp.
    """

    title: str
    stamp: Path
    key: str
    outputs: Sequence[Path]
    action: Callable[[], None]

    def run(self) -> float | None:
        """Run the step if needed; return its seconds, None if it is up to date."""
        with suppress(OSError, ValueError):
            if json.loads(self.stamp.read_text()) == self._state():
                return None
        self.stamp.unlink(missing_ok=True)
        start = time.monotonic()
        self.action()
        with atomic_write(self.stamp) as stream:
            stream.write(json.dumps(self._state()).encode())
        return time.monotonic() - start

    def _state(self) -> dict[str, Any]:
        files = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in self.outputs}
        return {"key": self.key, "files": files}
