"""Steps that are left out when what they make is there and made from the same things."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.atomic import atomic_write


def digest(*parts: Any) -> str:
    """A name for anything that JSON can hold; the contents of a file for a Path."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else json.dumps(part, sort_keys=True).encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


@dataclass(frozen=True)
class QuickstartStage:
    """A step, what its result depends on (``key``) and the files it makes.

    The step is up to date while its stamp holds the same key and each file has the size and time it had then.
    """

    title: str
    stamp: Path
    key: str
    outputs: Sequence[Path]
    action: Callable[[], None]

    def is_done(self) -> bool:
        try:
            return bool(json.loads(self.stamp.read_text()) == self._state())
        except (OSError, ValueError):
            return False

    def run(self) -> float | None:
        """Do the step where needed.

        Returns:
            Its seconds; None when there was nothing to do.
        """
        if self.is_done():
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
