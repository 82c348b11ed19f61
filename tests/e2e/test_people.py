"""What a person does with a fleet, what two people do to each other, and what a grant of one slice allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.kits.deployment import NEAR, PROJECT, Deployment, deployment, environment_of
from tpucare.adapters.google.client import connect
from tpucare.adapters.system import SystemClock
from tpucare.model.resources import LABEL_OWNER, LABEL_SLOT, NodeKey, NodeRequest, Place, Provisioning

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

STUBBORN = """\
trap '' TERM
while :; do echo "step $((++n))"; sleep 0.2; done
"""
SECRET = "hunter2-'$(id)\"-is-not-shown"


def test_down_leaves_nothing_and_apply_brings_it_back(tmp_path: Path) -> None:
    """The job ignores SIGTERM, so it is killed after its grace."""
    with deployment(tmp_path) as home:
        home.declare("pod", run=STUBBORN)
        planned = home.cli("plan").out
        assert planned.startswith("pod-0: create pod-0-a0 in us-east5-a as v5p-8 spot")
        assert home.audit("CreateNode") == [], "a plan changes nothing"
        home.start()
        home.await_steps("pod-0", least=3)
        assert home.cli("down", "pod", want=1).err.endswith("There is no terminal to ask on; pass --yes to confirm\n")
        home.allow_deletes("pod-0")
        assert home.cli("down", "pod", "--yes").out == "pod: all its nodes are deleted\n"

        assert home.names() == []
        assert home.runs() == {}
        assert "step 3" in home.cli("logs", "pod-0", "--attempt", "1").out
        home.restart()
        home.await_(lambda: home.ask("plan")["slots"] == [], "it stays down, though its file still lies there")
        assert len(home.audit("CreateNode")) == 1

        home.cli("apply", str(home.fleets / "pod.yaml"))
        assert home.await_training("pod-0") == "pod-0-a1"


def test_down_without_a_daemon(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", live=False)
        home.start()
        home.await_training("pod-0")
        home.stop()
        home.allow_deletes("pod-0")
        home.cli("down", "pod", "--yes")
        assert home.names() == []


def test_a_node_of_somebody_else_with_our_name_is_left_alone(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod")
        _create_as(home, "o-somebodyelse", "pod-0-a0")
        home.start()
        foreign = home.await_event("foreign")
        assert "o-somebodyelse" in foreign.text
        assert home.await_training("pod-0") == "pod-0-a1", "the number is theirs; the next one is free"
        home.await_(lambda: len(home.audit("ListNodes")) > 10, "some more passes")
        assert len(home.events("foreign")) == 1
        assert home.events("person") == []
        assert home.names() == ["pod-0-a0", "pod-0-a1"]
        assert len(home.audit("CreateNode")) == 2, "theirs and ours"
        assert home.audit("DeleteNode") == home.audit("UpdateNode") == []


def _create_as(home: Deployment, owner: str, name: str) -> None:
    cloud = connect(home.server.endpoint, monotonic=SystemClock().monotonic)
    try:
        place = Place(NEAR, "v5p-8", Provisioning.SPOT, "v2-alpha-tpuv5")
        labels = {LABEL_OWNER: owner, LABEL_SLOT: "pod-0"}
        cloud.create_node(NodeRequest(NodeKey(PROJECT, NEAR, name), place, labels, {}))
    finally:
        cloud.close()
    home.await_(lambda: name in home.names(), "their node is there")


def test_two_people_in_one_project(tmp_path: Path) -> None:
    """Two daemons with stores of their own and fleets of other names: neither touches what is the other's."""
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        (theirs / "own.yaml").write_text((home.fleets / "pod.yaml").read_text().replace("name: pod", "name: own"))
        environment = {"TPUCARE_STATE": str(tmp_path / "their-state"), "TPUCARE_FLEETS": str(theirs)}
        plan = home.cli("plan", "--json", environment=environment).json
        assert [row["slot"] for row in plan["slots"]] == ["own-0"]
        assert home.cli("gc", "--json", environment=environment).json["strays"] == []


def test_a_grant_of_one_slice_is_asked_for_again_the_instant_it_is_free(tmp_path: Path) -> None:
    """And the new node has the address of the old one, with another host key."""
    quota = {"generation": "v5p", "zone": NEAR, "limit": 1, "unit": "nodes"}
    with deployment(tmp_path, world={"quotas": [quota], "latencies": {"address_reuse": 0}}) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        address = home.nodes()[0].endpoints[0].internal
        home.order("preempt", selector="pod-0")
        second = home.await_(lambda: [one for one in home.names() if one != "pod-0-a0"], "the next node")[0]
        home.await_training("pod-0", second)

        assert home.nodes()[0].endpoints[0].internal == address
        records = home.audit()
        gone = next(one for one in records if one["kind"] == "node" and one["event"] == "gone")
        granted = next(one for one in records if one.get("method") == "CreateNode" and one["at"] > gone["at"])
        assert granted["code"] == 0
        asked, seen = home.events("create", node=second)[-1], home.await_event("gone", node="pod-0-a0")
        assert (asked.at - seen.at).total_seconds() < 1.0, "it is asked for in the pass that finds the old one gone"


def test_a_secret_is_in_the_environment_of_the_run_and_nowhere_else(tmp_path: Path) -> None:
    with deployment(tmp_path, pace={"TRAINING_KEY": SECRET}) as home:
        home.secrets = (SECRET,)
        job = 'test -n "$TRAINING_KEY" && echo "its length is ${#TRAINING_KEY}"\n' + STUBBORN
        home.declare("pod", run=job, job={"secrets": ["TRAINING_KEY"], "env": {"OTHER": "x"}})
        home.start("--log-level", "debug")
        shown: set[str] = set()

        def log_while_watching() -> str:
            shown.update(_argument_lists(SECRET))
            return home.log("pod-0")

        home.await_(log_while_watching, "the job says something")

        assert f"its length is {len(SECRET)}" in home.log("pod-0")
        assert not shown
        pids = home.runs()["pod-0-a0.1"]
        assert any(environment_of(pid).get("TRAINING_KEY") == SECRET for pid in pids)
        home.stop()
        home.start()
        home.await_training("pod-0")
        holders = [path for path in _files(tmp_path) if SECRET.encode() in path.read_bytes()]
        assert [path.name for path in holders] == ["env"], holders
        assert [stat.S_IMODE(path.stat().st_mode) for path in holders] == [0o600]


def _argument_lists(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if word.encode() in line:
            found.append(line.decode(errors="replace"))
    return found


def _files(folder: Path) -> list[Path]:
    walked = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return [path for path in walked if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)]
