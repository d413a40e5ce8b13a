"""Progress reports of document readers: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron.data.preprocess.pipeline import Totals

# Bad lines that are reported individually; later lines are only counted.
_SHOWN_BAD_LINES = 20


class EncodingProgress:
    """Reports documents, docs/s and MB/s: a bar on a terminal, otherwise a line per interval."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._start = time.monotonic()
        self._next = interval
        self._shown = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="docs", unit_scale=True, dynamic_ncols=True)

    def __call__(self, totals: Totals, bad: list[str]) -> None:
        """Show the running totals and the lines skipped since the last call."""
        for message in bad:
            self._shown += 1
            if self._shown <= _SHOWN_BAD_LINES:
                self._print(f"skipped {message}")
            elif self._shown == _SHOWN_BAD_LINES + 1:
                self._print("more bad lines are counted, not shown")
        docs_per_s, mb_per_s = self.rates(totals)
        if self._bar is not None:
            self._bar.update(totals.documents - self._bar.n)
            self._bar.set_postfix_str(f"{mb_per_s:.2f} MB/s")
        elif totals.documents >= self._next:
            self._next = (totals.documents // self._interval + 1) * self._interval
            self._print(f"Processed {totals.documents} documents ({docs_per_s:.1f} docs/s, {mb_per_s:.2f} MB/s).")

    def rates(self, totals: Totals) -> tuple[float, float]:
        """Documents per second and megabytes of input per second."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return totals.documents / seconds, totals.size / seconds / 1e6

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
