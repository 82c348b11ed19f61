"""
Clock and Executor of the operating system: the only reader of wall time and chance for the loop, and its threads.

The effects on these threads, and their results, are left to the engine.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

from tpucare.model.ports import Finished, Lane

# Threads per lane, sized for 2 shared cores: an effect mostly waits for the network. One listing per project is under
# way at a time, and the API limits the rate of creates long before 32 calls are under way.
DEFAULT_LANES: Mapping[Lane, int] = MappingProxyType(
    {Lane.LIST: 4, Lane.CLOUD: 32, Lane.PROBE: 64, Lane.LAUNCH: 32, Lane.STOP: 32}
)

_PRODUCT_FILE = Path("/sys/class/dmi/id/product_name")
# Link-local and by number: needs no resolver and no proxy.
_METADATA_ADDRESS = ("169.254.169.254", 80)
METADATA_SECONDS = 1.0
_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
# CLOCK_BOOTTIME counts suspended time, CLOCK_MONOTONIC does not; only Linux has it.
_STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def machine_id() -> str:
    """The id of this installation, machine-id(5); empty if there is none (bare containers)."""
    for path in _MACHINE_ID_FILES:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text != "uninitialized":
            return text
    return ""


def instance_id(product: Path = _PRODUCT_FILE, address: tuple[str, int] = _METADATA_ADDRESS) -> str:
    """
    The id of this virtual machine at Compute Engine; empty anywhere else, and if the metadata server does not answer.

    The server is asked only if the firmware names Compute Engine. It answers in a thousandth of METADATA_SECONDS.
    Source: https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys, `instance/id`.
    """
    try:
        if product.read_text(encoding="ascii").strip() != "Google Compute Engine":
            return ""
        connection = http.client.HTTPConnection(*address, timeout=METADATA_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/computeMetadata/v1/instance/id", headers={"Metadata-Flavor": "Google"})
            response = connection.getresponse()
            text = response.read(64).decode("ascii").strip()
            return text if response.status == http.HTTPStatus.OK and text.isdecimal() else ""
    except (OSError, UnicodeDecodeError, http.client.HTTPException):
        return ""


def random_source() -> random.Random:
    """Random numbers, seeded by the operating system; for jitter, not for secrets."""
    return random.Random()


class SystemClock:
    """ports.Clock."""

    def now(self) -> datetime:
        """Wall time, aware, UTC; may jump."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since the machine started; never jumps, and counts suspended time."""
        return time.clock_gettime(_STEADY_CLOCK)


class _Effect:
    """One effect that waits for a thread of its lane."""

    __slots__ = ("call", "tag")

    def __init__(self, tag: Hashable, call: Callable[[], object]) -> None:
        self.tag = tag
        self.call = call

    def run(self) -> Finished:
        try:
            return Finished(self.tag, result=self.call())
        except Exception as error:
            return Finished(self.tag, error=error)
        except BaseException as error:
            # SystemExit or KeyboardInterrupt from an effect: it must end only that effect, and reach the engine.
            wrapped = RuntimeError(f"an effect ended by {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return Finished(self.tag, error=wrapped)


class _LaneState:
    """Effects and threads of one lane; guarded by the executor's lock, which is also that of `work`."""

    def __init__(self, lane: Lane, size: int, lock: threading.RLock) -> None:
        if size < 1:
            raise ValueError(f"lane {lane}: needs at least one thread, not {size}")
        self.lane = lane
        self.size = size
        self.idle = 0
        self.waiting: deque[_Effect] = deque()
        self.threads: list[threading.Thread] = []
        self.work = threading.Condition(lock)

    @property
    def needs_thread(self) -> bool:
        return len(self.waiting) > self.idle and len(self.threads) < self.size


class ThreadExecutor:
    """
    ports.Executor on a limited number of daemon threads per lane, each started when there is first work for it.

    A signal handler may call `nudge`: the lock is re-entrant, since the handler may run on a thread that holds it.
    """

    def __init__(self, lanes: Mapping[Lane, int] = DEFAULT_LANES) -> None:
        self._lock = threading.RLock()
        self._awake = threading.Condition(self._lock)
        self._lanes = {lane: _LaneState(lane, size, self._lock) for lane, size in lanes.items()}
        self._ended: deque[Finished] = deque()
        self._nudged = False
        self._closed = False

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None:
        """
        Run *effect* as soon as its lane has a free thread.

        Raises: RuntimeError: the executor was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is closed")
            state = self._lanes[lane]
            state.waiting.append(_Effect(tag, effect))
            if state.needs_thread:
                self._start_thread(state)
            else:
                state.work.notify()

    def finished(self) -> list[Finished]:
        """The effects that ended since the last call, in the order of their ends. Never blocks."""
        with self._lock:
            ended, self._ended = self._ended, deque()
        return list(ended)

    def sleep(self, timeout: timedelta) -> None:
        """Return when *timeout* has passed, `finished` has an ended effect, or `nudge` was called."""
        seconds = min(max(timeout.total_seconds(), 0.0), threading.TIMEOUT_MAX)
        with self._lock:
            self._awake.wait_for(lambda: self._nudged or bool(self._ended), seconds)
            self._nudged = False

    def nudge(self) -> None:
        """Let the current or next `sleep` return at once. From any thread or signal handler."""
        with self._lock:
            self._nudged = True
            self._awake.notify_all()

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> bool:
        """
        Start no more effects, wait at most *timeout* for the running ones. Returns True if all threads ended.

        Effects that waited for a thread are dropped: their intents are on the disk, and the next start settles them.
        An effect that never returns keeps its daemon thread, which ends with the process.
        """
        with self._lock:
            self._closed = True
            for state in self._lanes.values():
                state.waiting.clear()
                state.work.notify_all()
            threads = [thread for state in self._lanes.values() for thread in state.threads]
        deadline = time.monotonic() + timeout.total_seconds()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self, state: _LaneState) -> None:
        name = f"tpucare-{state.lane.value}-{len(state.threads)}"
        thread = threading.Thread(target=self._work, args=(state,), name=name, daemon=True)
        state.threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            # The limit of processes is reached. With one thread the lane goes on, slower; without one it never does.
            state.threads.pop()
            if not state.threads:
                state.waiting.pop()
                raise

    def _work(self, state: _LaneState) -> None:
        while (effect := self._next(state)) is not None:
            end = effect.run()
            # A thread that waits for work must not keep the last effect, its result or its traceback in memory.
            del effect
            with self._lock:
                self._ended.append(end)
                del end
                self._awake.notify_all()

    def _next(self, state: _LaneState) -> _Effect | None:
        with self._lock:
            state.idle += 1
            try:
                state.work.wait_for(lambda: self._closed or bool(state.waiting))
            finally:
                state.idle -= 1
            return None if self._closed else state.waiting.popleft()
