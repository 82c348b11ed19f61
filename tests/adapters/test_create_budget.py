"""The shared create budget: never exceeded by all processes of a folder together, whoever is stopped or killed when."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.kits.stopped import stopped_at_each_line
from tpucare.adapters.state import create_budget as budgets
from tpucare.adapters.state.create_budget import SharedBudget
from tpucare.adapters.state.folder import StoreLock, lock_path
from tpucare.model.errors import StoreError

# The promise: a process that is stopped, or killed, holds up no other one for longer.
HELD_UP_SECONDS = 2.0


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def _clock() -> None:
    Clock.now = 0.0


def budget(folder: Path, limit: int = 3, store: str = "a", project: str = "grant") -> SharedBudget:
    return SharedBudget(folder, project, limit, store, lambda: Clock.now)


def holding(folder: Path, store: str) -> StoreLock:
    """The lock that a process holds as long as it cares for *store*."""
    folder.mkdir(exist_ok=True)
    return StoreLock(lock_path(folder, store))


def spend(shared: SharedBudget, slot: str, now: float) -> bool:
    """A create that is admitted, sent and answered at one instant."""
    if shared.free_at(now) is not None:
        return False
    shared.reserve(slot, now)
    shared.create_ended(slot, now)
    return True


def spent(folder: Path) -> list[str]:
    """Slots of all creates of the newest version."""
    newest = max((folder / "creates").iterdir(), key=lambda path: int(path.name.rpartition("@")[2] or -1))
    return [slot for _, slot, _, _ in json.loads(newest.read_text())["spent"]]


def test_two_processes_share_one_minute(tmp_path: Path) -> None:
    one, other = budget(tmp_path), budget(tmp_path, store="b")
    assert spend(one, "a-0", 100.0)
    assert spend(other, "b-0", 110.0)
    assert spend(one, "a-1", 120.0)
    assert other.free_at(130.0) == 160.0
    assert one.shares() == {"a-0": 1, "a-1": 1, "b-0": 1}
    assert spend(other, "b-1", 160.0)
    assert one.free_at(161.0) == 170.0


def test_a_create_counts_a_minute_from_its_answer(tmp_path: Path) -> None:
    one, other = budget(tmp_path, 1), budget(tmp_path, 1, "b")
    assert one.free_at(100.0) is None
    one.reserve("a-0", 100.0)
    one.create_ended("a-0", 140.0)
    assert other.free_at(161.0) == 200.0


def test_a_place_that_was_found_is_nobody_elses(tmp_path: Path) -> None:
    one, other = budget(tmp_path, 1), budget(tmp_path, 1, "b")
    assert one.free_at(100.0) is None
    assert other.free_at(100.0) == 160.0


def test_other_projects_have_their_own(tmp_path: Path) -> None:
    assert spend(budget(tmp_path, 1), "a-0", 100.0)
    assert spend(budget(tmp_path, 1, project="example.com:other/../x"), "a-0", 100.0)
    names = {path.name.partition("@")[0] for path in (tmp_path / "creates").iterdir()}
    assert names == {"grant", "example.com%3Aother%2F..%2Fx"}


def test_what_the_store_remembers_counts_once(tmp_path: Path) -> None:
    first = budget(tmp_path)
    first.restore([(90.0, "")])
    assert spend(first, "a-0", 100.0)
    again = budget(tmp_path)
    again.restore([(100.0, ""), (90.0, "")])
    assert sum(again.shares().values()) == 2


@pytest.mark.parametrize(
    "content", ["", "{", '{"boot": "another", "spent": [[1, "a", "b", ""]]}', '{"spent": 3}', "[]"]
)
def test_a_file_of_another_boot_or_of_nobody_counts_as_none(tmp_path: Path, content: str) -> None:
    shared = budget(tmp_path)
    (tmp_path / "creates" / "grant@7").write_text(content)
    assert shared.free_at(100.0) is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    shared = budget(tmp_path)
    (tmp_path / "creates" / ".a").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        shared.free_at(100.0)


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    shared = budget(tmp_path)
    (tmp_path / "creates").rmdir()
    with pytest.raises(StoreError, match="cannot be read"):
        shared.free_at(100.0)


def test_old_versions_are_deleted(tmp_path: Path) -> None:
    shared = budget(tmp_path, 60)
    for index in range(30):
        assert spend(shared, f"a-{index}", 100.0 + index)
    assert len(list((tmp_path / "creates").iterdir())) == budgets._VERSIONS_KEPT
    assert len(spent(tmp_path)) == 30


def _crowd(folder: str, name: str, found: multiprocessing.SimpleQueue[int]) -> None:
    budgets._PATIENCE_SECONDS = 60.0  # One that gives up in the crowd may leave a place to nobody.
    lock = holding(Path(folder), name)
    shared = budget(Path(folder), 25, name)
    found.put(sum(spend(shared, f"{name}-{index}", 100.0) for index in range(20)))
    lock.release()


def test_many_at_once_never_find_more_than_there_is(tmp_path: Path) -> None:
    methods = multiprocessing.get_context("spawn")
    found = methods.SimpleQueue()
    crowd = [methods.Process(target=_crowd, args=(str(tmp_path), f"p{index}", found)) for index in range(4)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join(120)
        assert process.exitcode == 0
    assert sum(found.get() for _ in crowd) == 25
    asked = spent(tmp_path)
    assert len(asked) == len(set(asked)) == 25


@pytest.mark.parametrize("is_restored", [False, True], ids=["a create", "what the store remembers"])
def test_a_process_that_is_stopped_behind_its_link_loses_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    """When it looks again, so many versions were made that its own looks like one that was made too late."""
    one, other = budget(tmp_path, 60), budget(tmp_path, 60, "b")
    link = os.link

    def link_and_stop(draft: Path, made: Path) -> None:
        link(draft, made)
        monkeypatch.setattr(os, "link", link)
        assert all(spend(other, f"b-{index}", 100.0) for index in range(budgets._VERSIONS_KEPT))

    lock = holding(tmp_path, "a")
    monkeypatch.setattr(os, "link", link_and_stop)
    if is_restored:
        one.restore([(100.0, "a-0"), (100.0, "a-0")])
    else:
        assert spend(one, "a-0", 100.0)
        assert spend(one, "a-0", 100.0)
    assert Counter(spent(tmp_path)) == {"a-0": 2} | {f"b-{index}": 1 for index in range(budgets._VERSIONS_KEPT)}
    lock.release()


class TestWithoutAnAnswer:
    """What was admitted may be sent at any moment until it is answered, or its process is dead."""

    def test_it_counts_however_long_that_takes(self, tmp_path: Path) -> None:
        one, other = budget(tmp_path, 2), budget(tmp_path, 2, "b")
        with_lock = holding(tmp_path, "a")
        assert one.free_at(100.0) is None
        one.reserve("a-0", 100.0)
        assert spend(other, "b-0", 500.0)
        assert other.free_at(501.0) == 560.0
        one.create_ended("a-0", 510.0)
        assert spend(other, "b-1", 560.0)
        assert other.free_at(561.0) == 570.0
        with_lock.release()

    def test_of_a_dead_process_it_counts_from_when_that_is_noticed(self, tmp_path: Path) -> None:
        one, other = budget(tmp_path, 2), budget(tmp_path, 2, "b")
        lock = holding(tmp_path, "a")
        assert one.free_at(100.0) is None
        lock.release()
        Clock.now = 500.0
        # The process that notices was stopped itself after it had asked for the time.
        assert other.free_at(150.0) is None
        other.reserve("b-0", 500.0)
        other.create_ended("b-0", 500.0)
        assert other.free_at(501.0) == 560.0

    def test_the_next_process_of_its_store_lets_it_expire(self, tmp_path: Path) -> None:
        lock = holding(tmp_path, "a")
        assert budget(tmp_path, 1).free_at(100.0) is None
        successor, other = budget(tmp_path, 1), budget(tmp_path, 1, "b")
        assert other.free_at(300.0) == 360.0
        assert successor.free_at(310.0) == 370.0
        assert other.free_at(370.0) is None
        lock.release()

    def test_nobody_has_more_than_half_of_what_is_left(self, tmp_path: Path) -> None:
        """Else one that is stopped in a burst would stop all others for as long."""
        locks = [holding(tmp_path, store) for store in "abc"]
        found = {}
        for store in "abc":
            shared = budget(tmp_path, 60, store)
            for index in range(60):
                if (free_at := shared.free_at(100.0)) is not None:
                    assert free_at == 101.0
                    break
                shared.reserve(f"{store}-{index}", 100.0)
                found[store] = index + 1
        assert found == {"a": 30, "b": 15, "c": 7}
        for lock in locks:
            lock.release()

    def test_a_slot_has_one_create_at_a_time(self, tmp_path: Path) -> None:
        shared = budget(tmp_path, 4)
        for _ in range(3):
            assert shared.free_at(100.0) is None
            shared.reserve("a-0", 100.0)
        assert shared.shares() == {"a-0": 3}
        shared.create_ended("a-0", 130.0)
        assert shared.free_at(159.0) is None
        assert shared.free_at(159.0) == 160.0


LIMIT = 6


def _caretaker(folder: Path, sent: Path) -> None:
    """Two creates, as a process that holds the lock of store `a` sends them; each is written down as it is sent."""

    def clock() -> float:
        return float((folder / "clock").read_text())

    lock = StoreLock(lock_path(folder, "a"))
    shared = SharedBudget(folder, "grant", LIMIT, "a", clock)
    for slot in ("a-0", "a-1"):
        now = clock()
        if shared.free_at(now) is None:
            shared.reserve(slot, now)
            with sent.open("a") as calls:
                calls.write(f"{clock()}\n")
            shared.create_ended(slot, clock())
    lock.release()


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "is killed"])
def test_stopped_at_any_line_it_holds_up_nobody_and_the_budget_is_kept(tmp_path: Path, ends: bool, step: int) -> None:
    """
    A process of an earlier version that was stopped while it held the file's lock let no other process create anything,
    and one that was stopped behind it sent what had been free long ago.
    """
    sent = tmp_path / "sent"

    def act() -> None:
        _caretaker(folder, sent)

    lines = 0
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "clock").write_text("100.0")
    for child in stopped_at_each_line(act, "adapters/state/create_budget.py", __file__, step=step):
        lines += 1
        other, calls = budget(folder, LIMIT, "b"), []
        for now in (100.0, 110.0, 400.0, 410.0):
            Clock.now = now
            (folder / "clock").write_text(str(now))
            for index in range(LIMIT):
                began = time.monotonic()
                if spend(other, f"b-{index}", now):
                    calls.append(now)
                assert time.monotonic() - began < HELD_UP_SECONDS
        assert len(calls) >= 2 * (LIMIT - 2), f"line {child.line}: {calls}"
        Clock.now = 411.0
        (folder / "clock").write_text("411.0")
        if ends:
            child.kill()
        else:
            child.go_on()
        for now in (412.0, 475.0):
            Clock.now = now
            calls += [now for index in range(LIMIT) if spend(other, f"b-{index}", now)]
        calls = sorted([*calls, *map(float, sent.read_text().split() if sent.exists() else ())])
        crowded = [pair for pair in zip(calls, calls[LIMIT:], strict=False) if pair[1] - pair[0] < 60]
        assert not crowded, f"line {child.line}: {calls}"
        assert calls.count(475.0) == LIMIT, f"line {child.line}: a place is lost: {calls}"
        sent.unlink(missing_ok=True)
        folder = tmp_path / str(lines)
        folder.mkdir()
        (folder / "clock").write_text("100.0")
    assert lines * step > 100
