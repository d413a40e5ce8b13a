"""Trial steps: all ranks agree on the time, all steps update, and nothing is left behind."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.compression.schedule import RunLength
from megatron.data.batch import Batch
from megatron.data.build import Dataset
from megatron.parallel.data.buffer import FlatBuffer
from megatron.training import trial_steps
from megatron.training.run_plan import RunPlan
from tests.support.spawn import run_ranks
from tests.support.tiny import VOCAB, merge, tiny_engines, tiny_tensors

pytestmark = pytest.mark.multiprocess

SHARDED = {"parallel": {"use_distributed_optimizer": True}}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "stages": merge(
        {"parallel": {"pipeline_model_parallel_size": 2}},
        {"compression": {"compress": ["auto", "pp-forward=fixpoint,bits=8"]}},
        {"model": {"hidden_dropout": 0.1}},
    ),
    "fp16, sharded": merge(
        SHARDED,
        {"precision": {"fp16": True}},
        {"compression": {"compress": ["auto", "dp-grad=fixpoint,bits=4,error-feedback=on"]}},
    ),
    "warm-up": {"compression": {"compress": ["auto", "dp-grad=powersgd,rank=4,warmup=3"]}},
}


class Texts:
    """A data set of ``samples`` draws."""

    row_length = 1

    def __init__(self, config: Any, samples: int) -> None:
        self.config, self.samples = config, samples

    def __len__(self) -> int:
        return self.samples

    def sample_id(self, draw: int) -> int:
        return draw

    def read(self, draw: int, row: Any) -> None:
        row[:] = draw

    def collate(self, rows: Any, sample_ids: Any, draws: Any) -> Batch:
        tensors = tiny_tensors(self.config, draws.tolist(), False)
        return Batch(sample_ids_b=torch.from_numpy(sample_ids), draw_ids_b=torch.from_numpy(draws), **tensors)


def _try(samples: int, logs: str) -> dict[str, Any]:
    """What five trials of each case have taken and left: seconds, shapes of steps, buffers, random state."""
    results: dict[str, Any] = {}
    train_step, steps, observers = trial_steps.train_step, [], []

    def record(*args: Any, **kwargs: Any) -> Any:
        metrics = train_step(*args, **kwargs)
        steps.append((metrics.skipped_iterations, metrics.global_batch_size, metrics.seq_length, args[2]))
        observers.extend(args[0].ledger.observers)
        return metrics

    trial_steps.train_step = record
    for name, changes in CHANGES.items():
        engines = tiny_engines(merge(changes, {"logging": {"profile_trace": f"{logs}/{name}"}}))
        config, topology = engines.config, engines.topology
        dataset = cast(Dataset, Texts(config, samples))
        plan = RunPlan(30, cast(Any, None), train_set=dataset, valid_sets=[], test_sets=[], started=0.0)
        state, seconds, buffers = torch.get_rng_state(), [], []
        assert engines.ledger.observers  # the run's own trace
        for _ in range(3):
            gc.collect()
            buffers.append(sum(isinstance(x, FlatBuffer) for x in gc.get_objects()))
            seconds.append(trial_steps.time_steps(topology, VOCAB, RunLength(30), plan, 0, config))
        results[name] = {
            "seconds": seconds,
            "steps": list(steps),
            "buffers": buffers,
            "same state": torch.equal(state, torch.get_rng_state()),
            "observers": len(observers),
        }
        steps.clear()
    return results


def test_trial_steps_are_whole_steps_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Of the last samples fewer than a global batch are left."""
    ranks = run_ranks(2, _try, 3, str(tmp_path))
    for name in CHANGES:
        for result in (rank[name] for rank in ranks):
            assert result["seconds"] == ranks[0][name]["seconds"]
            assert min(result["seconds"]) > 0.0
            expected_batch = 3 if name == "stages" else 2
            warmup_iters = 3 if "powersgd" in json.dumps(CHANGES[name]) else 0
            first_steps = result["steps"][:5]
            assert first_steps == [(0, expected_batch, 16, warmup_iters + step) for step in range(5)]
            assert result["buffers"][0] == result["buffers"][1] == result["buffers"][2]
            assert result["same state"]
            assert result["observers"] == 0
