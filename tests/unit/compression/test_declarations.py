"""All declarations of a compressor are in its file, and no other file names it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.compression.api import Controller, RoundCompressor, SumTraits
from megatron.compression.builtin import BUILTIN, MODULES
from megatron.compression.edgc import EDGC, EDGCConfig
from megatron.compression.error_feedback import ErrorFeedback, ErrorFeedbackCodec
from megatron.compression.points import Point
from megatron.compression.quantized_adam import QuantizedAdam, QuantizedAdamConfig
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_spec

PACKAGE = Path(__file__).resolve().parents[3] / "megatron"
ALONE = ("edgc", "quantized_adam", "delta", "topk", "chunked_topk")
"""Compressors with special needs of the engines, which no other file may name."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _classes(path: Path) -> set[str]:
    return {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef)}


@cache
@cache
def _named(path: Path) -> set[str]:
    """Names used by the code of a file, prose aside."""
    names = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            names |= {alias.name for alias in node.names if path.name != "builtin.py"}
    return names


@pytest.mark.parametrize("name", ALONE)
def test_nothing_names_a_compressor_outside_its_file(name: str) -> None:
    source = PACKAGE / "compression" / f"{name}.py"
    assert f"megatron.compression.{name}" in {module.__name__ for module in MODULES}
    secret = _classes(source) | {f"megatron.compression.{name}"}
    assert len(secret) > 2
    listed = {"compression/builtin.py": {f"megatron.compression.{name}"}}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = str(path.relative_to(PACKAGE))
        if path != source:
            assert _named(path) & secret == listed.get(relative, set()), relative


def test_no_file_compares_the_name_of_a_compressor() -> None:
    """Engines read declarations such as ``Spec.identity``, which a plug-in can make as well."""
    secret = {*BUILTIN, "lazy", "lazy-reset"} - {"cast", "delta"}  # words with other meanings
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in ("error_feedback.py", "legacy.py"):
            continue  # a kind of residual, and switches of other systems
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute | ast.Name):
                compared = node.left.attr if isinstance(node.left, ast.Attribute) else node.left.id
                words = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                assert compared not in ("name", "feedback") or not words & secret, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("name", [name for name, entry in BUILTIN.items() if not entry.no_feedback])
def test_error_feedback_has_the_traits_of_its_compressor(name: str) -> None:
    entry = BUILTIN[name]
    if entry.rounds is not None:
        inner = entry.rounds(entry.config())
        assert ErrorFeedback(inner).traits == inner.traits
    if entry.codec is not None:
        codec = entry.codec(entry.config())
        assert ErrorFeedbackCodec(codec).traits == codec.traits


def test_a_misspelled_trait_is_an_error() -> None:
    with pytest.raises(TypeError, match="freeze_variance"):
        SumTraits(freeze_variance=True)  # type: ignore[call-arg]


def test_only_quantized_adam_and_error_feedback_finalize() -> None:
    finalizing = {name for name, entry in BUILTIN.items() if entry.rounds and entry.rounds(entry.config()).finalizes}
    assert finalizing == {"quantized-adam"}
    assert all(ErrorFeedback(entry.rounds(entry.config())).finalizes for entry in BUILTIN.values() if entry.rounds)


def test_a_controller_is_refused_where_gradients_are_not_reduced() -> None:
    class Tuned(EDGC):
        def controller(self) -> Controller:
            return super().controller()

    registry = Registry(BUILTIN)
    registry.register("tuned", Registration(EDGCConfig, rounds=Tuned))
    assert read_spec("dp-grad=tuned", registry, RunLength()).make_controller() is not None
    assert read_spec("embedding=tuned", registry, RunLength()).make_controller() is not None
    with pytest.raises(UserError, match="tp-forward: tuned is tuned by reduced gradients"):
        read_spec("tp-forward=tuned", registry, RunLength())


FLAGS: dict[str, Any] = {"optimizer": "adam", "adam_beta1": 0.9}


def test_quantized_adam_refuses_other_optimizers_and_betas() -> None:
    adam = QuantizedAdam(QuantizedAdamConfig())
    assert adam.check(Point.DP_GRAD, FLAGS) == ""
    assert "use --optimizer adam" in adam.check(Point.DP_GRAD, {**FLAGS, "optimizer": "sgd"})
    assert "write beta=0.8" in adam.check(Point.DP_GRAD, {**FLAGS, "adam_beta1": 0.8})


def test_quantized_adam_needs_a_warm_up_which_may_be_in_epochs() -> None:
    text = "dp-grad=quantized-adam,warmup=1epochs"
    assert read_spec(text, Registry(BUILTIN), RunLength()).activation.warms_up
    for wrong, why in (("", "add warmup=N"), (",warmup=0", "add warmup=N"), (",warmup=5,stages=first:1", "^stages: ")):
        with pytest.raises(UserError, match=why):
            read_spec(f"dp-grad=quantized-adam{wrong}", Registry(BUILTIN), RunLength())


class _Odd(RoundCompressor):
    def rounds(self, x: Any, state: Any, peers: Any) -> Any:
        raise NotImplementedError


def test_a_plain_compressor_declares_nothing() -> None:
    odd = _Odd()
    assert odd.traits == SumTraits()
    assert not odd.finalizes
    assert odd.controller() is None
    assert odd.tuned_limits() == {}
