"""State that a compressor carries between steps: tensors and counters, staged and committed together."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.compression.health import ResidualHealth
from megatron.compression.sample_cache import SampleCache


def both(*parts: Hashable) -> Hashable:
    """The parts of a key together; None where one of them is unknown."""
    return None if None in parts else parts


@dataclass
class CompressorState:
    """Named tensors and integers of one compressor at one place.

    Writes go to a staging area and become visible to later reads of the same step at once, but are only kept
    when the optimizer step is taken: ``commit`` keeps them, ``rollback`` (a skipped step) forgets them. Staged
    tensors must be new tensors, not in-place updates of committed ones. What changes only after the step is known to
    have finite gradients everywhere (``RoundCompressor.finalize``) is changed in place instead, and exists once.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    _staged_tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _staged_counters: dict[str, int] = field(default_factory=dict, repr=False)
    _health: ResidualHealth | None = field(default=None, repr=False)
    _staged_health: ResidualHealth | None = field(default=None, repr=False)
    _caches: dict[str, SampleCache] = field(default_factory=dict, repr=False)
    _queues: dict[str, deque[Any]] = field(default_factory=dict, repr=False)

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

    def owned(self, name: str, like: Tensor) -> Tensor:
        """A tensor that is kept and may be changed in place, whether or not the step is taken; zeros at first."""
        if name not in self.tensors:
            self.tensors[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.tensors[name]

    def layout(self, steady: Collection[str] = ()) -> Hashable:
        """Shapes and dtypes of the newest tensors, and the newest counters; None where a memory of samples is held.

        Args:
            steady: names of counters and memories that are left out.
        """
        if any(name not in steady for name in self._caches):
            return None
        tensors, counters = self.tensors | self._staged_tensors, self.counters | self._staged_counters
        return (
            tuple(sorted((name, tuple(x.shape), str(x.dtype)) for name, x in tensors.items())),
            tuple(sorted((name, count) for name, count in counters.items() if name not in steady)),
        )

    @property
    def health(self) -> ResidualHealth | None:
        """Figures of the residual, as of the newest step; None where there is none. Checkpoints do not hold them."""
        return self._staged_health or self._health

    def stage_health(self, health: ResidualHealth) -> None:
        """Sets ``health`` for the rest of this step."""
        self._staged_health = health

    def commit(self) -> None:
        """Keeps what was staged: the optimizer step was taken."""
        self._health = self.health
        self.tensors.update(self._staged_tensors)
        self.counters.update(self._staged_counters)
        for cache in self._caches.values():
            cache.commit()
        self._forget()

    def rollback(self) -> None:
        """Forgets what was staged: the optimizer step was skipped."""
        for cache in self._caches.values():
            cache.rollback()
        self._forget()

    def _forget(self) -> None:
        self._staged_tensors.clear()
        self._staged_counters.clear()
        self._staged_health = None
        self._queues.clear()

    def cache(self, name: str, capacity: int, memory: int | None = None, folder: str | None = None) -> SampleCache:
        """The sample cache of a name; made at the first call, from ``tensors`` where they were loaded."""
        if name not in self._caches:
            self._caches[name] = SampleCache(capacity, memory, folder)
            samples, rows = self.tensors.pop(f"{name}.ids", None), self.tensors.pop(f"{name}.rows", None)
            if samples is not None and rows is not None:
                self._caches[name].load(samples, rows)
        return self._caches[name]

    def queue(self, name: str) -> deque[Any]:
        """Decisions about messages that are in flight; empty between steps."""
        return self._queues.setdefault(name, deque())

    def portable(self) -> dict[str, Tensor]:
        """The committed tensors, and those of the sample caches."""
        found = dict(self.tensors)
        for name, cache in self._caches.items():
            exported = cache.exported()
            if exported is not None:
                found[f"{name}.ids"], found[f"{name}.rows"] = exported
        return found

    @property
    def empty(self) -> bool:
        """Whether nothing was ever kept."""
        return not self.portable() and not self.counters
