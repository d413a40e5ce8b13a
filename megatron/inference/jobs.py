"""Inference jobs on a model split over ranks: a leader broadcasts jobs to its followers."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.distributed.errors import CommunicationError
from megatron.inference.generate import Generated, OnToken, Token, generate, score
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling

_IDLE, _STOP = "idle", "stop"

_IDLE_SECONDS = 20.0
"""Heartbeat interval of an idle leader."""


@dataclass(frozen=True)
class InferenceJob:
    """Prompts to continue or score.

    Args:
        prompts: token ids.
        max_new_tokens: maximum number of new tokens for each prompt; 0 only scores the prompts.
        sampling: sampling options.
        seeds: random seed of each prompt.
        top: number of alternatives to report with each token; None: no log-probabilities are requested.
        score: whether to report the prompts' log-probabilities, too.
        stop: strings that end a text.
        stop_tokens: tokens that end a text, besides the end of document.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    seeds: list[int]
    top: int | None = None
    score: bool = False
    stop: list[str] = field(default_factory=list)
    stop_tokens: list[int] = field(default_factory=list)


JobResult = tuple[list[list[Token]], list[Generated]]
"""Scored prompt tokens after the first (empty lists without scoring), and continuations."""


def _run_job(model: LoadedModel, job: InferenceJob, on_token: OnToken | None = None) -> JobResult:
    top = job.top or 0
    scored = score(model, job.prompts, top) if job.score else [[] for _ in job.prompts]
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
    """Runner of jobs on all ranks of a model, used on its sampling rank.

    While idle, a thread sends heartbeats, so that the other ranks do not time out. On exit, the context manager stops
    the other ranks.

    Args:
        model: the model, on its sampling rank.
        patience_s: communication timeout of the other ranks, in seconds.
    """

    def __init__(self, model: LoadedModel, patience_s: float) -> None:
        self.model = model
        self._sending = threading.Lock()
        self._stopped = threading.Event()
        self._interval = min(_IDLE_SECONDS, patience_s / 3)
        if model.topology.layout.world_size > 1:
            threading.Thread(target=self._send_heartbeats, name="idle", daemon=True).start()

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(self._interval):
            # No heartbeat is needed while a job is being sent.
            if self._sending.acquire(blocking=False):
                try:
                    if not self._stopped.is_set():
                        self.model.broadcast_json(_IDLE, self.model.sampling_rank)
                except CommunicationError:
                    return  # the next job raises it
                finally:
                    self._sending.release()

    def run(self, job: InferenceJob, on_token: OnToken | None = None) -> JobResult:
        """Run a job.

        Raises:
            UserError: on every rank, when a text is longer than the model's window.
            CommunicationError: when another rank is gone.
        """
        with self._sending:
            self.model.broadcast_json(asdict(job), self.model.sampling_rank)
            return _run_job(self.model, job, on_token)

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped.set()
        if kind is None:
            with self._sending:
                self.model.broadcast_json(_STOP, self.model.sampling_rank)


def follow(model: LoadedModel) -> None:
    """Run the leader's jobs on this rank until the leader stops."""
    while True:
        message: Any = model.broadcast_json(None, model.sampling_rank)
        if message == _STOP:
            return
        if message != _IDLE:
            _run_job(model, InferenceJob(**{**message, "sampling": Sampling(**message["sampling"])}))
