"""Names of compressors."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.identity import IdentityCodec, IdentityConfig
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_spec


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


POINTS = [point for point in Point if point.compressible]


def _accepted(spec: str) -> bool:
    try:
        read_spec(spec, Registry(BUILTIN), RunLength(1000))
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(BUILTIN))
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.value)
def test_a_point_takes_what_its_refusals_advise(point: Point, name: str) -> None:
    """Another spec that does something there, and every name that the refusal lists."""
    try:
        BUILTIN[name].check(point, name)
    except UserError:
        with pytest.raises(UserError) as refused:
            read_spec(f"{point.value}={name}", Registry(BUILTIN), RunLength(1000))
        found = re.search(rf"; use (\S+); {point.value} takes (.*)$", str(refused.value))
        assert found is not None, refused.value
        advised, listed = found.groups()
        assert _accepted(f"{point.value}={advised}")
        # Only what is exact itself is replaced by nothing.
        assert BUILTIN[advised.partition(",")[0]].identity == (name == "parameter-server")
        options = {"quantized-adam": ",warmup=10"}
        assert all(_accepted(f"{point.value}={other}{options.get(other, '')}") for other in listed.split(", "))
