"""Files, commands, addresses and listings of the Python API, on an emulated cloud whose workers are real machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.deployment import FAR, NEAR, PROJECT, TWO_HOSTS, Deployment, eventually
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.state import folder as state_folder
from tpucare.api import hosts, session
from tpucare.api.attempt import Attempt, Host, bind
from tpucare.api.exec_command import exec_command
from tpucare.model.errors import CommandFailed, ConfigError, NeedsPerson, NodeGone, TpuCareError, WorkerSilent
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_OWNER,
    LABEL_SLOT,
    NodeKey,
    NodeRequest,
    NodeState,
    Place,
    Provisioning,
)

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

OWNER = "o-abcdefghijkl"
KEY = "0123456789" * 4
OURS = {LABEL_OWNER: OWNER, LABEL_FLEET: "pod"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """An emulated cloud, nobody who cares for anything in it, and `pod`, a TPU of two hosts that answers."""
    built = Deployment(tmp_path_factory.mktemp("h").resolve())
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TPUCARE_")]:
            patch.delenv(name)
        for name in ("TPUCARE_EMULATOR", "TPUCARE_STATE"):
            patch.setenv(name, built.environment[name])
        try:
            state_folder.prepare_folder(built.state)
            state_folder.settle_owner(built.state, OWNER)
            create(built, "pod-a1", {**OURS, LABEL_SLOT: "pod"})
            eventually(lambda: "pod" in hosts.tpu_names(NEAR, preempted=False) and answers("pod"), "pod answers")
            yield built
        finally:
            session.close()
            built.close(judge=False)


def deny(*_: object) -> object:
    raise NeedsPerson("type a -> b is not in location", advice="list another zone under `tpu`")


def create(deployment: Deployment, name: str, labels: dict[str, str], zone: str = NEAR) -> None:
    here = session.current()
    line = f"{here.options.ssh_user}:{load_or_make_key(here.options.key).public}"
    place = Place(zone, TWO_HOSTS, Provisioning.SPOT, "v2-alpha-tpuv5")
    here.cloud.create_node(NodeRequest(NodeKey(PROJECT, zone, name), place, labels, {"ssh-keys": line}))
    here.forget_listings()


def answers(host: str) -> bool:
    try:
        return hosts.exec_on_tpu(host, NEAR, "echo yes", "all") == "yes\nyes\n"
    except TpuCareError:
        return False


def attempt_on(node: str) -> Attempt:
    here = session.current()
    return Attempt(here.remote, slot="pod", token=f"{node}.1", number=1, workers=here.reach(node, NEAR).workers)


# --- files and commands ----------------------------------------------------------------------------------------------


def test_a_file_arrives_whole_and_private(deployment: Deployment) -> None:
    hosts.send_to_tpu("pod", NEAR, "config.yaml", "width: 1\nname: é\n", "all")
    hosts.send_to_tpu("pod", NEAR, "~/run.sh", "#!/bin/sh\necho ran\n")
    assert hosts.exec_on_tpu("pod", NEAR, "cat config.yaml", 1) == "width: 1\nname: é\n"
    assert hosts.exec_on_tpu("pod", NEAR, "stat -c '%a %n' config.yaml run.sh") == "600 config.yaml\n700 run.sh\n"
    assert hosts.exec_on_tpu("pod", NEAR, "./run.sh") == "ran\n"


def test_outputs_of_all_workers_are_in_their_order(deployment: Deployment) -> None:
    command = 'test "${HOSTNAME##*-}" = 1 || sleep 0.5; printf "worker ${HOSTNAME##*-}"'
    assert hosts.exec_on_tpu("pod", NEAR, command, "all") == "worker 0\nworker 1"
    assert hosts.exec_on_tpu("pod-a1", NEAR, command, 1) == "worker 1"


def test_a_command_that_fails_says_how(deployment: Deployment) -> None:
    with pytest.raises(CommandFailed, match=r"pod, worker 1: exit status 3: one \| two$") as failed:
        hosts.exec_on_tpu("pod", NEAR, "echo lost; printf 'one\\ntwo\\n' >&2; exit 3", 1)
    assert (failed.value.exit_status, failed.value.stderr_tail) == (3, "one\ntwo")
    with pytest.raises(CommandFailed, match=r"worker 1: exit status 1$"):
        hosts.exec_on_tpu("pod", NEAR, 'test "${HOSTNAME##*-}" = 0', "all")
    with pytest.raises(CommandFailed, match=r"2 of 2 workers failed: .*worker 0.*worker 1"):
        hosts.exec_on_tpu("pod", NEAR, "exit 4", "all")
    with pytest.raises(CommandFailed, match=r"^pod, worker 0: nowhere/config.yaml cannot be written: No such file"):
        hosts.send_to_tpu("pod", NEAR, "nowhere/config.yaml", "x")


def test_the_key_travels_beside_the_script(deployment: Deployment) -> None:
    command = exec_command("https://example.org/job", KEY)
    hosts.send_to_tpu("pod", NEAR, "setup.sh", command, "all")
    said = hosts.exec_on_tpu(
        "pod", NEAR, "stat -c '%a %n' setup.sh*; cat setup.sh.netrc; grep -c " + KEY + " setup.sh || true", 1
    )
    assert said == f"700 setup.sh\n600 setup.sh.netrc\n{command.netrc}0\n"


def test_the_script_of_2022_starts_a_run_on_all_workers(deployment: Deployment, tmp_path: Path) -> None:
    job = tmp_path / "job"
    os.system(
        f"git init -q -b main {job} && git -C {job} -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x"
    )
    command = exec_command(
        f"file://{job}", setup_command="mv ~/config.yaml .", run_command="cat config.yaml >~/ran; sleep 600",
        install_python=False,
    )  # fmt: skip
    hosts.send_to_tpu("pod", NEAR, "config.yaml", "width: 2\n", "all")
    hosts.send_to_tpu("pod", NEAR, "setup.sh", command, "all")
    started = hosts.exec_on_tpu("pod", NEAR, "bash setup.sh", "all")
    assert started.count("is started in screen") == 2
    eventually(lambda: hosts.exec_on_tpu("pod", NEAR, "cat ran || true", "all") == "width: 2\n" * 2, "both run")
    again = hosts.exec_on_tpu("pod", NEAR, command, "all")
    assert again.count("left unchanged") == 2


def test_a_command_may_take_its_time(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ASK_EVERY_SECONDS", 0.2)
    assert hosts.exec_on_tpu("pod", NEAR, "sleep 1.5; echo done") == "done\n"


# --- inside a start_fn -----------------------------------------------------------------------------------------------


def test_within_an_attempt_every_command_bears_its_marks(deployment: Deployment) -> None:
    attempt = attempt_on("pod-a1")
    host = Host(attempt)
    assert hosts.exec_on_tpu(host, "any-zone-1", 'echo "$TPUCARE_RUN $TPUCARE_WORKER"', "all") == (
        "pod-a1.1 0\npod-a1.1 1\n"
    )
    hosts.send_to_tpu(host, NEAR, "sent", "x", "all")
    assert hosts.exec_on_tpu(host, NEAR, "cat sent", 1) == "x"
    assert hosts.tpu_ips(host, NEAR) == [worker.host for worker in attempt.workers]


def test_once_its_attempt_is_over_a_host_reaches_nothing(deployment: Deployment) -> None:
    attempt = attempt_on("pod-a1")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(hosts.exec_on_tpu, Host(attempt), NEAR, "sleep 600", "all")
        eventually(lambda: attempt.calls_in_flight(1), "the call is under way")
        attempt.end("preempted")
        with pytest.raises(NodeGone, match="preempted"):
            call.result(timeout=30)
    late: list[Callable[[Any], object]] = [
        lambda host: hosts.exec_on_tpu(host, NEAR, "touch late"),
        lambda host: hosts.send_to_tpu(host, NEAR, "late", "x"),
        lambda host: hosts.tpu_ips(host, NEAR),
    ]
    for call_late in late:
        with pytest.raises(NodeGone, match="preempted"):
            call_late(Host(attempt))
        with bind(attempt), pytest.raises(NodeGone, match="preempted"):
            call_late("pod")
    assert hosts.exec_on_tpu("pod", NEAR, "ls late 2>/dev/null || echo none") == "none\n"


# --- listings --------------------------------------------------------------------------------------------------------


def test_nodes_are_shown_as_the_rest_api_shows_them(deployment: Deployment) -> None:
    (node,) = [node for node in hosts.all_tpus(NEAR) if node["name"].endswith("/pod-a1")]
    assert node["name"] == f"projects/{PROJECT}/locations/{NEAR}/nodes/pod-a1"
    assert (node["state"], node["acceleratorType"], node["schedulingConfig"]) == ("READY", TWO_HOSTS, {"spot": True})
    assert node["labels"][LABEL_SLOT] == "pod"
    assert isinstance(node["id"], str)
    addresses = [endpoint["accessConfig"]["externalIp"] for endpoint in node["networkEndpoints"]]
    assert hosts.tpu_ips("pod", NEAR) == addresses
    assert len(addresses) == 2
    assert hosts.all_tpus(FAR) == []


def test_names_are_filtered_as_in_2022(deployment: Deployment) -> None:
    def state(name: str) -> NodeState | None:
        listed = session.current().nodes(NEAR, fresh=True)
        return next((node.state for node, _ in listed if node.name == name), None)

    create(deployment, "other-1", {})
    create(deployment, "lost-a1", {**OURS, LABEL_SLOT: "lost"})
    eventually(lambda: state("lost-a1") is NodeState.READY, "ready")
    deployment.order("preempt", selector="lost-a1")
    eventually(lambda: state("lost-a1") is NodeState.PREEMPTED, "preempted")
    session.current().forget_listings()
    assert set(hosts.tpu_names(NEAR)) == {"pod", "other-1", "lost"}
    assert set(hosts.tpu_names(NEAR, preempted=False)) == {"pod", "other-1"}
    assert hosts.tpu_names(NEAR, prefix="p") == ["pod"]
    with pytest.raises(NodeGone, match="lost-a1 is PREEMPTED"):
        hosts.exec_on_tpu("lost", NEAR, "true")


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        ({"state": "READY"}, {"plain", "no-preempted", "all-states", "unhealthy"}),
        ({"state": "CREATING"}, {"plain", "no-preempted", "all-states", "unhealthy"}),
        ({"state": "PREEMPTED"}, {"plain", "all-states", "unhealthy"}),
        ({"state": "TERMINATED"}, {"plain", "all-states", "unhealthy"}),
        ({"state": "DELETING"}, {"all-states"}),
        ({"state": "READY", "health": "HEALTHY"}, {"plain", "no-preempted", "all-states", "unhealthy"}),
        ({"state": "READY", "health": "TIMEOUT"}, {"unhealthy"}),
        ({}, {"all-states"}),
    ],
)
def test_which_nodes_are_meant(rest: dict[str, str], wanted: set[str]) -> None:
    filters: dict[str, tuple[bool, bool, bool]] = {
        "plain": (True, False, False),
        "no-preempted": (False, False, False),
        "all-states": (True, True, False),
        "unhealthy": (True, False, True),
    }
    found = {
        name
        for name, (preempted, deleting, unhealthy) in filters.items()
        if hosts._is_wanted(rest, preempted=preempted, deleting=deleting, unhealthy=unhealthy)
    }
    assert found == wanted


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: hosts.all_tpus("us-east5-aa"), "nearest: us-east5-a"),
        (lambda: hosts.tpu_names("us-east5-c"), "zone us-east5-c of project grant cannot be seen"),
        (lambda: hosts.tpu_names("us east"), "zone us east is not of the form"),
        (lambda: hosts.exec_on_tpu("po d", NEAR, "x"), "host po d is not a name"),
        (lambda: hosts.exec_on_tpu("$(reboot)", NEAR, "x"), "is not a name"),
        (lambda: hosts.exec_on_tpu("pod", NEAR, "x", 2), "no worker 2: its workers are 0 to 1"),
        (lambda: hosts.exec_on_tpu("pod", NEAR, "x", "each"), 'neither a number nor "all"'),  # type: ignore[arg-type]
        (lambda: hosts.exec_on_tpu("pod", NEAR, "x", True), 'neither a number nor "all"'),
        (lambda: hosts.exec_on_tpu("pod", NEAR, b"x"), "command must be a text"),  # type: ignore[arg-type]
        (lambda: hosts.exec_on_tpu("pod", NEAR, "x" * 100_000), "send_to_tpu"),
        (lambda: hosts.send_to_tpu("pod", NEAR, "", "x"), "filename_on_tpu"),
        (lambda: hosts.send_to_tpu("pod", NEAR, "~/", "x"), "filename_on_tpu"),
        (lambda: hosts.send_to_tpu("pod", NEAR, "a", "\ud800"), "half a character"),
    ],
)
def test_bad_input_is_one_line(deployment: Deployment, call: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert word in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_zone_that_is_denied_is_told_without_advice_about_fleet_files(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(session.current().cloud), "list_zone", deny)
    with pytest.raises(ConfigError) as refused:
        hosts.tpu_names("us-east5-b")
    assert ": type a -> b is not in location -> check the zone's name" in str(refused.value)
    assert "under `tpu`" not in str(refused.value)


def test_who_looks_in_the_wrong_place_is_told_the_right_one(deployment: Deployment) -> None:
    with pytest.raises(NodeGone, match=f"it is in {NEAR}"):
        hosts.tpu_ips("pod", FAR)
    with pytest.raises(NodeGone, match="nearest: pod"):
        hosts.tpu_ips("podd", NEAR)


def test_an_unknown_project_and_missing_credentials_are_one_line(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TPUCARE_EMULATOR")
    monkeypatch.setenv("TPUCARE_PROJECT", "grant")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="no Google credentials found"):
        hosts.tpu_names(NEAR)
    monkeypatch.setenv("TPUCARE_SSH_PORT", "x")
    with pytest.raises(ConfigError, match="TPUCARE_SSH_PORT"):
        hosts.tpu_names(NEAR)


# --- the last: a worker dies and comes back, and one does not -------------------------------------------------------


def test_a_reboot_starts_the_run_again(deployment: Deployment) -> None:
    assert hosts.exec_on_tpu("pod", NEAR, "screen -ls | grep -c model; cat ran; rm ran", 1) == "1\nwidth: 2\n"
    deployment.order("lose-worker", selector="pod-a1", worker=1)
    deployment.order("restore-worker", selector="pod-a1", worker=1)
    eventually(lambda: answers("pod"), "it is up again")
    eventually(lambda: _ran_again("pod"), "it runs again")
    assert "left unchanged" in hosts.exec_on_tpu("pod", NEAR, "bash setup.sh", 1)


def _ran_again(host: str) -> bool:
    try:
        return hosts.exec_on_tpu(host, NEAR, "cat ran || true", 1) == "width: 2\n"
    except WorkerSilent:
        # It answered a moment ago, and had not gone down yet.
        return False


def test_a_worker_that_vanished_ends_the_call(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ASK_EVERY_SECONDS", 0.5)
    monkeypatch.setattr(session, "ASK_DEADLINE", timedelta(seconds=1))
    call = session.in_background(lambda: hosts.exec_on_tpu("pod", NEAR, "touch begun; sleep 600"))
    eventually(lambda: "begun" in hosts.exec_on_tpu("pod", NEAR, "ls"), "it began")
    deployment.order("lose-worker", selector="pod-a1", worker=0, silent=True)
    with pytest.raises(WorkerSilent, match=r"^pod, worker 0 \([0-9.]+\): [a-z]"):
        call.result(timeout=30)
