"""Promises of every registered compressor. A new compressor is tested once it is registered."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.compression.api import Codec, Payload, RoundCompressor
from megatron.compression.builtin import BUILTIN
from megatron.compression.contract import (
    check_compressor,
    check_feedback_of_messages,
    check_feedback_of_sums,
    check_memory,
    check_other_replicas,
    check_round_trip,
    check_state_of_messages,
    check_state_of_sums,
    check_strides,
    check_sum,
    noise,
    send,
)
from megatron.compression.error_feedback import MessageResidual, SumResidual
from megatron.compression.fixpoint import FixpointConfig
from megatron.compression.lockstep import run_lockstep
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from tests.support.combinations import in_turn, mark_repeats, pairwise

CODECS = sorted(name for name, entry in BUILTIN.items() if entry.codec is not None)
GATHERED = [name for name in CODECS if (BUILTIN[name].points or {Point.TP_FWD}) & {Point.TP_FWD, Point.PARAM_GATHER}]
ROUNDS = sorted(name for name, entry in BUILTIN.items() if entry.rounds is not None)
EXACT = frozenset({"none", "identity"})
"""Compressors that lose nothing."""

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (4, 1, 9), (2, 3, 4, 5), (257,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make_codec(name: str) -> Codec:
    entry = BUILTIN[name]
    assert entry.codec is not None
    return entry.codec(entry.config())


def make_rounds(name: str) -> RoundCompressor:
    entry = BUILTIN[name]
    assert entry.rounds is not None
    return entry.rounds(entry.config())


@pytest.mark.parametrize(("name", "shape", "dtype"), pairwise(CODECS, SHAPES, DTYPES), ids=str)
def test_messages(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Round trips, strided inputs, skipped steps and state across a checkpoint."""
    assert make_codec(name).traits.exact == (name in EXACT)
    check_round_trip(partial(make_codec, name), shape, dtype)
    check_strides(partial(make_codec, name), shape, dtype)
    check_state_of_messages(partial(make_codec, name), shape, dtype)


TOGETHER: list[dict[str, Any]] = [
    {"rotation": 8, "rotate_when": "outlier", "outlier_ratio": 1.2},
    {"bits": 2, "group": 8},
    {"bits": 3, "group": 8, "rounding": "stochastic"},
    {"bits": 2.4, "group": 8, "grid": "midrise", "rounding": "stochastic"},
    {"bits": 3.8, "group": 8, "grid": "minmax", "rotation": 16, "rotate_when": "outlier", "scale_dtype": "bf16"},
    {"bits": 4.5, "group": 16, "rotation": 8},
]
"""Options of quantized messages that need others."""


def variants(cls: type[Any]) -> list[Any]:
    """Options: the defaults; each option alone at its bounds (512 without an upper bound), at every choice and at a
    fraction between the bounds; and options that need each other."""
    instances = [cls(), *(cls(**options) for options in TOGETHER if issubclass(cls, FixpointConfig))]
    for field in field_options("", cls):
        bounds: Any = field.option
        values: Any = field.choices
        if field.is_switch:
            values = (False, True)
        elif not values:
            values = (bounds.minimum, 512 if bounds.maximum is None else bounds.maximum)
            if field.element is float and None not in values:
                values = (*values, 0.3 * bounds.minimum + 0.7 * values[1])
        for value in values:
            if value is None or (isinstance(field.default, str) and not isinstance(value, str)):
                continue
            with contextlib.suppress(UserError):
                instances.append(cls(**{field.name: value}))
    return list(dict.fromkeys(instances))


VARIANTS = [(name, options) for name in CODECS for options in variants(BUILTIN[name].config)]
FED = [(name, options) for name, options in VARIANTS if not BUILTIN[name].no_feedback]


class TestOwnership:
    """A codec's messages, inputs, states and results share no memory that anyone changes later.

    Callers may overwrite inputs and results, the network message buffers, and error feedback its residual. These tests
    overwrite all of them.
    """

    @pytest.mark.parametrize(("name", "options", "shape"), in_turn(VARIANTS, ((6, 2, 8), (40, 1, 16), (9, 5))), ids=str)
    def test_messages_survive_changes_of_inputs_and_buffers(
        self, name: str, options: Any, shape: tuple[int, ...]
    ) -> None:
        entry = BUILTIN[name]
        assert entry.codec is not None
        check_memory(partial(entry.codec, options), shape)

    @pytest.mark.parametrize(
        ("name", "options", "shape", "kind"),
        in_turn(FED, ((6, 2, 8), (40, 1, 16), (1, 3)), ("lazy", "lazy-mean")),
        ids=str,
    )
    def test_feedback_of_messages_conserves_the_inputs(
        self, name: str, options: Any, shape: tuple[int, ...], kind: MessageResidual
    ) -> None:
        """Outputs and residuals add up to the inputs, within and over steps; messages in flight do not change."""
        entry = BUILTIN[name]
        assert entry.codec is not None
        check_feedback_of_messages(partial(entry.codec, options), shape, kind)


@pytest.mark.parametrize(("name", "shape", "dtype"), pairwise(GATHERED, SHAPES, DTYPES), ids=str)
def test_gathered_messages(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = shape or (1,)  # a scalar has no first dimension to concatenate along
    codec = make_codec(name)
    xs = [noise(shape, dtype, seed) for seed in range(3)]
    wires = [codec.encode(x, CompressorState(), None).wire for x in xs]
    y = codec.decode_gathered(Payload(torch.cat(wires)), 3, xs[0].shape, dtype, CompressorState(), None)
    singly = [codec.decode(Payload(wire), xs[0].shape, dtype, CompressorState(), None) for wire in wires]
    assert torch.equal(y, torch.cat(singly))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "sharded"),
    pairwise(ROUNDS, SHAPES, [torch.float32, torch.float64], [False, True]),
    ids=str,
)
def test_sums(name: str, shape: tuple[int, ...], dtype: torch.dtype, sharded: bool) -> None:
    """All ranks get the sum of all reported contributions; skipped steps and state across a checkpoint."""
    check_sum(partial(make_rounds, name), shape, dtype, sharded, exact=name in EXACT)
    check_state_of_sums(partial(make_rounds, name), shape, dtype)


FED_ROUNDS = [
    (name, options)
    for name in ROUNDS
    if not BUILTIN[name].no_feedback
    for options in variants(BUILTIN[name].config)
    if getattr(options, "flush", "") != "mean"  # forgets by design
    if getattr(options, "merge", "") != "senders"  # exceeds the sum by design
]


SCHEDULED = ("min_rank", "window", "sample_every", "sample_share", "rule", "max_step", "warmup_ends", "stage_slack")
"""Options by which edgc chooses ranks between steps; a plain sum takes none of them."""


def changes_sums(options: Any) -> bool:
    """Whether options other than a seed and ``SCHEDULED`` differ from the defaults, or none does."""
    default = type(options)()
    unused = {name: getattr(default, name) for name in (*SCHEDULED, "seed") if hasattr(default, name)}
    return bool(options == default or replace(options, **unused) != default)


FED_SUMS = in_turn(FED_ROUNDS, ("local", "aggregate"))


@pytest.mark.parametrize(
    ("name", "options", "kind"), mark_repeats(FED_SUMS, [case for case in FED_SUMS if changes_sums(case[1])]), ids=str
)
def test_feedback_of_sums_conserves_the_inputs(name: str, options: Any, kind: SumResidual) -> None:
    """Also after a change of the number of replicas."""
    entry = BUILTIN[name]
    assert entry.rounds is not None
    check_feedback_of_sums(partial(entry.rounds, options), (2, 8, 6), kind)
    check_other_replicas(partial(entry.rounds, options), (2, 8, 6))


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_built_in_compressors_pass_what_plug_ins_are_checked_by(name: str) -> None:
    check_compressor(BUILTIN[name])


NON_FINITE = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_accept_non_finite_numbers_and_exact_codecs_keep_them(name: str) -> None:
    for bad, dtype in product(NON_FINITE, DTYPES):
        x = torch.tensor([1.0, bad, -2.0], dtype=dtype)
        y = send(make_codec(name), x, CompressorState(), CompressorState(), 0)
        if name in EXACT:
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ROUNDS)
def test_non_finite_numbers_stay_visible_in_sums(name: str) -> None:
    """The optimizer skips a step if a sum is not finite. Lossy sums are of fp32 or fp64 numbers."""
    dtypes = [dtype for dtype in DTYPES if name in EXACT or dtype.itemsize >= 4]
    for bad, dtype in product(NON_FINITE, dtypes):
        compressor = make_rounds(name)
        shape = (1, 1, 3) if compressor.traits.batched else (3,)
        xs = [torch.tensor([1.0, bad, -2.0], dtype=dtype).view(shape), torch.ones(shape, dtype=dtype)]
        total = run_lockstep(compressor, xs, [CompressorState(), CompressorState()])[0].total
        assert not torch.isfinite(total).all()
        if name in EXACT:
            expected = torch.tensor([2.0, bad, -1.0], dtype=dtype)
            torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)


def test_every_builtin_serves_something_and_has_default_options() -> None:
    for name, entry in BUILTIN.items():
        assert entry.codec is not None or entry.rounds is not None, name
        entry.config()
