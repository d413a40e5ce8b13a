"""Job queue of a model; jobs run sequentially on all ranks that hold the model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from megatron.inference.generate import Token
from megatron.inference.jobs import InferenceJob, Leader
from megatron.inference.model import LoadedModel
from megatron.inference.server.requests import RequestError
from megatron.inference.text import TextStream


@dataclass(frozen=True)
class StreamedToken:
    """A new token of a continuation, and the text that it completes."""

    row: int
    token: Token
    text: str


@dataclass(frozen=True)
class Result:
    """Result of a prompt.

    Args:
        text: the continuation, cut before a stop string.
        unstreamed_text: end of ``text`` that was not streamed with a token.
        tokens: tokens of the continuation.
        reason: "stop" if the model ended the document or a stop string occurred, else "length".
        prompt: tokens of the prompt after the first, if their probabilities were requested.
        end: token with which the model ended the document, if any.
    """

    text: str
    unstreamed_text: str
    tokens: list[Token]
    reason: str
    prompt: list[Token]
    end: Token | None = None

    @property
    def sampled(self) -> list[Token]:
        """All sampled tokens: the continuation and the end of document."""
        return self.tokens if self.end is None else [*self.tokens, self.end]


@dataclass(frozen=True)
class Failure:
    """Failure of a job.

    Args:
        message: message to the client.
        status: HTTP status.
    """

    message: str
    status: int = 500


Event = StreamedToken | list[Result] | Failure

_SHUTTING_DOWN = "the server is shutting down; try again later"


@dataclass
class Ticket:
    """A job in the queue.

    Args:
        job: the job.
        emit: called with the job's events, in the worker's thread: streamed tokens, then the results, or a failure.
    """

    job: InferenceJob
    emit: Callable[[Event], None]
    canceled: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs jobs sequentially in a thread of the sampling rank.

    Args:
        model: the model, on its sampling rank.
        max_queue: maximum number of queued jobs; further jobs are refused.
        patience_s: timeout in seconds after which the other ranks give up on this rank.
        on_end: called when the thread ends, for any reason.
    """

    def __init__(self, model: LoadedModel, max_queue: int, patience_s: float, on_end: Callable[[], None]) -> None:
        self.model = model
        self.error: BaseException | None = None
        self.served = 0
        self.max_queue = max_queue
        self._on_end = on_end
        self._patience_s = patience_s
        self._queue: queue.Queue[Ticket] = queue.Queue(max_queue)
        self._stop = threading.Event()
        self._current: Ticket | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop_jobs(self) -> None:
        """Stop the current job early, and fail all queued jobs."""
        self._stop.set()
        self._fail_queued_jobs()

    def fail_current_job(self) -> None:
        """Fail the current job, so that its client stops waiting."""
        ticket = self._current
        if ticket is not None:
            ticket.emit(Failure(_SHUTTING_DOWN, 503))

    def stop(self) -> None:
        """Stop the current job early and join the thread; the other ranks end, too."""
        self.stop_jobs()
        self._thread.join()

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def queued_jobs(self) -> int:
        """Number of jobs in the queue."""
        return self._queue.qsize()

    def check_room(self) -> None:
        """Check that a job would be accepted now.

        Raises:
            RequestError: when the queue is full, or the server is shutting down.
        """
        if self._stop.is_set():
            raise RequestError(_SHUTTING_DOWN, 503)
        if self._queue.full():
            raise RequestError(f"{self.queued_jobs} requests are waiting; try again later", 503)

    def submit(self, ticket: Ticket) -> None:
        """Add a job to the queue.

        Raises:
            RequestError: when the queue is full, or the server is shutting down.
        """
        self.check_room()
        try:
            self._queue.put_nowait(ticket)
        except queue.Full as error:
            raise RequestError(f"{self.queued_jobs} requests are waiting; try again later", 503) from error
        if self._stop.is_set():
            self._fail_queued_jobs()  # the thread may have emptied the queue already

    def _run(self) -> None:
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)  # the current device is per thread
            with Leader(self.model, self._patience_s) as leader:
                while not self._stop.is_set():
                    try:
                        ticket = self._queue.get(timeout=0.2)
                    except queue.Empty:
                        continue
                    if not ticket.canceled.is_set():
                        self._run_job(leader, ticket)
        except BaseException as error:
            self.error = error
        finally:
            self._stop.set()
            self._fail_queued_jobs()
            self._on_end()

    def _fail_queued_jobs(self) -> None:
        """Fail all queued jobs."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait().emit(Failure(_SHUTTING_DOWN, 503))

    def _run_job(self, leader: Leader, ticket: Ticket) -> None:
        job = ticket.job
        streams = [TextStream(self.model.tokenizer, job.stop, prompt) for prompt in job.prompts]
        texts = [""] * len(streams)

        def on_token(row: int, token: Token) -> bool:
            text = streams[row].add_token(token.id)
            texts[row] += text
            ticket.emit(StreamedToken(row, token, text))
            return streams[row].stopped or ticket.canceled.is_set() or self._stop.is_set()

        self._current = ticket
        try:
            scored_prompts, continuations = leader.run(job, on_token)
        except BaseException as error:
            ticket.emit(Failure(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._current = None
        self.served += 1
        results = []
        for text, stream, sample, prompt in zip(texts, streams, continuations, scored_prompts, strict=True):
            remaining_text = stream.finish()
            is_finished = sample.finished or stream.stopped
            reason = "stop" if is_finished else "length"
            results.append(Result(text + remaining_text, remaining_text, sample.details, reason, prompt, sample.end))
        ticket.emit(results)
