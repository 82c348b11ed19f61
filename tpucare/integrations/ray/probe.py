"""
Asks a Ray cluster for its state, drains its hosts and reports to it, through `templates/ray/gcs_probe.py`.

The probe runs under the Python of the cluster's head, so neither the import of Ray nor a call of Ray that hangs is the
daemon's. Everything is asked on one thread. Decisions are left to `rules` and `companion`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tpucare.adapters.runner.scripts import read_template
from tpucare.integrations.background import Background
from tpucare.integrations.ray.cluster import HeadRecord
from tpucare.integrations.ray.demand import (
    ClusterState,
    DrainReason,
    HeadAway,
    PendingSlice,
    ProbeSilent,
    UnmetDemand,
    read_state,
)
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.text import length, plain

# An answer takes milliseconds; one that takes longer than this means that Ray hangs.
REQUEST_SECONDS: Final = 5.0
# The first answer waits for the import of Ray: 1.3 s on a free core.
START_SECONDS: Final = 30.0
BACKOFF_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# A report is also the heartbeat by which another tpucare sees this one.
REPORT_SECONDS: Final = 10.0
# As many hosts as the probe drains at once.
DRAINS_AT_ONCE: Final = 32
ANSWER_LIMIT: Final = 64 << 20
# How soon a request under way sees that it is not wanted any more.
_STEP_SECONDS: Final = 0.2

# The source comes first on standard input: it may be in a zip file, and it is too long for a list of processes.
_BOOT: Final = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv.pop(1))), 'tpucare-gcs-probe', 'exec'))"

Answer = ClusterState | TpuCareError
Drained = Mapping[str, bool | str]


@dataclass(frozen=True, slots=True)
class _Task:
    """One question for the probe of `head`; a drain has the `ticket` and the `ids` of its hosts."""

    head: HeadRecord
    question: Mapping[str, Any]
    ticket: int = 0
    ids: tuple[str, ...] = ()


class Probe:
    """
    One Ray cluster; no method blocks.

    owner, host:  of this daemon; to another tpucare they name it
    on_answer:    called, on a thread of the probe, when `newest` or `drained` has something new
    source:       of the probe; start_seconds, request_seconds: limits of the first and of each further answer
    """

    def __init__(
        self,
        *,
        owner: str,
        host: str,
        on_answer: Callable[[], None] = lambda: None,
        source: str = "",
        start_seconds: float = START_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caretaker, self._on_answer = (owner, host), on_answer
        self._source = source or read_template("ray/gcs_probe.py")
        self._start_seconds, self._request_seconds = start_seconds, request_seconds
        self._monotonic = monotonic
        self._thread = Background(self._run, name="tpucare-ray-probe")
        self._changed = self._thread.changed
        self._head: HeadRecord | None = None
        self._every = self._due = 0.0
        self._newest: tuple[Answer, float] | None = None
        self._drains: deque[_Task] = deque()
        self._drained: list[tuple[int, Drained]] = []
        self._tickets = 0
        self._report: dict[str, Any] | None = None
        self._report_due = 0.0
        # Rows of failures of the process, not of the cluster; nothing is asked before `_again_at`.
        self._failures, self._again_at = 0, 0.0

    def follow(self, head: HeadRecord | None, every: float) -> None:
        """From now on ask this head, at once and then *every* so many seconds; None: no head."""
        with self._changed:
            if (head, every) == (self._head, self._every):
                return
            now = self._monotonic()
            if head != self._head:
                self._fail_drains("another head")
                self._head, self._newest = head, None
                self._failures, self._again_at, self._due = 0, now, now
            self._every, self._due = every, min(self._due, now + every)
            self._thread.start()
            self._changed.notify_all()

    def newest(self) -> tuple[Answer, float] | None:
        """The newest answer of this head, and the monotonic seconds at which it was asked for; None: none yet."""
        with self._changed:
            return self._newest

    def drain(self, ids: Iterable[str], reason: DrainReason, deadline: float, text: str) -> int:
        """
        Tell Ray to put no more work on hosts; the outcome is in `drained` under the ticket that is returned.

        deadline: seconds until the hosts are gone; 0: when their work is done    text: why, for people who use Ray
        """
        hosts = tuple(ids)
        question = {"op": "drain", "ids": hosts, "reason": reason.value, "seconds": deadline, "text": text}
        with self._changed:
            self._tickets += 1
            if self._head is None:
                self._drained.append((self._tickets, dict.fromkeys(hosts, "no head is known")))
            else:
                self._drains.append(_Task(self._head, question, self._tickets, hosts))
                self._changed.notify_all()
            return self._tickets

    def drained(self) -> list[tuple[int, Drained]]:
        """The tickets that are over since the last call: by host True, or why Ray did not drain it."""
        with self._changed:
            over, self._drained = self._drained, []
        return over

    def report(self, pending: Sequence[PendingSlice], unmet: Sequence[UnmetDemand]) -> None:
        """From now on `ray status` shows this; it is sent when it changes, and every REPORT_SECONDS."""
        shown = [{"what": one.what, "why": one.why, "count": one.count} for one in unmet]
        report = {"op": "report", "pending": [asdict(one) for one in pending], "unmet": shown}
        with self._changed:
            if report != self._report:
                self._report, self._report_due = report, self._monotonic()
                self._changed.notify_all()

    def close(self, seconds: float = 1.0) -> None:
        """End the probe; wait at most *seconds* for it."""
        self._thread.close(seconds)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        child: _Child | None = None
        while not self._thread.closing:
            head = self._head
            if child is not None and child.head != head:
                child.end()
                child = None
            task = self._next(head)
            if head is None or task is None:
                continue
            asked = self._monotonic()
            try:
                if child is None:
                    child = _Child(head, self._caretaker, self._source, self._start_seconds)
                answer = self._ask(child, task)
            except (ProbeSilent, OSError) as error:
                if child is not None:
                    child.end()
                    child = None
                self._apply_failure(task, ProbeSilent(f"Ray's probe {plain(str(error))}"), asked)
            else:
                self._apply_answer(task, answer, asked)
                if asked - child.started_at > BACKOFF_SECONDS[-1]:
                    self._failures = 0
        if child is not None:
            child.end()

    def _next(self, head: HeadRecord | None) -> _Task | None:
        """Wait for the next question; None: another head, or `close`."""
        with self._changed:
            while self._head == head and not self._thread.closing:
                now = self._monotonic()
                if head is None:
                    self._changed.wait()
                elif now < self._again_at:
                    self._fail_drains("Ray's probe is about to start anew")
                    self._changed.wait(self._again_at - now)
                elif self._drains:
                    return self._drains.popleft()
                elif self._due <= now:
                    return _Task(head, {"op": "state"})
                else:
                    report = self._report if self._is_sole_caretaker() else None
                    if report is not None and self._report_due <= now:
                        return _Task(head, report)
                    self._changed.wait(min(self._due, self._report_due if report is not None else self._due) - now)
        return None

    def _ask(self, child: _Child, task: _Task) -> dict[str, Any]:
        # Hosts that do not answer keep one round of drains in the probe waiting for 2 s.
        limit = self._request_seconds * (1 + len(task.ids) // DRAINS_AT_ONCE)
        answer = child.ask(task.question, limit, lambda: self._thread.closing or self._head != task.head)
        if task.ticket:
            found = answer.get("drained")
            outcomes = found if isinstance(found, dict) else dict.fromkeys(task.ids, answer.get("error"))
            drained = {one: outcomes.get(one) for one in task.ids}
            answer["drained"] = {one: why is True or plain(str(why or "no answer")) for one, why in drained.items()}
        return answer

    def _apply_answer(self, task: _Task, answer: dict[str, Any], asked: float) -> None:
        with self._changed:
            if task.head != self._head:
                return
            if task.ticket:
                self._drained.append((task.ticket, answer["drained"]))
            elif task.question["op"] == "state":
                self._newest, self._due = (_read(answer), asked), asked + self._every
            else:
                # A report that was refused is sent again like one that arrived; the state says why.
                self._report_due = self._monotonic() + REPORT_SECONDS if self._report == task.question else asked
                return
        self._on_answer()

    def _apply_failure(self, task: _Task, error: ProbeSilent, asked: float) -> None:
        """The probe has ended or was ended: ask again after a pause."""
        with self._changed:
            if task.head != self._head:
                return
            self._again_at = self._monotonic() + BACKOFF_SECONDS[min(self._failures, len(BACKOFF_SECONDS) - 1)]
            self._failures += 1
            self._newest, self._due = (error, asked), self._again_at
            if task.ticket:
                self._drained.append((task.ticket, dict.fromkeys(task.ids, str(error))))
        self._on_answer()

    def _fail_drains(self, why: str) -> None:
        self._drained += [(task.ticket, dict.fromkeys(task.ids, why)) for task in self._drains]
        self._drains.clear()

    def _is_sole_caretaker(self) -> bool:
        answer = self._newest[0] if self._newest is not None else None
        return isinstance(answer, ClusterState) and not answer.reporter


def _read(answer: dict[str, Any]) -> Answer:
    try:
        if answer["ok"] is True:
            return read_state(answer)
        text = plain(str(answer["error"]))[:500]
        return _ERRORS.get(answer["cause"], ProbeSilent)(text)
    except (KeyError, TypeError) as error:
        return ProbeSilent(f"the answer of Ray's probe cannot be read: {error!r}")
    except ProbeSilent as error:
        return error


_ERRORS: Final[Mapping[str, type[TpuCareError]]] = {"away": HeadAway, "token": ConfigError, "version": ConfigError}


class _Child:
    """
    The process of the probe. Its session is its own, so that it ends whole, and not by a Ctrl-C that is for the daemon.

    Raises: ProbeSilent: it cannot be started.
    """

    def __init__(self, head: HeadRecord, caretaker: tuple[str, str], source: str, start_seconds: float) -> None:
        self.head, self.started_at = head, time.monotonic()
        self._limit: float | None = start_seconds
        self._to_write = source.encode()
        self._said = b""
        command = [head.python, "-c", _BOOT, str(len(self._to_write)), head.address, *caretaker]
        # Nothing else of the daemon's environment: a proxy's variables would send gRPC to the proxy.
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": head.token, "RAY_USAGE_STATS_ENABLED": "0"}
        pipe = subprocess.PIPE
        try:
            # At `/`, since `import ray` also finds a folder `ray` of the working directory.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd="/", env=env, start_new_session=True
            )
        except OSError as error:
            why = f"cannot be started with {head.python} ({error.strerror or error})"
            raise ProbeSilent(f"{why}: start the head again with a Python that has Ray") from error
        self._selector = selectors.DefaultSelector()
        process = self._process
        self._streams = [one for one in (process.stdin, process.stdout, process.stderr) if one is not None]
        self._in, self._out, self._err = (one.fileno() for one in self._streams)
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)

    def ask(self, question: Mapping[str, Any], seconds: float, is_unwanted: Callable[[], bool]) -> dict[str, Any]:
        """Raises: ProbeSilent: no answer in time, the process ended, its line is nonsense, or nobody waits for it."""
        limit = seconds if self._limit is None else self._limit
        until = time.monotonic() + limit
        self._to_write += json.dumps(question).encode() + b"\n"
        if self._in not in self._selector.get_map():
            self._selector.register(self._in, selectors.EVENT_WRITE)
        found = bytearray()
        while not found.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0:
                raise ProbeSilent(f"gave no answer within {length(limit)}")
            if is_unwanted():
                raise ProbeSilent("is not wanted any more")
            for descriptor in [key.fd for key, _ in self._selector.select(min(left, _STEP_SECONDS))]:
                if descriptor == self._in:
                    self._write()
                elif descriptor == self._err:
                    self._listen()
                elif new := os.read(self._out, 1 << 16):
                    found += new
                else:
                    raise ProbeSilent(f"ended{self._last_words()}")
            if len(found) > ANSWER_LIMIT:
                raise ProbeSilent(f"said more than {ANSWER_LIMIT >> 20} MiB")
        self._limit = None
        try:
            answer = json.loads(found)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ProbeSilent(f"said nonsense: {plain(repr(bytes(found[:80])))}")
        return answer

    def _write(self) -> None:
        try:
            self._to_write = self._to_write[os.write(self._in, self._to_write) :]
        except BrokenPipeError:
            # It ended; its last words are still to be read.
            self._to_write = b""
        if not self._to_write:
            self._selector.unregister(self._in)

    def _listen(self) -> None:
        if new := os.read(self._err, 1 << 16):
            self._said = (self._said + new)[-2000:]
        else:
            self._selector.unregister(self._err)

    def _last_words(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._err, 1 << 16)
        lines = self._said.decode(errors="replace").strip().splitlines()
        return f": {plain(lines[-1])[:300]}" if lines else ""

    def end(self) -> None:
        """Kill the process and what it started."""
        self._selector.close()
        # Not reaped yet, so the number is still its own.
        os.killpg(self._process.pid, signal.SIGKILL)
        for stream in self._streams:
            stream.close()
        self._process.wait()
