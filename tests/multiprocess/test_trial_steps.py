"""Trial steps: all ranks agree on times and rounds, all steps update, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.schedule import RunLength
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.data.build import Dataset
from megatron.parallel.data.buffer import FlatBuffer
from megatron.planner.trials import TrialRounds
from megatron.training import trial_steps
from megatron.training.run_plan import RunPlan
from megatron.training.schedule_choice import list_times
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
    "delayed": {"parallel": {"delay": 1}, "compression": {"compress": ["auto", "dp-grad=fixpoint,bits=8"]}},
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


def _run_plan(config: Any, samples: int) -> RunPlan:
    dataset = cast(Dataset, Texts(config, samples))
    return RunPlan(1000, cast(Any, None), train_set=dataset, valid_sets=[], test_sets=[], started=0.0)


def _without(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, compression=dataclasses.replace(config.compression, compress=["auto"]))


def _try(samples: int, logs: str) -> dict[str, Any]:
    """What trials of each case have taken and left: times, shapes of steps, buffers, random state."""
    results: dict[str, Any] = {}
    train_step = trial_steps.train_step
    steps: list[tuple[int, ...]] = []
    observers: list[Any] = []
    buffers: list[int] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        metrics = train_step(*args, **kwargs)
        steps.append((metrics.skipped_iterations, metrics.global_batch_size, metrics.seq_length, args[2]))
        observers.extend(args[0].ledger.observers)
        buffers.append(sum(isinstance(x, FlatBuffer) for x in gc.get_objects()))
        return metrics

    trial_steps.train_step = record
    for name, changes in CHANGES.items():
        engines = tiny_engines(merge(changes, {"logging": {"profile_trace": f"{logs}/{name}"}}))
        config, topology = engines.config, engines.topology
        state = torch.get_rng_state()
        assert engines.ledger.observers  # the run's own trace
        buffers_before = sum(isinstance(x, FlatBuffer) for x in gc.get_objects())
        results[name] = {}
        for all_at_once in (True, False):
            configs = [_without(config), config]
            plan = _run_plan(config, samples)
            run = topology, VOCAB, RunLength(30), plan, 0
            times = trial_steps.time_sets(*run, configs, [1.0, 1.0], [None, None], all_at_once)
            gc.collect()
            results[name][all_at_once] = {
                "seconds": [each.seconds for each in times],
                "gains": [each.gains for each in times],
                "steps": list(steps),
                "most buffers": max(buffers) - buffers_before,
                "left buffers": sum(isinstance(x, FlatBuffer) for x in gc.get_objects()) - buffers_before,
                "same state": torch.equal(state, torch.get_rng_state()),
                "observers": len(observers),
            }
            steps.clear()
            buffers.clear()
    return results


def test_trial_steps_are_whole_steps_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Of the last samples fewer than a global batch are left. Engines are kept together, or built for each step.

    With delayed gradients always for each step: reductions run beside the next one.
    """
    ranks = run_ranks(2, _try, 3, str(tmp_path))
    for name in CHANGES:
        expected_batch = 3 if name == "stages" else 2
        warmup_iters = 3 if "powersgd" in json.dumps(CHANGES[name]) else 0
        for all_at_once in (True, False):
            for result in (rank[name][all_at_once] for rank in ranks):
                expected = ranks[0][name][all_at_once]
                assert (result["seconds"], result["gains"]) == (expected["seconds"], expected["gains"])
                assert min(result["seconds"]) > 0.0
                assert result["gains"][0] is False
                assert {step[:3] for step in result["steps"]} == {(0, expected_batch, 16)}
                iterations = [step[3] for step in result["steps"][:6]]
                together = all_at_once and name != "delayed"
                if together:
                    assert iterations[:4] == [warmup_iters, 0, warmup_iters + 1, 1]
                else:
                    assert iterations[:4] == [warmup_iters, warmup_iters + 1, 0, 1]
                assert result["most buffers"] == (2 if together else 1)
                assert result["left buffers"] == 0
                assert result["same state"]
                assert result["observers"] == 0


STAGE_TIMES = [[0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0], [0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0]]


def _try_schedules(samples: int) -> tuple[dict[bool, list[tuple[str, Any]]], list[tuple[str, Any]]]:
    """The schedule of each step, and the times that it was made for: in trials with predicted times, with kept and with
    new engines, and in a trial that measures its times."""
    engines = tiny_engines(CHANGES["stages"])
    train_step = trial_steps.train_step
    steps: list[tuple[str, Any]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        measured = args[0].pipeline.measured
        steps.append(
            (args[0].config.parallel.pipeline_schedule, None if measured is None else list_times(measured.pipeline))
        )
        return train_step(*args, **kwargs)

    trial_steps.train_step = record
    chosen = dataclasses.replace(engines.config.parallel, pipeline_schedule="auto")
    config = dataclasses.replace(engines.config, parallel=chosen)
    run, results = (engines.topology, VOCAB, RunLength(30), _run_plan(engines.config, samples), 0), {}
    for all_at_once in (True, False):
        trial_steps.time_sets(*run, [engines.config, config], [1.0, 1.0], [None, STAGE_TIMES], all_at_once)
        results[all_at_once] = list(steps)
        steps.clear()
    trial_steps.SetTrial(*run, config).time_step()
    return results, steps


def test_trial_steps_take_the_schedule_for_the_predicted_times() -> None:
    for predicted, measured in run_ranks(2, _try_schedules, 3):
        for steps in predicted.values():
            times = [times for schedule, times in steps if schedule == "auto"]
            assert len(times) >= 2
            for each in times:
                torch.testing.assert_close(each, STAGE_TIMES)
            assert all(times is None for schedule, times in steps if schedule != "auto")
        # Without predicted times, two steps more measure them.
        assert [times is None for _, times in measured] == [True, True, False]


class Obstinate(TrialRounds):
    """Rounds of a rank that would end at once, and choose."""

    def next_round(self) -> list[int]:
        super().next_round()
        return []

    def gaining(self) -> list[int]:
        return [1]


def _try_on_a_rank_that_differs(samples: int) -> tuple[list[trial_steps.SetTime], int]:
    """Rank 1 is slower, and would decide differently."""
    engines = tiny_engines(CHANGES["stages"])
    train_step, count = trial_steps.train_step, 0

    def count_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if engines.topology.rank == 1:
            time.sleep(0.1)
        return train_step(*args, **kwargs)

    trial_steps.train_step = count_step
    if engines.topology.rank == 1:
        trial_steps.TrialRounds = Obstinate  # type: ignore[misc]
    configs = [_without(engines.config), engines.config]
    plan = _run_plan(engines.config, samples)
    run = engines.topology, VOCAB, RunLength(30), plan, 0
    return trial_steps.time_sets(*run, configs, [1.0, 1.0], [None, None], True), count


def test_rank_0_decides_on_the_times_of_the_slowest_rank() -> None:
    first, second = run_ranks(2, _try_on_a_rank_that_differs, 3)
    assert first == second
    assert first[1] >= 6
    assert all(set_time.seconds >= 0.1 for set_time in first[0])
    assert not any(set_time.gains for set_time in first[0])


def _try_with_engines_that_take_long(samples: int) -> int:
    """Number of steps in a short run, with half a second to build engines."""
    engines = tiny_engines(CHANGES["stages"])
    train_step, build_engines, count = trial_steps.train_step, trial_steps.build_engines, 0

    def count_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return train_step(*args, **kwargs)

    def build(*args: Any) -> Any:
        time.sleep(0.5)
        return build_engines(*args)

    trial_steps.train_step, trial_steps.build_engines = count_step, cast(Any, build)
    plan = dataclasses.replace(_run_plan(engines.config, samples), train_iters=100)
    configs = [_without(engines.config), engines.config]
    trial_steps.time_sets(engines.topology, VOCAB, RunLength(30), plan, 0, configs, [1.0, 1.0], [None, None], True)
    return count


def test_building_engines_counts_for_the_time_of_the_choice() -> None:
    """After the first round, it has taken its share of the run."""
    assert run_ranks(2, _try_with_engines_that_take_long, 3) == [2, 2]


def _fail_on_a_rank(samples: int) -> str:
    """Rank 1 cannot build the engines of the second set."""
    engines = tiny_engines(CHANGES["stages"])
    build_engines = trial_steps.build_engines

    def fail(config: RunConfig, *args: Any, **kwargs: Any) -> Any:
        if engines.topology.rank == 1 and config.compression.compress == ["auto"]:
            raise UserError("no room")
        return build_engines(config, *args, **kwargs)

    trial_steps.build_engines = cast(Any, fail)
    configs = [_without(engines.config), engines.config]
    with pytest.raises(UserError) as caught:
        trial_steps.time_sets(
            engines.topology, VOCAB, RunLength(30), _run_plan(engines.config, samples), 0, configs, [1.0, 1.0],
            [None, None], True,
        )  # fmt: skip
    return str(caught.value)


def test_what_fails_on_a_rank_fails_on_all() -> None:
    assert run_ranks(2, _fail_on_a_rank, 3) == ["no room", "no room"]
