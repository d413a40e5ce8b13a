"""The comparison of trial steps, with made-up times of steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from megatron.planner.compressor_search import MAX_TRIALS
from megatron.planner.trials import MAX_SECONDS, TrialRounds, num_sets_to_time

StepTime = Callable[[int, int], float]
"""Seconds of a step, by round and set."""


def _compare(
    count: int,
    step_time: StepTime,
    predicted_s: Sequence[float] | None = None,
    train_iters: int = 1_000_000,
    spent_s: float = 0.0,
    building_s: float = 0.0,
) -> tuple[TrialRounds, list[list[int]]]:
    """The times of all rounds, and the sets of each round; by default no gain is predicted. Building engines takes
    ``building_s`` in each round."""
    rounds = TrialRounds(predicted_s or [1.0] * count, train_iters, spent_s, keeps_engines=not building_s)
    taken: list[list[int]] = []
    while numbers := rounds.next_round():
        seconds = {number: step_time(len(taken), number) for number in numbers}
        rounds.add(seconds, sum(seconds.values()) + building_s)
        taken.append(numbers)
    return rounds, taken


def _noisy(seconds: Sequence[float], scatter: float, seed: int, warmup: float = 1.15) -> StepTime:
    """Steps whose times scatter; one in 25 is delayed by up to half, and the first take longer."""
    generator = random.Random(seed)

    def step_time(number_of_round: int, number: int) -> float:
        delay = 1.0 + 0.5 * generator.random() * (generator.random() < 0.04)
        delay *= 1.0 if number_of_round else warmup
        return seconds[number] * delay * math.exp(generator.gauss(0.0, scatter))

    return step_time


@pytest.mark.parametrize("seconds", [(0.36, 0.36), (0.36, 0.36, 0.37), (0.36, 0.38, 0.355)])
def test_in_noise_a_tie_or_a_small_loss_gains_nothing(seconds: Sequence[float]) -> None:
    assert not any(_compare(len(seconds), _noisy(seconds, 0.04, seed))[0].gaining() for seed in range(200))


def test_in_noise_most_gains_of_an_eighth_are_found() -> None:
    found = [_compare(2, _noisy((0.4, 0.35), 0.04, seed))[0].gaining() for seed in range(200)]
    assert found.count([1]) > 180


def test_a_tie_soon_ends() -> None:
    """After four or five rounds in the mean, of at least three."""
    counts = [len(_compare(2, _noisy((0.36, 0.36), 0.03, seed))[1]) for seed in range(200)]
    assert min(counts) == 3
    assert sum(counts) / len(counts) < 5


@pytest.mark.parametrize("seconds", [(2.5, 0.7), (4.1, 1.5), (0.92, 0.46)])
def test_a_clear_gain_that_was_predicted_ends_after_a_round_and_a_step(seconds: tuple[float, float]) -> None:
    for seed in range(20):
        rounds, taken = _compare(2, _noisy(seconds, 0.03, seed, warmup=1.1), seconds)
        assert taken == [[1, 0], [1]]
        assert rounds.gaining() == [1]
        assert rounds.typical_s(1) == pytest.approx(seconds[1], rel=0.6)
        assert rounds.typical_s(0) == pytest.approx(1.1 * seconds[0], rel=0.6)


def test_a_small_gain_in_noise_takes_more_rounds() -> None:
    clear, small = (
        [len(_compare(2, _noisy((0.4, s), 0.05, seed), (0.4, s))[1]) for seed in range(50)] for s in (0.2, 0.38)
    )
    assert max(clear) <= 4
    assert sum(small) > 3 * sum(clear)
    quiet, taken = _compare(2, _noisy((0.4, 0.36), 0.005, 0))
    assert quiet.gaining() == [1]
    assert 5 <= len(taken) <= 7


@pytest.mark.parametrize(
    ("train_iters", "spent_s", "building_s", "count"),
    [
        *((50, 0.0, 0.0, 1), (400, 0.0, 0.0, 3), (400, 4.0, 0.0, 1), (400, 0.0, 1.0, 2), (400, 0.0, 2.0, 1)),
        *((1000, 10.5, 0.0, 3), (1000, 12.0, 5.0, 1), (10_000, 0.0, 0.0, 9)),
    ],
)
def test_the_rounds_take_a_share_of_the_run(train_iters: int, spent_s: float, building_s: float, count: int) -> None:
    """At most 1.7% of its time with the fastest set, to which the time before the rounds counts, and that in which
    engines are built; but at least a round; and 15 s. Steps of a round take 1.97 s, whatever was predicted."""
    rounds, taken = _compare(2, lambda _, number: 1.0 - 0.03 * number, [0.1, 0.1], train_iters, spent_s, building_s)
    assert rounds.gaining() == []
    limit_s = 0.017 * train_iters * 0.97
    assert len(taken) == count
    if count < 9:
        after_s = [spent_s + number * (1.97 + building_s) for number in (count, count + 1)]
        assert after_s[1] > limit_s
        assert count == 1 or after_s[0] <= limit_s


def test_engines_that_are_kept_are_built_once() -> None:
    rounds = TrialRounds([0.1, 0.1], 400)
    rounds.add({0: 1.0, 1: 0.97}, 4.6)
    assert rounds.next_round() == [1, 0]  # until 6.57 s, of 6.60


def test_a_prediction_counts_beside_few_steps_and_little_beside_many() -> None:
    """A gain of a fifth was predicted, and steps show 9%, or none. Beside a smaller prediction, 9% are not certain
    after three rounds."""
    for predicted, gain, is_certain in ((0.2, 0.09, True), (0.02, 0.09, False), (0.06, 0.09, False), (0.2, 0.0, False)):
        rounds = TrialRounds([1.0, 1.0 - predicted], 1_000_000)
        for difference in (-0.1, gain - 0.02, gain + 0.02):
            rounds.add({0: 2.0, 1: 2.0 * math.exp(-difference)}, 4.0)
        assert rounds.gaining() == ([1] if is_certain else []), (predicted, gain)
    many = TrialRounds([1.0, 0.8], 1_000_000)
    for number in range(20):
        many.add({0: 2.0, 1: 2.0 * math.exp(-0.03 - (0.02 if number % 2 else -0.02))}, 4.0)
    assert many.gaining() == []


@pytest.mark.parametrize(
    ("predicted", "rounds_s", "spent_s", "is_certain"),
    [
        (0.19, [(2.74, 3.83), (2.45, 2.08)], 21.4, True),  # measured, with eight ranks on two slow cores
        (0.14, [(2.74, 3.83), (2.45, 2.08)], 21.4, False),
        (0.19, [(2.74, 3.83), (2.45, 2.45)], 21.4, False),
        (0.19, [(2.74, 3.83), (2.45, 2.08)], 10.0, False),  # there is time for a third round
        (0.19, [(2.45, 2.08)], 30.0, False),
    ],
)
def test_a_warm_up_hides_no_predicted_gain_when_time_has_run_out(
    predicted: float, rounds_s: Sequence[tuple[float, float]], spent_s: float, is_certain: bool
) -> None:
    rounds = TrialRounds([2.63, 2.63 * (1 - predicted)], 1000, spent_s)
    for without_s, with_s in rounds_s:
        assert rounds.gaining() == []
        rounds.add({1: with_s, 0: without_s}, 1.03 * (without_s + with_s))
    assert rounds.gaining() == ([1] if is_certain else [])


def test_no_round_is_ignored_without_warm_ups() -> None:
    """Engines that are built for each step warm up in steps that are not timed."""
    for keeps_engines in (True, False):
        rounds = TrialRounds([2.5, 2.0], 1000, 30.0, keeps_engines)
        for without_s, with_s in ((2.5, 2.5), (2.8, 2.5)):
            rounds.add({1: with_s, 0: without_s}, without_s + with_s)
        assert rounds.gaining() == ([1] if keeps_engines else [])


def test_gains_in_scattered_steps_when_time_runs_out() -> None:
    """Time ends after two rounds, with warm-ups in the first. Predicted and true gains of a fifth are chosen mostly;
    a predicted one that is none, seldom."""
    counts = []
    for seconds in ((2.5, 2.0), (2.5, 2.5)):
        chosen = 0
        for seed in range(200):
            steps = _noisy(seconds, 0.06, seed)
            rounds, taken = _compare(
                2,
                lambda turn, number, steps=steps: steps(turn, number) * (1.5 if (turn, number) == (0, 1) else 1.0),  # type: ignore[misc]
                (2.5, 2.0),
                1000,
                spent_s=1.7 * seconds[1] * 10 - 12.0,
            )
            assert len(taken) <= 3
            chosen += rounds.gaining() == [1]
        counts.append(chosen)
    assert counts[0] >= 160
    assert counts[1] <= 30


def test_the_time_is_bounded_but_not_below_five_rounds() -> None:
    """A gain between those that count and those that do not is never certain."""
    for without_s in (0.5, 100.0):
        rounds, taken = _compare(2, lambda _, number, s=without_s: s * (1.0, 0.965)[number])  # type: ignore[misc]
        assert rounds.gaining() == []
        assert len(taken) == max(5, 1 + math.ceil(MAX_SECONDS / without_s / 1.965))


def test_what_slows_whole_rounds_changes_nothing() -> None:
    def step_time(number_of_round: int, number: int) -> float:
        return (1.0 + number_of_round % 3) * (0.4, 0.3)[number]

    rounds, taken = _compare(2, step_time)
    assert rounds.gaining() == [1]
    assert len(taken) <= 6


def test_a_warm_up_counts_for_a_set_alone() -> None:
    """Compilation in the first steps neither hides a gain nor makes one."""
    gaining, _ = _compare(2, lambda turn, number: (0.4, 0.3)[number] + (0, 30)[number] * (turn == 0))
    assert gaining.gaining() == [1]
    assert gaining.typical_s(1) == 0.3
    losing, taken = _compare(2, lambda turn, number: (0.3, 0.32)[number])
    assert losing.gaining() == []
    assert [numbers[-1] for numbers in taken] == [0] * 3  # without compressors last


@pytest.mark.parametrize("late_round", range(4))
@pytest.mark.parametrize("seconds", [0.36, 3.6])
def test_a_delayed_step_chooses_nothing(late_round: int, seconds: float) -> None:
    """Unless a clear gain was predicted: then a delay to four times the length in the first round seems to confirm
    it."""

    def step_time(turn: int, number: int) -> float:
        return seconds * (4.0 if (turn, number) == (late_round, 0) else 1.0)

    assert _compare(2, step_time)[0].gaining() == []
    assert _compare(2, step_time, (1.0, 0.67))[0].gaining() == []
    assert _compare(2, step_time, (1.0, 0.66))[0].gaining() == ([1] if late_round == 0 else [])


def test_the_first_round_counts_for_a_set_that_gains() -> None:
    """Three rounds are needed, of long steps; without the first it would be four."""
    rounds, taken = _compare(2, lambda _, number: (4.0, 3.53)[number], (1.0, 0.95))
    assert rounds.gaining() == [1]
    assert len(taken) == 3


def test_a_gain_that_was_predicted_takes_fewer_rounds() -> None:
    counts = [len(_compare(2, lambda _, number: (4.0, 3.6)[number], (1.0, share))[1]) for share in (0.95, 0.9)]
    assert counts[1] < counts[0]


@pytest.mark.parametrize(("predicted_s", "count"), [(0.85, 4), (0.95, 3)])
def test_a_predicted_gain_is_given_up_a_round_later(predicted_s: float, count: int) -> None:
    """The first round never counts against a set."""
    _, taken = _compare(2, lambda _, number: (1.0, 1.01)[number], [1.0, predicted_s])
    assert taken == [[1, 0]] * count


def test_a_predicted_gain_alone_chooses_nothing() -> None:
    """In noise, of sets that gain nothing, few are chosen, and of those that take 2% longer, none."""
    few, none = (
        [_compare(2, _noisy((0.36, s), 0.04, seed), (0.36, 0.31))[0].gaining() for seed in range(200)]
        for s in (0.36, 0.367)
    )
    assert few.count([1]) <= 2
    assert none.count([1]) == 0


@pytest.mark.parametrize(
    ("seconds", "predicted_s"),
    [((0.71, 0.45), (0.72, 0.44)), ((0.545, 0.469), (0.555, 0.461)), ((1.2, 1.0), (1.2, 1.0))],
)
def test_a_short_run_takes_most_predicted_gains(seconds: Sequence[float], predicted_s: Sequence[float]) -> None:
    """In the time of two to four rounds; and few ties for which a gain was predicted."""
    gaining, ties = (
        [_compare(2, _noisy(times, 0.04, seed), predicted_s, 1000, spent_s=4.5)[0].gaining() for seed in range(200)]
        for times in (seconds, (seconds[0], seconds[0]))
    )
    assert gaining.count([1]) >= 150
    assert ties.count([1]) <= 4


@pytest.mark.parametrize("train_iters", range(390, 630, 10))
def test_two_predicted_gains_are_taken_when_time_is_up(train_iters: int) -> None:
    """Both, although there would be time for another round of one of them."""
    seconds = 0.5, 0.4, 0.41
    rounds, taken = _compare(3, lambda _, number: seconds[number], seconds, train_iters)
    assert len(taken) in (2, 3)
    assert rounds.gaining() == [1, 2]


def test_a_gain_that_was_not_predicted_takes_five_rounds() -> None:
    """Though steps are long; two if it was predicted, or three of short steps."""
    for predicted_s, seconds, count in (
        ((1.0, 0.98), (4.0, 2.0), 5),
        ((1.0, 0.96), (4.0, 2.0), 2),
        ((1.0, 0.96), (0.4, 0.2), 3),
    ):
        rounds, taken = _compare(2, lambda _, number, s=seconds: s[number], predicted_s)  # type: ignore[misc]
        assert (rounds.gaining(), len(taken)) == ([1], count)


def test_on_a_busy_machine_a_tie_is_rarely_taken_for_a_gain() -> None:
    """Times scatter by 25%; 2% of 200 seeds at most."""
    chosen = [_compare(2, _noisy((0.36, 0.36), 0.25, seed))[0].gaining() for seed in range(200)]
    assert chosen.count([1]) <= 4


def test_a_set_that_loses_leaves_and_one_that_gains_goes_on() -> None:
    rounds, taken = _compare(3, lambda _, number: (0.36, 0.45, 0.32)[number])
    assert rounds.gaining() == [2]
    assert taken == [[1, 2, 0]] * 3 + [[2, 0]] * 2


def test_a_set_that_is_slower_than_one_that_gains_leaves() -> None:
    """Though it may gain, too, and many rounds are left; a set that is nearly as fast stays."""
    predicted_s, taken = (1.0, 0.6, 0.7), {}
    for second_s in (0.66, 0.63):
        seconds = 0.98, 0.55, second_s
        rounds, taken[second_s] = _compare(3, lambda _, number, s=seconds: s[number], predicted_s)  # type: ignore[misc]
        assert 1 in rounds.gaining()
    assert taken[0.66] == [[1, 2, 0], [1]]
    assert taken[0.63][1] == [1, 2, 0]


def test_the_slower_of_two_sets_that_gain_is_not_timed_again() -> None:
    rounds, taken = _compare(3, lambda _, number: (2.0, 0.9, 0.6)[number], (2.0, 0.9, 0.9))
    assert rounds.gaining() == [1, 2]
    assert taken == [[1, 2, 0], [2]]


@pytest.mark.parametrize(("scale", "steps"), [(1.0, 3), (10.0, 2)])
def test_sets_that_gain_are_compared_in_as_many_steps(scale: float, steps: int) -> None:
    """Two past the first where steps are short, otherwise one."""
    seconds = (0.9, 0.3, 0.31)
    rounds, taken = _compare(3, lambda turn, number: scale * seconds[number] * (1.0 + (turn == 0)), seconds)
    assert taken == [[1, 2, 0], *[[1, 2]] * (steps - 1)]
    assert rounds.gaining() == [1, 2]
    assert rounds.typical_s(2) == pytest.approx(0.31 * scale)


def test_without_sets_there_is_no_round() -> None:
    assert _compare(0, lambda *_: 1.0)[1] == []
    assert _compare(1, lambda *_: 1.0)[1] == []


def test_short_runs_time_fewer_sets() -> None:
    """At least one, and as many as five rounds fit into 1.7% of the run."""
    assert num_sets_to_time(0.5, 1_000_000, 3.0) == MAX_TRIALS
    assert num_sets_to_time(0.5, 100, 0.5) == 1
    # 17 steps, of which 15 are left for rounds of a step with each of two sets and one without, or not quite.
    assert [num_sets_to_time(0.5, 1000, spent_s) for spent_s in (0.9, 1.1)] == [2, 1]
