"""The Python API over the emulator's real service, without machines: what is asked for, refused, shared and left."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tpucare
from tests.kits.service import BEAT, QUICK, REPOSITORY
from tpucare.adapters.google.client import connect
from tpucare.adapters.state.store import open_reader, open_store
from tpucare.adapters.system import SystemClock, machine_id
from tpucare.api import start as api
from tpucare.api.arguments import CallOptions
from tpucare.api.foreground import raise_if_refused
from tpucare.api.start import options_of
from tpucare.engine.state import ProjectView
from tpucare.model.errors import (
    CloudError,
    ConfigError,
    NeedsPerson,
    OwnCredentials,
    StoreError,
    StoreLocked,
    Transient,
)
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, End, FleetRecord, Memory, NodeMemory
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_OWNER,
    LABEL_SLOT,
    Event,
    Network,
    Node,
    NodeKey,
    NodeRequest,
    Place,
    Provisioning,
)
from tpucare.service import stores
from tpucare.service.control_socket import NoDaemon, request
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

ZONE = "europe-west4-a"
PROJECT = "emulated"
PATIENCE = 120.0


def start_fn(ctx: object, worker: object) -> None: ...


def created(host: str, ctx: object) -> object:
    return ctx


@dataclass
class Call:
    """A blocking call on a thread of its own."""

    function: Callable[[], object]
    error: BaseException | None = None
    returned: bool = False
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.function()
            self.returned = True
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@dataclass
class CloudAndState:
    """An emulated cloud, and a state folder."""

    server: EmulatorServer
    state: Path
    calls: list[tuple[Call, Path]] = field(default_factory=list)

    def arguments(self, **more: Any) -> dict[str, Any]:
        return {"endpoint": self.server.endpoint, "project": PROJECT, "store": self.state, **more}

    def single(self, host: str = "pod", **more: Any) -> Call:
        events: list[Event] = []
        named = self.arguments(**{"on_event": events.append, **more})
        call = Call(
            lambda: tpucare.start_single(host, 3, ZONE, True, None, 1, start_fn, created, **named), events=events
        )
        self.calls.append((call, self.socket(host)))
        return call

    def multiple(self, prefix: str, tpus: int, **more: Any) -> Call:
        call = Call(
            lambda: tpucare.start_multiple(
                prefix, 3, ZONE, 1, None, 1, start_fn, created, tpus, **self.arguments(**more)
            )
        )
        self.calls.append((call, self.socket(prefix)))
        return call

    def socket(self, name: str) -> Path:
        return self.state / f"{stores.store_name(name, PROJECT)}.sock"

    def ask(self, name: str, do: str, **what: Any) -> dict[str, Any]:
        return request(self.socket(name), {"do": do, **what})

    def row(self, name: str) -> dict[str, Any]:
        """The first slot as it is shown; empty while nobody cares."""
        with contextlib.suppress(NoDaemon, IndexError):
            found: dict[str, Any] = self.ask(name, "status")["slots"][0]
            return found
        return {}

    def sees(self, name: str) -> bool:
        with contextlib.suppress(NoDaemon, IndexError):
            return bool(self.ask(name, "status")["projects"][0]["seen"])
        return False

    def down(self, name: str, target: str = "") -> None:
        self.ask(name, "down", target=target or name)

    def nodes(self) -> dict[str, Mapping[str, str]]:
        with self.server.lock:
            return {node.path.node_id: dict(node.spec.labels) for node in self.server.world.nodes()}

    def created(self) -> list[str]:
        with self.server.lock:
            audit = list(self.server.world.audit)
        return [str(r["name"]).rpartition("/")[2] for r in audit if r["kind"] == "node" and r["event"] == "created"]

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what}: {[(call.error, call.events[-5:]) for call, _ in self.calls]}"
            time.sleep(0.03)

    def make(self, name: str, zone: str = ZONE, labels: Mapping[str, str] | None = None) -> Node:
        """A node that somebody else created."""
        cloud = connect(self.server.endpoint, monotonic=time.monotonic)
        try:
            place = Place(zone, "v3-8", Provisioning.PREEMPTIBLE, "tpu-ubuntu2204-base", network=Network())
            cloud.create_node(NodeRequest(NodeKey(PROJECT, zone, name), place, labels or {}, {}))
            self.until(lambda: name in self.nodes(), f"{name} is there")
            return cloud.get_node(NodeKey(PROJECT, zone, name))
        finally:
            cloud.close()

    def close(self) -> None:
        for call, socket in self.calls:
            if call.thread.is_alive():
                with contextlib.suppress(Exception):
                    request(socket, {"do": "stop"})
        for call, _ in self.calls:
            call.thread.join(PATIENCE)


@pytest.fixture
def grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudAndState]:
    for name in [name for name in os.environ if name.startswith(("TPUCARE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in BEAT.items():
        monkeypatch.setenv(name, value)
    with EmulatorServer(WorldConfig.fast(latencies=QUICK)) as server:
        made = CloudAndState(server, tmp_path / "state")
        yield made
        made.close()


# --- one call, from its begin to its end -----------------------------------------------------------------------------


def test_a_host_is_a_slot_and_a_fleet_of_its_own_until_somebody_takes_it_down(grant: CloudAndState) -> None:
    call = grant.single("pod")
    grant.until(grant.nodes, "a node is made")
    ((name, labels),) = grant.nodes().items()
    assert name.startswith("pod-a")
    assert (labels[LABEL_FLEET], labels[LABEL_SLOT]) == ("pod", "pod")
    assert labels[LABEL_OWNER] == (grant.state / "owner").read_text().strip()
    row = grant.ask("pod", "status")["slots"][0]
    assert (row["slot"], row["attempt"]) == ("pod", 0)
    grant.down("pod")
    call.end()
    assert call.returned
    assert grant.nodes() == {}
    assert {"start", "create", "stop"} <= {event.kind for event in call.events}


def test_a_swarm_ends_when_its_last_slot_does(grant: CloudAndState) -> None:
    call = grant.multiple("tuning", 2)
    grant.until(lambda: len(grant.nodes()) == 2, "two nodes are made")
    assert sorted(labels[LABEL_SLOT] for labels in grant.nodes().values()) == ["tuning-0", "tuning-1"]
    grant.down("tuning", "tuning-1")
    grant.until(lambda: len(grant.nodes()) == 1, "one is deleted")
    assert call.thread.is_alive()
    grant.down("tuning", "tuning-0")
    call.end()
    assert call.returned
    assert grant.nodes() == {}


def test_stopping_it_leaves_nodes_alive_and_the_next_call_adopts_them(grant: CloudAndState) -> None:
    first = grant.single("pod")
    grant.until(grant.nodes, "a node is made")
    grant.until(lambda: any(event.kind == "state" for event in first.events), "it is seen")
    grant.ask("pod", "stop")
    first.end()
    assert isinstance(first.error, SystemExit)
    assert first.error.code == 128 + signal.SIGTERM
    before = grant.nodes()
    second = grant.single("pod")
    grant.until(lambda: any(event.kind == "state" for event in second.events), "it is seen again")
    assert grant.nodes() == before
    assert len(grant.created()) == 1
    grant.down("pod")
    second.end()


def test_nothing_is_created_while_the_semaphore_is_held_by_another(grant: CloudAndState) -> None:
    semaphore = threading.Semaphore(1)
    with semaphore:
        grant.single("pod", creation_semaphore=semaphore)
        grant.until(lambda: grant.sees("pod"), "it sees")
        time.sleep(0.5)
        assert grant.nodes() == {}
    grant.until(grant.nodes, "it is made")


def test_a_paused_host_stays_paused_and_says_so(grant: CloudAndState, monkeypatch: pytest.MonkeyPatch) -> None:
    first = grant.single("pod")
    grant.until(grant.nodes, "a node is made")
    grant.ask("pod", "pause", target="pod")
    grant.ask("pod", "stop")
    first.end()
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    grant.single("pod")
    grant.until(lambda: "pod is paused: `tpucare resume pod`" in said.getvalue(), "it says so")


def test_a_listener_that_raises_ends_nothing(grant: CloudAndState, capsys: pytest.CaptureFixture[str]) -> None:
    def listen(event: Event) -> None:
        raise ValueError("mine")

    call = grant.single("pod", on_event=listen)
    grant.until(grant.nodes, "a node is made")
    grant.down("pod")
    call.end()
    assert call.returned
    assert capsys.readouterr().err.count("on_event raised ValueError: mine") == 1


def test_a_context_that_is_kept_from_the_last_start_is_named_at_this_one() -> None:
    """
    A script that was started again while its node went lost its context, and with it the count of retries and the run
    it resumes. A context is kept until a person says `fresh=True`, and a line at the start names it: a script that
    makes a new sweep at each start must hear that the next node works for the old one.
    """
    said = api._context_kept_event("pod", {"sweep": "old"}, datetime(2026, 11, 1, tzinfo=UTC))
    assert (said.kind, said.slot) == ("context", "pod")
    assert "the last start (dict) is kept" in said.text
    assert "fresh=True begins without it" in said.text


def test_a_context_is_kept_while_its_node_goes() -> None:
    """Only a person's `down`, the end of its work, or `fresh=True` begins without one."""
    tpu = {"type": "v4-8", "zones": ["us-central2-b"]}
    fleet = tpucare.Fleet("pod", tpu, {"run": "true"}, count=3, project="my-project").parsed
    lost = NodeMemory("pod-0-a0", "us-central2-b", 1, datetime(2026, 11, 1, tzinfo=UTC), status=NodeStatus.DEAD)
    memories = {
        "pod-0": Memory("pod", nodes=(lost,)),
        "pod-1": Memory("pod", wish=DesiredState.DOWN),
        "pod-2": Memory("pod", end=End.DONE),
        "other-0": Memory("other", wish=DesiredState.DOWN),
    }
    assert api._slots_without_context(memories, fleet, fresh=False) == ["pod-1", "pod-2"]
    assert api._slots_without_context(memories, fleet, fresh=True) == ["pod-0", "pod-1", "pod-2"]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_the_same_host_twice_is_one_clear_line(grant: CloudAndState) -> None:
    grant.single("pod")
    grant.until(lambda: grant.row("pod"), "the first cares")
    with pytest.raises(StoreLocked) as caught:
        tpucare.start_single("pod", 3, ZONE, True, None, 1, start_fn, created, **grant.arguments())
    assert str(caught.value).startswith(f"pod is cared for already, by process {os.getpid()}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__, "one traceback, and no lock of the operating system above it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zone": "europe-west4-z"}, "zone"),
        ({"host": "My Pod; rm -rf /"}, "host="),
        ({"start_fn": lambda ctx: None}, "start_fn"),
        ({"tpu_version": 9}, "accelerator_type="),
        ({"endpiont": "x"}, "nearest: endpoint"),
    ],
)
def test_what_is_wrong_is_told_before_a_folder_is_made(
    grant: CloudAndState, changes: dict[str, Any], words: str
) -> None:
    named = {
        "host": "pod",
        "tpu_version": 3,
        "zone": ZONE,
        "preemptible": 1,
        "service_account": None,
        "slices": 1,
        "start_fn": start_fn,
        "creation_callback": created,
    }
    with pytest.raises(ConfigError, match=words):
        tpucare.start_single(**{**named, **grant.arguments(), **changes})
    assert not grant.state.exists()
    assert grant.created() == []


class TestNodesOfTheOldKind:
    def test_one_is_refused_with_both_ways_out(self, grant: CloudAndState) -> None:
        grant.make("pod")
        call = grant.single("pod")
        call.end()
        assert isinstance(call.error, ConfigError)
        text = str(call.error)
        assert "`tpucare adopt-node pod pod`" in text
        assert "delete_unowned=True" in text
        assert "\n" not in text
        assert list(grant.nodes()) == ["pod"]

    def test_a_call_that_begins_nothing_leaves_its_store_as_old_as_it_is(self, grant: CloudAndState) -> None:
        grant.make("pod")
        marks = []
        for _ in range(2):
            call = grant.single("pod")
            call.end()
            assert isinstance(call.error, ConfigError)
            with open_reader(grant.state, name=stores.store_name("pod", PROJECT)) as store:
                marks.append(store.marked)
        assert marks[0] is not None
        assert marks[1] == marks[0]

    def test_exactly_that_one_is_deleted_where_it_was_asked_for(self, grant: CloudAndState) -> None:
        for name in ("pod", "pod-other", "pods"):
            grant.make(name)
        call = grant.single("pod", delete_unowned=True)
        grant.until(lambda: any(name.startswith("pod-a") for name in grant.nodes()), "its own node is made")
        assert sorted(name for name in grant.nodes() if not name.startswith("pod-a")) == ["pod-other", "pods"]
        assert "delete-unowned" in {event.kind for event in call.events}

    def test_one_that_was_adopted_is_the_hosts_node(self, grant: CloudAndState) -> None:
        grant.make("pod")
        call = grant.single("pod")
        call.end()
        owner = (grant.state / "owner").read_text().strip()
        cloud = connect(grant.server.endpoint, monotonic=time.monotonic)
        cloud.add_labels(NodeKey(PROJECT, ZONE, "pod"), {LABEL_OWNER: owner, LABEL_FLEET: "pod", LABEL_SLOT: "pod"})
        cloud.close()
        grant.until(lambda: grant.nodes()["pod"].get(LABEL_OWNER) == owner, "it bears our label")
        grant.single("pod")
        grant.until(lambda: grant.row("pod").get("node") == "pod", "it is adopted")
        assert list(grant.nodes()) == ["pod"]


# --- side by side ----------------------------------------------------------------------------------------------------


def test_two_scripts_side_by_side_do_not_meet(grant: CloudAndState) -> None:
    first, second = grant.single("one"), grant.multiple("two", 2)
    grant.until(lambda: len(grant.nodes()) == 3, "all nodes are made")
    for name in ("one", "two"):
        grant.until(lambda name=name: all(row["node"] for row in grant.ask(name, "status")["slots"]), "seen")  # type: ignore[misc]
        assert grant.ask(name, "status")["strays"] == []
        assert {row["fleet"] for row in grant.ask(name, "status")["slots"]} == {name}
    assert len({labels[LABEL_OWNER] for labels in grant.nodes().values()}) == 1
    rows = tpucare.status(store=grant.state)
    assert [row["slot"] for row in rows] == ["one", "two-0", "two-1"]
    assert tpucare.status("two-1", store=grant.state)[0]["slot"] == "two-1"
    grant.down("one")
    first.end()
    assert len(grant.nodes()) == 2
    assert second.thread.is_alive()


def test_they_share_one_create_budget(grant: CloudAndState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUCARE_CREATES_PER_MINUTE", "1")
    grant.single("one")
    grant.until(grant.nodes, "the first node is made")
    grant.single("two")
    grant.until(lambda: "budget" in grant.row("two").get("why", ""), "it waits")
    assert len(grant.created()) == 1


def test_a_fleet_of_the_daemon_is_not_declared_again(grant: CloudAndState) -> None:
    clock = SystemClock()
    with open_store(grant.state, machine_id=machine_id(), now=clock.now()) as daemons:
        daemons.save_fleet(FleetRecord("pod", "name: pod\n", "/", clock.now()))
        with pytest.raises(ConfigError, match="pod is cared for already, by store tpucare"):
            tpucare.start_multiple("pod", 3, ZONE, 1, None, 1, start_fn, created, 2, **grant.arguments())
        daemons.save_fleet(FleetRecord("pod", "name: pod\n", "/", clock.now(), DesiredState.DOWN))
    grant.multiple("pod", 1)
    grant.until(grant.nodes, "it is made once the daemon's is down")


def test_a_store_serves_one_host(grant: CloudAndState) -> None:
    first = grant.single("one", store=grant.state / "mine.sqlite")
    grant.until(grant.nodes, "a node is made")
    request(grant.state / "mine.sock", {"do": "stop"})
    first.end()
    with pytest.raises(ConfigError, match=r"mine\.sqlite cares for one: give another store=, or `tpucare down one`"):
        tpucare.start_single(
            "two", 3, ZONE, 1, None, 1, start_fn, created, **grant.arguments(store=grant.state / "mine.sqlite")
        )


@pytest.mark.parametrize(
    ("store", "state", "name"),
    [
        ("", "home", "tpucare"),
        ("mine", "home", "mine"),
        ("mine.sqlite", "home", "mine"),
        ("/data/x", "/data/x", "tpucare"),
        ("/data/x.sqlite", "/data", "x"),
        (Path("/data/x"), "/data/x", "tpucare"),
        (Path("/data/x.sqlite"), "/data", "x"),
    ],
)
def test_what_store_may_be(
    store: str | Path, state: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUCARE_STATE", str(tmp_path))
    options = options_of(CallOptions(store=store))
    assert options.state == (tmp_path if state == "home" else Path(state))
    assert options.store == name


@pytest.mark.parametrize(("store", "kind"), [("tpucare", ConfigError), ("My Store", StoreError), ("..x y", StoreError)])
def test_what_store_may_not_be(store: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        options_of(CallOptions(store=store))


# --- run and status --------------------------------------------------------------------------------------------------


def fleet(**changes: Any) -> tpucare.Fleet:
    said: dict[str, Any] = {
        "name": "pod",
        "tpu": {"type": "v3-8", "zones": [ZONE], "provisioning": "spot"},
        "job": {"run": "python3 train.py", "checkpoint": "gs://bucket/pod"},
        **changes,
    }
    return tpucare.Fleet(**said)


def test_run_cares_for_a_declared_fleet(grant: CloudAndState) -> None:
    call = Call(lambda: tpucare.run(fleet(count=2), **grant.arguments()))
    grant.calls.append((call, grant.socket("pod")))
    grant.until(lambda: len(grant.nodes()) == 2, "two nodes are made")
    assert sorted(labels[LABEL_SLOT] for labels in grant.nodes().values()) == ["pod-0", "pod-1"]
    grant.down("pod")
    call.end()
    assert call.returned
    assert grant.nodes() == {}


def test_run_takes_a_fleet_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match=r"run takes a tpucare.Fleet, not a str: Fleet.from_file"):
        tpucare.run("pod.yaml")  # type: ignore[arg-type]


def test_status_of_nothing_is_empty(tmp_path: Path) -> None:
    assert tpucare.status(store=tmp_path / "nowhere") == []


def test_store_is_checked_by_every_function_that_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUCARE_STATE", str(tmp_path))
    assert tpucare.status(store=None) == []  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="store must be a folder"):
        tpucare.status(store=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="store must be a folder"):
        tpucare.run(fleet(), store=5)  # type: ignore[arg-type]


class TestBlindness:
    DENIED = NeedsPerson("listing grant failed: no permission", 7, advice="ask for it")

    def view(self, blind: CloudError | None = None, passes: int = 0) -> ProjectView:
        return ProjectView("grant", timedelta(minutes=1), blind=blind, passes=passes)

    @pytest.mark.parametrize("blind", [DENIED, OwnCredentials("expired", 16)])
    def test_a_listing_that_needs_a_person_ends_a_call_that_has_seen_nothing(self, blind: CloudError) -> None:
        raise_if_refused([self.view()])
        raise_if_refused([self.view(Transient("not now", 13))])
        with pytest.raises(CloudError) as caught:
            raise_if_refused([self.view(Transient("not now", 13)), self.view(blind)])
        assert caught.value is blind

    def test_later_it_is_waited_out(self) -> None:
        raise_if_refused([self.view(self.DENIED, passes=1)])
        raise_if_refused([self.view(self.DENIED), self.view(passes=1)])


def test_a_call_without_permission_ends_with_what_its_first_listing_was_refused_with(grant: CloudAndState) -> None:
    events: list[Event] = []
    with grant.server.lock:
        grant.server.world.operator.fail_next("ListNodes", 7, "Permission 'tpu.nodes.list' denied")
    with pytest.raises(NeedsPerson, match=r"^listing .* failed: Permission .* denied -> give the caller") as caught:
        tpucare.start_single(
            "pod", 3, ZONE, True, None, 1, start_fn, created, **grant.arguments(on_event=events.append)
        )
    assert (caught.value.code, caught.value.advice[:16]) == (7, "give the caller ")
    assert "blind" in [event.kind for event in events]
    assert grant.created() == []


# --- the public names ------------------------------------------------------------------------------------------------


def test_every_public_name_is_there() -> None:
    assert set(tpucare.__all__) <= set(dir(tpucare))
    for name in tpucare.__all__:
        assert getattr(tpucare, name) is not None
    with pytest.raises(AttributeError, match="start_sinlge"):
        _ = tpucare.start_sinlge


@pytest.mark.parametrize(
    "code",
    [
        "from tpucare import sweeps; sweeps.sweep, sweeps.Outcome",
        "from tpucare import Event, sweeps, training; sweeps.sweep",
        "import tpucare; tpucare.sweeps.sweep",
        "import tpucare; tpucare.training.resume_step",
        "import tpucare.training as t; t.__path__[0]",
        "from tpucare import training; training.resume_step",
        "from tpucare.training import Requests, Wish, init_wandb, resume_step",
    ],
)
def test_every_import_that_the_docs_showed_works_in_a_fresh_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_it_costs_next_to_nothing() -> None:
    heavy = ("google", "grpc", "paramiko", "pydantic", "rich")
    code = f"import sys, tpucare; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout == "[]\n"


def test_names_that_are_gone_can_be_imported_and_say_so() -> None:
    from tpucare import create_tpu

    with pytest.raises(ConfigError, match=r"tpucare\.create_tpu is gone: start_single"):
        create_tpu("pod", ZONE, 3, True, None, None)


# --- as a process ----------------------------------------------------------------------------------------------------

SCRIPT = """
    import signal
    import sys
    import tpucare

    # Whoever runs these tests in a shell's background hands SIGINT on as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tpucare.start_single(sys.argv[1], 3, "europe-west4-a", 1, None, 1, lambda ctx, worker: None, lambda host, ctx: ctx)
    print("returned", flush=True)
"""


class Script:
    def __init__(self, grant: CloudAndState, folder: Path, host: str = "pod", **env: str) -> None:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(SCRIPT))
        ours = {
            "TPUCARE_ENDPOINT": grant.server.endpoint,
            "TPUCARE_PROJECT": PROJECT,
            "TPUCARE_STATE": str(grant.state),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(path), host],
            env={**os.environ, **ours, "PYTHONPATH": str(REPOSITORY), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def end(self, *numbers: signal.Signals) -> tuple[int, str, str]:
        for number in numbers:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@pytest.fixture
def scripts(grant: CloudAndState, tmp_path: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(**env: str) -> Script:
        made.append(Script(grant, tmp_path, **env))
        return made[-1]

    yield make
    for script in made:
        if script.process.poll() is None:
            script.process.kill()
            script.process.communicate()


def test_ctrl_c_deletes_and_returns(grant: CloudAndState, scripts: Callable[..., Script]) -> None:
    script = scripts()
    grant.until(grant.nodes, "a node is made")
    code, out, err = script.end(signal.SIGINT)
    assert (code, out) == (0, "returned\n")
    assert "interrupted: deleting every node of pod" in err
    assert grant.nodes() == {}
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_leave_the_node_and_say_how_to_go_on(
    grant: CloudAndState, scripts: Callable[..., Script], number: signal.Signals
) -> None:
    script = scripts()
    grant.until(grant.nodes, "a node is made")
    name = next(iter(grant.nodes()))
    code, out, err = script.end(number)
    assert (code, out) == (128 + number, "")
    assert "the same call goes on where this one stopped" in err
    assert f"{number.name}: 1 node is left alive ({name} in {ZONE})" in err
    assert list(grant.nodes()) == [name]
    assert "Traceback" not in err


def test_a_second_ctrl_c_names_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BEAT.items():
        monkeypatch.setenv(name, value)
    stuck = WorldConfig.fast(latencies={**QUICK, "delete": 600})
    with EmulatorServer(stuck) as server:
        grant = CloudAndState(server, tmp_path / "state")
        script = Script(grant, tmp_path)
        grant.until(grant.nodes, "a node is made")
        node = next(iter(grant.nodes()))
        script.process.send_signal(signal.SIGINT)
        grant.until(lambda: grant.ask("pod", "status")["slots"][0]["phase"] == "deleting", "it is being deleted")
        code, out, err = script.end(signal.SIGINT)
    assert (code, out) == (128 + signal.SIGINT, "")
    assert f"left behind: {node} in {ZONE}; `tpucare down pod` deletes it" in err
    assert "Traceback" not in err


def test_commands_find_a_script_by_its_host(grant: CloudAndState, scripts: Callable[..., Script]) -> None:
    script = scripts()
    grant.until(grant.nodes, "a node is made")
    env = {**os.environ, "TPUCARE_ENDPOINT": grant.server.endpoint, "TPUCARE_PROJECT": PROJECT}
    env |= {"TPUCARE_STATE": str(grant.state), "PYTHONPATH": str(REPOSITORY)}

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tpucare.cli", *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (row,) = json.loads(command("status", "--json"))["slots"]
    assert (row["slot"], row["store"]) == ("pod", f"pod.{PROJECT}")
    assert "pod" in command("events", "pod")
    assert command("logs", "pod", "--list").startswith("pod has no kept log"), "there is no pod-0"
    command("down", "pod", "--yes")
    assert script.end()[:2] == (0, "returned\n")
    assert grant.nodes() == {}


def test_a_script_that_was_killed_can_be_taken_down_without_it(
    grant: CloudAndState, scripts: Callable[..., Script]
) -> None:
    script = scripts()
    grant.until(grant.nodes, "a node is made")
    script.end(signal.SIGKILL)
    env = {**os.environ, "TPUCARE_ENDPOINT": grant.server.endpoint, "TPUCARE_STATE": str(grant.state)}
    done = subprocess.run(
        [sys.executable, "-m", "tpucare.cli", "down", "pod", "--yes"],
        env={**env, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert grant.nodes() == {}
    with open_reader(grant.state, name=f"pod.{PROJECT}") as store:
        assert store.fleets()["pod"].wish is DesiredState.DOWN
