"""Threads are bounded, ends are never lost, and nothing that hangs or dies in an effect reaches beyond it."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.local_server import serving
from tpucare.adapters import system
from tpucare.adapters.system import SystemClock, ThreadExecutor, instance_id, machine_id, random_source
from tpucare.model.ports import Finished, Lane

LONG = timedelta(seconds=20)
LANES = {Lane.LIST: 1, Lane.CLOUD: 2, Lane.PROBE: 3, Lane.LAUNCH: 1}


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor(LANES)
    yield executor
    executor.close(LONG)


def collect(executor: ThreadExecutor, count: int) -> list[Finished]:
    """Sleep as the engine does until *count* effects ended."""
    ended: list[Finished] = []
    deadline = time.monotonic() + LONG.total_seconds()
    while len(ended) < count:
        executor.sleep(LONG)
        ended += executor.finished()
        assert time.monotonic() < deadline, f"only {len(ended)} of {count} ended"
    return ended


def threads(executor: ThreadExecutor, lane: Lane) -> list[threading.Thread]:
    """Live ones of *executor*; those of an earlier test may still be ending."""
    ours = executor._lanes[lane].threads
    return [each for each in ours if each.is_alive() and each.name.startswith(f"tpucare-{lane.value}-")]


def raising(error: BaseException) -> Callable[[], object]:
    def effect() -> object:
        raise error

    return effect


class TestClock:
    def test_wall_time_is_aware_and_utc(self) -> None:
        now = SystemClock().now()
        assert now.tzinfo is UTC
        assert abs(now - datetime.now(UTC)) < timedelta(seconds=5)

    def test_steady_time_counts_suspension_where_it_can(self) -> None:
        clock = SystemClock()
        before = clock.monotonic()
        assert clock.monotonic() >= before
        with open("/proc/uptime", encoding="ascii") as file:
            uptime = float(file.read().split()[0])
        assert abs(clock.monotonic() - uptime) < 60 or not sys.platform.startswith("linux")

    def test_chance_differs_between_processes(self) -> None:
        assert random_source().random() != random_source().random()


class TestMachineId:
    def test_first_usable_file_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

        first, second = tmp_path / "first", tmp_path / "second"
        monkeypatch.setattr(system, "_MACHINE_ID_FILES", (first, second))
        assert machine_id() == ""
        second.write_text("b" * 32 + "\n")
        assert machine_id() == "b" * 32
        first.write_text("uninitialized\n")
        assert machine_id() == "b" * 32
        first.write_text("a" * 32 + "\n")
        assert machine_id() == "a" * 32


class Metadata(BaseHTTPRequestHandler):
    """A metadata server as Compute Engine has it; `told` is what it says, after `seconds`."""

    told, status, seconds = b"4242424242\n", 200, 0.0

    def do_GET(self) -> None:
        assert self.path == "/computeMetadata/v1/instance/id"
        assert self.headers["Metadata-Flavor"] == "Google"
        threading.Event().wait(self.seconds)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.told)

    def log_message(self, format: str, *args: object) -> None: ...


class TestInstanceId:
    @pytest.fixture
    def google(self, tmp_path: Path) -> Path:
        (tmp_path / "product_name").write_text("Google Compute Engine\n")
        return tmp_path / "product_name"

    @pytest.mark.parametrize(
        ("answer", "want"),
        [({}, "4242424242"), ({"status": 404}, ""), ({"told": b"<html>"}, ""), ({"seconds": 0.4}, "")],
        ids=["told", "refused", "a captive portal", "late"],
    )
    def test_it_is_what_the_metadata_server_says(
        self, google: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], want: str
    ) -> None:
        monkeypatch.setattr(system, "METADATA_SECONDS", 0.2)
        handler = type("Handler", (Metadata,), answer)
        with serving(HTTPServer(("127.0.0.1", 0), handler)) as server:
            assert instance_id(google, ("127.0.0.1", server.server_port)) == want

    def test_nobody_is_asked_on_another_machine(self, tmp_path: Path) -> None:
        (tmp_path / "product_name").write_text("ThinkPad\n")
        for product in (tmp_path / "product_name", tmp_path / "none"):
            assert instance_id(product, ("nowhere.invalid", 80)) == ""

    def test_a_server_that_is_away_refuses_nothing(self, google: Path) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            assert instance_id(google, unused.getsockname()) == ""


class TestEffects:
    def test_result_and_error_come_back_under_their_tag(self, executor: ThreadExecutor) -> None:
        error = ValueError("no")
        executor.submit(Lane.CLOUD, "good", lambda: 42)
        executor.submit(Lane.CLOUD, ("bad", 1), raising(error))
        ended = {end.tag: end for end in collect(executor, 2)}
        assert ended["good"] == Finished("good", result=42)
        assert ended["bad", 1].error is error
        assert executor.finished() == []

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
    def test_an_effect_that_ends_its_thread_is_heard_of(self, executor: ThreadExecutor, error: BaseException) -> None:
        executor.submit(Lane.LIST, "bad", raising(error))
        (end,) = collect(executor, 1)
        assert isinstance(end.error, RuntimeError)
        assert type(error).__name__ in str(end.error)
        assert end.error.__cause__ is error
        executor.submit(Lane.LIST, "next", lambda: "works on the lane's only thread")
        assert collect(executor, 1)[0].error is None

    def test_lanes_are_bounded_and_do_not_wait_for_each_other(self, executor: ThreadExecutor) -> None:
        gate = threading.Event()
        running: Counter[Lane] = Counter()
        most: Counter[Lane] = Counter()
        guard = threading.Condition()

        def effect(lane: Lane) -> None:
            with guard:
                running[lane] += 1
                most[lane] = max(most[lane], running[lane])
                guard.notify_all()
            gate.wait(LONG.total_seconds())
            with guard:
                running[lane] -= 1

        for number in range(20):
            executor.submit(Lane.CLOUD, number, lambda: effect(Lane.CLOUD))
            executor.submit(Lane.PROBE, -number, lambda: effect(Lane.PROBE))
        executor.submit(Lane.LAUNCH, "free", lambda: "not held up")
        assert collect(executor, 1)[0].tag == "free"
        with guard:
            assert guard.wait_for(lambda: running == {Lane.CLOUD: 2, Lane.PROBE: 3}, LONG.total_seconds())
        gate.set()
        collect(executor, 40)
        assert most == {Lane.CLOUD: 2, Lane.PROBE: 3}

    def test_one_lane_keeps_the_order_of_asking(self, executor: ThreadExecutor) -> None:
        for number in range(50):
            executor.submit(Lane.LIST, number, lambda: None)
        assert [end.tag for end in collect(executor, 50)] == list(range(50))


class TestThreads:
    def test_threads_start_when_needed_and_bear_names(self) -> None:
        executor = ThreadExecutor(LANES)
        assert threads(executor, Lane.PROBE) == []
        for number in range(5):
            executor.submit(Lane.PROBE, number, lambda: None)
            collect(executor, 1)
            # An effect is told of before its thread is free for the next one.
            eventually(lambda: executor._lanes[Lane.PROBE].idle, LONG.total_seconds())
        assert len(threads(executor, Lane.PROBE)) == 1
        assert threads(executor, Lane.LAUNCH) == []
        assert all(thread.daemon for thread in threads(executor, Lane.PROBE))
        assert executor.close(LONG)
        assert threads(executor, Lane.PROBE) == []

    def test_nothing_grows_over_thousands_of_effects(self, executor: ThreadExecutor) -> None:
        class Payload:
            pass

        seen: list[weakref.ref[Payload]] = []

        def effect() -> Payload:
            payload = Payload()
            seen.append(weakref.ref(payload))
            if len(seen) % 2:
                raise ValueError(payload)
            return payload

        for round_number in range(20):
            for number in range(250):
                executor.submit(Lane.PROBE, (round_number, number), effect)
            collect(executor, 250)
        assert len(seen) == 5000
        assert len(threads(executor, Lane.PROBE)) == 3
        gc.collect()
        assert sum(payload() is not None for payload in seen) == 0

    def test_a_lane_needs_a_thread(self) -> None:
        with pytest.raises(ValueError, match="at least one thread"):
            ThreadExecutor({Lane.LIST: 0})

    def test_no_more_threads_to_be_had(self, executor: ThreadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        executor.submit(Lane.CLOUD, "first", lambda: None)
        collect(executor, 1)
        gate = threading.Event()

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", refuse)
            for number in range(3):
                executor.submit(Lane.CLOUD, number, lambda: gate.wait(LONG.total_seconds()))
            with pytest.raises(RuntimeError, match="new thread"):
                executor.submit(Lane.LAUNCH, "lost", lambda: None)
        gate.set()
        assert {end.tag for end in collect(executor, 3)} == {0, 1, 2}
        executor.submit(Lane.LAUNCH, "again", lambda: None)
        assert collect(executor, 1)[0].tag == "again"


def sleep_less_than_long(executor: ThreadExecutor) -> None:
    """Each of thousands by itself: together they may last long on a machine that is busy with other things."""
    before = time.monotonic()
    executor.sleep(LONG)
    assert time.monotonic() - before < LONG.total_seconds()


class TestSleep:
    def test_it_lasts_as_long_as_asked_when_nothing_happens(self, executor: ThreadExecutor) -> None:
        before = time.monotonic()
        executor.sleep(timedelta(seconds=0.2))
        assert 0.19 <= time.monotonic() - before < 5

    @pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-5)])
    def test_no_time_is_no_sleep(self, executor: ThreadExecutor, timeout: timedelta) -> None:
        before = time.monotonic()
        executor.sleep(timeout)
        assert time.monotonic() - before < 5

    def test_an_endless_sleep_is_woken(self, executor: ThreadExecutor) -> None:
        executor.submit(Lane.CLOUD, "end", lambda: None)
        executor.sleep(timedelta.max)
        assert len(executor.finished()) == 1

    def test_a_nudge_before_the_sleep_counts_once(self, executor: ThreadExecutor) -> None:
        executor.nudge()
        executor.nudge()
        before = time.monotonic()
        executor.sleep(LONG)
        assert time.monotonic() - before < 10
        before = time.monotonic()
        executor.sleep(timedelta(seconds=0.1))
        assert time.monotonic() - before >= 0.09

    def test_an_end_that_nobody_fetched_keeps_it_awake(self, executor: ThreadExecutor) -> None:
        executor.submit(Lane.CLOUD, "end", lambda: None)
        before = time.monotonic()
        executor.sleep(LONG)
        executor.sleep(LONG)
        assert time.monotonic() - before < 10
        assert len(executor.finished()) == 1

    def test_no_end_is_slept_through(self, executor: ThreadExecutor) -> None:
        """Each sleep begins while its effect may be ending: a lost wake-up would cost a whole LONG."""
        for number in range(3000):
            executor.submit(Lane.CLOUD, number, lambda: None)
            sleep_less_than_long(executor)
            assert [end.tag for end in executor.finished()] == [number]

    def test_no_nudge_is_slept_through(self, executor: ThreadExecutor) -> None:
        rounds = 3000
        slept = threading.Semaphore(0)

        def nudge() -> None:
            for _ in range(rounds):
                executor.nudge()
                assert slept.acquire(timeout=LONG.total_seconds())

        nudger = threading.Thread(target=nudge)
        nudger.start()
        for _ in range(rounds):
            sleep_less_than_long(executor)
            slept.release()
        nudger.join()

    def test_a_signal_handler_may_nudge_at_any_moment(self, executor: ThreadExecutor) -> None:
        """The handler runs on this thread, perhaps while it holds the executor's lock."""
        nudges = 0

        def handler(number: int, frame: object) -> None:
            nonlocal nudges
            nudges += 1
            executor.nudge()

        previous = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            asked = ended = 0
            while nudges < 300:
                executor.submit(Lane.CLOUD, asked, lambda: None)
                asked += 1
                executor.sleep(LONG)
                ended += len(executor.finished())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert ended + len(collect(executor, asked - ended)) == asked


class TestClose:
    def test_what_runs_may_end_and_what_waits_is_dropped(self) -> None:
        executor = ThreadExecutor(LANES)
        begun, gate = threading.Event(), threading.Event()

        def effect() -> str:
            begun.set()
            gate.wait(LONG.total_seconds())
            return "done"

        executor.submit(Lane.LIST, "runs", effect)
        executor.submit(Lane.LIST, "waits", lambda: None)
        assert begun.wait(LONG.total_seconds())

        def open_once_closed() -> None:
            try:
                while True:
                    executor.submit(Lane.LIST, "waits, too", lambda: None)
                    time.sleep(0.01)
            except RuntimeError:
                gate.set()

        threading.Thread(target=open_once_closed).start()
        assert executor.close(LONG)
        assert [end.tag for end in executor.finished()] == ["runs"]
        with pytest.raises(RuntimeError, match="closed"):
            executor.submit(Lane.LIST, "late", lambda: None)

    def test_an_effect_that_never_returns_does_not_hold_it(self) -> None:
        executor = ThreadExecutor(LANES)
        begun, gate = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            gate.wait()

        executor.submit(Lane.CLOUD, "hangs", hang)
        assert begun.wait(LONG.total_seconds())
        before = time.monotonic()
        assert not executor.close(timedelta(seconds=0.2))
        assert time.monotonic() - before < 5
        gate.set()
        assert executor.close(LONG)

    def test_nor_does_it_hold_the_process(self) -> None:
        script = """
import threading
from datetime import timedelta
from tpucare.model.ports import Lane
from tpucare.adapters.system import ThreadExecutor
executor = ThreadExecutor()
begun = threading.Event()
executor.submit(Lane.CLOUD, "hangs", lambda: (begun.set(), threading.Event().wait()))
begun.wait()
executor.close(timedelta(seconds=0.1))
print("ended")
"""
        ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=30)
        assert (ran.stdout, ran.stderr) == ("ended\n", "")
