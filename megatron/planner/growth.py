"""Prediction of runs with a sequence-length curriculum: times at several lengths, and the mean over the run."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron.config.curriculum import lengths_of
from megatron.planner.choice import Choice
from megatron.planner.predict import Predictor


def describe_growth(predictor: Predictor, choice: Choice) -> str:
    """Describe the predicted iterations of a choice with growing sequences; "" if they do not grow.

    The step time is assumed to be quadratic in the sequence length, like the number of operations.
    """
    config = predictor.config
    lengths = lengths_of(config.curriculum, config.model.seq_length)
    iterations = config.training.planned_iters
    if not lengths.grows or not iterations:
        return ""
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
    return (
        f"sequences grow from {low} tokens to {full}, the length assumed here: an iteration takes {seconds[low]:.3g} s "
        f"at first, {seconds[full]:.3g} s in the end, and {spent / iterations:.3g} s on average over the run's "
        f"{iterations:,} iterations"
    )
