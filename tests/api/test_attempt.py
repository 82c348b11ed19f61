"""An attempt ends with its node, and with it every call, whoever made it; a Host belongs to one attempt."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.local_remote import LocalRemote
from tpucare.api.attempt import Attempt, Host, attempt_of, bind
from tpucare.model.errors import CommandFailed, ConfigError, NodeGone, WorkerSilent
from tpucare.model.resources import NodeKey, Worker

KEY = NodeKey("p", "z", "pod-a3")


@pytest.fixture
def remote() -> Iterator[LocalRemote]:
    made = LocalRemote()
    yield made
    made.close()


def attempt(remote: LocalRemote, slot: str = "pod", number: int = 4, **more: Any) -> Attempt:
    workers = tuple(Worker(KEY, 7, index, f"host-{index}") for index in range(2))
    return Attempt(remote, slot=slot, token="pod-a3.1", number=number, workers=workers, **more)


@pytest.fixture
def one(remote: LocalRemote) -> Iterator[Attempt]:
    made = attempt(remote)
    yield made
    made.end("the test is over")


def test_commands_and_files_go_to_the_worker_that_was_named(one: Attempt, remote: LocalRemote) -> None:
    one.put(1, "note", b"hello", 0o600)
    assert one.run(1, "cat note").stdout == b"hello"
    assert one.run(0, "cat note").exit_status == 1
    assert one.run(0, "cat", stdin=b"sent").stdout == b"sent"
    assert (remote.home(one.workers[1]) / "note").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandFailed):
        one.put(1, "no/such/folder", b"", 0o600)


def test_every_command_bears_the_marks_of_its_run(one: Attempt) -> None:
    said = one.run(1, "env | grep ^TPUCARE_ | sort").stdout.decode().split()
    assert said == [
        "TPUCARE_ATTEMPT=4",
        "TPUCARE_NODE=pod-a3",
        "TPUCARE_RUN=pod-a3.1",
        "TPUCARE_SLOT=pod",
        "TPUCARE_WORKER=1",
        "TPUCARE_WORKERS=2",
    ]
    # Bash itself bears them too: a loop without a child would not be found else.
    assert b"TPUCARE_RUN=pod-a3.1" in one.run(0, "cat /proc/$$/environ").stdout.split(b"\0")


def test_names_with_metacharacters_are_quoted(remote: LocalRemote) -> None:
    hostile = attempt(remote, slot="it's; touch $HOME/x `id`")
    assert hostile.run(0, 'printf %s "$TPUCARE_SLOT"; ls').stdout.decode() == hostile.slot


@pytest.mark.parametrize("worker", [2, -1, True, "0", "all"])
def test_a_worker_that_there_is_not_is_named(one: Attempt, worker: Any) -> None:
    with pytest.raises(ConfigError, match="its workers are 0 to 1"):
        one.run(worker, "true")


def test_a_deadline_is_kept_and_is_no_word_about_the_command(one: Attempt) -> None:
    with pytest.raises(WorkerSilent):
        one.run(0, "sleep 30", deadline=timedelta(seconds=0.3))
    assert not one.over


def test_calls_in_flight_and_later_ones_end_with_the_attempt(one: Attempt) -> None:
    met: list[str] = []

    def call() -> None:
        try:
            one.run(0, "sleep 30")
        except NodeGone as error:
            met.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: one.calls_in_flight(0) == 8)
    assert one.calls_in_flight(1) == 0
    assert not one.over
    one.end("PREEMPTED")
    for thread in threads:
        thread.join(10)
    assert met == ["pod-a3 (attempt 4 of pod): PREEMPTED"] * 8
    assert one.calls_in_flight(0) == 0
    assert one.over
    for call_again in (lambda: one.run(0, "true"), lambda: one.put(0, "x", b"", 0o600)):
        with pytest.raises(NodeGone, match="PREEMPTED"):
            call_again()
    one.end("another reason")
    assert one.why == "PREEMPTED"


def test_how_long_a_call_has_gone_on(remote: LocalRemote) -> None:
    clock = [100.0]
    one = attempt(remote, monotonic=lambda: clock[0])
    assert one.longest_call() == timedelta()
    thread = threading.Thread(target=lambda: one.run(0, "while [ ! -e done ]; do sleep 0.02; done"))
    thread.start()
    eventually(lambda: one.calls_in_flight(0))
    clock[0] += 90
    assert one.longest_call() == timedelta(seconds=90)
    (remote.home(one.workers[0]) / "done").touch()
    thread.join(10)
    assert one.longest_call() == timedelta()


def test_a_stopped_run_begins_nothing_more(one: Attempt, remote: LocalRemote) -> None:
    folder = remote.home(one.workers[0]) / ".tpucare" / one.token
    folder.mkdir(parents=True)
    (folder / "stopped").touch()
    ran = one.run(0, "echo begun")
    assert (ran.exit_status, ran.stdout) == (75, b"")
    assert one.run(1, "echo begun").stdout == b"begun\n"


# --- whose attempt a call is ---


def test_a_host_is_the_slots_name_and_nothing_else_outside(one: Attempt) -> None:
    host = Host(one)
    assert (host, host.attempt) == ("pod", one)
    assert json.dumps({"host": host}) == '{"host": "pod"}'
    thawed = pickle.loads(pickle.dumps(host))
    assert (type(thawed), thawed) == (str, "pod")
    assert copy.copy(host) is host


def test_a_thread_acts_for_its_own_attempt_alone(remote: LocalRemote) -> None:
    """
    A context keeps the `Host` of an earlier node, whose attempt is over. The attempt of the calling thread comes first.
    """
    old, new = attempt(remote, number=1), attempt(remote, number=2)
    assert attempt_of("pod") is None
    assert attempt_of(Host(old)) is old, "a thread of the user's own"
    with bind(new):
        assert attempt_of("pod") is attempt_of("pod-a3") is new
        assert attempt_of(Host(old)) is new, "a context may bear the Host of an earlier node"
        assert attempt_of("other") is None
    old.end("gone")
    with bind(old):
        assert attempt_of(Host(new)) is old, "never for a later attempt than its own"
    assert attempt_of("pod") is None


def test_a_copy_made_for_an_attempt_is_bound_to_it(remote: LocalRemote) -> None:
    """
    A context keeps the `Host` of an earlier node, whose attempt is over. A copy made for an attempt is bound to that
    attempt.
    """
    old, new = attempt(remote, number=1), attempt(remote, number=2)
    context: dict[str, Any] = {"host": Host(old), "others": [Host(attempt(remote, slot="other"))]}
    with bind(new):
        made = copy.deepcopy(context)
    assert made["host"].attempt is new
    assert made["others"][0].attempt is not new
    assert context["host"].attempt is old
