"""A run that chooses its compressors again: what it frees, how often it chooses, and what it keeps."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.config.run import RunConfig
from megatron.distributed.observer import Finding
from megatron.distributed.topology import Topology
from megatron.parallel.data.buffer import FlatBuffer
from megatron.planner.auto import AutoChoice
from megatron.training import pretrain, run_segment
from megatron.training.assembly import Engines
from megatron.training.loss_guard import LossGuard
from megatron.training.metrics import StepMetrics
from megatron.training.records import read_records
from megatron.training.saved_choice import with_choice
from megatron.training.saved_run import SavedRun
from megatron.training.step_time_check import StepTimeCheck
from tests.multiprocess.test_quantization_noise import NOISY
from tests.support.corpus import tiny_flags
from tests.support.events import read_losses
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.multiprocess


class ImpatientCheck(StepTimeCheck):
    """Asks for a choice after iterations 3 and 9, on the last rank."""

    def after_step(self, step: StepMetrics) -> Finding | None:
        self.needs_choice = step.iteration in (3, 9)
        return None


def _make_choice(took_s: float = 0.0, check_s: float = 0.0) -> AutoChoice:
    """A choice with steps of a second."""
    chosen = SimpleNamespace(settings={}, seconds=1.0)
    return cast(AutoChoice, SimpleNamespace(chosen=chosen, took_s=took_s, estimate=SimpleNamespace(check_s=check_s)))


def _train(flags: list[str], gains: bool) -> tuple[int, list[int], list[int]]:
    """Trains with choices of nothing, then of 8-bit gradients if they gain, and then of nothing. Returns the exit
    status, at each choice the buffers of engines that are left, and the samples that the trial steps begin with."""
    buffers, positions = [], []

    def choose(config: RunConfig, topology: Topology, *args: Any) -> tuple[RunConfig, AutoChoice]:
        gc.collect()
        buffers.append(sum(isinstance(x, FlatBuffer) for x in gc.get_objects()))
        positions.append(args[4].args[-1])
        remaining_iters = 12 - positions[-1] // 4
        assert (args[2], args[4].args[3].train_iters) == (remaining_iters, remaining_iters)
        specs = ["dp-grad=fixpoint,bits=8,error-feedback=on"] if gains and len(buffers) == 2 else []
        return with_choice(config, specs, {}, topology), _make_choice(took_s=0.06, check_s=2.0)

    def restore(engines: Engines, saved: SavedRun, chooses_again: bool, log: Callable[[str], None]) -> None:
        assert chooses_again

    class PacedGuard(LossGuard):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            intervals.append(self.interval)

    intervals: list[int] = []
    run_segment.choose_compressors = choose  # type: ignore[assignment]
    run_segment.StepTimeCheck = ImpatientCheck  # type: ignore[misc]
    run_segment.LossGuard = PacedGuard  # type: ignore[assignment, misc]
    run_segment.restore_schedule = restore
    status = pretrain.main(flags)
    # The choice took 0.06 s of 8 remaining steps of a second; 2 s of every 100 are more than the 1.25% that are left.
    assert intervals == ([200] if gains and buffers else [])
    return status, buffers, positions


FULL = {"delay": 1, "no_pipeline_flush": True, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("gains", "settings", "pauses"),
    [(True, {}, (4, 10)), (False, {"delay": 1}, (4, 10)), (False, FULL, (5, 11))],
    ids=["gradients", "delayed gradients", "a full pipeline"],
)
def test_a_run_chooses_again_on_all_ranks_after_the_same_iteration(
    prefix: Path, tmp_path: Path, gains: bool, settings: dict[str, Any], pauses: tuple[int, int]
) -> None:
    """And with the same compressors it takes the same steps as without a break, also while gradients are under way."""
    adapting = {"compress": ["auto"], "compress_adapt": True, "save": tmp_path / "saved", "certificate": "false"}
    log, plain_log = tmp_path / "log.jsonl", tmp_path / "plain.jsonl"
    base = {"train_iters": 12, "hidden_size": 32, "log_json_file": log, **settings}
    results = run_ranks(2, _train, tiny_flags(prefix, **base, **adapting), gains, init=False)
    assert results[0] == results[1]
    assert results[0] == (0, [0, 0, 0], [0, *(4 * pause for pause in pauses)])
    folders = sorted(path.name for path in (tmp_path / "saved").glob("iter_*"))
    assert folders == [f"iter_{iteration:07d}" for iteration in (*pauses, 12)]
    run_ranks(2, _train, tiny_flags(prefix, **{**base, "log_json_file": plain_log}), gains, init=False)
    losses, plain_losses = read_losses(log), read_losses(plain_log)
    assert sorted(losses) == list(range(1, 13))
    equal = [iteration for iteration in losses if losses[iteration] == plain_losses[iteration]]
    assert equal == (list(range(1, 5)) if gains else list(range(1, 13)))


def _gather_flag_fields(flags: list[str]) -> tuple[int, set[str]]:
    """Rank 1 repeats two defaults as flags: the exit status, and the fields that its choice takes for set by flags."""
    fields: set[str] = set()

    def choose(config: RunConfig, topology: Topology, *args: Any) -> tuple[RunConfig, AutoChoice]:
        fields.update(args[3])
        return with_choice(config, [], {}, topology), _make_choice()

    run_segment.choose_compressors = choose  # type: ignore[assignment]
    run_segment.StepTimeCheck = ImpatientCheck  # type: ignore[misc]
    defaults = ["--pipeline-schedule", "1f1b", "--overlap-grad-reduce", "false"] if os.environ["RANK"] == "1" else []
    return pretrain.main([*flags, *defaults]), fields


def test_flags_that_only_some_ranks_have_count_on_all(prefix: Path, tmp_path: Path) -> None:
    """Their values are the same. Otherwise ranks could choose different schedules."""
    flags = tiny_flags(prefix, train_iters=1, compress=["auto"], save=tmp_path / "saved", certificate="false")
    for status, fields in run_ranks(2, _gather_flag_fields, flags, init=False):
        assert status == 0
        assert {"parallel.pipeline_schedule", "parallel.overlap_grad_reduce"} <= fields


def _train_on_8_bits(flags: list[str]) -> tuple[int, str, list[int]]:
    """Trains with a choice of 8-bit gradients. Returns the exit status, the output, and the steps after which the
    expected time of a step is known."""
    known = []

    class WatchedCheck(StepTimeCheck):
        def after_step(self, step: StepMetrics) -> Finding | None:
            finding = super().after_step(step)
            if self.expected_s_per_token is not None:
                known.append(step.iteration)
            return finding

    def choose(config: RunConfig, topology: Topology, *_: Any) -> tuple[RunConfig, AutoChoice]:
        chosen = SimpleNamespace(settings={}, seconds=1.0, trial_s=1.0, prediction=SimpleNamespace(seconds=1.0))
        choice = SimpleNamespace(chosen=chosen, took_s=0.0, estimate=None)
        specs = ["dp-grad=fixpoint,bits=8,error-feedback=on"]
        return with_choice(config, specs, {}, topology), cast(AutoChoice, choice)

    run_segment.choose_compressors = choose  # type: ignore[assignment]
    run_segment.StepTimeCheck = WatchedCheck  # type: ignore[misc]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pretrain.main(flags)
    return status, output.getvalue(), known


def test_the_time_of_steps_is_measured_anew_after_a_check_has_changed_a_compressor(prefix: Path) -> None:
    """It is known after 7 steps. A check after 8 steps turns a compressor off; one after 16 changes nothing."""
    flags = tiny_flags(prefix, train_iters=18, compress=["auto"], max_loss_increase=1e-9, loss_check_interval=8)
    results = run_ranks(2, _train_on_8_bits, flags, init=False)
    assert results[-1][1].count("dp-grad goes on uncompressed") == 1
    for status, _, known in results:
        assert (status, known) == (0, [7, 8, 15, 16, 17, 18])


@pytest.mark.parametrize(("split", "count"), [("100,0,0", 1), ("80,10,10", 0)])
def test_a_run_says_if_it_checks_the_loss_on_training_samples(prefix: Path, split: str, count: int) -> None:
    """Once, and not with validation data."""
    flags = tiny_flags(prefix, train_iters=1, compress=["auto"], split=split)
    results = run_ranks(2, _train_on_8_bits, flags, init=False)
    assert [status for status, _, _ in results] == [0, 0]
    note = "note: without validation data, --compress auto checks the loss on the last training samples\n"
    assert "".join(text for _, text, _ in results).count(note) == count


def _train_with_chosen(flags: list[str], spec: str) -> tuple[int, list[int]]:
    """Trains with a chosen spec, or with that of the checkpoint. Returns the exit status and the checks' interval."""
    intervals: list[int] = []

    class RecordedGuard(LossGuard):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            intervals.append(self.interval)

    def choose(config: RunConfig, topology: Topology, *args: Any) -> tuple[RunConfig, AutoChoice]:
        # For rank 1 alone, the choice took so long that little time is left for checks.
        return with_choice(config, [spec], {}, topology), _make_choice(took_s=100.0 * topology.rank, check_s=3.0)

    run_segment.choose_compressors = choose  # type: ignore[assignment]
    run_segment.LossGuard = RecordedGuard  # type: ignore[assignment, misc]
    return pretrain.main(flags), intervals


def test_noise_is_measured_in_the_steps_before_checks(prefix: Path, tmp_path: Path) -> None:
    """70% of each number is lost, which no budget allows; then 50%."""
    module, log = tmp_path / "noisy.py", tmp_path / "log.jsonl"
    module.write_text(NOISY)
    flags: dict[str, Any] = {"pipeline_model_parallel_size": 2, "compress": ["auto"], "max_loss_increase": 100}
    checks = {"loss_check_interval": 2, "train_iters": 5, "log_json_file": log, "compress_module": module}
    results = run_ranks(
        2, _train_with_chosen, tiny_flags(prefix, **flags, **checks), "pp-backward=noisy,lost=0.7", init=False
    )
    assert results == [(0, [2]), (0, [2])]
    first, second = [record for record in read_records(log) if record["kind"] == "loss_check"]
    assert (first["iteration"], first["interval"], first["eased"]) == (2, 2, "pp-backward")
    assert first["expected_increase"] is None  # infinite
    assert (second["iteration"], second["eased"], second["settings"]) == (4, None, {"pp-backward": 1})
    assert min(first["seconds"], second["seconds"]) > 0.0


def test_a_resumed_run_keeps_the_interval_of_its_checks(prefix: Path, tmp_path: Path) -> None:
    """3 s of every 100 steps of a second are more than 2%."""
    spec = "dp-grad=fixpoint,bits=8,error-feedback=on"
    folders = {"save": tmp_path, "load": tmp_path, "certificate": "false"}
    flags: dict[str, Any] = {"compress": ["auto"], "train_iters": 6, **folders}
    first = run_ranks(2, _train_with_chosen, tiny_flags(prefix, **flags, exit_interval=3), spec, init=False)
    resumed = run_ranks(2, _train_with_chosen, tiny_flags(prefix, **flags), "chooses nothing", init=False)
    assert first == resumed == [(0, [200])] * 2
