"""Notes on compressors with little effect on a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.compression.builtin import BUILTIN
from megatron.compression.points import Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_spec
from megatron.config.batch_size import BatchSizeSchedule
from megatron.data.build import build_datasets
from megatron.training.compression_notes import cache_notes, compression_notes, run_length
from tests.support.tiny import tiny_config
from tests.unit.data.cases import write


def _notes(folder: Path, spec: str, samples: int, replicas: int = 1, micro: int = 1, **data: Any) -> list[str]:
    path = write(folder / "data", np.full(40, 101).tolist(), 0)
    config = tiny_config(
        {
            "compression": {"compress": [spec]},
            "data": {"data_path": [path], "sample_order": "fixed", "split": "1,0,0", **data},
            "parallel": {"pipeline_model_parallel_size": 2},
            "training": {"micro_batch_size": micro, "global_batch_size": 4 * micro * replicas, "train_iters": 100},
        },
        2 * replicas,
    )
    counts = (samples, 0, 0)
    train, _, _ = build_datasets(
        config.data, seq_length=16, seed=5, train_valid_test_num_samples=counts, eod_token=0, vocab_size=None
    )
    batch_sizes = BatchSizeSchedule(4 * micro * replicas, micro_batch_size=micro, dp_size=replicas)
    length = run_length(100, train, batch_sizes)
    return compression_notes(config, train, replicas, length, 100)


@pytest.mark.parametrize(
    ("spec", "samples", "words"),
    [
        ("pp-forward=delta", 1000, ""),
        ("pp-forward=delta", 300, "a sample comes 1.2 times in this run"),
        ("pp-forward=delta,cache=50", 1000, "cache=50 is less than the 248 samples"),
        ("pp-forward=fixpoint,warmup=1epochs", 1000, ""),
        ("pp-forward=fixpoint,warmup=2epochs", 1000, "its warm-up of 124 iterations is the whole run of 100"),
        ("dp-grad=chunked-topk", 1000, "each number about 1.6 times in the whole run; below 3 times"),
        ("dp-grad=chunked-topk,k=128,warmup=4", 1000, ""),
        ("dp-grad=chunked-topk,k=128,warmup=5", 1000, "train for 96 steps"),
        ("dp-grad=chunked-topk,k=4096", 1000, ""),
        ("dp-grad=topk,density=1~0.02@50", 1000, "sends 2.00% of the numbers in each of 100 steps"),
        ("dp-grad=stable-topk,density=0.01", 1000, ""),
        ("outer=topk,density=0.1,every=10,warmup=0", 1000, "in each of 10 rounds, each number about 1.0 times"),
        ("outer=topk,density=0.1,every=3,warmup=9", 1000, ""),
        ("outer=topk,density=0.1,every=3,warmup=13", 1000, "the differences never leaves the residuals: send more of "),
        ("outer=topk,density=0.1,every=10,fragments=2,warmup=0", 1000, "or let islands take 300 steps"),
    ],
)
def test_notes(tmp_path: Path, spec: str, samples: int, words: str) -> None:
    notes = _notes(tmp_path, spec, samples)
    assert len(notes) == bool(words)
    assert all(words in note for note in notes)


@pytest.mark.parametrize(
    ("options", "islands", "words"),
    [
        ("in-step=compressed,every=10,warmup=0", 2, ["in-step=compressed: no effect, islands never go in step with "]),
        ("in-step=compressed,every=10,warmup=10", 1, ["in-step=compressed: no effect, there is one island"]),
        ("in-step=compressed,every=10,warmup=10", 2, []),
        ("in-step=compressed,every=10,warmup=1.0", 2, []),  # the compressor makes the sum of each step
        ("in-step=compressed,every=10,warmup=1.0", 1, ["there is one island", "is the whole run of 100"]),
        ("in-step=exact,every=10,warmup=1.0", 2, ["no effect, its warm-up of 100 iterations is the whole run of 100"]),
        ("every=10,warmup=0", 2, []),
    ],
)
def test_notes_on_in_step_sums(options: str, islands: int, words: list[str]) -> None:
    island_flags = {"islands": islands, "island": 0, "islands_address": "127.0.0.1:1"} if islands > 1 else {}
    compression = {"compress": [f"outer=fixpoint,bits=4,{options}"]}
    config = tiny_config({"compression": compression, "islands": island_flags, "training": {"train_iters": 100}}, 1)
    notes = compression_notes(config, None, 1, RunLength(100), 100)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_samples_that_change_replicas_are_reported(tmp_path: Path) -> None:
    assert _notes(tmp_path, "pp-forward=delta", 1000, replicas=4) == []
    (note,) = _notes(tmp_path, "pp-forward=delta", 1000, replicas=3)
    assert "samples return to other replicas" in note


@pytest.mark.parametrize(
    ("memory", "ending"),
    [(0, "6 samples of 128 bytes: 768 bytes of memory"), (2, "256 bytes of memory, and 512 bytes in a file")],
)
def test_a_sample_cache_is_split_between_memory_and_a_file(memory: int, ending: str) -> None:
    """Half of 12 samples, each 4 x 16 numbers of two bytes."""
    point = Point.PP_FWD
    spec = read_spec(f"pp-forward=delta,bits=4,cache=100,memory={memory}", Registry(BUILTIN), RunLength())
    engines: Any = SimpleNamespace(
        channel=SimpleNamespace(shapes=[torch.Size((4, 1, 16))]),
        plan=SimpleNamespace(specs={point: spec}, codec=lambda at: {point: spec.make_codec()}[at]),
        topology=SimpleNamespace(layout=SimpleNamespace(dp=2)),
    )
    train: Any = SimpleNamespace(epoch_samples=12)
    (note,) = cache_notes(engines, train)
    assert note.endswith(ending)
