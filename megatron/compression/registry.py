"""Name -> compressor. Registering is one call; an unknown name lists the choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.identity import IdentityCodec, IdentityConfig, IdentityRounds


@dataclass(frozen=True)
class Entry:
    """One registered compressor: its options and the contracts that it fulfils (None where it does not)."""

    config: type[Any]
    codec: type[Codec] | None = None
    rounds: type[RoundCompressor] | None = None


class Registry:
    """Names of compressors. A run builds its own from ``builtin`` and may add to it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def register(self, name: str, entry: Entry) -> None:
        """Adds a compressor.

        Raises:
            ValueError: when the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"a compressor named {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"no compressor is named {name!r}; the choices are: {', '.join(self.names)}")
        return self._entries[name]


BUILTIN: Mapping[str, Entry] = MappingProxyType(
    {"none": Entry(IdentityConfig, codec=IdentityCodec, rounds=IdentityRounds)}
)
"""The compressors that come with the package."""
