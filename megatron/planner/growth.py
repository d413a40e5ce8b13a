"""What sequences that grow make of a prediction, which is of whole ones: the time of other steps, and the mean."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.curriculum import lengths_of
from megatron.planner.choice import Choice
from megatron.planner.predict import Predictor


@dataclass(frozen=True)
class Growth:
    """Seconds of a run's iterations whose sequences grow.

    Args:
        first, full: tokens of the first sequences, and of whole ones.
        first_s, full_s: seconds of an iteration with these.
        iterations: iterations of the run, in batches of full size.
        mean_s: mean seconds of them.
    """

    first: int
    full: int
    first_s: float
    full_s: float
    iterations: int
    mean_s: float

    @property
    def line(self) -> str:
        """The prediction in words."""
        return (
            f"sequences grow from {self.first} tokens to the {self.full} that are counted here: an iteration "
            f"takes {self.first_s:.3g} s at first, {self.full_s:.3g} s in the end, and {self.mean_s:.3g} s in the mean "
            f"of the {self.iterations:,} of the run"
        )


def _of_length(predictor: Predictor, length: int) -> Predictor:
    """The predictor of the same model on shorter sequences."""
    config = predictor.config
    model = dataclasses.replace(config.model, seq_length=length)
    return Predictor(dataclasses.replace(config, model=model), predictor.cluster, predictor.vocab_size)


def growth(predictor: Predictor, choice: Choice) -> Growth | None:
    """Predicts the steps of a choice while sequences grow; None where they do not.

    A step's time is taken to be of the second degree in the length, as its operations are.
    """
    config = predictor.config
    lengths = lengths_of(config.curriculum, config.model.seq_length)
    iterations = config.training.planned_iters
    if not lengths.grows or not iterations:
        return None
    low, full = lengths.lengths[0], lengths.full
    parts = choice.message_parts(config)
    middle = max((low + full) // 2 // parts, 1) * parts
    seconds = {length: _of_length(predictor, length).predict(choice).seconds for length in {low, middle, full}}

    def at(length: int) -> float:
        """Lagrange's polynomial through what was predicted."""
        total = 0.0
        for one, value in seconds.items():
            for other in seconds:
                value *= (length - other) / (one - other) if other != one else 1.0
            total += value
        return total

    ends = [min(end, iterations) for end in (*lengths.first[1:], iterations)]
    spent = sum(
        (end - begin) * at(length)
        for length, begin, end in zip(lengths.lengths, lengths.first, ends, strict=True)
        if end > begin
    )
    return Growth(low, full, seconds[low], seconds[full], iterations, spent / iterations)
