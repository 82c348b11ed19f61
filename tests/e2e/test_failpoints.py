"""
The real daemon, killed with SIGKILL at every boundary between an intent, its effect and its outcome, and started again.

Afterwards: one node, one run, no attempt lost, nothing that has no slot; `close` checks the audit log and processes.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.test_examples import commit
from tests.kits.deployment import ONE_HOST, TRAIN, TWO_HOSTS, Deployment, deployment
from tpucare.service.failpoints import NAMES, VARIABLE

pytestmark = [pytest.mark.machines, pytest.mark.timeout(240)]

MOMENTS = ("before-intent", "after-intent", "after-effect", "after-outcome")


def start_to_die(home: Deployment, point: str, *, ready: bool = True) -> None:
    """The next daemon dies at *point*; what makes it get there may come later."""
    home.environment[VARIABLE] = point
    home.start(ready=ready)
    del home.environment[VARIABLE]


def await_death(home: Deployment, point: str) -> None:
    assert home.daemon is not None
    assert home.daemon.wait(60) == -signal.SIGKILL, home.daemon_log.read_text()[-2000:]
    home.daemon = None
    home.restarts.append(home.server.now())
    assert f"failpoint {point.partition(':')[0]}: killed" in home.daemon_log.read_text()


def die(home: Deployment, point: str) -> None:
    start_to_die(home, point, ready=False)
    await_death(home, point)


def run_alone(home: Deployment, slot: str, node: str) -> None:
    """*node* is the only one, and on it lives one run, that of the slot."""
    home.await_training(slot, node)
    home.await_(lambda: home.names() == [node], "one node")
    home.await_(lambda: list(home.runs()) == [home.token(slot)], "one run")


def test_killed_at_one_boundary_after_another(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod")
        for point in ("create.after-intent", "create.after-effect", "launch.pushed"):
            die(home, point)
        home.start()
        run_alone(home, "pod-0", "pod-0-a0")
        assert home.token("pod-0") == "pod-0-a0.1", "the run that was begun goes on"
        assert home.attempts("pod-0") == 1
        home.kill()
        home.order("preempt", selector="pod-0")
        for point in ("delete.after-intent", "delete.after-effect"):
            die(home, point)
        home.start()
        run_alone(home, "pod-0", "pod-0-a1")
        assert home.attempts("pod-0") == 2


CREATE = [f"create.{moment}" for moment in MOMENTS]
LAUNCH = [*(f"launch.{moment}" for moment in MOMENTS), "launch.pushed", "launch.pushed:2"]


@pytest.mark.slow
@pytest.mark.parametrize("point", [*CREATE, *LAUNCH])
def test_killed_around_a_create_or_a_launch(tmp_path: Path, point: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        die(home, point)
        home.start()
        run_alone(home, "pod-0", "pod-0-a0")
        assert home.attempts("pod-0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"delete.{moment}" for moment in MOMENTS])
def test_killed_around_a_delete(tmp_path: Path, point: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        home.start()
        home.await_training("pod-0")
        home.kill()
        home.order("preempt", selector="pod-0")
        die(home, point)
        home.start()
        run_alone(home, "pod-0", "pod-0-a1")
        assert home.attempts("pod-0") == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", [f"stop.{moment}" for moment in MOMENTS])
def test_killed_around_a_stop(tmp_path: Path, point: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        home.start()
        home.await_training("pod-0")
        home.kill()
        start_to_die(home, point)
        home.await_(lambda: home.row("pod-0")["phase"] == "run", "it is back")
        home.cli("apply", str(home.fleets / "pod.yaml"), "--restart", want=None)
        await_death(home, point)
        home.start()
        home.await_(lambda: home.token("pod-0") == "pod-0-a0.2", "a second run")
        run_alone(home, "pod-0", "pod-0-a0")
        assert home.attempts("pod-0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", ["stop.after-effect", "delete.after-intent", "delete.after-effect"])
def test_killed_while_a_fleet_is_taken_down(tmp_path: Path, point: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", live=False)
        home.start()
        home.await_training("pod-0")
        home.kill()
        home.allow_deletes("pod-0")
        start_to_die(home, point)
        home.await_(lambda: home.row("pod-0")["phase"] == "run", "it is back")
        home.cli("down", "pod", "--yes", want=None)
        await_death(home, point)
        home.start()
        home.await_(lambda: not home.names() and not home.runs(), "nothing is left")


# The commit that worker 0 was told stands in the run's folder by then: the same run keeps it, wherever the branch is.
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        (ONE_HOST, "launch.pushed"),
        pytest.param(TWO_HOSTS, "launch.pushed:2", marks=pytest.mark.slow),
        pytest.param(TWO_HOSTS, "launch.after-effect", marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_repository_is_launched(tmp_path: Path, kind: str, point: str) -> None:
    repository = tmp_path / "repository"
    first = commit(repository, {"train.sh": f"echo first\n{TRAIN}"})
    job = {"repository": f"file://{repository}", "branch": "main"}
    with deployment(tmp_path / "house") as home:
        home.declare("pod", kind=kind, run='echo "at $TPUCARE_COMMIT"; . ./train.sh', job=job)
        die(home, point)
        assert [event.slot for event in home.events("launch")] == ["pod-0"]
        assert bool(home.runs()) is (point == "launch.after-effect")
        commit(repository, {"train.sh": f"echo second\n{TRAIN}"})
        home.start()
        run_alone(home, "pod-0", "pod-0-a0")
        assert home.token("pod-0") == "pod-0-a0.1"
        assert home.attempts("pod-0") == 1
        logs = partial(map, partial(home.log, "pod-0", 1), range(1 if kind == ONE_HOST else 2))
        home.await_(lambda: all(f"at {first}\nfirst\n" in log for log in logs()), "all workers run the first commit")
        assert not any("second" in log for log in logs())


def test_every_boundary_has_its_test() -> None:
    assert {name.partition(".")[0] for name in NAMES} == {"create", "launch", "delete", "stop"}
    assert {name.partition(".")[2] for name in NAMES} == {*MOMENTS, "pushed"}
