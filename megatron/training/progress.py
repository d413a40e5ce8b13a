"""A progress bar at a terminal; silent anywhere else."""

from __future__ import annotations

import sys
from typing import Any, Literal, TextIO

from megatron.base.errors import UserError

ProgressMode = Literal["auto", "on", "off"]


class ProgressBar:
    """The progress bar: iterations done, loss, tokens/s and time left, on the last line of a terminal.

    Args:
        total: iterations of the run.
        done: iterations already done, when the run resumes.
        mode: ``auto`` shows the bar only when ``stream`` is a terminal (and tqdm imports), ``on`` always, ``off``
            never.
        stream: where the bar is drawn.
        output: where ``write`` puts whole lines.
        name: title of the bar.

    Raises:
        UserError: when the mode is ``on`` and tqdm is missing.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        mode: ProgressMode = "auto",
        stream: TextIO | None = None,
        output: TextIO | None = None,
        name: str = "training",
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._output = sys.stdout if output is None else output
        self._bar: Any = None
        if mode == "on" or (mode == "auto" and self._stream.isatty()):
            try:
                from tqdm import tqdm
            except ImportError as error:
                if mode == "on":
                    raise UserError(
                        "--progress-bar on needs the tqdm package: pip install tqdm, or drop the flag"
                    ) from error
            else:
                self._bar = tqdm(total=total, initial=done, file=self._stream, unit="it", dynamic_ncols=True, desc=name)

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def update(self, *, loss: float | None = None, tokens_per_second: float | None = None, steps: int = 1) -> None:
        """Set the number of iterations done. Figures that are None are left out of the bar."""
        if self._bar is None:
            return
        figures = {}
        if loss is not None:
            figures["loss"] = f"{loss:.4f}"
        if tokens_per_second is not None:
            figures["tokens/s"] = f"{tokens_per_second:,.0f}"
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(steps)

    def write(self, text: str) -> None:
        """Print whole lines to the output, above the bar when there is one."""
        if self._bar is None:
            print(text, file=self._output, flush=True)
        else:
            self._bar.write(text, file=self._output)
            self._output.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
