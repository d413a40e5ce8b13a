"""Noise of quantized gradients: as sent, in the checks of a run, and in trial steps; and the pace of the checks."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.compression.ladder import MAX_NOISE
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.distributed.observer import Observer, SentMessage
from megatron.planner.auto import AutoChoice, LossEstimate
from megatron.training import loss_guard, trial_steps
from megatron.training.certificate import MessageSampler
from megatron.training.evaluation import evaluate
from megatron.training.loss_guard import LossGuard, choose_interval, held_out_batches
from megatron.training.quantization_noise import NoiseProbe
from megatron.training.traffic import TrafficMeter
from tests.multiprocess.test_loss_guard import FOUR_BITS, _auto, _guard
from tests.multiprocess.test_trial_steps import _run_plan, _without
from tests.support.spawn import run_ranks
from tests.support.tiny import VOCAB, merge, tiny_config, tiny_engines, tiny_train

pytestmark = pytest.mark.multiprocess

STAGES: dict[str, dict[str, Any]] = {"parallel": {"pipeline_model_parallel_size": 2}}
NOISY = """
import dataclasses

from megatron.compression.cast import CastCodec, CastConfig
from megatron.compression.ladder import Rung
from megatron.compression.options import opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration


@dataclasses.dataclass(frozen=True)
class NoisyConfig(CastConfig):
    \"\"\"Half precision of numbers of which a share is left out.\"\"\"

    lost: float = opt(0.0, "share of each number that is lost")
    rounds: bool = opt(True, "whether that counts as noise")


class NoisyCodec(CastCodec):
    def __init__(self, config):
        super().__init__(config)
        self.traits = dataclasses.replace(self.traits, quantizes=config.rounds)

    def encode(self, x, state, key):
        return super().encode(x * (1.0 - self.config.lost), state, key)


def register(registry):
    texts = "lost=0.1", "lost=0.5", "lost=0.7", "lost=0.7,rounds=off"
    ladder = {Point.PP_BWD: tuple(Rung(text, {1000: (0.01 + i / 1000,) * 2}) for i, text in enumerate(texts))}
    registry.register("noisy", Registration(NoisyConfig, codec=NoisyCodec, ladder=ladder))
"""


class Errors(Observer):
    """Energies of the gradients that are sent, and of their errors."""

    def __init__(self) -> None:
        self.gradient = self.error = 0.0

    def on_send(self, sent: SentMessage) -> None:
        if sent.point is Point.PP_BWD:
            self.gradient += float(sent.x.double().square().sum())
            self.error += float(sent.error().double().square().sum())


def _measure_noise(bits: int) -> tuple[dict[Point, float], float, float, dict[Point, float]]:
    """The noise by the probe, both energies by another observer of the same step, and the noise after a step more."""
    spec = f"pp-backward=fixpoint,bits={bits}"
    engines = tiny_engines(merge(STAGES, {"compression": {"compress": [spec, "pp-forward=fixpoint,bits=4"]}}))
    probe, errors = NoiseProbe(engines.topology, engines.ledger, [Point.PP_BWD]), Errors()
    probe.watch(True)
    engines.ledger.observers.append(errors)
    tiny_train(engines, 1)
    probe.watch(False)
    assert Point.PP_FWD not in probe._energies
    noise = probe.take_noise()
    gradient, error = errors.gradient, errors.error
    tiny_train(engines, 1, first=1)
    return noise, gradient, error, probe.take_noise()


@pytest.mark.parametrize("bits", [2, 8])
def test_the_noise_is_the_error_of_the_gradients_that_were_sent(bits: int) -> None:
    """Only the second stage sends gradients; both ranks know the noise, of the watched step alone."""
    results = run_ranks(2, _measure_noise, bits)
    gradient, error = (sum(result[number] for result in results) for number in (1, 2))
    for noise, _, _, later in results:
        assert noise == {Point.PP_BWD: pytest.approx(math.sqrt(error / gradient), rel=1e-6)}
        assert (noise[Point.PP_BWD] > 0.3) == (bits == 2)
        assert later == {}


def _check_messages(spec: str, module: str) -> list[tuple[float, str | None, str]]:
    """Expected increase, eased point and its setting, of eight checks whose budget allows anything finite."""
    engines = tiny_engines(merge(STAGES, _auto([spec], module, 100.0)))
    guard, checks = _guard(engines), []
    guard.interval = 2
    for step in range(16):
        guard.begin_step(step)
        tiny_train(engines, 1, first=step)
        if guard.is_due(step + 1):
            finding = guard.check(step + 1)
            setting = guard._points[Point.PP_BWD].candidate.spec
            checks.append((finding.values["points"]["pp-backward"], finding.values["eased"], setting))
    assert not engines.ledger.observers
    return checks


@pytest.mark.parametrize("lost", ["0.7", "0.5", "0.7,rounds=off"])
def test_noisy_messages_of_gradients_are_eased_whatever_the_budget(tmp_path: Path, lost: str) -> None:
    """A codec that loses 70% of each number, for good; not one that loses half, or that does not quantize."""
    module = tmp_path / "noisy.py"
    module.write_text(NOISY)
    spec = f"pp-backward=noisy,lost={lost}"
    first, second = run_ranks(2, _check_messages, spec, str(module))
    assert first == second
    if lost == "0.7":
        assert 0.5 < MAX_NOISE < 0.7
        assert [check[1] for check in first] == ["pp-backward", *[None] * 7]
        assert [check[2] for check in first] == ["pp-backward=noisy,lost=0.5"] * 8
        assert first[0][0] == math.inf
    else:
        assert [check[1] for check in first] == [None] * 8
    assert all(cost < 100.0 for cost, eased, _ in first if eased is None)


def _check_sums(spec: str, share: float) -> tuple[float, str | None]:
    """A check whose budget allows anything finite, with a limit that is a share of the residual over the gradient."""
    engines = tiny_engines(_auto([spec]))
    ratios, meter = [], TrafficMeter(engines)
    tiny_train(engines, 3, after_step=lambda _: ratios.append(meter.collect(1)[0]["dp-grad"].residual))
    limit, loss_guard.MAX_NOISE = loss_guard.MAX_NOISE, share * (ratios[-1] or math.nan)
    guard = _guard(engines)
    guard._budget = 1e6
    finding = guard.check(3)
    loss_guard.MAX_NOISE = limit
    return finding.values["points"]["dp-grad"], finding.values["eased"]


@pytest.mark.parametrize("spec", [FOUR_BITS, "dp-grad=powersgd,rank=8,factors=fixpoint8,warmup=0.04"])
def test_a_residual_of_quantized_sums_is_their_noise(spec: str) -> None:
    """That of PowerSGD does not come from rounding."""
    for share, is_eased in ((1.01, False), (0.99, spec is FOUR_BITS)):
        first, second = run_ranks(2, _check_sums, spec, share)
        assert first == second
        assert (first == (math.inf, "dp-grad")) == is_eased
        assert math.isinf(first[0]) == (first[1] is not None) == is_eased


def _try_specs(module: str, samples: int) -> list[Any]:
    """Times and estimates of trials with each set, and the increase by plain evaluations before the first step."""
    results = []
    for spec in ("pp-backward=noisy,lost=0.7", "pp-backward=noisy,lost=0.5", "pp-forward=fixpoint,bits=8"):
        engines = tiny_engines(merge(STAGES, _auto([spec], module, 100.0)))
        plan = _run_plan(engines.config, samples)
        run = engines.topology, VOCAB, RunLength(1000), plan, 0
        configs, chosen_set = [_without(engines.config), engines.config], 1 if engines.topology.rank == 0 else 0
        set_times = {}
        for all_at_once in (True, False):
            rounds = trial_steps.TrialRounds
            trial_steps.TrialRounds = Gaining  # type: ignore[misc]
            set_times[all_at_once] = trial_steps.time_sets(
                *run, configs, [1.0, 1.0], [None, None], all_at_once, 0.0, partial(_choose_set, chosen_set)
            )
            trial_steps.TrialRounds = rounds  # type: ignore[misc]
        batches = held_out_batches(engines, plan)
        engines.plan.evaluation_overrides = {Point.PP_FWD: True}
        compressed = evaluate(engines, iter(batches), 1, len(batches), 0).losses["lm loss"]
        engines.plan.evaluation_overrides = {Point.PP_FWD: False}
        exact = evaluate(engines, iter(batches), 1, len(batches), 0).losses["lm loss"]
        declared = LossGuard(engines, batches, RunLength(1000))._points[Point(spec.partition("=")[0])].candidate
        results.append((set_times, 100.0 * (compressed / exact - 1.0), declared.increase))
    return results


def _choose_set(number: int, _: Any) -> int:
    return number


class Gaining(trial_steps.TrialRounds):
    """Rounds of two steps of each set, after which set 1 gains."""

    def next_round(self) -> list[int]:
        return [1, 0] if len(self._rounds) < 2 else []

    def gaining(self) -> list[int]:
        return [1] if self._rounds else []


def test_the_chosen_set_is_eased_after_its_trial_steps_until_it_fits(tmp_path: Path) -> None:
    """By the noise of its gradients, and by the loss with compressed messages, at the weights of the run's start; rank
    0 says which set is chosen."""
    module = tmp_path / "noisy.py"
    module.write_text(NOISY)
    first, second = run_ranks(2, _try_specs, str(module), 8)
    for results in (first, second):
        for set_times, _, _ in results:
            for plain, chosen in set_times.values():
                assert (plain.estimate, chosen.estimate is None) == (None, False)
                assert {Point.PP_FWD, Point.PP_BWD} <= plain.traffic.keys()
                # Each boundary of 4 micro-batches of 16 x 32 numbers is crossed by one of two ranks.
                assert plain.traffic[Point.PP_BWD].sent_bytes == pytest.approx(4 * 16 * 32 * 4 / 2, rel=0.1)
                assert 0.0 < sum(traffic.waits for traffic in plain.traffic.values()) < 1.0
                assert chosen.estimate.check_s > 0.0
        for all_at_once in (True, False):
            (noisy, _, _), (quiet, _, declared), (forward, increase, forward_declared) = results
            for set_times in (noisy, quiet):
                estimate = set_times[all_at_once][1].estimate
                assert estimate.specs == ["pp-backward=noisy,lost=0.5"]
                assert estimate.increase == pytest.approx(declared)
                assert estimate.measured is None
            estimate = forward[all_at_once][1].estimate
            assert estimate.specs == ["pp-forward=fixpoint,bits=8"]
            assert estimate.increase == pytest.approx(max(increase, forward_declared), rel=1e-6)
            assert estimate.measured == pytest.approx(increase, rel=1e-6)
    traffic = first[2][0][True][1].traffic
    assert traffic[Point.PP_FWD].sent_bytes < 0.4 * traffic[Point.PP_BWD].sent_bytes
    assert [each[0] for each in first] == [each[0] for each in second]


def _time_two_steps(samples: int) -> tuple[dict[Point, Any], dict[Point, Any], float]:
    """Traffic after one and after two steps of a trial, and the share of the second step that ranks wait."""
    engines = tiny_engines(merge(STAGES, _auto(["pp-forward=fixpoint,bits=8"])))
    run = engines.topology, VOCAB, RunLength(1000), _run_plan(engines.config, samples), 0
    trial = trial_steps.SetTrial(*run, engines.config)
    trial.time_step()
    first = trial.mean_traffic()
    trial.time_step()
    (warm_step,) = trial._warm_steps
    waited_s = sum(value for key, value in warm_step.items() if key.startswith("waited_s"))
    return first, trial.mean_traffic(), waited_s / warm_step["seconds"]


def test_the_first_step_of_engines_counts_only_without_others() -> None:
    results = run_ranks(2, _time_two_steps, 8)
    first, second, _ = results[0]
    assert first.keys() == second.keys()
    assert sum(traffic.waits for traffic in second.values()) == pytest.approx(results[0][2])
    assert first != second
    assert first[Point.PP_BWD].sent_bytes == second[Point.PP_BWD].sent_bytes


@pytest.mark.parametrize(
    ("check_s", "took_s", "iterations", "interval"),
    [
        (0.9, 0.0, 1000, 100),  # 0.9 s of 50 s, with 2% left
        (1.1, 0.0, 1000, 200),
        (0.4, 5.0, 1000, 100),  # with 1%
        (0.6, 5.0, 1000, 200),
        (0.6, 5.0, 100_000, 100),  # with 1.99%
        (0.4, 9.9, 1000, 400),  # 0.2% are left at least
        (9.0, 9.9, 1000, 1000),  # and ten times the interval is the most
    ],
)
def test_checks_leave_the_rest_of_the_run_its_time(
    check_s: float, took_s: float, iterations: int, interval: int
) -> None:
    """Beside steps of 0.5 s. An interval of the user stands; a resumed run keeps that of the checkpoint."""
    config = tiny_config({"compression": {"compress": ["auto"]}}, 1)
    chosen = cast(Any, SimpleNamespace(seconds=0.5))
    estimate = LossEstimate([], 0.1, None, check_s)
    choice = AutoChoice(chosen, chosen, cast(Any, None), estimate=estimate, took_s=took_s)
    assert choose_interval(config, (), choice, iterations) == interval
    assert choose_interval(config, ("compression.loss_check_interval",), choice, iterations) == 100
    by_file = tiny_config({"compression": {"compress": ["auto"], "loss_check_interval": 50}}, 1)
    assert choose_interval(by_file, (), choice, iterations) == 50
    assert choose_interval(config, (), None, iterations, interval) == interval
    assert choose_interval(config, (), None, iterations, 250) == 100  # of another --loss-check-interval
    assert choose_interval(config, (), dataclasses.replace(choice, estimate=None), iterations) == 100


def _sample_beside_the_probe() -> list[Any]:
    """Samples of a certificate in a step that a probe watches, in both orders of the observers."""
    spec = "pp-backward=fixpoint,bits=4,error-feedback=lazy"
    points = []
    for is_first in (True, False):
        engines = tiny_engines(merge(STAGES, {"compression": {"compress": [spec]}}))
        probe, sampler = NoiseProbe(engines.topology, engines.ledger, [Point.PP_BWD]), None
        for joins in ("probe", "sampler") if is_first else ("sampler", "probe"):
            if joins == "probe":
                probe.watch(True)
            else:
                sampler = MessageSampler(engines.ledger.observers)
                sampler.join()
        tiny_train(engines, 1)
        assert sampler is not None
        sampler.leave()
        points.append([(*key, entry.worst_error) for key, entry in sampler.entries.items()])
    return points


def test_certificates_see_the_residual_beside_the_probe() -> None:
    for points in zip(*run_ranks(2, _sample_beside_the_probe), strict=True):
        ((name, has_residual, error),) = [point for of_rank in points for point in of_rank]
        assert (name, has_residual) == ("pp-backward", True)
        assert error < 1e-5


def _watch_sums() -> dict[Point, float]:
    """Noise of sums with error feedback, by a probe that joins after a sampler."""
    engines = tiny_engines({"compression": {"compress": [FOUR_BITS]}})
    MessageSampler(engines.ledger.observers).join()
    probe = NoiseProbe(engines.topology, engines.ledger, [Point.DP_GRAD])
    probe.watch(True)
    tiny_train(engines, 1)
    return probe.take_noise()


def test_sums_with_error_feedback_are_left_out_beside_a_sampler() -> None:
    assert run_ranks(2, _watch_sums) == [{}, {}]


def test_the_guard_skips_settings_that_are_too_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_guard, "is_noisy", lambda candidate, spec: "bits=8" in candidate.spec)
    guard = _guard(tiny_engines(_auto([FOUR_BITS])))
    assert [candidate.spec for candidate, _ in guard._points[Point.DP_GRAD].settings] == [FOUR_BITS]


def test_points_of_gradients() -> None:
    assert [point.value for point in Point if point.carries_gradients] == [
        "pp-backward",
        "dp-grad",
        "embedding",
        "tp-backward",
        "ep-dispatch-backward",
        "ep-combine-backward",
    ]
