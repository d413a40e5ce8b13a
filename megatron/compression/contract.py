"""Conformance checks of compressors against the interfaces in ``api.py``, on simulated ranks in a single process.

Tests of a plug-in call ``check_compressor``, which raises a ``CompressorFault`` that names each broken promise. The
tests of the built-in compressors run the same checks on many more inputs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import describe_failure
from megatron.compression.api import Codec, Payload, RoundCompressor, SampleKey
from megatron.compression.approximation import dense
from megatron.compression.error_feedback import (
    RESIDUAL,
    ErrorFeedback,
    ErrorFeedbackCodec,
    MessageResidual,
    SumResidual,
)
from megatron.compression.lockstep import run_lockstep
from megatron.compression.options import CompressorFault
from megatron.compression.points import Point
from megatron.compression.registry import Registration
from megatron.compression.results import NOT_DECODED, NOT_SUMMED, check_finite, check_fit
from megatron.compression.state import CompressorState

MESSAGE_SHAPES: tuple[tuple[int, ...], ...] = ((6, 2, 8), (40, 1, 16), (5, 3, 7))
"""Shapes of activations and their gradients: (sequence, samples, hidden)."""

GATHER_SHAPES: tuple[tuple[int, ...], ...] = ((257,), (64,))
"""Shapes of parameters in an all-gather."""

SUM_SHAPES = ((2, 12, 8), (1, 40, 16), (3, 5, 7))
"""Shapes of all-reduced tensors: stacks of matrices."""

MakeCodec = Callable[[], Codec]
MakeRounds = Callable[[], RoundCompressor]


def check_compressor(registration: Registration, options: Any = None) -> None:
    """Check the codec of a compressor, its round compressor, or both.

    Args:
        registration: the compressor's registration.
        options: an instance of the compressor's options class; default options if None.

    Raises:
        CompressorFault: with a line for each broken promise and the first input that breaks it.
    """
    options = registration.config() if options is None else options
    points = frozenset(p for p in Point if p.compressible) if registration.points is None else registration.points
    checks: list[tuple[str, str, Callable[[], None]]] = []  # promise, input, check
    if registration.codec is not None:
        make_codec: MakeCodec = partial(registration.codec, options)
        for shape in (
            *(MESSAGE_SHAPES if points - {Point.PARAM_GATHER} else ()),
            *(GATHER_SHAPES if Point.PARAM_GATHER in points else ()),
        ):
            for dtype in (torch.float32, torch.float64):
                case = f"a message of {shape} {dtype}"
                checks += [
                    ("round trip", case, partial(check_round_trip, make_codec, shape, dtype)),
                    ("any strides", case, partial(check_strides, make_codec, shape, dtype)),
                    ("state of messages", case, partial(check_state_of_messages, make_codec, shape, dtype)),
                ]
            case = f"a message of {shape}"
            checks.append(("separate memory", case, partial(check_memory, make_codec, shape)))
            if not registration.no_feedback:
                check = partial(check_feedback_of_messages, make_codec, shape, "lazy")
                checks.append(("error feedback of messages", case, check))
    if registration.rounds is not None:
        make_rounds: MakeRounds = partial(registration.rounds, options)
        sharded = bool(points & {Point.DP_GRAD, Point.TP_FWD, Point.TP_BWD})
        for shape in SUM_SHAPES:
            if make_rounds().traits.batched and not make_rounds().should_compress(shape[1:]):
                continue
            case = f"a sum of {shape}"
            for shares in (False, True) if sharded else (False,):
                check = partial(check_sum, make_rounds, shape, torch.float32, shares, registration.identity)
                checks.append(("sum", case, check))
            checks.append(("state of sums", case, partial(check_state_of_sums, make_rounds, shape, torch.float32)))
            if not registration.no_feedback:
                checks += [
                    ("error feedback of sums", case, partial(check_feedback_of_sums, make_rounds, shape, "local")),
                    ("change of replicas", case, partial(check_other_replicas, make_rounds, shape)),
                ]
    faults: dict[str, str] = {}
    for promise, case, run_check in checks:
        if promise in faults:
            continue
        try:
            run_check()
        except CompressorFault as fault:
            faults[promise] = f"{promise}, {case}: {fault}"
        except Exception as error:
            faults[promise] = f"{promise}, {case}: {describe_failure(error)}"
    if faults:
        raise CompressorFault("\n".join(faults.values()))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CompressorFault(message)


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Seeded Gaussian noise."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_key(codec: Codec, shape: Sequence[int], step: int) -> SampleKey:
    """Make a message key whose samples repeat every two steps."""
    count = max(shape[1], 1) if len(shape) > 1 else 1
    key = SampleKey(range(step % 2 * count, (step % 2 + 1) * count))
    if codec.traits.tokens:
        key.vocab_size = 11
        tokens = torch.arange(step, step + torch.Size(shape[:-1]).numel()) % key.vocab_size
        key.tokens_sb = tokens.view(tuple(shape[:-1]))
    return key


def read_values(state: CompressorState) -> dict[str, Any]:
    """Read all values of a state, including staged values, in a form that ``==`` compares."""
    tensors = {name: state.get(name) for name in state.tensors.keys() | state._staged_tensors.keys()}
    tensors |= {name: x for name, x in state.export_tensors().items() if name not in tensors}
    counters = {name: state.count(name) for name in state.counters.keys() | state._staged_counters.keys()}
    return {"counters": counters, "tensors": {n: (t.dtype, t.tolist()) for n, t in tensors.items() if t is not None}}


def save_and_load(state: CompressorState) -> CompressorState:
    """Save a state to a file and load it again, without pickled classes, as a checkpoint does."""
    file = io.BytesIO()
    torch.save({"tensors": state.export_tensors(), "counters": state.counters}, file)
    file.seek(0)
    return CompressorState(**torch.load(file, weights_only=True))


def send(codec: Codec, x: Tensor, sender: CompressorState, receiver: CompressorState, key: Hashable) -> Tensor:
    """Encode ``x``, copy the message to the receiver's buffer, and decode it.

    Raises:
        CompressorFault: when buffer and message differ in shape or dtype, are not contiguous, or have a wrong
            ``nbytes``.
    """
    payload = codec.encode(x, sender, key)
    received = codec.empty_payload(x.shape, x.dtype, x.device, receiver, key)
    check_fit(payload, received)
    received.wire.copy_(payload.wire)
    decoded = codec.decode(received, x.shape, x.dtype, receiver, key)
    if bool(torch.isfinite(x).all()):
        check_finite(decoded, NOT_DECODED)
    return decoded


def check_round_trip(make: MakeCodec, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check that messages fit the receiver's buffer and decode to finite tensors, and that inputs do not change."""
    codec, ends = make(), (CompressorState(), CompressorState())
    for step in range(3):
        x = noise(shape, dtype, step % 2)
        original = x.clone()
        y = send(codec, x, *ends, make_key(codec, shape, step))
        same_kind = (y.shape, y.dtype) == (x.shape, x.dtype)
        _require(same_kind, f"decode returns {tuple(y.shape)} {y.dtype} for {tuple(x.shape)} {x.dtype}")
        _require(torch.equal(x, original), "encode changes its input")
        _require(not codec.traits.exact or torch.equal(y, x), "CodecTraits.exact is set, but decoded numbers differ")
        for state in ends:
            state.commit()
        tensors_of_ends = [state.export_tensors() for state in ends]
        for shared in codec.traits.shared:
            held_by_end = [shared in tensors for tensors in tensors_of_ends]
            _require(held_by_end[0] == held_by_end[1], f"CodecTraits.shared: only one end holds {shared}")
            if all(held_by_end):
                equal = torch.equal(tensors_of_ends[0][shared], tensors_of_ends[1][shared])
                _require(equal, f"CodecTraits.shared: the ends hold different {shared}")


def check_strides(make: MakeCodec, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check that a strided tensor and its contiguous copy decode to the same values."""
    x = noise((*shape, 2), dtype, 0)[..., 1]
    codecs = make(), make()
    ends = [CompressorState() for _ in range(4)]
    y = send(codecs[0], x, ends[0], ends[1], make_key(codecs[0], shape, 0))
    y_contiguous = send(codecs[1], x.contiguous(), ends[2], ends[3], make_key(codecs[1], shape, 0))
    _require(torch.equal(y, y_contiguous), "a strided tensor and its contiguous copy decode to different values")


def check_state_of_messages(make: MakeCodec, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check that a skipped step does not change the state, and that a resumed run sends the same messages."""
    codec = make()
    sender, receiver = CompressorState(), CompressorState()
    key = make_key(codec, shape, 0)
    send(codec, noise(shape, dtype, 0), sender, receiver, key)
    sender.commit()
    receiver.commit()
    resumed = save_and_load(sender), save_and_load(receiver)
    x = noise(shape, dtype, 1)
    skipped = send(codec, x, sender, receiver, key)
    sender.rollback()
    receiver.rollback()
    repeated = send(codec, x, sender, receiver, key)
    _require(torch.equal(skipped, repeated), f"a skipped step changes the state{_STAGED}")
    other = send(make(), x, *resumed, key)
    _require(torch.equal(repeated, other), f"a run resumed from a checkpoint sends other messages{_STATE_ADVICE}")
    equal = read_values(sender) == read_values(resumed[0])
    _require(equal, f"a run resumed from a checkpoint has a different state{_STATE_ADVICE}")


_STAGED = "; write state with state.stage, and do not modify tensors returned by state.get"
_STATE_ADVICE = "; keep persistent values in the state, not in the compressor"


def check_memory(make: MakeCodec, shape: Sequence[int]) -> None:
    """Overwrite messages, inputs and results in turn, to check that they and the states share no memory."""
    reference, tested = make(), make()
    ends = [CompressorState() for _ in range(4)]
    for step in range(4):
        key, x = make_key(reference, shape, step), noise(shape, torch.float32, step)
        expected = send(reference, x, ends[0], ends[1], key)
        x_copy = x.clone()
        payload = tested.encode(x_copy, ends[2], key)
        sent = payload.wire.clone()
        samples, approximation = tested.traits.samples or tested.traits.tokens, None
        if not samples:
            approximation = dense(tested.reconstruct(payload, x_copy, ends[2], key), x_copy)
        if not tested.traits.exact:
            x_copy.fill_(torch.nan)
        _require(torch.equal(payload.wire, sent), "the message shares memory with the input")
        received = tested.empty_payload(x.shape, x.dtype, x.device, ends[3], key)
        received.wire.copy_(sent)
        payload.wire.view(torch.uint8).fill_(255)
        result = tested.decode(received, x.shape, x.dtype, ends[3], key)
        _require(torch.equal(result, expected), "the state or the result shares memory with a message or an input")
        equal = approximation is None or torch.equal(approximation, expected)
        _require(equal, "reconstruct and decode return different values")
        result.fill_(torch.nan)
        received.wire.view(torch.uint8).fill_(255)
        for state in ends:
            state.commit()


def check_feedback_of_messages(make: MakeCodec, shape: Sequence[int], kind: MessageResidual) -> None:
    """Check that decoded messages and the residual add up to the inputs, and that messages in flight do not change."""
    codec, sender, receiver = ErrorFeedbackCodec(make(), kind), CompressorState(), CompressorState()

    def mean(y: Tensor) -> Tensor:
        return y.reshape(-1, shape[-1]).mean(dim=0) if kind == "lazy-mean" else y

    inputs, decoded = torch.zeros(tuple(shape)), torch.zeros(tuple(shape))
    for step in range(3):
        in_flight = []
        for message in range(2):
            x = noise(shape, torch.float32, 2 * step + message)
            inputs += x
            payload = codec.encode(x, sender, message)
            in_flight.append((payload, payload.wire.clone()))
            decoded += codec.decode(Payload(payload.wire.clone()), x.shape, x.dtype, receiver, message)
        check_finite(decoded, NOT_DECODED)
        unchanged = all(torch.equal(payload.wire, sent) for payload, sent in in_flight)
        _require(unchanged, "a message changes when the next message is encoded")
        residual = sender.get(RESIDUAL)
        equal = residual is not None and torch.allclose(mean(decoded) + residual, mean(inputs), rtol=1e-5, atol=1e-4)
        _require(equal, f"the decoded messages and the residual ({kind}) do not add up to the inputs")
        sender.commit()


def make_inputs(compressor: RoundCompressor, shape: Sequence[int], dtype: torch.dtype, seeds: range) -> list[Tensor]:
    """Make an input for each seed; batched compressors get stacks of matrices."""
    if compressor.traits.batched and len(shape) < 3:
        shape = (2, *shape) if len(shape) == 2 else (1, *(shape or (1,)), 1)
    return [noise(shape, dtype, seed) for seed in seeds]


def _full_sum(totals: Sequence[Tensor], shares: bool) -> Tensor:
    """The complete sum, which is finite; with ``shares``, concatenated from the ranks' shares."""
    total = totals[0]
    if shares:
        parts = [t.reshape(-1).chunk(len(totals))[r] if t.numel() else t.reshape(-1) for r, t in enumerate(totals)]
        total = torch.cat(parts).view(total.shape)
    check_finite(total, NOT_SUMMED)
    _require(shares or all(torch.equal(each, total) for each in totals), "the ranks have different sums")
    return total


def check_sum(
    make: MakeRounds, shape: Sequence[int], dtype: torch.dtype, sharded: bool = False, exact: bool = False
) -> None:
    """Check that all ranks get the same sum, and that the ranks' ``Aggregate.local`` add up to it."""
    compressor, ranks = make(), 3
    states = [CompressorState() for _ in range(ranks)]
    for step in range(3):
        xs = make_inputs(compressor, shape, dtype, range(ranks * step, ranks * (step + 1)))
        inputs = torch.stack(xs)
        results = run_lockstep(compressor, xs, states, sharded)
        total = _full_sum([result.total for result in results], sharded and inputs[0].numel() % ranks == 0)
        same_kind = (total.shape, total.dtype) == (inputs[0].shape, dtype)
        _require(same_kind, f"the sum is {tuple(total.shape)} {total.dtype} for {tuple(inputs[0].shape)} {dtype}")
        same_shape = all(result.local.shape == total.shape for result in results)
        _require(same_shape, "Aggregate.local and Aggregate.total have different shapes")
        tolerance = 1e-5 if dtype is torch.float32 else 1e-12
        contributed = torch.stack([result.local for result in results]).sum(dim=0)
        equal = torch.allclose(total, contributed, rtol=tolerance, atol=tolerance)
        _require(equal, "the ranks' Aggregate.local do not add up to Aggregate.total")
        same_sum = not exact or torch.equal(total, inputs.sum(dim=0))
        _require(same_sum, "Registration.identity is set, but the sum is not exact")
        for state in states:
            state.commit()


def check_state_of_sums(make: MakeRounds, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check that a skipped step does not change the state, and that a resumed run computes the same sums."""
    compressor, states = make(), [CompressorState(), CompressorState()]
    run_lockstep(compressor, make_inputs(compressor, shape, dtype, range(2)), states)
    for state in states:
        state.commit()
    resumed = [save_and_load(state) for state in states]
    xs = make_inputs(compressor, shape, dtype, range(10, 12))
    skipped = run_lockstep(compressor, [x.clone() for x in xs], states, step_taken=False)[0].total.clone()
    for state in states:
        state.rollback()
    repeated = run_lockstep(compressor, [x.clone() for x in xs], states)[0].total.clone()
    check_finite(repeated, NOT_SUMMED)
    _require(torch.equal(skipped, repeated), f"a skipped step changes the state{_STAGED}")
    other = run_lockstep(make(), [x.clone() for x in xs], resumed)[0].total
    _require(torch.equal(repeated, other), f"a run resumed from a checkpoint computes a different sum{_STATE_ADVICE}")
    equal = [read_values(state) for state in states] == [read_values(state) for state in resumed]
    _require(equal, f"a run resumed from a checkpoint has a different state{_STATE_ADVICE}")


class _FeedbackRun:
    """Steps with error feedback, with the exact and the compressed sums of all steps."""

    def __init__(self, make: MakeRounds, shape: Sequence[int], kind: SumResidual) -> None:
        self.compressor = ErrorFeedback(make(), kind)
        self.shape = tuple(shape)
        self.exact_sum = torch.zeros(self.shape, dtype=torch.float64)
        self.compressed_sum = torch.zeros(self.shape, dtype=torch.float64)

    def step(self, seed: int, states: Sequence[CompressorState]) -> None:
        """Run a step and commit its state."""
        xs = [noise(self.shape, torch.float64, seed + rank) for rank in range(len(states))]
        self.exact_sum += torch.stack(xs).sum(dim=0)
        total = _full_sum([result.total for result in run_lockstep(self.compressor, xs, states)], False)
        self.compressed_sum += total
        for state in states:
            if self.compressor.traits.observes:
                self.compressor.observe(total.clone(), state)
            state.commit()

    def check_sums(self, states: Sequence[CompressorState], when: str) -> None:
        """Check that compressed sums and residuals add up to the exact sums."""
        residual_sum = torch.stack([state.tensors[RESIDUAL] for state in states]).sum(dim=0)
        equal = torch.allclose(self.compressed_sum + residual_sum, self.exact_sum, rtol=1e-5, atol=1e-4)
        _require(equal, f"{when}, sums and residuals do not add up to the inputs: is Aggregate.local correct?")


def check_feedback_of_sums(make: MakeRounds, shape: Sequence[int], kind: SumResidual) -> None:
    """Check error feedback over six steps with three ranks."""
    run, states = _FeedbackRun(make, shape, kind), [CompressorState() for _ in range(3)]
    for step in range(6):
        run.step(3 * step, states)
    run.check_sums(states, "over six steps")


def check_other_replicas(make: MakeRounds, shape: Sequence[int]) -> None:
    """Check that nothing is lost when a run resumes with a different number of replicas.

    Each new replica gets an equal share of the sum of all residuals; other state is copied from the first replica.
    """
    run, states = _FeedbackRun(make, shape, "local"), [CompressorState() for _ in range(4)]
    for step in range(3):
        run.step(4 * step, states)
    residual_share = torch.stack([state.tensors[RESIDUAL] for state in states]).sum(dim=0) / 2
    resumed = [save_and_load(states[0]) for _ in range(2)]
    for state in resumed:
        state.tensors[RESIDUAL] = residual_share.clone()
    for step in range(3):
        run.step(100 + 2 * step, resumed)
    run.check_sums(resumed, "after a change of the number of replicas")
