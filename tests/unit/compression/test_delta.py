"""Delta messages against a reference loop, evictions in lockstep, receives posted early."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.base.errors import UserError
from megatron.compression.delta import DeltaCodec, DeltaConfig
from megatron.compression.fixpoint import FixpointConfig, Quantizer
from megatron.compression.row_store import DamagedRowError, RowFileError, RowStore
from megatron.compression.sample_cache import SampleCache
from megatron.compression.state import CompressorState

S, H = 6, 16


def _activation(samples: tuple[int, ...], step: int) -> Tensor:
    """Activations of samples with a slow drift, (s, b, h) in fp32."""
    rows = []
    for sample in samples:
        base = torch.randn((S, H), generator=torch.Generator().manual_seed(sample))
        drift = torch.randn((S, H), generator=torch.Generator().manual_seed(1000 * sample + step))
        rows.append(base + 0.01 * drift)
    return torch.stack(rows, dim=1)


def _same(a: CompressorState, b: CompressorState) -> bool:
    sender, receiver = a.export_tensors(), b.export_tensors()
    return sender.keys() == receiver.keys() and all(torch.equal(sender[name], receiver[name]) for name in sender)


def test_delta_messages_match_a_reference_loop() -> None:
    """m <- x at the first visit, in fp32; then m <- m + Q(x - m)."""
    options = {"bits": 3, "scale": "channel", "grid": "asymmetric"}
    codec = DeltaCodec(DeltaConfig(first_bits=32, cache_dtype="fp32", **options))  # type: ignore[arg-type]
    quantizer = Quantizer(FixpointConfig(**options))  # type: ignore[arg-type]
    ends = CompressorState(), CompressorState()
    memory: dict[int, Tensor] = {}
    for step in range(12):
        samples = ((3 * step) % 8, (3 * step + 1) % 8)
        x = _activation(samples, step)
        payload = codec.encode(x, ends[0], samples)
        room = codec.empty_payload(x.shape, x.dtype, x.device, ends[1], samples)
        assert room.wire.shape == payload.wire.shape
        got = codec.decode(payload, x.shape, x.dtype, ends[1], samples)
        for column, sample in enumerate(samples):
            expected = x[:, column]
            if sample in memory:
                difference = expected - memory[sample]
                expected = memory[sample] + quantizer.decode(quantizer.encode(difference, None), difference.shape)
            memory[sample] = expected
            assert torch.equal(got[:, column], expected)
        for state in ends:
            state.commit()
        assert _same(*ends)


@pytest.mark.parametrize("cache_bits", [0, 4])
@pytest.mark.parametrize("capacity", [1, 5, 9])
def test_both_ends_stay_equal_through_evictions_and_skipped_steps(capacity: int, cache_bits: int) -> None:
    """Receives are posted before earlier messages are decoded."""
    codec = DeltaCodec(DeltaConfig(bits=4, cache=capacity, cache_bits=cache_bits))
    ends = CompressorState(), CompressorState()
    generator = random.Random(capacity)
    errors = []
    for step in range(200):
        keys = [tuple(generator.sample(range(12), 2)) for _ in range(3)]
        xs = [_activation(key, step) for key in keys]
        payloads = [codec.encode(x, ends[0], key) for x, key in zip(xs, keys, strict=True)]
        rooms = [codec.empty_payload(x.shape, x.dtype, x.device, ends[1], k) for x, k in zip(xs, keys, strict=True)]
        for x, key, payload, room in zip(xs, keys, payloads, rooms, strict=True):
            room.wire.copy_(payload.wire)
            got = codec.decode(room, x.shape, x.dtype, ends[1], key)
            errors.append(float((got - x).norm() / x.norm()))
        for state in ends:
            if step % 7 == 5:
                state.rollback()
            else:
                state.commit()
        assert _same(*ends), step
        cache = ends[0].cache("samples", capacity)
        assert len(cache) <= capacity
        assert len(cache._rows) == len(cache)
    assert max(errors) < 0.2
    assert np.mean(errors[300:]) < (0.02 if cache_bits == 0 else 0.1)


def test_a_skipped_step_leaves_no_trace() -> None:
    codec = DeltaCodec(DeltaConfig(cache=2))
    state = CompressorState()
    codec.encode(_activation((1, 2), 0), state, (1, 2))
    state.commit()
    before = state.export_tensors()
    bad = _activation((3, 1), 1)
    bad[0, 1, 0] = torch.inf
    codec.encode(bad, state, (3, 1))
    state.rollback()
    after = state.export_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


def test_differences_are_as_small_as_fixed_point_with_less_error() -> None:
    codec = DeltaCodec(DeltaConfig(bits=2))
    state, x = CompressorState(), _activation((1,), 0)
    first = codec.encode(x, state, (1,))
    assert first.nbytes == x.numel() * 2
    for step in range(1, 6):
        x = _activation((1,), step)
        payload = codec.encode(x, state, (1,))
    assert payload.nbytes == Quantizer(FixpointConfig(bits=2)).nbytes(torch.Size((S, H)))
    error = float((codec._recall(codec._cache(state), 1, torch.Size((S, H)), x.device) - x[:, 0]).norm() / x.norm())
    direct = Quantizer(FixpointConfig(bits=2))
    plain = float((direct.decode(direct.encode(x, None), x.shape) - x).norm() / x.norm())
    assert error < plain / 10


@pytest.mark.parametrize("option", ["first_bits", "cache_bits"])
def test_a_signed_grid_needs_two_bits(option: str) -> None:
    with pytest.raises(UserError, match="=1: has no level on one side of zero with grid=signed; use 2"):
        DeltaConfig(grid="signed", **{option: 1})  # type: ignore[arg-type]


def test_rows_of_earlier_checkpoints_decode_to_the_same_values() -> None:
    """The grid of the memory stays symmetric, whatever the default grid of messages is."""
    row = _activation((1,), 0)[:, 0]
    for bits in (1, 2, 3, 4):
        before = Quantizer(FixpointConfig(bits=bits, grid="symmetric"))
        wire = before.encode(row, None)
        codec = DeltaCodec(DeltaConfig(bits=2, cache_bits=bits))
        assert torch.equal(codec.memory.decode(wire, row.shape), before.decode(wire, row.shape))


def test_the_least_recently_visited_sample_is_evicted() -> None:
    cache = SampleCache(2)
    assert [cache.visit(sample, 1) for sample in (1, 2, 1, 3, 2, 1)] == [False, False, True, False, False, False]
    for sample in (1, 2):
        cache.store(sample, torch.tensor([float(sample)]))
    cache.commit()
    exported = cache.export()
    assert exported is not None
    assert exported[0].tolist() == [2, 1]
    other = SampleCache(1)
    other.load(*exported)
    assert [other.visit(sample, 1) for sample in (1, 2)] == [True, False]


def _visited(codec: DeltaCodec, steps: int) -> tuple[list[Tensor], tuple[CompressorState, CompressorState]]:
    ends = CompressorState(), CompressorState()
    got = []
    for step in range(steps):
        samples = (step % 7, (5 * step + 1) % 11)
        x = _activation(samples, step)
        payload = codec.encode(x, ends[0], samples)
        codec.empty_payload(x.shape, x.dtype, x.device, ends[1], samples)
        got.append(codec.decode(payload, x.shape, x.dtype, ends[1], samples))
        for state in ends:
            if step % 5 == 4:
                state.rollback()
            else:
                state.commit()
    return got, ends


@pytest.mark.parametrize("options", [{}, {"cache_bits": 4}, {"cache": 6}])
def test_rows_beyond_the_memory_limit_go_to_a_file(options: dict[str, int], tmp_path: Path) -> None:
    near, its_ends = _visited(DeltaCodec(DeltaConfig(bits=3, **options)), 60)  # type: ignore[arg-type]
    config = DeltaConfig(bits=3, memory=2, folder=str(tmp_path / "new"), **options)  # type: ignore[arg-type]
    far, ends = _visited(DeltaCodec(config), 60)
    assert (tmp_path / "new").is_dir()
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))
    assert _same(ends[0], ends[1])
    assert _same(ends[0], its_ends[0])


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    store = RowStore(memory=1, folder=str(tmp_path))
    for name in range(4):
        store.put(name, torch.full((3,), 1.0 + name))
    assert [float(store.get(name)[0]) for name in (0, 3, 1, 2)] == [1.0, 4.0, 2.0, 3.0]
    assert store._file is not None
    store._file.seek(0)
    store._file.write(bytes(store._slot_count * 12))
    with pytest.raises(DamagedRowError, match=r"sample 0 on disk is damaged; go on from the last checkpoint"):
        store.get(0)


def test_prefetched_rows_are_read_ahead(tmp_path: Path) -> None:
    store = RowStore(memory=1, folder=str(tmp_path))
    for name in range(4):
        store.put(name, torch.full((3,), 1.0 + name))
    for name in (1, 3, 7):
        store.prefetch(name)
    assert list(store._pending_reads) == [1]  # 3 is in memory, 7 nowhere
    assert torch.equal(store._pending_reads[1].result(), torch.full((3,), 2.0))
    assert store.get(1) is not store.peek(2)
    assert not store._pending_reads
    store.prefetch(0)
    store.put(0, torch.zeros(3))
    assert float(store.get(0)[0]) == 0.0


def test_a_codec_prefetches_the_rows_of_coming_messages(tmp_path: Path) -> None:
    """The sender in ``expect``, the receiver when it posts the receive."""
    codec = DeltaCodec(DeltaConfig(memory=1, folder=str(tmp_path)))
    _, (sender, receiver) = _visited(codec, 6)
    shape, key = torch.Size((S, 1, H)), (next(iter(sender.cache("samples", 9)._order)),)
    codec.expect(torch.Size((S + 1, 1, H)), sender, key)
    assert not sender.cache("samples", 9)._rows._pending_reads, "a row of another length is prefetched"
    codec.expect(shape, sender, key)
    assert len(sender.cache("samples", 9)._rows._pending_reads) == 1
    codec.empty_payload(shape, torch.float32, torch.device("cpu"), receiver, key)
    assert len(receiver.cache("samples", 9)._rows._pending_reads) == 1


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = RowStore(memory=1, folder=str(tmp_path / "file"))
    store.put(0, torch.zeros(3))
    store.put(1, torch.zeros(3))
    with pytest.raises(RowFileError, match=r"cannot be written to .*file: .*make room, name another folder"):
        store.get(0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "discard", "prefetch"]), st.integers(0, 9)), max_size=60),
    st.integers(1, 4),
)
def test_a_store_behaves_like_a_dictionary(actions: list[tuple[str, int]], memory: int) -> None:
    store, plain = RowStore(memory), dict[int, float]()
    for number, (action, name) in enumerate(actions):
        if action == "put":
            store.put(name, torch.tensor([float(number)]))
            plain[name] = float(number)
        elif action == "prefetch":
            store.prefetch(name)
        elif action == "discard":
            store.discard(name)
            plain.pop(name, None)
        elif name in plain:
            assert float(store.get(name)) == plain[name]
        assert (name in store) == (name in plain)
        assert sorted(store.names()) == sorted(plain)
        assert {n: float(store.peek(n)) for n in store.names()} == plain


@pytest.mark.parametrize("options", [{}, {"cache_dtype": "fp32"}, {"cache_bits": 3}])
def test_remembered_bytes_is_the_memory_of_a_sample(options: dict[str, Any]) -> None:
    codec = DeltaCodec(DeltaConfig(**options))
    _, (sender, receiver) = _visited(codec, 2)
    for state in (sender, receiver):
        exported = state.cache("samples", 9).export()
        assert exported is not None
        samples, rows = exported
        row_bytes = rows.numel() * rows.element_size() / len(samples)
        assert codec.remembered_bytes(torch.Size((S, H))) == row_bytes
