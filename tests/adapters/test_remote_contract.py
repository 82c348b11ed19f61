"""What every Remote promises: the same tests for paramiko with real sshd, with the stand-in server, and for folders."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import pytest

from tests.kits import sshd
from tests.kits.bench_worker import eventually
from tests.kits.local_remote import LocalRemote
from tests.kits.ssh_stand_in import SshStandIn
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.model.errors import CommandFailed, WorkerSilent
from tpucare.model.ports import Remote
from tpucare.model.resources import NodeKey, Worker

pytestmark = pytest.mark.contract

KEY = NodeKey("my-project", "us-central2-b", "pod-0-a1")
SHORT = timedelta(milliseconds=400)
LONG = timedelta(minutes=1)

# What is told at once arrives within milliseconds on a quiet machine, and within this on a busy one.
SOON = 30.0


class RemoteSetup(Protocol):
    """One way to have workers and a Remote that reaches them."""

    @property
    def remote(self) -> Remote: ...

    def worker(self, number: int = 0) -> Worker: ...

    def home(self, worker: Worker) -> Path: ...

    def silence(self, worker: Worker) -> None: ...

    def heal(self, worker: Worker) -> None: ...

    def close(self) -> None: ...


class FolderSetup:
    def __init__(self, folder: Path) -> None:
        self.remote = LocalRemote()

    def worker(self, number: int = 0) -> Worker:
        return Worker(KEY, 1, number, f"127.2.0.{number + 1}")

    def home(self, worker: Worker) -> Path:
        return self.remote.home(worker)

    def silence(self, worker: Worker) -> None:
        self.remote.silence(worker)

    def heal(self, worker: Worker) -> None:
        self.remote.heal(worker)

    def close(self) -> None:
        self.remote.close()


class StandInSetup:
    """One stand-in per worker; silent = stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = load_or_make_key(folder / "key")
        self._port = sshd.free_port()
        self._servers: dict[Worker, SshStandIn] = {}
        self.remote = ParamikoRemote(self._key, user="tpu", pins=folder / "pins", nudge=lambda: None, port=self._port)

    def worker(self, number: int = 0) -> Worker:
        worker = Worker(KEY, 1, number, f"127.2.0.{number + 1}")
        if worker not in self._servers:
            self.home(worker).mkdir()
            self._start(worker)
        return worker

    def home(self, worker: Worker) -> Path:
        return self._folder / f"home-{worker.number}"

    def silence(self, worker: Worker) -> None:
        self._servers[worker].stop()

    def heal(self, worker: Worker) -> None:
        self._start(worker)

    def close(self) -> None:
        self.remote.close()
        for server in self._servers.values():
            server.stop()

    def _start(self, worker: Worker) -> None:
        keys = self._servers[worker].host_keys if worker in self._servers else ()
        self._servers[worker] = SshStandIn(
            self._key.public,
            home=self.home(worker),
            host_keys=keys,
            address=worker.host,
            port=self._port,
        )


class SshdSetup:
    """One real sshd per worker; silent = killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = load_or_make_key(folder / "key")
        self._port = sshd.free_port()
        self._servers: dict[Worker, sshd.Sshd] = {}
        self.remote = ParamikoRemote(
            self._key, user=_login_name(), pins=folder / "pins", nudge=lambda: None, port=self._port
        )

    def worker(self, number: int = 0) -> Worker:
        worker = Worker(KEY, 1, number, f"127.2.1.{number + 1}")
        if worker not in self._servers:
            folder = self._folder / f"worker-{number}"
            self._servers[worker] = sshd.Sshd(folder, worker.host, self._port, self._key.public).start()
        return worker

    def home(self, worker: Worker) -> Path:
        return self._servers[worker].home

    def silence(self, worker: Worker) -> None:
        self._servers[worker].stop()

    def heal(self, worker: Worker) -> None:
        self._servers[worker].start()

    def close(self) -> None:
        self.remote.close()
        for server in self._servers.values():
            server.stop()


def _login_name() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


SETUPS: dict[str, Callable[[Path], RemoteSetup]] = {
    "folders": FolderSetup,
    "stand-in": StandInSetup,
    "sshd": SshdSetup,
}


@pytest.fixture(
    params=["folders", "stand-in", pytest.param("sshd", marks=pytest.mark.machines)],
)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteSetup]:
    if request.param == "sshd" and not sshd.available():
        pytest.skip("no sshd here: apt-get install openssh-server")
    setup = SETUPS[request.param](tmp_path)
    try:
        yield setup
    finally:
        setup.close()


def hint_within(remote: Remote, seconds: float) -> frozenset[NodeKey]:
    """The next hints that are not empty; empty when none came."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if hints := remote.hints():
            return hints
        time.sleep(0.005)
    return frozenset()


# --- commands ---


def test_command_gives_status_and_both_streams(setup: RemoteSetup) -> None:
    ran = setup.remote.run(setup.worker(), "echo out; echo err >&2; exit 7")
    assert (ran.exit_status, ran.stdout, ran.stderr, ran.truncated) == (7, b"out\n", b"err\n", False)


def test_command_runs_in_the_home_of_its_worker(setup: RemoteSetup) -> None:
    for number in (0, 1):
        worker = setup.worker(number)
        ran = setup.remote.run(worker, 'pwd; echo "$HOME"')
        assert ran.stdout.decode().split() == [str(setup.home(worker))] * 2


def test_stdin_arrives_whole_and_ends(setup: RemoteSetup) -> None:
    for content in (b"", b"few", os.urandom(5 << 20)):
        ran = setup.remote.run(setup.worker(), "sha256sum", stdin=content, deadline=LONG)
        assert ran.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()


def test_stdin_that_nobody_reads_does_no_harm(setup: RemoteSetup) -> None:
    ran = setup.remote.run(setup.worker(), "exit 3", stdin=bytes(5 << 20))
    assert ran.exit_status == 3


def test_output_is_cut_at_the_limit_and_drained(setup: RemoteSetup) -> None:
    flood = "head -c 20000000 /dev/zero; head -c 20000000 /dev/zero >&2; exit 4"
    ran = setup.remote.run(setup.worker(), flood, limit=1000, deadline=LONG)
    assert (ran.exit_status, ran.stdout, ran.stderr, ran.truncated) == (4, bytes(1000), bytes(1000), True)


def test_output_of_exactly_the_limit_is_whole(setup: RemoteSetup) -> None:
    ran = setup.remote.run(setup.worker(), "head -c 1000 /dev/zero", limit=1000)
    assert (len(ran.stdout), ran.truncated) == (1000, False)


def test_deadline_ends_the_wait(setup: RemoteSetup) -> None:
    worker = setup.worker()
    begun = time.monotonic()
    with pytest.raises(WorkerSilent, match="within"):
        setup.remote.run(worker, "exec sleep 60", deadline=SHORT)
    assert time.monotonic() - begun < SOON
    assert setup.remote.run(worker, "echo next").stdout == b"next\n"


def test_deadline_ends_a_flood(setup: RemoteSetup) -> None:
    with pytest.raises(WorkerSilent):
        setup.remote.run(setup.worker(), "timeout 60 cat /dev/zero", deadline=SHORT, limit=10)


def test_child_in_the_background_does_not_hold_the_answer_back(setup: RemoteSetup) -> None:
    begun = time.monotonic()
    ran = setup.remote.run(setup.worker(), "sleep 60 & echo started", deadline=timedelta(minutes=2))
    assert ran.stdout == b"started\n"
    assert time.monotonic() - begun < SOON


def test_command_ended_by_a_signal_is_unknown(setup: RemoteSetup) -> None:
    with pytest.raises(WorkerSilent, match="without a status"):
        setup.remote.run(setup.worker(), "kill -KILL $$")


def test_commands_of_one_worker_run_side_by_side(setup: RemoteSetup) -> None:
    worker = setup.worker()
    all_begun = "mktemp here.XXXX && until [ $(ls -d here.* | wc -l) = 4 ]; do sleep 0.05; done"
    results = setup.remote.each([worker] * 4, lambda one: setup.remote.run(one, all_begun, deadline=LONG))
    assert [getattr(ran, "exit_status", ran) for ran in results] == [0] * 4


# --- files ---


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_put_writes_content_and_mode(setup: RemoteSetup, mode: int) -> None:
    worker = setup.worker()
    setup.remote.put(worker, "file", b"echo hello", mode)
    target = setup.home(worker) / "file"
    assert target.read_bytes() == b"echo hello"
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert os.listdir(setup.home(worker)) == ["file"]


def test_put_replaces_at_once(setup: RemoteSetup) -> None:
    worker = setup.worker()
    setup.remote.put(worker, "file", b"old, and longer", 0o644)
    reader = (setup.home(worker) / "file").open("rb")
    setup.remote.put(worker, "file", b"new", 0o600)
    with reader:
        assert reader.read() == b"old, and longer"
    assert (setup.home(worker) / "file").read_bytes() == b"new"


@pytest.mark.parametrize("size", [0, 32768, 32769, 3_000_000])
def test_put_of_any_size(setup: RemoteSetup, size: int) -> None:
    worker = setup.worker()
    content = os.urandom(size)
    setup.remote.put(worker, "big", content, 0o600)
    assert (setup.home(worker) / "big").read_bytes() == content


def test_put_into_a_missing_folder_says_so(setup: RemoteSetup) -> None:
    with pytest.raises(CommandFailed, match="No such file"):
        setup.remote.put(setup.worker(), "missing/file", b"", 0o600)


def test_put_and_run_take_odd_names(setup: RemoteSetup) -> None:
    worker = setup.worker()
    setup.remote.put(worker, "a b'c\"d$e-ü", b"odd", 0o600)
    assert setup.remote.run(worker, "cat a*").stdout == b"odd"


# --- workers that fail, many workers ---


def test_silent_worker(setup: RemoteSetup) -> None:
    worker = setup.worker()
    setup.remote.run(worker, "true")
    setup.silence(worker)
    with pytest.raises(WorkerSilent):
        setup.remote.run(worker, "true", deadline=SHORT)
    with pytest.raises(WorkerSilent):
        setup.remote.put(worker, "file", b"", 0o600, deadline=SHORT)
    setup.heal(worker)
    assert setup.remote.run(worker, "echo back").stdout == b"back\n"


def test_worker_that_falls_silent_in_the_middle(setup: RemoteSetup) -> None:
    worker, other = setup.worker(), setup.worker(1)
    begun, over = setup.home(worker) / "begun", setup.home(worker) / "over"

    def act(one: Worker) -> object:
        if one == other:
            eventually(begun.exists, SOON)
            setup.silence(worker)
            over.touch()
            return None
        return setup.remote.run(one, "touch begun; until [ -e over ]; do sleep 0.05; done; echo done", deadline=LONG)

    lost, _ = setup.remote.each([worker, other], act)
    assert isinstance(lost, WorkerSilent)


def test_each_keeps_the_order_and_every_error(setup: RemoteSetup) -> None:
    workers = [setup.worker(number) for number in range(3)]
    setup.silence(workers[1])

    def act(worker: Worker) -> bytes:
        if worker.number == 2:
            raise KeyError("unexpected")
        return setup.remote.run(worker, f"echo {worker.number}", deadline=LONG).stdout

    first, second, third = setup.remote.each(workers, act)
    assert first == b"0\n"
    assert isinstance(second, WorkerSilent)
    assert isinstance(third, KeyError)


def test_each_of_nobody(setup: RemoteSetup) -> None:
    assert setup.remote.each([], lambda worker: worker) == []


def test_knock_hints_once_when_the_worker_listens(setup: RemoteSetup) -> None:
    worker = setup.worker()
    setup.silence(worker)
    setup.remote.hints()
    setup.remote.watch_ports([worker])
    setup.remote.watch_ports([worker])
    assert hint_within(setup.remote, 0.5) == frozenset()
    setup.heal(worker)
    assert hint_within(setup.remote, SOON) == {KEY}
    assert hint_within(setup.remote, 0.5) == frozenset()


def test_forget_ends_knocking(setup: RemoteSetup) -> None:
    worker = setup.worker()
    setup.silence(worker)
    setup.remote.watch_ports([worker])
    setup.remote.forget_node(KEY)
    setup.remote.hints()
    setup.heal(worker)
    assert hint_within(setup.remote, 0.7) == frozenset()
