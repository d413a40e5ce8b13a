"""Prediction of runs with a sequence-length curriculum: times at several lengths, and the mean over the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron.config.curriculum import lengths_of
from megatron.planner.choice import Choice
from megatron.planner.predict import Predictor


@dataclass(frozen=True)
class GrowingLengths:
    """Iteration times of a run with growing sequences.

    Args:
        first, full: initial and full sequence length, in tokens.
        first_s, full_s: seconds of an iteration at these lengths.
        iterations: iterations of the run, in batches of full size.
        mean_s: mean seconds of an iteration.
    """

    first: int
    full: int
    first_s: float
    full_s: float
    iterations: int
    mean_s: float

    @property
    def line(self) -> str:
        """The prediction as a sentence."""
        return (
            f"sequences grow from {self.first} tokens to {self.full}, the length assumed here: an iteration "
            f"takes {self.first_s:.3g} s at first, {self.full_s:.3g} s in the end, and {self.mean_s:.3g} s on average "
            f"over the run's {self.iterations:,} iterations"
        )


def predict_growth(predictor: Predictor, choice: Choice) -> GrowingLengths | None:
    """Predict the steps of a choice with growing sequences; None if they do not grow.

    The step time is assumed to be quadratic in the sequence length, like the number of operations.
    """
    config = predictor.config
    lengths = lengths_of(config.curriculum, config.model.seq_length)
    iterations = config.training.planned_iters
    if not lengths.grows or not iterations:
        return None
    low, full = lengths.lengths[0], lengths.full
    message_parts = choice.message_parts(config)
    middle = max((low + full) // 2 // message_parts, 1) * message_parts
    seconds = {}
    for length in sorted({low, middle, full}):
        shorter = dataclasses.replace(config, model=dataclasses.replace(config.model, seq_length=length))
        at_length = Predictor(shorter, predictor.cluster, predictor.vocab_size, predictor.book.imbalance)
        seconds[length] = at_length.predict(choice).seconds
    times = np.polynomial.Polynomial.fit(list(seconds), list(seconds.values()), len(seconds) - 1)
    ends = [min(end, iterations) for end in (*lengths.first[1:], iterations)]
    spent = sum(
        (end - begin) * float(times(length))
        for length, begin, end in zip(lengths.lengths, lengths.first, ends, strict=True)
        if end > begin
    )
    return GrowingLengths(low, full, seconds[low], seconds[full], iterations, spent / iterations)
