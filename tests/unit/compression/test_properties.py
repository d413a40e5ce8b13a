"""What every registered compressor promises. A new one is picked up by being registered."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.compression.api import Codec, Payload, RoundCompressor
from megatron.compression.approximation import dense
from megatron.compression.builtin import BUILTIN
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback, ErrorFeedbackCodec, MessageResidual
from megatron.compression.fixpoint import FixpointConfig
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from tests.support.lockstep import run_lockstep

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


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def for_rounds(
    compressor: RoundCompressor, shape: tuple[int, ...], dtype: torch.dtype, seeds: range
) -> tuple[tuple[int, ...], list[Tensor]]:
    """One input for each seed, and their shape: stacks of matrices for compressors that take those."""
    if compressor.traits.batched and len(shape) < 3:
        shape = (2, *shape) if len(shape) == 2 else (1, *(shape or (1,)), 1)
    return shape, [noise(shape, dtype, seed) for seed in seeds]


def contents(state: CompressorState) -> dict[str, Any]:
    """Everything that a state holds, staged values included, comparable with ``==``."""
    tensors = {name: state.get(name) for name in state.tensors.keys() | state._staged_tensors.keys()}
    tensors |= {name: x for name, x in state.portable().items() if name not in tensors}
    counters = {name: state.count(name) for name in state.counters.keys() | state._staged_counters.keys()}
    return {"counters": counters, "tensors": {n: (t.dtype, t.tolist()) for n, t in tensors.items() if t is not None}}


def saved_and_loaded(state: CompressorState) -> CompressorState:
    """Through a file of plain types, as a checkpoint does it."""
    file = io.BytesIO()
    torch.save({"tensors": state.portable(), "counters": state.counters}, file)
    file.seek(0)
    return CompressorState(**torch.load(file, weights_only=True))


def send(codec: Codec, x: Tensor, sender: CompressorState, receiver: CompressorState, key: object) -> Tensor:
    """One message from one end to the other, through bytes that the receiver allocated."""
    payload = codec.encode(x, sender, key)
    arrived = codec.empty_payload(x.shape, x.dtype, x.device, receiver, key)
    assert (arrived.wire.shape, arrived.wire.dtype) == (payload.wire.shape, payload.wire.dtype)
    assert payload.wire.is_contiguous()
    assert arrived.wire.is_contiguous()
    assert payload.nbytes == arrived.nbytes
    arrived.wire.copy_(payload.wire)
    return codec.decode(arrived, x.shape, x.dtype, receiver, key)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
class TestCodec:
    def test_round_trip(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        codec, ends = make_codec(name), (CompressorState(), CompressorState())
        for step in range(3):
            x = noise(shape, dtype, step % 2)
            given = x.clone()
            y = send(codec, x, *ends, ("sample", step % 2))
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert torch.equal(x, given), "encode changed its input"
            assert torch.isfinite(y).all()
            if name in EXACT:
                assert torch.equal(y, x)
            for state in ends:
                state.commit()
            for shared in codec.traits.shared:
                assert torch.equal(*(state.portable()[shared] for state in ends))

    def test_strided_input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = noise((*shape, 2), dtype, 0)[..., 1]
        y = send(make_codec(name), x, CompressorState(), CompressorState(), 0)
        dense = send(make_codec(name), x.contiguous(), CompressorState(), CompressorState(), 0)
        assert torch.equal(y, dense)

    def test_determinism_and_state_across_a_checkpoint(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """An interrupted run sends the same bytes as one that goes on; a skipped step leaves no trace."""
        codec = make_codec(name)
        sender, receiver = CompressorState(), CompressorState()
        send(codec, noise(shape, dtype, 0), sender, receiver, 0)
        sender.commit()
        receiver.commit()
        resumed = saved_and_loaded(sender), saved_and_loaded(receiver)
        x = noise(shape, dtype, 1)
        skipped = send(codec, x, sender, receiver, 0)
        sender.rollback()
        receiver.rollback()
        again = send(codec, x, sender, receiver, 0)
        other = send(make_codec(name), x, *resumed, 0)
        assert torch.equal(skipped, again)
        assert torch.equal(again, other)
        assert contents(sender) == contents(resumed[0])


TOGETHER: list[dict[str, Any]] = [
    {"rotation": 8, "rotate_when": "outlier", "outlier_ratio": 1.2},
    {"bits": 2, "group": 8},
    {"bits": 3, "group": 8, "rounding": "stochastic"},
    {"bits": 2.4, "group": 8, "grid": "midrise", "rounding": "stochastic"},
    {"bits": 3.8, "group": 8, "grid": "minmax", "rotation": 16, "rotate_when": "outlier", "scale_dtype": "bf16"},
    {"bits": 4.5, "group": 16, "rotation": 8},
]
"""Options of quantized messages that do something only with others."""


def variants(cls: type[Any]) -> list[Any]:
    """Options classes' instances: the defaults; each option alone at its bounds, a large rank, every choice, and a
    number between the bounds that has a fraction; and options that need each other."""
    found = [cls(), *(cls(**options) for options in TOGETHER if issubclass(cls, FixpointConfig))]
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
                found.append(cls(**{field.name: value}))
    return list(dict.fromkeys(found))


VARIANTS = [(f"{name} {options}", name, options) for name in CODECS for options in variants(BUILTIN[name].config)]
FED = [variant for variant in VARIANTS if not BUILTIN[variant[1]].no_feedback]


class TestOwnership:
    """Of a codec's messages, inputs, states and results, no two share memory that anyone changes later.

    Whoever holds one of them may overwrite it: the caller its input and what was decoded, the network the buffers of
    messages, error feedback its residual. Here everybody does, at once.
    """

    @pytest.mark.parametrize("shape", [(6, 2, 8), (40, 1, 16), (9, 5)], ids=str)
    @pytest.mark.parametrize(("name", "options"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS])
    def test_messages_survive_what_their_holders_do(self, name: str, options: Any, shape: tuple[int, ...]) -> None:
        entry = BUILTIN[name]
        assert entry.codec is not None
        calm, rough = entry.codec(options), entry.codec(options)
        ends = [CompressorState() for _ in range(4)]
        for step in range(4):
            key, x = ("sample", step % 2), noise(shape, torch.float32, step)
            wanted = send(calm, x, ends[0], ends[1], key)
            given = x.clone()
            payload = rough.encode(given, ends[2], key)
            sent = payload.wire.clone()
            expected = (
                dense(rough.reconstruct(payload, given, ends[2], key), given) if not rough.traits.samples else None
            )
            if not rough.traits.exact:
                given.fill_(torch.nan)
            assert torch.equal(payload.wire, sent), "the message lives in the input"
            arrived = rough.empty_payload(x.shape, x.dtype, x.device, ends[3], key)
            arrived.wire.copy_(sent)
            payload.wire.view(torch.uint8).fill_(255)
            got = rough.decode(arrived, x.shape, x.dtype, ends[3], key)
            assert torch.equal(got, wanted)
            if expected is not None:
                assert torch.equal(expected, wanted)
            got.fill_(torch.nan)
            arrived.wire.view(torch.uint8).fill_(255)
            for state in ends:
                state.commit()

    @pytest.mark.parametrize("kind", ["lazy", "lazy-mean"])
    @pytest.mark.parametrize("shape", [(6, 2, 8), (40, 1, 16), (1, 3)], ids=str)
    @pytest.mark.parametrize(("name", "options"), [v[1:] for v in FED], ids=[v[0] for v in FED])
    def test_feedback_conserves_what_was_meant(
        self, name: str, options: Any, shape: tuple[int, ...], kind: MessageResidual
    ) -> None:
        """What was decoded and what is left make what was meant, over messages of one step and of several; messages
        still under way do not change."""
        entry = BUILTIN[name]
        assert entry.codec is not None
        codec, sender, receiver = ErrorFeedbackCodec(entry.codec(options), kind), CompressorState(), CompressorState()
        meant, decoded = torch.zeros(shape), torch.zeros(shape)
        for step in range(3):
            under_way = []
            for message in range(2):
                x = noise(shape, torch.float32, 2 * step + message)
                meant += x
                payload = codec.encode(x, sender, message)
                under_way.append((payload, payload.wire.clone()))
                decoded += codec.decode(Payload(payload.wire.clone()), x.shape, x.dtype, receiver, message)
            assert all(torch.equal(payload.wire, sent) for payload, sent in under_way)
            residual = sender.get(RESIDUAL)
            assert residual is not None
            over = (lambda y: y.reshape(-1, shape[-1]).mean(dim=0)) if kind == "lazy-mean" else (lambda y: y)
            torch.testing.assert_close(over(decoded) + residual, over(meant), rtol=1e-5, atol=1e-4)
            sender.commit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_messages(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = shape or (1,)  # a scalar has no first dimension to concatenate along
    codec = make_codec(name)
    xs = [noise(shape, dtype, seed) for seed in range(3)]
    wires = [codec.encode(x, CompressorState(), None).wire for x in xs]
    y = codec.decode_gathered(Payload(torch.cat(wires)), 3, xs[0].shape, dtype, CompressorState(), None)
    singly = [codec.decode(Payload(wire), xs[0].shape, dtype, CompressorState(), None) for wire in wires]
    assert torch.equal(y, torch.cat(singly))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROUNDS)
class TestRounds:
    def test_sum(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sharded: bool) -> None:
        """All ranks get one sum, and it is the sum of what each says it contributed (residual conservation)."""
        ranks = 3
        compressor = make_rounds(name)
        states = [CompressorState() for _ in range(ranks)]
        for step in range(3):
            shape, xs = for_rounds(compressor, shape, dtype, range(ranks * step, ranks * (step + 1)))
            inputs = [x.clone() for x in xs]
            aggregates = run_lockstep(compressor, xs, states, sharded)
            shares = sharded and xs[0].numel() % ranks == 0
            total = self._assemble([a.total for a in aggregates], shares)
            assert (total.shape, total.dtype) == (shape, dtype)
            locals_ = [a.local for a in aggregates]
            assert all(x.shape == torch.Size(shape) for x in locals_)
            tolerance = 1e-5 if dtype is torch.float32 else 1e-12
            torch.testing.assert_close(total, torch.stack(locals_).sum(dim=0), rtol=tolerance, atol=tolerance)
            if name in EXACT:
                assert torch.equal(total, torch.stack(inputs).sum(dim=0))
            for state in states:
                state.commit()

    @staticmethod
    def _assemble(totals: list[Tensor], shares: bool) -> Tensor:
        """The sum, put together from the ranks' shares where each has only its own."""
        if not shares:
            assert all(torch.equal(total, totals[0]) for total in totals)
            return totals[0]
        parts = [t.reshape(-1).chunk(len(totals))[r] if t.numel() else t.reshape(-1) for r, t in enumerate(totals)]
        return torch.cat(parts).view(totals[0].shape)

    def test_determinism_and_state_across_a_checkpoint(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sharded: bool
    ) -> None:
        compressor = make_rounds(name)
        states = [CompressorState() for _ in range(2)]
        run_lockstep(compressor, for_rounds(compressor, shape, dtype, range(2))[1], states)
        for state in states:
            state.commit()
        resumed = [saved_and_loaded(state) for state in states]
        xs = for_rounds(compressor, shape, dtype, range(10, 12))[1]
        skipped = run_lockstep(compressor, copy.deepcopy(xs), states, taken=False)[0].total.clone()
        for state in states:
            state.rollback()
        again = run_lockstep(compressor, copy.deepcopy(xs), states)[0].total.clone()
        other = run_lockstep(make_rounds(name), copy.deepcopy(xs), resumed)[0].total
        assert torch.equal(skipped, again)
        assert torch.equal(again, other)
        assert [contents(state) for state in states] == [contents(state) for state in resumed]


FED_ROUNDS = [
    (f"{name} {options}", name, options)
    for name in ROUNDS
    if not BUILTIN[name].no_feedback
    for options in variants(BUILTIN[name].config)
    if getattr(options, "flush", "") != "mean"  # forgets on purpose
]


@pytest.mark.parametrize("kind", ["local", "aggregate"])
@pytest.mark.parametrize(("name", "options"), [v[1:] for v in FED_ROUNDS], ids=[v[0] for v in FED_ROUNDS])
def test_feedback_of_sums_conserves_what_was_meant(name: str, options: Any, kind: Any) -> None:
    """Over the steps, what all ranks meant is what was summed and what is left on them, whatever the options are."""
    entry, ranks, shape = BUILTIN[name], 3, (2, 8, 6)
    assert entry.rounds is not None
    compressor = ErrorFeedback(entry.rounds(options), kind)
    states = [CompressorState() for _ in range(ranks)]
    meant, summed = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(6):
        xs = [noise(shape, torch.float64, ranks * step + rank) for rank in range(ranks)]
        meant += sum(xs)
        totals = [aggregate.total for aggregate in run_lockstep(compressor, xs, states)]
        assert all(torch.equal(total, totals[0]) for total in totals)
        summed += totals[0]
        if compressor.traits.observes:
            for state in states:
                compressor.observe(totals[0].clone(), state)
        for state in states:
            state.commit()
    left = sum((state.tensors[RESIDUAL] for state in states), torch.zeros(shape, dtype=torch.float64))
    torch.testing.assert_close(summed + left, meant, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestNonFinite:
    @pytest.mark.parametrize("name", CODECS)
    def test_codecs_do_not_fail_and_exact_ones_hide_nothing(self, name: str, dtype: torch.dtype, bad: float) -> None:
        x = torch.tensor([1.0, bad, -2.0], dtype=dtype)
        y = send(make_codec(name), x, CompressorState(), CompressorState(), 0)
        if name in EXACT:
            torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("name", ROUNDS)
    def test_sums_do_not_fail_and_hide_nothing(self, name: str, dtype: torch.dtype, bad: float) -> None:
        """The optimizer skips a step by what it finds in the sums."""
        if name not in EXACT and dtype.itemsize < 4:
            dtype = torch.float32  # what lossy sums are given
        compressor = make_rounds(name)
        shape = (1, 1, 3) if compressor.traits.batched else (3,)
        xs = [torch.tensor([1.0, bad, -2.0], dtype=dtype).view(shape), torch.ones(shape, dtype=dtype)]
        total = run_lockstep(compressor, xs, [CompressorState(), CompressorState()])[0].total
        assert not torch.isfinite(total).all()
        if name in EXACT:
            wanted = torch.tensor([2.0, bad, -1.0], dtype=dtype)
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)


def test_every_builtin_serves_something_and_has_default_options() -> None:
    for name, entry in BUILTIN.items():
        assert entry.codec is not None or entry.rounds is not None, name
        entry.config()
