"""Work for a model that is split over ranks: one rank leads, the others follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.generate import Generated, OnToken, Token, generate, score
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling

_IDLE, _STOP = "idle", "stop"


@dataclass(frozen=True)
class Job:
    """Texts to be continued, or to be scored.

    Args:
        prompts: token ids.
        max_new_tokens: for each; 0 only scores the prompts.
        sampling: how tokens are chosen.
        seeds: of each prompt's draws.
        top: alternatives to report with each token; None: no probabilities are asked for.
        score: report the prompts' probabilities, too.
        stop: strings that end a text.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    seeds: list[int]
    top: int | None = None
    score: bool = False
    stop: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON's types, for the other ranks."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Job:
        """The inverse of ``plain``."""
        return Job(**{**values, "sampling": Sampling(**values["sampling"])})


Done = tuple[list[list[Token]], list[Generated]]
"""The prompts' tokens after the first, where they were to be scored, and the continuations."""


def _compute(model: LoadedModel, job: Job, on_token: OnToken | None = None) -> Done:
    scored: list[list[Token]] = [[] for _ in job.prompts]
    top = job.top or 0
    if job.score:
        scored = score(model, job.prompts, top)
    found = generate(model, job.prompts, job.max_new_tokens, job.sampling, job.seeds, top=top, on_token=on_token)
    return scored, found


class Leader:
    """Does jobs on all ranks of a model; lives on its speaker.

    Args:
        model: on its speaker.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def do(self, job: Job, on_token: OnToken | None = None) -> Done:
        """Does a job.

        Raises:
            UserError: for a text that is longer than the model can look at; on the other ranks as well.
        """
        self.model.tell_all_json(job.plain(), self.model.speaker)
        return _compute(self.model, job, on_token)

    def idle(self) -> None:
        """Tells the others that there is nothing to do, lest they take this rank for dead."""
        self.model.tell_all_json(_IDLE, self.model.speaker)

    def stop(self) -> None:
        """Lets the others go."""
        self.model.tell_all_json(_STOP, self.model.speaker)


def follow(model: LoadedModel) -> None:
    """Takes part in the leader's jobs until it lets this rank go."""
    while True:
        said: Any = model.tell_all_json(None, model.speaker)
        if said == _STOP:
            return
        if said != _IDLE:
            _compute(model, Job.from_plain(said))
