"""A queue of jobs for a model: one at a time, on all ranks that hold the model."""

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
    """A new token of a prompt's continuation, and the text that is final since."""

    row: int
    token: Token
    text: str


@dataclass(frozen=True)
class Result:
    """The result of one prompt.

    Args:
        text: the continuation, cut before a stop string.
        rest: the end of it that no streamed token held.
        tokens: tokens of the continuation.
        reason: "stop" where the model ended the document or a stop string came, else "length".
        prompt: tokens of the prompt after the first, where their probabilities were asked for.
        end: the token with which the model ended the document, where it did.
    """

    text: str
    rest: str
    tokens: list[Token]
    reason: str
    prompt: list[Token]
    end: Token | None = None

    @property
    def sampled(self) -> list[Token]:
        """All tokens that the model chose: those of the continuation, and the end of document."""
        return self.tokens if self.end is None else [*self.tokens, self.end]


@dataclass(frozen=True)
class Failed:
    """The failure of a job.

    Args:
        message: the message to the client.
        status: HTTP status.
    """

    message: str
    status: int = 500


Event = StreamedToken | list[Result] | Failed

_ENDS = "the server ends; ask again when it is back"


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
    """Runs jobs one after the other, in a thread of the sampling rank.

    Args:
        model: the model, on its sampling rank.
        waiting: most jobs that may wait; more are refused.
        patience_s: longest time for which the other ranks wait for this one.
        ended: called when the thread ends, for whatever reason.
    """

    def __init__(self, model: LoadedModel, waiting: int, patience_s: float, ended: Callable[[], None]) -> None:
        self.model = model
        self.error: BaseException | None = None
        self.served = 0
        self._ended = ended
        self._patience_s = patience_s
        self._queue: queue.Queue[Ticket] = queue.Queue(waiting)
        self._stop = threading.Event()
        self._at_hand: Ticket | None = None
        self._thread = threading.Thread(target=self._main, name="generation", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def cut(self) -> None:
        """Cuts the current job short, and runs none after it: those that wait are told at once."""
        self._stop.set()
        self._turn_away()

    def give_up(self) -> None:
        """Releases whoever waits for the current job, however far it is."""
        ticket = self._at_hand
        if ticket is not None:
            ticket.emit(Failed(_ENDS, 503))

    def stop(self) -> None:
        """Ends after the current job, which is cut short; the other ranks end, too."""
        self.cut()
        self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._at_hand is not None

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return self._queue.qsize()

    @property
    def most_waiting(self) -> int:
        """Largest number of jobs that may wait."""
        return self._queue.maxsize

    def check_room(self) -> None:
        """Checks that a job would be accepted now.

        Raises:
            RequestError: when the queue is full, or the server ends.
        """
        if self._stop.is_set():
            raise RequestError(_ENDS, 503)
        if self._queue.full():
            raise RequestError(f"{self.waiting} requests are waiting; try again later", 503)

    def submit(self, ticket: Ticket) -> None:
        """Adds a job to the queue.

        Raises:
            RequestError: when it is full, or the server ends.
        """
        self.check_room()
        try:
            self._queue.put_nowait(ticket)
        except queue.Full as error:
            raise RequestError(f"{self.waiting} requests are waiting; try again later", 503) from error
        if self._stop.is_set():
            self._turn_away()  # the thread may have looked for the last time

    def _main(self) -> None:
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)  # each thread has a current device of its own
            self._loop()
        except BaseException as error:
            self.error = error
        finally:
            self._stop.set()
            self._turn_away()
            self._ended()

    def _turn_away(self) -> None:
        """Tells those that wait that their jobs will not run."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait().emit(Failed(_ENDS, 503))

    def _loop(self) -> None:
        with Leader(self.model, self._patience_s) as leader:
            while not self._stop.is_set():
                try:
                    ticket = self._queue.get(timeout=0.2)
                except queue.Empty:
                    continue
                if not ticket.canceled.is_set():
                    self._do(leader, ticket)

    def _do(self, leader: Leader, ticket: Ticket) -> None:
        job = ticket.job
        streams = [TextStream(self.model.tokenizer, job.stop, prompt) for prompt in job.prompts]
        texts = [""] * len(streams)

        def on_token(row: int, token: Token) -> bool:
            text = streams[row].add(token.id)
            texts[row] += text
            ticket.emit(StreamedToken(row, token, text))
            return streams[row].stopped or ticket.canceled.is_set() or self._stop.is_set()

        self._at_hand = ticket
        try:
            scored, found = leader.do(job, on_token)
        except BaseException as error:
            ticket.emit(Failed(f"the server failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._at_hand = None
        self.served += 1
        results = []
        for text, stream, sample, prompt in zip(texts, streams, found, scored, strict=True):
            rest = stream.finish()
            ended = sample.finished or stream.stopped
            reason = "stop" if ended else "length"
            results.append(Result(text + rest, rest, sample.details, reason, prompt, sample.end))
        ticket.emit(results)
