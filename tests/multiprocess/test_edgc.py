"""EDGC in training runs: decisions of its probe, and its state after a restart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.compression.edgc import RankController
from megatron.compression.points import Point
from megatron.distributed.clock import HostClock
from megatron.training.assembly import Engines
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train
from tests.support.train import train

pytestmark = pytest.mark.multiprocess

FALLING = "dp-grad=edgc,rank=16,min-rank=2,window=4,sample-every=1,max-step=16,min-ratio=0.5"
"""A run with a rank that falls at the end of the third window."""


def _controller(engines: Engines) -> RankController:
    controller = engines.sync.controllers.by_point[Point.DP_GRAD]
    assert isinstance(controller, RankController)
    return controller


def _bytes_of_steps(
    spec: str, head_start: float, changes: dict[str, Any], steps: int = 16
) -> tuple[int, list[float], dict[str, Any]]:
    """This rank's stage, the bytes that it sends in each step, and its controller's state.

    A second of the clock is a byte of the gradients, and the last stage waits for the others for ``head_start``.
    """
    engines = tiny_engines({"parallel": changes, "compression": {"compress": [spec]}})
    gradients, control = (engines.ledger.accounts[point] for point in (Point.DP_GRAD, Point.CONTROL))
    late = [head_start * engines.plan.stage / 6]  # for each byte of the ranks' meeting
    engines.ledger.clock = HostClock(lambda: gradients.wire_bytes + late[0] * control.wire_bytes)
    totals = [0.0]

    def after_step(engines: Engines) -> None:
        totals.append(gradients.wire_bytes)
        # The second of three meetings is unusual.
        late[0] = head_start * engines.plan.stage / 6 * (100.0 if len(totals) == 9 else 1.0)

    tiny_train(engines, steps, after_step=after_step)
    sent = [after - before for before, after in pairwise(totals)]
    return engines.plan.stage, sent, dict(_controller(engines).state_dict())


def _by_stage(results: list[tuple[int, list[float], dict[str, Any]]]) -> list[list[float]]:
    """Bytes of each stage's steps, alike on all of its ranks."""
    stages = sorted({stage for stage, _, _ in results})
    assert all(state == results[0][2] for _, _, state in results)
    assert all(sent == next(s for at, s, _ in results if at == stage) for stage, sent, _ in results)
    return [next(sent for at, sent, _ in results if at == stage) for stage in stages]


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"pipeline_model_parallel_size": 2},
    "sharded, virtual": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "use_distributed_optimizer": True,
    },
}


@pytest.mark.parametrize("layout", mark_repeats(LAYOUTS, keep=["sharded, virtual"]))
def test_later_stages_send_as_much_as_their_head_start_allows(layout: str) -> None:
    """A longer warm-up saves more of the probe's cost, up to all of it. The probe is in the tenth step."""
    changes = LAYOUTS[layout]
    runs = [run_ranks(4, _bytes_of_steps, FALLING, head_start, changes) for head_start in (0.0, 1e4, 1e6)]
    dense = run_ranks(4, _bytes_of_steps, f"{FALLING},warmup=16,stage-slack=0", 0.0, changes)
    none, some, long = (_by_stage(results) for results in runs)
    (first, last), (exact, exact_last) = none, _by_stage(dense)
    for results, head_start in zip(runs, (0.0, 1e4, 1e6), strict=True):
        times = results[0][2]["times"]
        assert times["ranks"] == [2, 4, 8, 16]
        assert times["ahead_s"] == [0.0, pytest.approx(head_start)]
    assert runs[0][0][2]["times"]["exact_s"] == [exact[0], exact_last[0]]
    assert first[9] > 10 * first[8], "the trials are counted"
    assert first[15] < min(first[0], exact[0])
    assert first[11] == (exact[11] if "sharded" in layout else first[0]), "a reduce-scatter beats sums of 16 columns"
    assert some[0] == first, "the first stage waits for nobody"
    assert last[15] <= first[15]
    assert first[15] < some[1][15] <= first[15] + 1e4
    assert long[1][11:] == exact_last[11:]
    assert long[1][:9] == last[:9]


def test_gradients_are_sent_exactly_where_that_is_faster() -> None:
    """Factors of 32 columns are larger than the matrices."""
    spec = "dp-grad=edgc,rank=32,min-rank=32,min-ratio=0,warmup=12"
    for _, sent, state in run_ranks(2, _bytes_of_steps, spec, 0.0, {}):
        assert state["times"]["tried_s"][0][-1] > state["times"]["exact_s"][0]
        assert sent[12:] == sent[:4]
    for _, sent, _ in run_ranks(2, _bytes_of_steps, f"{spec},stage-slack=0", 0.0, {}):
        assert sent[12] > sent[0]


SHARDED = {"use_distributed_optimizer": True}
BY_ERROR = "dp-grad=edgc,rank=4,min-rank=4,window=4,sample-every=1,stage-slack=0,warmup-ends=error,min-ratio=0.5"


@pytest.mark.parametrize("warmup", [0, 21])
def test_a_warm_up_ends_by_its_error(warmup: int) -> None:
    """At the end of a window that comes after the iterations of the warm-up, if the rank loses less than in step 10."""
    results = run_ranks(4, _bytes_of_steps, f"{BY_ERROR},warmup={warmup}", 0.0, LAYOUTS["plain"], 26)
    for sent, state in zip(_by_stage(results), (state for _, _, state in results), strict=False):
        tested = {at for at in range(26) if at < 24 and sent[at] > sent[0]}
        assert tested == ({9, 11, 15, 19} if warmup == 0 else {9, 23})
        ends = 20 if warmup == 0 else 24
        assert all(sent[at] == sent[0] for at in range(ends) if at not in tested)
        assert all(0 < sent[at] < sent[0] for at in range(ends, 26))
        assert state["warm"] is True
        assert 0 < state["measured"]["first_error"] < 1


def test_a_warm_up_goes_on_while_the_least_rank_loses_more() -> None:
    """Two columns lose more than four did, and nothing is lost of a gradient in its full width."""
    for ranks in ("rank=4,min-rank=2", "rank=32,min-rank=16"):
        spec = BY_ERROR.replace("rank=4,min-rank=4", ranks)
        for _, sent, state in run_ranks(2, _bytes_of_steps, spec, 0.0, {}):
            assert state["warm"] is False
            assert min(sent) == sent[0]


def _losses(path: Path) -> dict[int, tuple[float, float | None]]:
    return {event["iteration"]: (event["lm_loss"], event["grad_norm"]) for event in read_events(path)}


def _figures(path: Path) -> dict[str, float]:
    """The controller's figures in the last log line."""
    figures: dict[str, float] = read_events(path)[-1]["controllers"]["dp-grad"]
    return figures


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "common.json").read_text())["controllers"]["dp-grad"]["state"]
    return state


def _stop_at_12(prefix: Path, folder: Path, **flags: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The controller's states of a run after 12 and 24 iterations; the rest of it, done again, is the same."""
    flags = {"pipeline_model_parallel_size": 2, "train_iters": 24, **flags}
    whole_log, rest_log, saved, resumed_log = (folder / name for name in ("whole.jsonl", "rest.jsonl", "saved", "then"))
    train(4, tiny_flags(prefix, **flags, save=saved, save_interval=12, log_json_file=whole_log))
    (saved / "latest_checkpointed_iteration.txt").write_text("12")
    train(4, tiny_flags(prefix, **flags, load=saved, save=resumed_log, log_json_file=rest_log))
    assert _losses(rest_log) == {at: values for at, values in _losses(whole_log).items() if at > 12}
    assert _state(resumed_log / "iter_0000024") == _state(saved / "iter_0000024")
    assert _figures(rest_log) == _figures(whole_log)
    assert {"entropy", "rank", "rank_of_stage_0", "rank_of_stage_1"} <= _figures(whole_log).keys()
    return _state(saved / "iter_0000012"), _state(saved / "iter_0000024")


@pytest.mark.parametrize("changes", mark_repeats([{}, SHARDED], keep=[{}]), ids=["plain", "sharded"])
def test_a_run_goes_on_with_the_times_of_its_probe(prefix: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """To the last digit, though times decide: the rest of a run measures nothing again."""
    before, after = _stop_at_12(prefix, tmp_path, compress=[FALLING], **changes)
    assert before["times"]["ranks"] == [2, 4, 8, 16]
    assert after["times"] == before["times"]


def test_a_run_goes_on_in_a_warm_up_that_ends_by_its_error(prefix: Path, tmp_path: Path) -> None:
    before, after = _stop_at_12(
        prefix, tmp_path, compress=[BY_ERROR.replace("slack=0", "slack=0.5").replace("window=4", "window=7")]
    )
    assert before["measured"]["first_error"] == after["measured"]["first_error"] > 0
    assert (before["warm"], after["warm"]) == (False, True)


def test_another_layout_measures_again(prefix: Path, tmp_path: Path) -> None:
    flags = {"compress": [FALLING], "train_iters": 22}
    saved, resumed = tmp_path / "saved", tmp_path / "then"
    train(2, tiny_flags(prefix, **flags, save=saved, exit_interval=12))
    train(4, tiny_flags(prefix, **flags, pipeline_model_parallel_size=2, load=saved, save=resumed, save_interval=14))
    assert len(_state(saved / "iter_0000012")["times"]["ahead_s"]) == 1
    assert _state(resumed / "iter_0000014")["times"] is None
    assert len(_state(resumed / "iter_0000022")["times"]["ahead_s"]) == 2
