"""Jobs for a model that is split over ranks: one rank leads, the others follow."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.generate import Generated, OnToken, Token, generate, score
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.topology.errors import CommunicationError

_IDLE, _STOP = "idle", "stop"

_IDLE_SECONDS = 20.0
"""Interval at which the other ranks hear from the leader when there is nothing to do."""


@dataclass(frozen=True)
class InferenceJob:
    """A job: prompts to be continued or scored.

    Args:
        prompts: token ids.
        max_new_tokens: most new tokens for each; 0 only scores the prompts.
        sampling: options of choosing tokens.
        seeds: seeds of each prompt's draws.
        top: number of alternatives to report with each token; None: no probabilities are asked for.
        score: whether to report the prompts' probabilities, too.
        stop: strings that end a text.
        stop_tokens: tokens that end a text, as the end of document does.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    seeds: list[int]
    top: int | None = None
    score: bool = False
    stop: list[str] = field(default_factory=list)
    stop_tokens: list[int] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The job in JSON's types, for the other ranks."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> InferenceJob:
        """Restores a job from ``plain``."""
        return InferenceJob(**{**values, "sampling": Sampling(**values["sampling"])})


Done = tuple[list[list[Token]], list[Generated]]
"""The prompts' tokens after the first, where they were to be scored, and the continuations."""


def _compute(model: LoadedModel, job: InferenceJob, on_token: OnToken | None = None) -> Done:
    scored: list[list[Token]] = [[] for _ in job.prompts]
    top = job.top or 0
    if job.score:
        scored = score(model, job.prompts, top)
    continued = generate(
        model,
        job.prompts,
        job.max_new_tokens,
        job.sampling,
        job.seeds,
        top=top,
        stop_tokens=job.stop_tokens,
        on_token=on_token,
    )
    return scored, continued


class Leader:
    """Runs jobs on all ranks of a model; lives on its sampling rank.

    While there is nothing to do, a thread sends the others heartbeats, so that they do not take this rank for dead. As
    a context manager it ends the others at the end.

    Args:
        model: the model, on its sampling rank.
        patience_s: longest time for which another rank waits for this one.
    """

    def __init__(self, model: LoadedModel, patience_s: float) -> None:
        self.model = model
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._interval = min(_IDLE_SECONDS, patience_s / 3)
        if model.topology.layout.world_size > 1:
            threading.Thread(target=self._idle, name="idle", daemon=True).start()

    def _idle(self) -> None:
        while not self._over.wait(self._interval):
            # A job that is being sent is a heartbeat, too.
            if self._sending.acquire(blocking=False):
                try:
                    if not self._over.is_set():
                        self.model.broadcast_json(_IDLE, self.model.sampling_rank)
                except CommunicationError:
                    return  # the next job raises it
                finally:
                    self._sending.release()

    def do(self, job: InferenceJob, on_token: OnToken | None = None) -> Done:
        """Runs a job.

        Raises:
            UserError: when a text is longer than the model's window; on the other ranks as well.
            CommunicationError: when another rank is gone.
        """
        with self._sending:
            self.model.broadcast_json(job.plain(), self.model.sampling_rank)
            return _compute(self.model, job, on_token)

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if kind is None:
            with self._sending:
                self.model.broadcast_json(_STOP, self.model.sampling_rank)


def follow(model: LoadedModel) -> None:
    """Takes part in the leader's jobs until the leader ends."""
    while True:
        received: Any = model.broadcast_json(None, model.sampling_rank)
        if received == _STOP:
            return
        if received != _IDLE:
            _compute(model, InferenceJob.from_plain(received))
