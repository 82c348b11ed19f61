"""The creation semaphore: any context manager, entered and left on one thread, never on the one that decides."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.field import calls
from tests.kits.harness import PROJECT, Daemon, place
from tpucare.adapters.semaphore import ContextGate
from tpucare.adapters.state.create_budget import SharedBudget
from tpucare.engine.admission import CreateSemaphore
from tpucare.engine.engine import Settings
from tpucare.model.causes import Cause
from tpucare.model.memory import DesiredState
from tpucare.model.resources import Care

# --- over real context managers ---


class Bell:
    """Counts the nudges."""

    def __init__(self) -> None:
        self.rang = threading.Event()

    def __call__(self) -> None:
        self.rang.set()


@pytest.fixture
def bell() -> Bell:
    return Bell()


def got(gate: ContextGate, slot: str) -> bool:
    """Ask until it is held."""
    eventually(lambda: gate.acquire(slot))
    return True


@pytest.mark.parametrize(
    "context", [threading.Semaphore(1), threading.Lock(), threading.RLock(), threading.Condition()]
)
def test_one_holds_it_and_the_other_gets_it_then(
    context: contextlib.AbstractContextManager[object], bell: Bell
) -> None:
    gate = ContextGate(context, bell)
    assert gate.acquire("a") in (False, True)
    assert got(gate, "a")
    assert bell.rang.wait(5)
    assert "a" in gate.changed_slots()
    assert not gate.acquire("b")
    assert not gate.acquire("b")
    gate.release("a")
    assert got(gate, "b")
    gate.close()
    with context:
        pass  # All of it was let go of, by the threads that took it.


def test_who_waits_in_vain_gives_it_back_at_once(bell: Bell) -> None:
    lock = threading.Lock()
    lock.acquire()
    gate = ContextGate(lock, bell)
    assert not gate.acquire("a")
    gate.release("a")
    lock.release()
    assert lock.acquire(timeout=5)
    lock.release()
    eventually(lambda: not lock.locked())


def test_an_error_of_it_is_told_once_and_then_it_is_tried_again(bell: Bell) -> None:
    broken = [True]

    class Turnstile:
        def __enter__(self) -> None:
            if broken:
                raise OSError("no such queue")

        def __exit__(self, *_: object) -> None:
            return None

    gate = ContextGate(Turnstile(), bell)
    assert not gate.acquire("a")
    assert bell.rang.wait(5)
    with pytest.raises(RuntimeError, match="creation_semaphore: OSError: no such queue"):
        gate.acquire("a")
    broken.clear()
    assert got(gate, "a")
    gate.close()


def test_closing_lets_go_of_all_that_is_held(bell: Bell) -> None:
    semaphore = threading.Semaphore(2)
    gate = ContextGate(semaphore, bell)
    for slot in ("a", "b"):
        assert got(gate, slot)
    gate.close()
    assert [semaphore.acquire(timeout=5) for _ in range(2)] == [True, True]


# --- in the loop, under virtual time ---


class FakeGate:
    """As many turns as `free`; a turn is had at the question after the one that asked for it."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.held: set[str] = set()
        self.queue: list[str] = []
        self.error: Exception | None = None
        self.most = 0
        self._news: set[str] = set()

    def acquire(self, slot: str) -> bool:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if slot not in self.held and slot not in self.queue:
            self.queue.append(slot)
            self._serve()
            return False
        return slot in self.held

    def release(self, slot: str) -> None:
        self.held.discard(slot)
        if slot in self.queue:
            self.queue.remove(slot)
        self._serve()

    def changed_slots(self) -> frozenset[str]:
        news, self._news = frozenset(self._news), set()
        return news

    def _serve(self) -> None:
        while self.queue and len(self.held) < self.free:
            slot = self.queue.pop(0)
            self.held.add(slot)
            self._news.add(slot)
        self.most = max(self.most, len(self.held))


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Daemon, FakeGate]]:
    daemon, gate = Daemon(tmp_path), FakeGate(1)
    daemon.engine.create_admission.semaphore = CreateSemaphore(gate)
    yield daemon, gate
    daemon.check()


def creating(daemon: Daemon) -> int:
    return daemon.zone.states().count("CREATING")


def test_one_at_a_time_and_all_come_up(gated: tuple[Daemon, FakeGate]) -> None:
    daemon, gate = gated
    daemon.care_for("pod", 4, place(workers=1, kind="v2-8"))
    most = 0
    for _ in range(1200):
        daemon.run(seconds=1)
        most = max(most, creating(daemon))
    assert daemon.all_train()
    assert (most, gate.most) == (1, 1)
    assert (gate.held, gate.queue) == (set(), [])


def test_waiting_for_it_is_told(gated: tuple[Daemon, FakeGate]) -> None:
    daemon, gate = gated
    gate.free = 0
    daemon.care_for("pod", 2)
    daemon.run(minutes=5)
    assert set(daemon.causes().values()) == {Cause.CREATE_SEMAPHORE}
    assert daemon.zone.nodes() == []
    assert all(not daemon.memory(f"pod-{number}").creates for number in range(2)), "no intent before it is held"
    gate.free = 2
    gate._serve()
    daemon.executor.nudge()
    daemon.run(minutes=15)
    assert daemon.all_train()


def test_a_slot_that_is_taken_down_meanwhile_gives_its_place_up(gated: tuple[Daemon, FakeGate]) -> None:
    daemon, gate = gated
    gate.free = 0
    daemon.care_for("pod", 2)
    daemon.run(minutes=1)
    assert sorted(gate.queue) == ["pod-0", "pod-1"]
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(seconds=10)
    assert gate.queue == ["pod-1"]
    gate.free = 1
    gate._serve()
    daemon.run(minutes=15)
    assert daemon.trains("pod-1")
    assert gate.held == set()


def test_it_is_given_back_when_the_create_is_refused_or_gives_up(gated: tuple[Daemon, FakeGate]) -> None:
    daemon, gate = gated
    where = place()
    daemon.zone.world.operator.set_capacity(
        where.zone, where.accelerator_type, where.provisioning.value, 0, daemon.clock.now()
    )
    daemon.care_for("pod", 2, care=Care())
    held = set()
    for _ in range(1800):
        daemon.run(seconds=1)
        held |= gate.held
    assert held == {"pod-0", "pod-1"}, "a stockout does not hold it"
    assert gate.most == 1


def test_an_error_of_it_sets_the_slot_aside_loudly(gated: tuple[Daemon, FakeGate]) -> None:
    daemon, gate = gated
    gate.error = RuntimeError("creation_semaphore: OSError: no such queue")
    daemon.care_for("pod")
    daemon.run(seconds=10)
    assert any("no such queue" in text for text in daemon.told("error"))
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")


def budget(folder: Path, project: str, limit: int) -> SharedBudget:
    return SharedBudget(folder, project, limit, "tpucare", lambda: 0.0)


def test_a_turn_waits_for_the_budget_and_no_place_of_it_is_lost(tmp_path: Path) -> None:
    """
    A slot reserved a place in the create budget before it held the semaphore, and lost its turn while it waited for the
    budget: with many slots both were used up and hardly a node was made. The semaphore comes first; its holder keeps it
    while it waits for the budget.
    """
    daemon = Daemon(tmp_path / "state", settings=Settings(budget=lambda project: budget(tmp_path, project, 6)))
    gate = FakeGate(4)
    daemon.engine.create_admission.semaphore = CreateSemaphore(gate)
    daemon.care_for("pod", 20, place(workers=1, kind="v2-8"))
    for _ in range(40):
        daemon.run(seconds=30)
        places = budget(tmp_path, PROJECT, 6).shares()
        assert all(name.startswith("pod-") for name in places), "a place that no create took"
    assert daemon.all_train()
    assert len(daemon.zone.created()) == 20
    assert (gate.held, gate.queue) == (set(), [])
    asked = sorted(datetime.fromisoformat(call["at"]) for call in calls(daemon, "CreateNode"))
    assert all(later - first >= timedelta(seconds=60) for first, later in zip(asked, asked[6:], strict=False))
    daemon.check()


def test_a_turn_that_waits_for_the_budget_in_vain_is_given_back(tmp_path: Path) -> None:
    """Other processes use the budget up; who is taken down meanwhile holds nobody up."""
    others = budget(tmp_path, PROJECT, 1)
    daemon = Daemon(tmp_path / "state", settings=Settings(budget=lambda project: budget(tmp_path, project, 1)))
    gate = FakeGate(1)
    daemon.engine.create_admission.semaphore = CreateSemaphore(gate)
    assert others.free_at(daemon.clock.monotonic()) is None
    others.reserve("other-0", daemon.clock.monotonic())
    daemon.care_for("pod", 2)
    daemon.run(seconds=20)
    assert gate.held == {"pod-0"}
    assert daemon.causes() == {"pod-0": Cause.CREATE_BUDGET, "pod-1": Cause.CREATE_SEMAPHORE}
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(seconds=10)
    assert gate.held == {"pod-1"}
    assert daemon.causes()["pod-0"] is not Cause.CREATE_BUDGET
    daemon.run(minutes=15)
    assert daemon.trains("pod-1")
    assert [call["node"] for call in calls(daemon, "CreateNode")] == ["pod-1-a0"]
    assert gate.held == set()
    daemon.check()
