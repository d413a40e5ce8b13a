"""State that a compressor carries between steps: tensors and counters, staged and committed together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class CompressorState:
    """Named tensors and integers of one compressor at one place.

    Writes go to a staging area and become visible to later reads of the same step at once, but are only kept
    when the optimizer step is taken: ``commit`` keeps them, ``rollback`` (a skipped step) forgets them. Staged
    tensors must be new tensors, not in-place updates of committed ones.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    _staged_tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _staged_counters: dict[str, int] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> Tensor | None:
        """The newest value of a tensor, staged or committed; None when it was never set."""
        staged = self._staged_tensors.get(name)
        return self.tensors.get(name) if staged is None else staged

    def count(self, name: str) -> int:
        """The newest value of a counter; 0 when it was never set."""
        return self._staged_counters.get(name, self.counters.get(name, 0))

    def stage(self, name: str, value: Tensor | int) -> None:
        """Sets a tensor or a counter for the rest of this step."""
        if isinstance(value, Tensor):
            self._staged_tensors[name] = value
        else:
            self._staged_counters[name] = value

    def commit(self) -> None:
        """Keeps what was staged: the optimizer step was taken."""
        self.tensors.update(self._staged_tensors)
        self.counters.update(self._staged_counters)
        self.rollback()

    def rollback(self) -> None:
        """Forgets what was staged: the optimizer step was skipped."""
        self._staged_tensors.clear()
        self._staged_counters.clear()
