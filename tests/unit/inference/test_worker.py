"""Jobs run one after the other; the end of the server ends them."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from megatron.inference.jobs import InferenceJob
from megatron.inference.sampling import Sampling
from megatron.inference.server.requests import RequestError
from megatron.inference.server.worker import Event, Failure, StreamedToken, Ticket, Worker
from tests.unit.inference.support import trained_model

ENDLESS = InferenceJob([[1, 2]], 10**6, Sampling(greedy=True), [1])


class Listener:
    """The events of a job."""

    def __init__(self, worker: Worker, job: InferenceJob) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        worker.submit(Ticket(job, self.events.put))

    def last(self) -> Event:
        """The event after the pieces."""
        while isinstance(event := self.events.get(timeout=20), StreamedToken):
            pass
        return event


def working() -> Worker:
    worker = Worker(trained_model(), 3, 60.0, lambda: None)
    worker.start()
    return worker


def start_job(worker: Worker) -> Listener:
    """Start a job that would take hours."""
    first = Listener(worker, ENDLESS)
    assert isinstance(first.events.get(timeout=20), StreamedToken)
    return first


def test_the_running_job_is_cut_short_and_waiting_jobs_are_refused() -> None:
    worker = working()
    first, second = start_job(worker), Listener(worker, ENDLESS)
    worker.stop_jobs()
    (result,) = first.last()  # type: ignore[misc]
    assert 0 < len(result.tokens) < 10**6
    last_event = second.last()
    assert isinstance(last_event, Failure)
    assert last_event.status == 503
    assert "shutting down" in last_event.message
    with pytest.raises(RequestError, match="shutting down") as refused:
        worker.submit(Ticket(ENDLESS, lambda event: None))
    assert refused.value.status == 503
    worker.stop()


def test_waiting_jobs_are_refused_while_the_running_job_is_slow() -> None:
    """A forward pass of minutes notices nothing; the queue need not wait for it."""
    model = trained_model()
    worker, entered, go_on = Worker(model, 3, 60.0, lambda: None), threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        go_on.wait(20)

    hook = model.stage.register_forward_pre_hook(slow)
    worker.start()
    first = Listener(worker, ENDLESS)
    assert entered.wait(20)
    second = Listener(worker, ENDLESS)
    worker.stop_jobs()
    event = second.events.get(timeout=5)
    assert isinstance(event, Failure)
    assert event.status == 503
    assert first.events.empty()
    hook.remove()
    go_on.set()
    worker.stop()


def test_a_job_that_outlasts_the_grace_period_is_ended() -> None:
    worker = working()
    first = start_job(worker)
    worker.fail_current_job()
    event = first.last()
    assert isinstance(event, Failure)
    assert event.status == 503
    worker.stop()


def test_waiting_jobs_are_refused_when_the_server_fails() -> None:
    model = trained_model()
    end_times: list[float] = []
    worker = Worker(model, 3, 60.0, lambda: end_times.append(time.monotonic()))
    broken = InferenceJob([[1, 10**6]], 3, Sampling(), [1])  # there is no such token
    first, second = Listener(worker, broken), Listener(worker, ENDLESS)
    worker.start()
    for listener, status in ((first, 500), (second, 503)):
        event = listener.last()
        assert isinstance(event, Failure)
        assert event.status == status
    worker.stop()
    assert worker.error is not None
    assert end_times
