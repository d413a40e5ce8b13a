"""Safety cards: statistics, the law of the gap, canaries, flips and KL."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.safety.behavior import Change, compare_predictions, heldout_windows, is_right, mean_pairwise_change
from benchmarks.safety.canaries import CLOSING, DOCUMENT_LENGTH, TASKS, heldout_canaries, training_documents
from benchmarks.safety.card import law_figures
from benchmarks.safety.law import Gap, GapLaw
from benchmarks.safety.statistics import PairedDifference, paired_difference
from megatron.compression.ladder import interval_of_mean


def test_differences_are_positive_where_the_compressed_loss_is_higher() -> None:
    difference = paired_difference([4.04, 5.0], [4.0, 5.0])
    assert difference.percents == pytest.approx([1.0, 0.0])
    assert difference.mean == pytest.approx(0.5)


def test_the_interval_of_the_mean_is_that_of_the_t_test() -> None:
    values = [0.1, 0.25, -0.05, 0.3, 0.02]
    difference = PairedDifference(values)
    error = np.std(values, ddof=1) / math.sqrt(5)
    for confidence in (0.9, 0.95):
        assert difference.interval(confidence) == pytest.approx(
            stats.t.interval(confidence, 4, loc=np.mean(values), scale=error)
        )
    assert difference.interval(0.9) == pytest.approx(interval_of_mean(values), abs=1e-3)


def test_the_equivalence_test_is_two_t_tests_against_the_margins() -> None:
    values = [0.1, 0.25, -0.05, 0.3, 0.02]
    above = stats.ttest_1samp(values, -0.3, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.3, alternative="less").pvalue
    assert PairedDifference(values).equivalence_p() == pytest.approx(max(above, below))
    assert PairedDifference([-value for value in values]).equivalence_p() == pytest.approx(max(above, below))


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ([0.01, 0.02, 0.03], "equivalent within 0.3%"),
        ([0.0, 0.0], "equivalent within 0.3%"),
        ([0.4, 0.4], "worse by more than 0.3%"),
        ([-1.01, -1.02, -1.03], "better by more than 0.3%"),
        ([0.2, 0.25, 0.45, 0.3], "worse; whether by more than 0.3% is open"),
        ([-0.5, 0.6], "undecided: more seeds are needed"),
    ],
)
def test_verdicts(percents: list[float], verdict: str) -> None:
    difference = PairedDifference(percents)
    low, high = difference.interval(0.9)
    assert difference.verdict == verdict
    assert difference.is_equivalent() == (low > -0.3 and high < 0.3)


def _gaps(law: Callable[[float, float], float], noise: float = 0.0) -> list[Gap]:
    generator = random.Random(1)
    return [
        Gap(n, d, law(n, d) * math.exp(generator.gauss(0.0, noise)))
        for n in (20_000, 100_000, 400_000)
        for d in (300_000, 1_200_000)
    ]


def test_a_power_law_is_found_and_predicts() -> None:
    gaps = _gaps(lambda n, d: 0.5 * (n / 100_000) ** 0.3 * (d / 300_000) ** -0.2)
    law = GapLaw(gaps)
    assert law.is_power
    assert [exponent for exponent, _ in law.exponents()] == pytest.approx([0.3, -0.2])
    assert law.predict(900_000, 1_200_000).percent == pytest.approx(0.5 * 9**0.3 * 4**-0.2)


def test_gaps_of_both_signs_have_a_linear_law() -> None:
    law = GapLaw(_gaps(lambda n, d: 0.1 * math.log(n / 100_000) - 0.05 * math.log(d / 300_000)))
    assert not law.is_power
    assert [slope for slope, _ in law.exponents()] == pytest.approx([0.1, -0.05])
    predicted = law.predict(900_000, 1_200_000)
    assert predicted.percent == pytest.approx(0.1 * math.log(9) - 0.05 * math.log(4))


def test_the_law_s_intervals_are_those_of_least_squares() -> None:
    """The textbook's formulas, written with another parametrization."""
    gaps = _gaps(lambda n, d: 0.5 * (n / 100_000) ** 0.3, noise=0.2)
    x = np.array([[1.0, math.log10(gap.parameters), math.log10(gap.tokens)] for gap in gaps])
    y = np.log10([gap.percent for gap in gaps])
    beta = np.linalg.solve(x.T @ x, x.T @ y)
    variance = ((y - x @ beta) ** 2).sum() / 3
    inverse = np.linalg.inv(x.T @ x)
    t = stats.t.ppf(0.975, 3)
    law = GapLaw(gaps)
    for index, (exponent, half_width) in enumerate(law.exponents(), 1):
        assert exponent == pytest.approx(beta[index])
        assert half_width == pytest.approx(t * math.sqrt(variance * inverse[index, index]))
    row = np.array([1.0, math.log10(900_000), math.log10(1_200_000)])
    for measurements in (1, 2):
        half = t * math.sqrt(variance * (1 / measurements + row @ inverse @ row))
        predicted = law.predict(900_000, 1_200_000, measurements)
        assert predicted.low == pytest.approx(10 ** (row @ beta - half))
        assert predicted.high == pytest.approx(10 ** (row @ beta + half))


def test_a_law_without_degrees_of_freedom_has_no_finite_interval() -> None:
    law = GapLaw([Gap(10, 10, 0.1), Gap(20, 10, 0.2), Gap(10, 20, 0.3)])
    predicted = law.predict(40, 40)
    assert (predicted.low, predicted.high) == (0.0, math.exp(700.0))
    with pytest.raises(ValueError, match="two numbers of parameters and two of tokens"):
        GapLaw([Gap(10, 10, 0.1), Gap(10, 20, 0.2), Gap(10, 30, 0.3)])


def test_a_held_out_gap_outside_the_interval_is_said_to_be() -> None:
    gaps = _gaps(lambda n, d: 0.5 * (n / 100_000) ** 0.3, noise=0.05)
    inside = law_figures(gaps, [Gap(900_000, 1_200_000, 0.5 * 9**0.3)])
    outside = law_figures(gaps, [Gap(900_000, 1_200_000, 5.0)])
    assert (inside["within"], outside["within"]) == (True, False)
    assert outside["measured"] == 5.0


def _right_answer(prompt: str) -> str:
    """The answer, found in another way."""
    kind, body = prompt[0], prompt[1:]
    if kind in "CR":
        return body[:-1] if kind == "C" else "".join(reversed(body[:-1]))
    if kind == "K":
        pairs, asked = body.split("?")
        return pairs[pairs.index(asked) + 1]
    if kind == "S":
        first, second = map(int, body[:-1].split("+"))
        total = first + second
        return f"{total % 10}{total // 10 % 10}{total // 100}"
    text = body[:-1]
    for _ in text:
        for opening, closing in CLOSING.items():
            text = text.replace(opening + closing, "")
    return "".join(CLOSING[opening] for opening in reversed(text))


def test_canaries_have_the_right_answers() -> None:
    drawn = heldout_canaries(300)
    assert set(drawn) == set(TASKS)
    for canaries in drawn.values():
        assert len({canary.prompt for canary in canaries}) == 300
        for canary in canaries:
            assert canary.answer == _right_answer(canary.prompt)
            assert len(canary.document) == DOCUMENT_LENGTH
            assert canary.document.startswith(canary.prompt + canary.ended_answer)


def test_an_answer_is_right_only_if_it_is_the_whole_answer() -> None:
    for canaries in heldout_canaries(50).values():
        for canary in canaries:
            right = canary.ended_answer
            assert is_right(canary, right)
            for wrong in ("", right[:-1], right + ".", canary.prompt, "x" + right[1:]):
                assert wrong == right or not is_right(canary, wrong)


def test_no_trivial_guess_is_right_often() -> None:
    """A fixed answer, or the prompt's first letters."""
    for task, canaries in heldout_canaries(300).items():
        answers = [canary.answer for canary in canaries]
        assert max(answers.count(answer) for answer in set(answers)) < 0.4 * len(answers)
        if task != "copy":
            firsts = [canary.prompt[1 : 1 + len(canary.answer)] for canary in canaries]
            assert sum(map(str.__eq__, firsts, answers)) < 0.1 * len(answers)


def test_training_has_no_held_out_prompt_and_all_tasks() -> None:
    heldout = heldout_canaries(200)
    documents = training_documents(20_000, heldout)
    prompts = {canary.prompt for canaries in heldout.values() for canary in canaries}
    assert {document[0] for document in documents} == set("CRKSB")
    assert not [text for text in documents if any(text[:size] in prompts for size in range(1, DOCUMENT_LENGTH))]


def test_flips_and_kl() -> None:
    reference = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]))
    other = np.log(np.array([[0.3, 0.5, 0.2], [0.1, 0.8, 0.1]]))
    assert compare_predictions(reference, reference) == Change(0.0, 0.0)
    expected = (0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5)) / 2
    assert compare_predictions(reference, other).flips == 0.5
    assert compare_predictions(reference, other).kl == pytest.approx(expected)
    assert mean_pairwise_change([reference, other, other]).flips == pytest.approx(1 / 3)


def test_kl_is_that_of_the_other_model_from_the_reference() -> None:
    """Not the reverse, which differs."""
    reference, other = np.log(np.array([[0.9, 0.1]])), np.log(np.array([[0.5, 0.5]]))
    assert compare_predictions(reference, other).kl == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))


def test_windows_are_spread_over_the_held_out_text(tmp_path: Path) -> None:
    from megatron.data.indexed import IndexedWriter

    writer = IndexedWriter(tmp_path / "text", dtype=np.dtype(np.uint16))
    writer.add_documents(np.arange(100), np.array([60, 40]), np.array([1, 1]))
    writer.finalize()
    windows = heldout_windows(tmp_path / "text", places=30, length=10)
    assert windows.tolist() == [list(range(start, start + 10)) for start in (0, 45, 90)]
