"""Names of compressors."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from megatron.base.errors import UserError
from megatron.compression.builtin import BUILTIN
from megatron.compression.identity import IdentityCodec, IdentityConfig
from megatron.compression.listing import list_names
from megatron.compression.points import EXPERT_POINTS, Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import named_points, read_spec, read_specs


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


@pytest.mark.parametrize("name", ["", "row sign", "row,sign", "RowSign"])
def test_a_name_that_no_spec_can_have_is_refused(name: str) -> None:
    """Specs are split at commas and spaces, and read in lower case."""
    with pytest.raises(ValueError, match=f"the name '{name}': use lower-case letters, digits and hyphens, such as"):
        Registry(BUILTIN).register(name, Registration(_Options, codec=IdentityCodec))


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
def test_a_point_accepts_the_advice_of_its_refusals(point: Point, name: str) -> None:
    """A refusal advises a lossy spec (an exact spec only instead of an exact compressor) and lists accepted names."""
    try:
        BUILTIN[name].check_serves(point, name)
    except UserError:
        with pytest.raises(UserError) as refused:
            read_spec(f"{point.value}={name}", Registry(BUILTIN), RunLength(1000))
        advice = re.search(rf"; use (\S+); {point.value} takes (.*)$", str(refused.value))
        assert advice is not None, refused.value
        advised, listed = advice.groups()
        assert _accepted(f"{point.value}={advised}")
        assert BUILTIN[advised.partition(",")[0]].identity == (name == "parameter-server")
        options = {"quantized-adam": ",warmup=10"}
        assert all(_accepted(f"{point.value}={other}{options.get(other, '')}") for other in listed.split(", "))


@pytest.mark.parametrize(("word", "fewest"), [("default", 8), ("aggressive", 4)])
def test_one_word_chooses_the_codecs_of_all_legs_of_experts(word: str, fewest: int) -> None:
    """The fewest bits go to the experts; options of every compressor may follow."""
    registry = Registry(BUILTIN)
    specs = read_specs([f"experts={word},warmup=3"], registry, RunLength(10))
    assert set(specs) == set(EXPERT_POINTS)
    bits = {point: getattr(spec.options, "bits", 16) for point, spec in specs.items()}
    assert bits[Point.EP_DISPATCH_FWD] == bits[Point.EP_COMBINE_BWD] == fewest
    assert bits[Point.EP_COMBINE_FWD] == bits[Point.EP_DISPATCH_BWD] == 2 * fewest
    assert {spec.activation.warmup_iters for spec in specs.values()} == {3}
    listed = next(line for line in list_names(registry).splitlines() if f"experts={word}" in line)
    assert read_specs(listed.split()[1:], registry, RunLength(10)) == read_specs(
        [f"experts={word}"], registry, RunLength(10)
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["experts=agressive"],
            "--compress experts=agressive: write experts=default or aggressive; the nearest is aggressive",
        ),
        (["experts=fixpoint"], "--compress experts=fixpoint: write experts=default or aggressive"),
        (["experts"], "--compress experts: write experts=default or aggressive"),
        (["experts=default", "ep-combine=cast"], "ep-combine-forward is given twice"),
        (["experts=default,bits=4"], "default sets bits; leave it out, or write a spec for each point"),
    ],
)
def test_a_wrong_word_for_experts_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_specs(texts, Registry(BUILTIN), RunLength(10))
    assert message in str(error.value)


def test_points_of_specs_for_several_points() -> None:
    experts = {point.value for point in EXPERT_POINTS}
    assert named_points(["experts=default", "DP-grad=cast"]) == {"dp-grad", *experts}
    assert named_points(["ep-combine=cast"]) == {"ep-combine-forward", "ep-combine-backward"}
