"""
Scripts in the style of 2022 as processes, unmodified and with nothing but environment variables, on real machines.

A script tells what its callbacks were given in a file; what it starts on a worker is a real screen. After each test
the audit log is replayed against the promises.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.deployment import Deployment, deployment, eventually
from tpucare.adapters.google.client import connect
from tpucare.adapters.state.store import open_reader
from tpucare.model.resources import NodeKey, NodeRequest, Place, Provisioning
from tpucare.service.control_socket import NoDaemon, request

pytestmark = [pytest.mark.machines, pytest.mark.timeout(180)]

ZONE = "europe-west4-a"
REPOSITORY = Path(__file__).parents[2]

# What a person wrote in 2022, with a little more talk about it.
POD = """
    import argparse
    import dataclasses
    import json
    import os
    import threading
    import typing

    from tpucare import exec_command, exec_on_tpu, send_to_tpu, start_single

    @dataclasses.dataclass
    class Context:
        retry: int
        zone: str
        host: str
        repository: str
        talk: str
        data_path: str = None

    def tell(ctx, **what):
        with open(ctx.talk, "a") as file:
            file.write(json.dumps({**what, "retry": ctx.retry, "pid": os.getpid()}) + "\\n")

    def start_fn(ctx: Context, worker: int):
        config = f"retry: {ctx.retry}"
        cmd = exec_command(repository=ctx.repository, install_python=False, setup_command="cp ~/config.yaml .")
        sender = threading.Thread(target=send_to_tpu, args=(ctx.host, ctx.zone, "config.yaml", config, worker))
        sender.start()
        send_to_tpu(ctx.host, ctx.zone, "setup.sh", cmd, worker)
        sender.join()
        exec_on_tpu(ctx.host, ctx.zone, "bash setup.sh", worker)
        ctx.retry += 100 * worker
        tell(ctx, worker=worker, said=exec_on_tpu(ctx.host, ctx.zone, "cat */config.yaml", worker).strip())

    def parse_args():
        parser = argparse.ArgumentParser()
        parser.add_argument("--host", type=str)
        parser.add_argument("--tpu-version", type=int, default=3)
        parser.add_argument("--zone", type=str, default="europe-west4-a")
        parser.add_argument("--preemptible", default=1, type=int)
        parser.add_argument("--service-account", type=str)
        parser.add_argument("--slices", default=1, type=int)
        parser.add_argument("--repository", type=str)
        parser.add_argument("--talk", type=str)
        return parser.parse_args()

    def main():
        args = parse_args()

        def creation_callback(host: str, ctx: typing.Optional[Context]) -> Context:
            if ctx is None:  # first invocation
                ctx = Context(0, args.zone, args.host, args.repository, args.talk)
            else:
                ctx.retry += 1
            tell(ctx, created=host)
            return ctx

        return start_single(args.host, args.tpu_version, args.zone, args.preemptible, args.service_account,
                            args.slices, start_fn, creation_callback{more})

    if __name__ == "__main__":
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        main()
        print("returned", flush=True)
"""

# On a node that another program made, the key is missing for good: nobody has to wait for a guest agent that is late.
KEY_IS_NOT_LATE = """
    import datetime
    from tpucare.planner import node

    node.KEY_MAY_BE_LATE = datetime.timedelta()
"""

SWARM = """
    import json
    import sys

    import tpucare
    from tpucare import exec_on_tpu, start_multiple

    tpucare.LOG_LEVEL = 0

    def start_fn(ctx, worker):
        exec_on_tpu(ctx["host"], ctx["zone"], "screen -dmS model bash -c 'echo $0; sleep 3600'", worker)

    def created(host, ctx):
        ctx = ctx or {"host": host, "zone": "europe-west4-a", "calls": 0}
        ctx["calls"] += 1
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps({"created": host, **ctx}) + "\\n")
        return ctx

    start_multiple(sys.argv[1], 3, "europe-west4-a", True, None, 1, start_fn, created_callback=created, tpus=2)
"""


class Script:
    """A script as a process. `told`: what its callbacks wrote."""

    def __init__(self, home: Deployment, text: str, host: str, *words: str) -> None:
        folder = home.folder / f"script-{host}"
        folder.mkdir(exist_ok=True)
        self.path, self.talk, self.log = folder / "script.py", folder / "talk", folder / "log"
        self.path.write_text(textwrap.dedent(text))
        self._home, self._host, self._words = home, host, words
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(self.path), *self._words],
                env={**self._home.environment, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.path.parent,
            )

    def again(self) -> None:
        self.process = self._begin()

    def told(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = self.talk.read_text().splitlines() if self.talk.exists() else []
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def row(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = request(
                self._home.state / f"{self._host}.grant.sock", {"do": "status", "target": self._host}
            )["slots"][0]
        except (NoDaemon, IndexError):
            return {}
        return found


class ScriptedDeployment:
    """A deployment whose scripts are ended with it."""

    def __init__(self, home: Deployment) -> None:
        self.home = home
        self.scripts: list[Script] = []

    def play(self, text: str, host: str, *words: str, slots: tuple[str, ...] = ()) -> Script:
        self.home._known_fleets.add(host)
        if self.home.live_slots is not None:
            self.home.live_slots |= set(slots or (host,))
        self.scripts.append(Script(self.home, text, host, *words))
        return self.scripts[-1]

    def pod(self, host: str = "pod", *words: str, before: str = "", more: str = "") -> Script:
        talk = self.home.folder / f"script-{host}" / "talk"
        arguments = ("--host", host, "--talk", str(talk), "--repository", self.repository(), *words)
        return self.play(before + POD.replace("{more}", more), host, *arguments)

    def repository(self) -> str:
        """A repository that trains, in its way."""
        work, bare = self.home.folder / "work", self.home.folder / "job.git"
        if not bare.exists():
            work.mkdir()
            (work / "run.sh").write_text("for i in $(seq 100000); do echo step $i; sleep 0.2; done\n")
            who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
            for words in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-qm", "train"]):
                subprocess.run(["git", *words], cwd=work, check=True)
            subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
        return f"file://{bare}"

    def await_(self, look: Any, what: str) -> Any:
        def told() -> str:
            return "\n".join(script.text[-3000:] for script in self.scripts)

        return eventually(look, what, 90, tell=told)

    def gone(self, *slots: str) -> None:
        """These slots are meant to have nothing left."""
        for slot in slots:
            self.home.allow_deletes(slot)
            assert self.home.live_slots is not None
            self.home.live_slots.discard(slot)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedDeployment]:
    with deployment(tmp_path / "h", world={"zones": {ZONE: {}}}) as home:
        made = ScriptedDeployment(home)
        try:
            yield made
        finally:
            for script in made.scripts:
                if script.process.poll() is None:
                    script.process.kill()
                    script.process.wait(10)
        assert not any("Traceback" in script.text for script in made.scripts), made.scripts[0].text


def screens(home: Deployment, node: str) -> int:
    """Living runs of *node*, as their tokens tell."""
    return sum(token.startswith(f"{node}.") for token in home.runs())


def test_a_script_of_2022_goes_on_over_a_preemption_and_ends_with_ctrl_c(scripted: ScriptedDeployment) -> None:
    home, script = scripted.home, scripted.pod("pod-3", "--slices", "4")
    scripted.await_(lambda: len(script.told(retry=0, said="retry: 0")) == 1, "worker 0 starts on the first node")
    scripted.await_(lambda: len([row for row in script.told() if "worker" in row]) == 4, "all four workers start")
    assert script.told(created="pod-3") == [script.told()[0]]
    # Each has its own copy of the context: what one adds to it is not seen by the others.
    assert sorted(row["retry"] for row in script.told() if "worker" in row) == [0, 100, 200, 300]

    (first,) = home.names()
    scripted.await_(lambda: screens(home, first), "a screen runs")
    home.order("preempt", selector="pod-3")
    scripted.await_(lambda: len(script.told(said="retry: 1")) == 4, "all four workers start again, with the context")
    (second,) = scripted.await_(lambda: [name for name in home.names() if name != first], "there is another node")
    scripted.await_(lambda: script.row().get("phase") == "run", "it runs")
    assert script.row()["attempt"] == 2

    scripted.gone("pod-3")
    assert script.end(signal.SIGINT) == 0
    assert script.text.endswith("returned\n")
    assert home.names() == []
    assert second not in "".join(home.runs())


def test_after_sigterm_the_next_start_goes_on_with_node_context_and_attempt(scripted: ScriptedDeployment) -> None:
    home, script = scripted.home, scripted.pod()
    scripted.await_(lambda: script.row().get("phase") == "run", "it runs")
    home.order("preempt", selector="pod")
    scripted.await_(lambda: script.told(said="retry: 1"), "it runs again")
    scripted.await_(lambda: script.row().get("phase") == "run" and script.row()["attempt"] == 2, "it runs")
    scripted.await_(lambda: len(home.names()) == 1, "the first node is gone")
    (node,), before, (token,) = home.names(), len(script.told()), home.runs()
    assert script.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert f"SIGTERM: 1 node is left alive ({node} in {ZONE})" in script.text
    assert "returned" not in script.text
    assert list(home.runs()) == [token], "what start_fn started goes on"

    script.again()
    scripted.await_(lambda: script.row().get("phase") == "run", "it is adopted")
    assert (script.row()["node"], script.row()["attempt"], script.row()["run"]) == (node, 2, token)
    assert len(script.told()) == before, "no callback is called for a node that has had its calls"
    home.order("preempt", selector="pod")
    scripted.await_(lambda: script.told(said="retry: 2"), "the context goes on")
    scripted.await_(lambda: script.row().get("phase") == "run" and script.row()["attempt"] == 3, "it runs")
    script.end(signal.SIGKILL)
    script.again()
    scripted.await_(lambda: script.row().get("phase") == "run", "it is adopted after SIGKILL too")
    assert script.row()["attempt"] == 3
    with open_reader(home.state, name="pod.grant") as store:
        assert '"retry": 2' in str(store.context("pod"))
    scripted.gone("pod")
    home.cli("down", "pod", "--yes")
    assert script.process.wait(60) == 0
    assert home.names() == []
    with open_reader(home.state, name="pod.grant") as store:
        assert store.context("pod") is None, "who was taken down begins anew"


def test_two_scripts_side_by_side(scripted: ScriptedDeployment) -> None:
    home, pod = scripted.home, scripted.pod()
    talk = home.folder / "script-tuning" / "talk"
    swarm = scripted.play(SWARM, "tuning", "tuning", str(talk), slots=("tuning-0", "tuning-1"))
    scripted.await_(lambda: len(home.runs()) == 3, "all three run")
    assert sorted(row["host"] for row in swarm.told()) == ["tuning-0", "tuning-1"]
    rows = json.loads(home.cli("status", "--json").out)["slots"]
    assert sorted(row["slot"] for row in rows) == ["pod", "tuning-0", "tuning-1"]
    assert "stray" not in pod.text + swarm.text

    home.order("preempt", selector="tuning-1")
    scripted.await_(lambda: swarm.told(created="tuning-1", calls=2), "its own context goes on")
    scripted.await_(lambda: len(home.runs()) == 3, "all three run again")
    assert swarm.told(created="tuning-0", calls=2) == []
    scripted.gone("tuning-0", "tuning-1")
    home.cli("down", "tuning", "--yes")
    assert swarm.process.wait(60) == 0
    assert [name.rpartition("-a")[0] for name in home.names()] == ["pod"]
    assert pod.process.poll() is None


def test_processes_instead_of_threads(scripted: ScriptedDeployment) -> None:
    home, script = scripted.home, scripted.pod(more=", start_method='process'")
    scripted.await_(lambda: script.told(said="retry: 0"), "it starts")
    (start,) = [row for row in script.told() if "worker" in row]
    assert start["pid"] != script.process.pid
    assert script.told()[0]["pid"] == script.process.pid, "creation_callback is called here, as ever"
    home.order("preempt", selector="pod")
    scripted.await_(lambda: script.told(said="retry: 1"), "it starts again")
    children = psutil.Process(script.process.pid).children(recursive=True)
    scripted.gone("pod")
    assert script.end(signal.SIGINT) == 0
    assert not [child for child in children if child.is_running()]
    assert home.names() == []


FAILING = """
    import sys
    from tpucare import start_single

    def start_fn(ctx, worker):
        raise ValueError("no such config")

    start_single("pod", 3, "europe-west4-a", 1, None, 1, start_fn, lambda host, ctx: {}, setup_budget=0,
                 keep_failed="1s")
"""


@pytest.mark.slow
def test_a_start_fn_that_raises_is_a_failed_setup_and_no_idle_node(scripted: ScriptedDeployment) -> None:
    script = scripted.play(FAILING, "pod")
    scripted.gone("pod")
    scripted.await_(lambda: script.process.poll() is not None, "it gives up")
    assert script.process.returncode == 1
    assert "SlotFailed: pod failed: " in script.text
    assert "ValueError: no such config" in script.text
    scripted.gone("pod")
    # A person of Python sees where it was raised from.
    script.log.write_text(script.text.replace("Traceback", "trace"))


def test_a_node_of_the_old_kind_is_taken_over_where_a_person_says_so(scripted: ScriptedDeployment) -> None:
    home = scripted.home
    cloud = connect(home.server.endpoint, monotonic=time.monotonic)
    place = Place(ZONE, "v3-8", Provisioning.PREEMPTIBLE, "tpu-ubuntu2204-base")
    cloud.create_node(NodeRequest(NodeKey("grant", ZONE, "pod"), place, {}, {}))
    scripted.await_(lambda: home.names() == ["pod"], "somebody's node is there")
    script = scripted.pod(before=KEY_IS_NOT_LATE)
    assert script.process.wait(60) == 1
    assert "`tpucare adopt-node pod pod` takes it over, delete_unowned=True deletes it first" in script.text
    assert "ConfigError" in script.text

    home.cli("adopt-node", "pod", "pod", "--yes")
    scripted.await_(lambda: cloud.get_node(NodeKey("grant", ZONE, "pod")).slot == "pod", "it bears our labels")
    cloud.close()
    script.again()
    scripted.await_(lambda: script.told(said="retry: 0"), "it is used as it is")
    scripted.await_(lambda: script.row().get("phase") == "run", "it runs")
    assert home.names() == ["pod"]
    home.order("preempt", selector="pod")
    scripted.await_(lambda: script.told(said="retry: 1"), "the next one is made")
    home.allowed_deletes.add("pod")
    script.log.write_text(script.text.replace("Traceback", "trace"))
