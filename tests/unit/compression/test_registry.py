"""Names of compressors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron.compression.builtin import BUILTIN
from megatron.compression.identity import IdentityCodec, IdentityConfig
from megatron.compression.registry import Registration, Registry


@dataclass(frozen=True)
class _Options:
    rank: int = 4


def test_an_unknown_name_lists_the_choices() -> None:
    registry = Registry(BUILTIN)
    registry.register("zeta", Registration(_Options, codec=IdentityCodec))
    with pytest.raises(KeyError, match=r"'powersdg'.*choices are: .*topk, zeta"):
        registry["powersdg"]


def test_registering_adds_to_this_registry_alone() -> None:
    registry, other = Registry(BUILTIN), Registry(BUILTIN)
    entry = Registration(_Options, codec=IdentityCodec)
    registry.register("mine", entry)
    assert registry["mine"] is entry
    assert "mine" in registry.names
    assert "mine" not in other.names
    assert "mine" not in BUILTIN
    assert registry.names == sorted(registry.names)


def test_a_taken_name_is_refused() -> None:
    registry = Registry(BUILTIN)
    with pytest.raises(ValueError, match="'none' is registered already"):
        registry.register("none", Registration(IdentityConfig, codec=IdentityCodec))
    assert registry["none"] is BUILTIN["none"]


def test_the_builtin_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        BUILTIN["none"] = Registration(IdentityConfig)  # type: ignore[index]
