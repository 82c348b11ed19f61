"""
One thread that runs the jobs of machines in their order.

Ends of machines that are adjacent in the queue run together, because a thousand processes end as fast as one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    """Either a function to call, or things to end."""

    work: Callable[[], None] | None = None
    ends: Collection[T] = ()
    done: Future[None] = field(default_factory=Future)


class JobThread(Generic[T]):
    """Runs jobs, ends things, and calls `watch` every *watch_seconds* without a job. Thread-safe."""

    def __init__(self, end: Callable[[Sequence[T]], None], watch: Callable[[], None], watch_seconds: float) -> None:
        self._end, self._watch, self._watch_seconds = end, watch, watch_seconds
        self._jobs: deque[_Job[T]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="machines", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Queue a call of *work* without blocking; its error is in the future."""
        return self._add(_Job(work=work))

    def end(self, things: Collection[T]) -> Future[None]:
        """Queue the end of *things* without blocking; its error is in the future."""
        return self._add(_Job(ends=things))

    def stop(self) -> None:
        """Return when all jobs are done and the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _add(self, job: _Job[T]) -> Future[None]:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        return job.done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping, self._watch_seconds)
                jobs = self._next()
                if self._stopping and not jobs:
                    return
            if not jobs:
                jobs = [_Job(work=self._watch)]
                jobs[0].done.add_done_callback(_log_failure)
            self._run_jobs(jobs)

    def _next(self) -> list[_Job[T]]:
        """One job with a function, or all ends at the head of the queue."""
        jobs: list[_Job[T]] = []
        while self._jobs and (not jobs or (jobs[0].work is None and self._jobs[0].work is None)):
            jobs.append(self._jobs.popleft())
        return jobs

    def _run_jobs(self, jobs: Sequence[_Job[T]]) -> None:
        """Run jobs; an error goes to the future of the job, and the thread goes on."""
        try:
            if jobs[0].work is not None:
                jobs[0].work()
            else:
                self._end([thing for job in jobs for thing in job.ends])
        except Exception as error:
            for job in jobs:
                job.done.set_exception(error)
        else:
            for job in jobs:
                job.done.set_result(None)


def _log_failure(watched: Future[None]) -> None:
    """Log the error of a watch, whose future no caller reads."""
    if error := watched.exception():
        _log.error("watching over machines failed", exc_info=error)


def done() -> Future[None]:
    """A future that is done."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
