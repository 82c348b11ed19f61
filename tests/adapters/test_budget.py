"""The shared create budget: never exceeded by all processes of a folder together, whoever is killed when."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tpucare.adapters.state import create_budget as budgets
from tpucare.adapters.state.create_budget import SharedBudget, shared_budget
from tpucare.model.errors import StoreError


def budget(folder: Path, limit: int = 3) -> SharedBudget:
    return shared_budget(folder, "grant", limit)


def spend(shared: SharedBudget, slot: str, now: float) -> bool:
    if shared.free_at(now) is not None:
        return False
    shared.take(slot, now)
    return True


def test_two_processes_share_one_minute(tmp_path: Path) -> None:
    one, other = budget(tmp_path), budget(tmp_path)
    assert spend(one, "a-0", 100.0)
    assert spend(other, "b-0", 110.0)
    assert spend(one, "a-1", 120.0)
    assert other.free_at(130.0) == 160.0
    assert one.shares() == {"a-0": 1, "a-1": 1, "b-0": 1}
    assert spend(other, "b-1", 160.0)
    assert one.free_at(161.0) == 170.0


def test_a_create_counts_a_minute_from_its_answer(tmp_path: Path) -> None:
    one, other = budget(tmp_path, 1), budget(tmp_path, 1)
    assert spend(one, "a-0", 100.0)
    one.answered("a-0", 140.0)
    assert other.free_at(161.0) == 200.0


def test_a_place_that_was_found_is_nobody_elses(tmp_path: Path) -> None:
    one, other = budget(tmp_path, 1), budget(tmp_path, 1)
    assert one.free_at(100.0) is None
    assert other.free_at(100.0) == 160.0


def test_other_projects_have_their_own(tmp_path: Path) -> None:
    assert spend(budget(tmp_path, 1), "a-0", 100.0)
    assert spend(shared_budget(tmp_path, "example.com:other/../x", 1), "a-0", 100.0)
    assert {path.suffix for path in (tmp_path / "creates").iterdir()} == {".json", ".lock"}


def test_what_the_store_remembers_counts_once(tmp_path: Path) -> None:
    first = budget(tmp_path)
    first.restore([(90.0, "")])
    assert spend(first, "a-0", 100.0)
    again = budget(tmp_path)
    again.restore([(100.0, ""), (90.0, "")])
    assert sum(again.shares().values()) == 2


@pytest.mark.parametrize("content", ["", "{", '{"boot": "another", "asked": [[1, "a"]]}', '{"asked": 3}', "[]"])
def test_a_file_of_another_boot_or_of_nobody_counts_as_none(tmp_path: Path, content: str) -> None:
    shared = budget(tmp_path)
    (tmp_path / "creates" / "grant.json").write_text(content)
    assert shared.free_at(100.0) is None


def test_who_was_stopped_in_the_middle_makes_others_wait_and_not_hang(tmp_path: Path) -> None:
    shared = budget(tmp_path)
    spend(shared, "a-0", 100.0)
    code = f"""
        import fcntl, os, time
        handle = os.open({str(tmp_path / "creates" / "grant.lock")!r}, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert shared.free_at(100.0) == 101.0
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    assert shared.free_at(101.0) is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    shared = budget(tmp_path)
    (tmp_path / "creates" / f"grant.json.{os.getpid()}").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        shared.free_at(100.0)


def _crowd(folder: str, name: str, found: multiprocessing.SimpleQueue[int]) -> None:
    budgets._PATIENCE_SECONDS = 60.0  # Whoever gives up waiting for the lock may leave a place to nobody.
    shared = budget(Path(folder), 25)
    found.put(sum(spend(shared, f"{name}-{index}", 100.0) for index in range(20)))


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
    asked = json.loads((tmp_path / "creates" / "grant.json").read_text())["asked"]
    assert len(asked) == len({slot for _, slot in asked}) == 25
