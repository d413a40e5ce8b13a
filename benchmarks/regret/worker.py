"""A rank of the regret benchmark: chooses like a run with ``--compress auto``, and times steps with the best sets of
all that it could have chosen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.config.flags import parse_program
from megatron.distributed.process_group import LaunchEnvironment
from megatron.planner.auto import AutoSearch
from megatron.planner.compressor_search import CompressorSet
from megatron.planner.settings import without_settings
from megatron.training.auto_compression import agree_on_sets
from megatron.training.pretrain import Job, resolve, train
from megatron.training.program import Ranks, run_program
from megatron.training.run_segment import ChosenRun, RunParts
from megatron.training.saved_choice import with_choice
from megatron.training.trial_steps import SetTrial

GRID_SETS = 6
"""Sets of the grid that are timed: those with the shortest predicted steps."""
ROUNDS = 5
"""Timed rounds of a step with each set, in random order, after a round to warm up."""


def all_sets(search: AutoSearch) -> Iterator[CompressorSet]:
    """All sets within the budget and the memory: every combination of candidates, with and without settings."""
    for each in search.searches:
        for combination in itertools.product(*([None, *ladder] for ladder in each.ladders.values())):
            chosen = zip(each.ladders, combination, strict=True)
            candidates = {point: candidate for point, candidate in chosen if candidate is not None}
            if sum(candidate.increase for candidate in candidates.values()) <= each.budget and each.fits(candidates):
                yield each.predict_set(candidates)


def select_sets(sets: Sequence[CompressorSet], chosen: CompressorSet) -> list[CompressorSet]:
    """The run as it is, the chosen set, and the sets of the grid that are predicted to be fastest."""
    fastest = sorted(sets, key=lambda each: each.prediction.seconds)[:GRID_SETS]
    identities = {(*each.specs, *each.settings): each for each in (sets[0], chosen, *fastest)}
    return list(identities.values())


def time_sets(parts: RunParts, run: ChosenRun, sets: Sequence[CompressorSet]) -> list[list[float]]:
    """Seconds of steps with each set, in rounds. A collective call."""
    trials, chosen = [], run.config.compression
    user_specs = [spec for spec in chosen.spec_texts if spec not in chosen.chosen_specs]
    plain = dataclasses.replace(run.config, compression=chosen.with_choice(user_specs, []))
    plain = without_settings(plain, run.settings)
    for each in sets:
        config = with_choice(plain, each.specs, each.settings, parts.topology)
        trials.append(SetTrial(parts.topology, parts.vocab_size, parts.length, parts.plan, 0, config))
    order, generator = list(range(len(trials))), random.Random(0)
    seconds: list[list[float]] = [[] for _ in trials]
    for _ in range(1 + ROUNDS):
        generator.shuffle(order)
        for number in order:
            seconds[number].append(trials[number].time_step())
    return [times[1:] for times in seconds]


def measure(parts: RunParts, run: ChosenRun, record: Path) -> None:
    """Time the grid, and write what was measured. A collective call."""
    group, is_first, started = parts.topology.control.pg, parts.topology.rank == 0, time.perf_counter()
    assert run.choice is not None
    search, chosen = run.choice.search, run.choice.chosen
    grid = list(all_sets(search)) if is_first else []
    sets = agree_on_sets(group, select_sets(grid, chosen) if is_first else [], search)
    seconds = time_sets(parts, run, sets)
    if is_first:
        entries: list[dict[str, Any]] = [
            {
                "flags": each.flags,
                "predicted_s": each.prediction.seconds,
                "seconds": statistics.median(times),
                "times": times,
                "is_chosen": (each.specs, each.settings) == (chosen.specs, chosen.settings),
            }
            for each, times in zip(sets, seconds, strict=True)
        ]
        duration_s = time.perf_counter() - started
        record.write_text(json.dumps({"grid": len(grid), "sets": entries, "duration_s": duration_s}))


def main() -> int:
    record, words = Path(sys.argv[1]), sys.argv[2:]

    def body(ranks: Ranks) -> None:
        parsed = parse_program(words, "gpt")
        ranks.env = env = LaunchEnvironment.read(parsed.config.parallel.local_rank)
        job = Job(after_choice=lambda parts, run: measure(parts, run, record))
        train(ranks, resolve(parsed, env), parsed.notes, parsed.flag_fields, job)

    return run_program(body)


if __name__ == "__main__":
    sys.exit(main())
