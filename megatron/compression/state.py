"""Compressor state between steps: tensors and counters, staged and committed together."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.compression.health import ResidualHealth
from megatron.compression.sample_cache import SampleCache


def combine_keys(*keys: Hashable) -> Hashable:
    """Combine keys to a tuple; None if any key is None (unknown)."""
    return None if None in keys else keys


@dataclass
class CompressorState:
    """Named tensors and counters of a compressor, for a single tensor or a single stream of messages.

    Writes are staged: reads in the same step see them, ``commit`` keeps them when the optimizer step is taken, and
    ``rollback`` discards them when the step is skipped. Stage new tensors; do not update committed tensors in place.
    ``buffer`` is the exception: ``RoundCompressor.finalize`` runs when all gradients are known to be finite, and may
    update state in place, without a second copy.
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
        """Staged value of a tensor if there is one, else the committed value; None if never set."""
        staged = self._staged_tensors.get(name)
        return self.tensors.get(name) if staged is None else staged

    def count(self, name: str) -> int:
        """Staged value of a counter if there is one, else the committed value; 0 if never set."""
        return self._staged_counters.get(name, self.counters.get(name, 0))

    def stage(self, name: str, value: Tensor | int) -> None:
        """Set a tensor or a counter, until ``commit`` or ``rollback``."""
        if isinstance(value, Tensor):
            self._staged_tensors[name] = value
        else:
            self._staged_counters[name] = value

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Committed tensor for in-place updates, initially zero. ``rollback`` does not undo the updates."""
        if name not in self.tensors:
            self.tensors[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.tensors[name]

    def layout(self, steady: Collection[str] = ()) -> Hashable:
        """Shapes and dtypes of all tensors, and values of all counters; None if there is a sample cache.

        Args:
            steady: names of counters and caches to leave out.
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
        """Statistics of the residual in the last step; None without a residual. Not checkpointed."""
        return self._staged_health or self._health

    def stage_health(self, health: ResidualHealth) -> None:
        """Set ``health``, until ``commit`` or ``rollback``."""
        self._staged_health = health

    def commit(self) -> None:
        """Keep staged values: the optimizer step was taken."""
        self._health = self.health
        self.tensors.update(self._staged_tensors)
        self.counters.update(self._staged_counters)
        for cache in self._caches.values():
            cache.commit()
        self._discard_staged()

    def rollback(self) -> None:
        """Discard staged values: the optimizer step was skipped."""
        for cache in self._caches.values():
            cache.rollback()
        self._discard_staged()

    def _discard_staged(self) -> None:
        self._staged_tensors.clear()
        self._staged_counters.clear()
        self._staged_health = None
        self._queues.clear()

    def cache(self, name: str, capacity: int, memory: int | None = None, folder: str | None = None) -> SampleCache:
        """Sample cache with this name. The first call creates it, from a checkpoint's tensors if there are any."""
        if name not in self._caches:
            self._caches[name] = SampleCache(capacity, memory, folder)
            samples, rows = self.tensors.pop(f"{name}.ids", None), self.tensors.pop(f"{name}.rows", None)
            if samples is not None and rows is not None:
                self._caches[name].load(samples, rows)
        return self._caches[name]

    def queue(self, name: str) -> deque[Any]:
        """Queue of decisions about messages in flight; empty between steps."""
        return self._queues.setdefault(name, deque())

    def export_tensors(self) -> dict[str, Tensor]:
        """Committed tensors, including the contents of the sample caches."""
        tensors = dict(self.tensors)
        for name, cache in self._caches.items():
            exported = cache.export()
            if exported is not None:
                tensors[f"{name}.ids"], tensors[f"{name}.rows"] = exported
        return tensors

    @property
    def empty(self) -> bool:
        """Whether the state holds neither tensors, nor counters, nor samples."""
        return not self.tensors and not self.counters and not any(map(len, self._caches.values()))


def end_states(states: Iterable[CompressorState], keep: bool) -> None:
    """Commit staged changes of states, or roll them back because the step was skipped."""
    for state in states:
        if keep:
            state.commit()
        else:
            state.rollback()
