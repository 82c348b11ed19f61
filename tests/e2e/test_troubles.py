"""
What goes wrong with one slot while others train: crashes, standstills, silence, keys. All at once in one deployment,
since most of it is a matter of patience; each test follows one slot to its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.deployment import TRAIN, TWO_HOSTS, Deployment, deployment
from tpucare.testbed.emulator.world.records import NodeSpec

pytestmark = [pytest.mark.machines, pytest.mark.timeout(180)]

PACE = {"TPUCARE_PROBE": "1", "TPUCARE_FAST_PROBE": "0.5"}
LONG = 120.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Every slot is declared here and has met its trouble when the first test begins."""
    with deployment(tmp_path_factory.mktemp("troubles"), pace=PACE) as home:
        once = '[ -e "$TPUCARE_CHECKPOINT.once" ] || { touch "$TPUCARE_CHECKPOINT.once"; %s; }\n' + TRAIN
        some_steps = 'for n in 1 2 3 4 5 6; do echo "step $n"; sleep 0.5; done'
        home.declare("crash", run=once % f"{some_steps}; exit 3")
        home.declare("hang", run=once % f"{some_steps}; sleep 600", care={"stalled_after": "5s"})
        home.declare("short", live=False, job={"env": {"STEPS": 5}})
        home.declare("mute", care={"unreachable_after": "5s"})
        home.declare("late")
        # As in a collective: what the host that is left can do is wait.
        stand = f"[ $TPUCARE_RUN != half-0-a0.1 ] || {{ {some_steps}; sleep 600; }}\n"
        home.declare("half", kind=TWO_HOSTS, run=stand + TRAIN, care={"unreachable_after": "30s"})
        home.declare("shy")
        home.declare("new-key")
        home.start()
        for slot in ("mute-0", "late-0", "half-0", "shy-0", "new-key-0"):
            home.await_steps(slot, least=6)
        home.order("preempt", selector="mute-0", silent=True, shown="never")
        home.order("preempt", selector="late-0", silent=True, visible_after=3)
        home.order("lose-worker", selector="half-0", worker=1)
        _take_key_away(home, "shy-0-a0")
        _change_host_key(home, "new-key-0-a0")
        yield home
        home.allow_deletes("short-0")


def _take_key_away(home: Deployment, node: str) -> None:
    """Somebody overwrote the metadata of the node: its guest agent takes our key away."""
    path = home.path(node)
    with home.server.lock:
        home.server.world.api.update_node(str(path), ["metadata"], NodeSpec(metadata={}), home.server.now())
    home.server.wake()
    home.machines.refuse_keys(path, 0).result(10)
    home.cut_connections(node)


def _change_host_key(home: Deployment, node: str) -> None:
    """The worker shows another key, for which its guest attributes do not vouch."""
    path = home.path(node)
    home.machines.change_host_key(path, 0).result(10)
    with home.server.lock:
        home.server.world.operator.set_guest_attribute(
            str(path), 0, "hostkeys", "ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIA=="
        )
    home.cut_connections(node)


def _total(home: Deployment, slot: str, book: str) -> int:
    memory = home.memory(slot)
    return memory.books[book].total if memory is not None and book in memory.books else 0


def test_a_gang_that_lost_a_worker_is_stopped_and_trains_again_on_the_same_node(home: Deployment) -> None:
    """The first of all tests: a worker that is not back in time costs the node."""
    stopped = home.await_event("stop", "half-0")
    assert "a worker is silent" in stopped.text
    home.order("restore-worker", selector="half-0", worker=1)
    home.await_(lambda: home.token("half-0") == "half-0-a0.2", "a second run", LONG)
    assert home.await_training("half-0", "half-0-a0", LONG) == "half-0-a0"
    assert home.attempts("half-0") == 1


def test_a_run_that_finishes_ends_its_slot_and_its_node(home: Deployment) -> None:
    home.await_event("done", "short-0")
    home.await_event("gone", "short-0")
    assert home.row("short-0")["phase"] == "done"
    assert "step 5" in home.cli("logs", "short", "--attempt", "1").out


def test_a_node_that_falls_silent_and_is_shown_later_is_replaced(home: Deployment) -> None:
    home.await_training("late-0", "late-0-a1")
    assert home.await_event("delete", node="late-0-a0").fields["reason"] == "dead"
    assert home.attempts("late-0") == 2


def test_a_node_that_falls_silent_and_is_never_shown_is_judged(home: Deployment) -> None:
    home.await_training("mute-0", "mute-0-a1", LONG)
    deleted = home.await_event("delete", node="mute-0-a0")
    assert deleted.fields["reason"] == "judged"
    assert "silent" in deleted.text


def test_a_standstill_is_restarted_on_the_same_node(home: Deployment) -> None:
    home.await_(lambda: home.token("hang-0") == "hang-0-a0.2", "a second run", LONG)
    home.await_training("hang-0", "hang-0-a0", LONG)
    assert _total(home, "hang-0", "stall") == 1
    assert home.attempts("hang-0") == 1


def test_a_crash_is_restarted_on_the_same_node_after_a_pause(home: Deployment) -> None:
    home.await_(lambda: home.token("crash-0") == "crash-0-a0.2", "a second run", LONG)
    home.await_training("crash-0", "crash-0-a0", LONG)
    assert _total(home, "crash-0", "crash") == 1
    assert home.attempts("crash-0") == 1


def test_a_refused_key_is_pushed_by_metadata_and_the_run_goes_on(home: Deployment) -> None:
    home.await_event("pushkey", "shy-0", seconds=LONG)
    home.await_(lambda: len(home.audit("UpdateNode")) == 2, "the key is written into the metadata")
    home.await_(lambda: home.row("shy-0")["phase"] == "run", "its worker answers again")
    assert home.token("shy-0") == "shy-0-a0.1"


def test_another_host_key_on_the_same_node_is_left_to_a_person(home: Deployment) -> None:
    home.await_(lambda: "another host key" in home.row("new-key-0")["why"], "its reason is shown")
    assert home.token("new-key-0") == "new-key-0-a0.1"
    assert home.runs()["new-key-0-a0.1"], "the run was touched"
    assert len(home.events("launch", "new-key-0")) == 1
