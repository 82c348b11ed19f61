"""ParamikoRemote beyond the contract: whom it trusts, what it keeps, and what it does when others misbehave."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import pwd
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import paramiko
import psutil
import pytest

from tests.kits import ssh_stand_in, sshd
from tests.kits.ssh_stand_in import SshStandIn, make_host_key
from tpucare.adapters.ssh.keys import LoginKey, PinStore, clean_host_keys, host_key_text, load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.adapters.ssh.transport import Transport, Wire
from tpucare.model.errors import AuthRefused, CommandFailed, ConfigError, HostKeyChanged, WorkerSilent
from tpucare.model.resources import NodeKey, Ran, Worker
from tpucare.testbed.emulator.machines.flood import Flood, Flooding

SHORT = timedelta(milliseconds=500)

# What is told at once arrives within milliseconds on a quiet machine, and within this on a busy one.
SOON = 30.0


def node_key(name: str = "pod-0-a1") -> NodeKey:
    return NodeKey("example.com:my-project", "us-central2-b", name)


def worker_at(server: SshStandIn, *, name: str = "pod-0-a1", node_id: int = 1, number: int = 0) -> Worker:
    return Worker(node_key(name), node_id, number, server.address)


def echo(command: str) -> Ran:
    return Ran(0, command.encode(), b"")


class NudgedRemote:
    """A ParamikoRemote, and a count of its nudges that can be waited for."""

    def __init__(self, key: LoginKey, pins: Path, port: int, **options: int) -> None:
        self._nudged = threading.Event()
        self.remote = ParamikoRemote(
            key, user=pwd.getpwuid(os.geteuid()).pw_name, pins=pins, nudge=self._nudged.set, port=port, **options
        )

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self.remote._pool)

    def next_hints(self, seconds: float) -> frozenset[NodeKey]:
        """Hints of the next nudge; empty when none came in time."""
        if not self._nudged.wait(seconds):
            return frozenset()
        self._nudged.clear()
        return self.remote.hints()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> LoginKey:
    return load_or_make_key(tmp_path_factory.mktemp("key") / "key")


@pytest.fixture
def server(key: LoginKey, tmp_path: Path) -> Iterator[SshStandIn]:
    home = tmp_path / "home"
    home.mkdir()
    server = SshStandIn(key.public, home=home)
    yield server
    server.stop()


@pytest.fixture
def opened(key: LoginKey, tmp_path: Path) -> Iterator[Callable[..., NudgedRemote]]:
    """Makes remotes that are closed at the end; all share one folder of pins, as restarts do."""
    doors: list[NudgedRemote] = []

    def make(port: int, **options: int) -> NudgedRemote:
        doors.append(NudgedRemote(key, tmp_path / "pins", port, **options))
        return doors[-1]

    yield make
    for nudged in doors:
        nudged.remote.close()


@pytest.fixture
def nudged(opened: Callable[..., NudgedRemote], server: SshStandIn) -> NudgedRemote:
    return opened(server.port)


@contextmanager
def restarted(server: SshStandIn, host_key: paramiko.PKey | None = None) -> Iterator[SshStandIn]:
    """Another server at the same address and port, with *host_key* or a new one."""
    server.stop()
    again = SshStandIn(
        server.authorized,
        home=server.home,
        host_keys=[host_key or make_host_key()],
        address=server.address,
        port=server.port,
    )
    try:
        yield again
    finally:
        again.stop()


# --- our own key ---


def test_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "key"
    first = load_or_make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert first.public.startswith("ssh-ed25519 AAAA")
    assert load_or_make_key(path).public == first.public
    assert os.listdir(path.parent) == ["key"]
    assert "PRIVATE" not in repr(first)


def test_openssh_reads_our_key(tmp_path: Path) -> None:
    made = load_or_make_key(tmp_path / "key")
    if not sshd.available():
        pytest.skip("no ssh-keygen here")
    shown = subprocess.run(["ssh-keygen", "-y", "-f", str(tmp_path / "key")], capture_output=True, check=True)
    assert shown.stdout.decode().split()[:2] == made.public.split()[:2]


def test_many_who_make_the_key_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda _: load_or_make_key(tmp_path / "key"), range(8)))
    assert len({made.public for made in keys}) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_make_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_or_make_key(tmp_path / "key")


def test_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match="not a private key"):
        load_or_make_key(tmp_path / "key")


# --- pinned host keys ---


def test_pins_are_private_per_node_and_survive(tmp_path: Path) -> None:
    store = PinStore(tmp_path / "pins")
    here, there = Worker(node_key(), 1, 0, "10.0.0.1"), Worker(node_key(), 2, 0, "10.0.0.1")
    assert store.check(here, "ssh-ed25519 AAAA")
    assert store.check(there, "ssh-ed25519 BBBB")
    for path in (tmp_path / "pins").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = PinStore(tmp_path / "pins")
    assert again.pinned(here) == {"ssh-ed25519 AAAA"}
    assert not again.check(here, "ssh-ed25519 BBBB")
    again.drop_node(node_key())
    assert list((tmp_path / "pins").iterdir()) == []
    assert again.check(here, "ssh-ed25519 CCCC")


def test_pins_file_serves_as_known_hosts(tmp_path: Path) -> None:
    store = PinStore(tmp_path / "pins")
    worker = Worker(node_key(), 7, 3, "10.0.0.1")
    line = host_key_text(make_host_key())
    store.pin(worker, [line])
    path, alias = store.known_hosts(worker)
    entries = paramiko.HostKeys(str(path)).lookup(alias)
    assert entries is not None
    assert host_key_text(entries["ssh-ed25519"]) == line


def test_only_host_keys_count_as_vouched() -> None:
    keys = [host_key_text(make_host_key(kind)) for kind in ("ed25519", "ecdsa")]
    noise = ["", "ssh-ed25519", "ssh-ed25519 ???", "ssh-rsa " + keys[0].split()[1], "# comment"]
    assert clean_host_keys([*(f"{line} root@host\n" for line in keys), *noise]) == set(keys)


def test_changed_host_key_is_refused_before_anything_is_said_about_us(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    with restarted(server) as stranger:
        with pytest.raises(HostKeyChanged):
            nudged.remote.run(worker, "true")
        assert stranger.logins == 0
        assert stranger.accepted == 1


def test_restart_does_not_trust_anew(opened: Callable[..., NudgedRemote], server: SshStandIn) -> None:
    worker = worker_at(server)
    first = opened(server.port)
    first.remote.run(worker, "true")
    first.remote.close()
    with restarted(server) as stranger:
        with pytest.raises(HostKeyChanged):
            opened(server.port).remote.run(worker, "true")
        assert stranger.logins == 0


def test_address_reused_by_another_node_is_a_new_acquaintance(nudged: NudgedRemote, server: SshStandIn) -> None:
    old = worker_at(server, name="pod-0-a1", node_id=1)
    new = worker_at(server, name="pod-0-a2", node_id=2)
    same_name = worker_at(server, name="pod-0-a1", node_id=3)
    nudged.remote.run(old, "true")
    old_key = server.host_keys[0]
    with restarted(server) as reused:
        assert nudged.remote.run(new, "echo hello").stdout == b"hello\n"
        assert nudged.remote.run(same_name, "echo hello").stdout == b"hello\n"
        with pytest.raises(HostKeyChanged):
            nudged.remote.run(old, "true")
        with restarted(reused, old_key):
            assert nudged.remote.run(old, "echo old").stdout == b"old\n"
            with pytest.raises(HostKeyChanged):
                nudged.remote.run(new, "true")


def test_repin_trusts_what_is_vouched_for_and_nothing_else(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    with restarted(server) as reborn:
        nudged.remote.repin(worker, ["", "nonsense"])
        nudged.remote.repin(worker, [host_key_text(make_host_key())])
        with pytest.raises(HostKeyChanged):
            nudged.remote.run(worker, "true")
        nudged.remote.repin(worker, [host_key_text(reborn.host_keys[0])])
        assert nudged.remote.run(worker, "echo back").stdout == b"back\n"


def test_repin_closes_a_connection_that_is_not_vouched_for(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    nudged.remote.repin(worker, [host_key_text(make_host_key())])
    with pytest.raises(HostKeyChanged):
        nudged.remote.run(worker, "true")


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_server_is_asked_for_the_kind_of_key_that_is_pinned(
    key: LoginKey, opened: Callable[..., NudgedRemote], kind: str
) -> None:
    keys = [make_host_key("ed25519"), make_host_key(kind)]
    server = SshStandIn(key.public, answer=echo, host_keys=keys)
    try:
        nudged = opened(server.port)
        nudged.remote.repin(worker_at(server), [host_key_text(keys[1])])
        assert nudged.remote.run(worker_at(server), "x").stdout == b"x"
        assert nudged.remote.run(worker_at(server, node_id=2), "x").stdout == b"x"
        path, alias = nudged.remote.known_hosts(worker_at(server, node_id=2))
        assert path.read_text().startswith(f"{alias} ssh-ed25519 ")
    finally:
        server.stop()


def test_server_without_the_pinned_kind_of_key_has_changed(nudged: NudgedRemote, server: SshStandIn) -> None:
    nudged.remote.repin(worker_at(server), [host_key_text(make_host_key("rsa"))])
    with pytest.raises(HostKeyChanged):
        nudged.remote.run(worker_at(server), "true")
    assert server.logins == 0


def test_refused_key(
    key: LoginKey, nudged: NudgedRemote, server: SshStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpucare.adapters.ssh.remote.refusal_pause", lambda _refusals: timedelta(0))
    worker = worker_at(server)
    server.authorized = " ".join(load_or_make_key(tmp_path / "other").public.split()[:2])
    with pytest.raises(AuthRefused):
        nudged.remote.run(worker, "true")
    # Who refused us was not pinned: the guest agent may simply not have made the user yet, or it is a stranger.
    server.authorized = " ".join(key.public.split()[:2])
    with restarted(server):
        assert nudged.remote.run(worker, "echo in").stdout == b"in\n"


# --- silence in all its forms ---


def test_nobody_listens(opened: Callable[..., NudgedRemote]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nudged = opened(taken.getsockname()[1])
        with pytest.raises(WorkerSilent, match="refused"):
            nudged.remote.run(Worker(node_key(), 1, 0, "127.0.0.1"), "true")


def test_server_that_never_says_a_word(nudged: NudgedRemote, server: SshStandIn) -> None:
    server.hang = True
    begun = time.monotonic()
    with pytest.raises(WorkerSilent, match=r"within 0\.5 s"):
        nudged.remote.run(worker_at(server), "true", deadline=SHORT)
    assert time.monotonic() - begun < 10, "paramiko itself waits 15 s for a banner"


def test_server_that_is_not_ssh(opened: Callable[..., NudgedRemote]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nudged = opened(listener.getsockname()[1])

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerSilent):
            nudged.remote.run(Worker(node_key(), 1, 0, "127.0.0.1"), "true", deadline=SHORT)
        thread.join()


@pytest.mark.parametrize("what", [Flooding.LINE, Flooding.LINES, Flooding.PACKET])
def test_server_that_floods_before_the_login(opened: Callable[..., NudgedRemote], what: Flooding) -> None:
    """It is left long before the deadline, with no more heard than an honest server would say."""
    flood = Flood("127.0.0.1", 0, what)
    try:
        nudged = opened(flood.server_address[1])
        with pytest.raises(WorkerSilent, match="dropped during the SSH handshake"):
            nudged.remote.run(Worker(node_key(), 1, 0, "127.0.0.1"), "true", deadline=timedelta(minutes=5))
        assert flood.sent < 32 << 20, "what the kernel takes for a socket nobody reads, and no more"
    finally:
        flood.close()


def test_server_that_announces_a_packet_beyond_measure_after_the_login(
    nudged: NudgedRemote, server: SshStandIn
) -> None:
    worker = worker_at(server)
    assert nudged.remote.run(worker, "echo in").stdout == b"in\n"
    server.say((2**32 - 4).to_bytes(4, "big") + bytes(1 << 16))
    assert nudged.next_hints(SOON) == {worker.key}
    assert nudged.remote.run(worker, "echo again").stdout == b"again\n"


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_server_that_sends_more_than_its_window(key: LoginKey, server: SshStandIn, stream: str) -> None:
    """What nobody has read yet is bounded by the window that we granted, and not by what the server cares to send."""
    server.overflows = True
    ended = threading.Event()
    wire = Wire(server.address, server.port)
    wire.connect(5)
    transport = Transport(wire, ended.set)
    transport.start_client(timeout=10)
    transport.auth_publickey(pwd.getpwuid(os.geteuid()).pw_name, key.private)
    channel = transport.open_session()
    channel.exec_command(f"yes{stream}")
    assert ended.wait(30)
    assert "more was sent than the window allows" in str(transport.saved_exception)
    assert len(channel.in_buffer) + len(channel.in_stderr_buffer) < 2 * channel.in_window_size
    transport.join()


@contextmanager
def dropped_while(server: SshStandIn, holds: Callable[[], bool], seconds: float = 0) -> Iterator[None]:
    """All connections are closed *seconds* after it holds; each time the block is used, and only during it."""

    def drop() -> None:
        wait_until(holds)
        time.sleep(seconds)
        server.drop()

    with ThreadPoolExecutor(1) as threads:
        dropping = threads.submit(drop)
        yield
        dropping.result()


def test_dropped_in_the_middle_of_much_output(nudged: NudgedRemote, server: SshStandIn) -> None:
    """Room for more is granted on the thread of the caller, who then meets the end of the connection."""
    worker = worker_at(server)
    assert server.home is not None
    for number in range(20):
        begun = server.home / f"begun-{number}"
        with (
            dropped_while(server, begun.exists, 0.02 * (number % 5 + 1)),
            pytest.raises(WorkerSilent, match="dropped"),
        ):
            nudged.remote.run(worker, f"touch {begun.name}; yes", deadline=timedelta(minutes=1))


def test_dropped_in_the_middle_of_a_command(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    assert server.home is not None
    with (
        dropped_while(server, (server.home / "begun").exists),
        pytest.raises(WorkerSilent, match="dropped"),
    ):
        # The deadline would be another word than "dropped".
        nudged.remote.run(worker, "touch begun; exec sleep 60", deadline=timedelta(minutes=1))
    assert nudged.next_hints(SOON) == {worker.key}


@pytest.mark.parametrize("step", ["_event_pending", "_unlink"])
def test_dropped_at_the_worst_moment(
    nudged: NudgedRemote, server: SshStandIn, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Just before paramiko begins to wait for an answer, and with the caller faster than the thread that ends it."""
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    taken = getattr(paramiko.Channel, step)

    def slowly(channel: paramiko.Channel) -> None:
        if step == "_event_pending":
            server.drop()
            wait_until(lambda: bool(channel.closed))
            taken(channel)
            return
        taken(channel)
        if isinstance(channel.get_transport(), Transport):
            time.sleep(0.3)

    monkeypatch.setattr(paramiko.Channel, step, slowly)
    assert server.home is not None
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(nudged.remote.run, worker, "touch begun; exec sleep 60", deadline=timedelta(minutes=1))
        if step == "_unlink":
            wait_until((server.home / "begun").exists)
            server.drop()
        with pytest.raises(WorkerSilent, match="dropped"):
            running.result(SOON)


def test_dropped_while_idle_is_noticed_at_once(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    server.drop()
    assert nudged.next_hints(SOON) == {worker.key}
    assert nudged.connections == 0
    assert nudged.remote.hints() == frozenset()
    assert nudged.remote.run(worker, "echo again").stdout == b"again\n"


def test_server_that_keeps_dropping_does_not_cause_a_storm_of_hints(
    nudged: NudgedRemote, server: SshStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpucare.adapters.ssh.remote.FLAP_SECONDS", 60.0)
    worker = worker_at(server)
    hints = 0
    for _ in range(5):
        nudged.remote.run(worker, "true")
        server.drop()
        hints += bool(nudged.next_hints(0.3))
    assert hints == 1


def test_own_lack_of_descriptors_is_not_the_workers_silence(nudged: NudgedRemote, server: SshStandIn) -> None:
    # Taken for silence it would end in the deletion of healthy nodes.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            nudged.remote.run(worker_at(server), "true")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE


def test_close_ends_what_is_under_way(opened: Callable[..., NudgedRemote], server: SshStandIn) -> None:
    nudged = opened(server.port)
    server.hang = True
    errors: list[Exception] = []

    def run() -> None:
        try:
            nudged.remote.run(worker_at(server), "true", deadline=timedelta(seconds=20))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: server.accepted == 1)
    begun = time.monotonic()
    nudged.remote.close()
    thread.join()
    assert time.monotonic() - begun < 10
    assert isinstance(errors[0], WorkerSilent)
    with pytest.raises(WorkerSilent):
        nudged.remote.run(worker_at(server), "true")


# --- files ---


def test_full_disk_is_told(nudged: NudgedRemote, server: SshStandIn) -> None:
    server.sftp_error = errno.ENOSPC
    for size in (10, 5_000_000):
        with pytest.raises(CommandFailed, match="df: "):
            nudged.remote.put(worker_at(server), "file", bytes(size), 0o600)
    assert server.home is not None
    assert os.listdir(server.home) == []
    assert nudged.connections == 1


def test_file_is_private_while_it_is_written(
    nudged: NudgedRemote, server: SshStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.home is not None
    home, seen = server.home, list[int]()
    write, rename = ssh_stand_in._File.write, os.replace

    def look() -> None:
        (path,) = home.glob(".file.*")
        seen.append(stat.S_IMODE(path.stat().st_mode))

    def watched_write(file: ssh_stand_in._File, offset: int, data: object) -> int:
        look()
        return write(file, offset, data)

    def watched_rename(source: Path, target: Path) -> None:
        if Path(target) == home / "file":
            look()
        rename(source, target)

    monkeypatch.setattr(ssh_stand_in._File, "write", watched_write)
    monkeypatch.setattr(os, "replace", watched_rename)
    nudged.remote.put(worker_at(server), "file", bytes(1_000_000), 0o600)
    assert len(seen) > 30
    assert set(seen) == {0o600}


# --- kept connections ---


def test_connection_is_kept_and_shared(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    results = nudged.remote.each([worker] * 16, lambda one: nudged.remote.run(one, "echo x").stdout)
    assert results == [b"x\n"] * 16
    assert server.accepted == 1


def test_kept_connection_does_not_grow_with_its_commands(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    def transports() -> list[Transport]:
        return [one for one in gc.get_objects() if type(one) is Transport]

    # Other tests' leftovers are of no interest, and may still be ending.
    before_us = transports()

    def held() -> int:
        # paramiko's own growth is a number per channel.
        (ours,) = [one for one in transports() if one not in before_us]
        return sum(len(value) for value in vars(ours).values() if isinstance(value, dict | list))

    server = SshStandIn(key.public, answer=echo)
    try:
        nudged = opened(server.port)
        nudged.remote.run(worker_at(server), "x")
        before = held()
        for _ in range(100):
            nudged.remote.run(worker_at(server), "x")
        assert held() <= before
    finally:
        server.stop()


@pytest.mark.machines
def test_start_up_file_that_prints_is_named_as_the_reason(opened: Callable[..., NudgedRemote], real: sshd.Sshd) -> None:
    wrap = real.folder / "wrap.sh"
    wrap.write_text(wrap.read_text().replace("#!/bin/bash\n", "#!/bin/bash\necho Welcome to your TPU\n"))
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    with pytest.raises(CommandFailed, match="start-up file"):
        nudged.remote.put(worker, "file", b"", 0o600)


def test_more_commands_at_once_than_a_server_grants_sessions(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    results = nudged.remote.each(
        [worker] * 30,
        lambda one: nudged.remote.run(one, "sleep 0.1; echo x", deadline=timedelta(minutes=1)).stdout,
    )
    assert results == [b"x\n"] * 30


def test_kept_connections_are_bounded_and_worker_0_stays(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    server = SshStandIn(key.public, answer=echo)
    try:
        nudged = opened(server.port, max_connections=4)
        for number in range(8):
            nudged.remote.run(worker_at(server, number=number), "x")
            assert nudged.connections <= 4
        for name in ("b", "c", "d"):
            nudged.remote.run(worker_at(server, name=name), "x")
        assert nudged.connections == 4
        accepted = server.accepted
        for name in ("pod-0-a1", "b", "c", "d"):
            nudged.remote.run(worker_at(server, name=name), "x")
        assert server.accepted == accepted
        nudged.remote.run(worker_at(server, number=5), "x")
        nudged.remote.run(worker_at(server, name="e"), "x")
        assert nudged.connections == 4
        assert server.accepted == accepted + 2
    finally:
        server.stop()


def test_new_address_of_the_same_worker_is_connected_to(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    port, same = sshd.free_port(), make_host_key()
    servers = [SshStandIn(key.public, answer=echo, host_keys=[same], address=f"127.2.3.{n}", port=port) for n in (1, 2)]
    try:
        nudged = opened(port)
        for server in servers:
            assert nudged.remote.run(worker_at(server), "x").stdout == b"x"
        assert [server.accepted for server in servers] == [1, 1]
        assert nudged.connections == 1
    finally:
        for server in servers:
            server.stop()


def test_disconnect_closes_and_keeps_the_pins(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    nudged.remote.disconnect(worker.key)
    wait_until(lambda: server.open == 0)
    assert nudged.next_hints(0.3) == frozenset()
    with restarted(server), pytest.raises(HostKeyChanged):
        nudged.remote.run(worker, "true")


def test_forget_closes_and_drops_the_pins(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.run(worker, "true")
    nudged.remote.forget_node(worker.key)
    wait_until(lambda: server.open == 0)
    assert nudged.next_hints(0.3) == frozenset()
    with restarted(server):
        assert nudged.remote.run(worker, "echo new").stdout == b"new\n"


def test_node_forgotten_while_it_is_connected_to_leaves_nothing(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    server.hang = True
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(nudged.remote.run, worker, "true", deadline=SHORT)
        wait_until(lambda: server.accepted == 1)
        nudged.remote.forget_node(worker.key)
        with pytest.raises(WorkerSilent):
            running.result()
    assert nudged.connections == 0
    assert not nudged.remote.known_hosts(worker)[0].exists()


def test_nothing_grows_over_many_connections(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    server = SshStandIn(key.public, answer=echo)
    me = psutil.Process()
    nudged = opened(server.port)
    # Those of other tests may still be ending.
    others = set(threading.enumerate())

    def is_quiet() -> bool:
        ours = set(threading.enumerate()) - others
        return server.open == 0 and not any(isinstance(thread, paramiko.Transport) for thread in ours)

    def cycle(number: int) -> None:
        worker = worker_at(server, name=f"pod-0-a{number}", node_id=number, number=number % 3)
        nudged.remote.watch_ports([worker])
        assert nudged.remote.run(worker, "x").stdout == b"x"
        if number % 10 == 0:
            server.drop()
        nudged.remote.forget_node(worker.key)

    try:
        for number in range(20):
            cycle(number)
        wait_until(is_quiet)
        files, threads = me.num_fds(), me.num_threads()
        for number in range(20, 520):
            cycle(number)
        # A thread is counted for a moment after it has ended.
        wait_until(lambda: is_quiet() and me.num_threads() <= threads and me.num_fds() <= files)
        assert nudged.connections == 0
        nudged.remote.close()
        ours = set(threading.enumerate()) - others
        assert not [thread.name for thread in ours if thread.name.startswith("tpucare")]
    finally:
        server.stop()


# --- many workers ---


def test_64_workers_in_parallel(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    together = threading.Barrier(16)

    def slow_echo(command: str) -> Ran:
        """A command that ends only when 16 are under way: of 64 in fewer lanes the last would wait for ever."""
        together.wait(SOON)
        return echo(command)

    server = SshStandIn(key.public, answer=slow_echo)
    try:
        nudged = opened(server.port)
        workers = [worker_at(server, number=number) for number in range(64)]
        for _ in range(2):
            results = nudged.remote.each(
                workers,
                lambda worker: nudged.remote.run(worker, f"{worker.number}", deadline=timedelta(minutes=2)).stdout,
            )
            assert results == [f"{number}".encode() for number in range(64)]
        assert server.accepted == 64
    finally:
        server.stop()


def test_each_within_each_within_many_threads_ends(opened: Callable[..., NudgedRemote]) -> None:
    nudged = opened(1, parallel=2)
    workers = [Worker(node_key(), 1, number, "127.0.0.1") for number in range(4)]

    def nested(worker: Worker) -> int:
        inner = nudged.remote.each(workers, lambda one: one.number)
        return worker.number * sum(value for value in inner if isinstance(value, int))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: nudged.remote.each(workers, nested), range(8)))
    assert answers == [[0, 6, 12, 18]] * 8


def test_slow_worker_does_not_delay_the_others(opened: Callable[..., NudgedRemote]) -> None:
    nudged = opened(1, parallel=4)
    done = threading.Semaphore(0)

    def call(worker: Worker) -> bool:
        if worker.number == 0:
            return all(done.acquire(timeout=SOON) for _ in range(9))
        done.release()
        return True

    workers = [Worker(node_key(), 1, number, "127.0.0.1") for number in range(10)]
    assert nudged.remote.each(workers, call) == [True] * 10


# --- knocking ---


def test_knock_hears_each_worker_of_a_node(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    port = sshd.free_port()
    nudged = opened(port)
    nudged.remote.watch_ports([Worker(node_key(), 1, number, f"127.2.4.{number}") for number in (1, 2)])
    for number in (1, 2):
        assert nudged.next_hints(0.4) == frozenset()
        server = SshStandIn(key.public, answer=echo, address=f"127.2.4.{number}", port=port)
        try:
            assert nudged.next_hints(SOON) == {node_key()}
        finally:
            server.stop()
    assert nudged.next_hints(0.4) == frozenset()


def test_knock_again_after_the_worker_was_heard_says_nothing(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}
    wait_until(lambda: server.accepted == 1)
    for _ in range(5):
        nudged.remote.watch_ports([worker])
    assert nudged.next_hints(0.5) == frozenset()
    assert server.accepted == 1


def test_knock_again_after_silence_hints_again(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    server.hang = True
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}
    with pytest.raises(WorkerSilent):
        nudged.remote.run(worker, "true", deadline=SHORT)
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}


def test_knock_at_many_keeps_its_sockets_bounded_and_wakes_for_each(
    key: LoginKey, opened: Callable[..., NudgedRemote]
) -> None:
    port = sshd.free_port()
    nudged = opened(port)
    files = psutil.Process().num_fds()
    awaited = [
        Worker(node_key(f"n{a}-{b}"), 1, 0, f"127.5.{a}.{b}") for a, b in itertools.product(range(20), range(1, 101))
    ]
    # A server whose queue of connections is full takes no more: its address is as dark as a VM that is not there yet.
    with dark_address(port) as dark:
        begun = time.monotonic()
        nudged.remote.watch_ports(awaited)
        nudged.remote.watch_ports([Worker(node_key(f"d{number}"), 1, 0, dark) for number in range(600)])
        assert time.monotonic() - begun < 10, "who waits for an answer of each would wait for minutes"
        server = SshStandIn(key.public, answer=echo, address="127.5.7.7", port=port)
        try:
            assert nudged.next_hints(SOON) == {node_key("n7-7")}
            assert psutil.Process().num_fds() <= files + 512 + 300
        finally:
            server.stop()
        for worker in awaited:
            nudged.remote.forget_node(worker.key)


def test_a_server_that_talks_without_being_asked_is_hung_up_on(
    nudged: NudgedRemote, server: SshStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A worker could send without end on a kept connection that was not in use. 1 MB that was not asked for ends the
    connection.
    """
    monkeypatch.setattr("tpucare.adapters.ssh.connection.UNASKED_BYTES", 1000)
    worker = worker_at(server)
    big = "x" * 100_000
    assert len(nudged.remote.run(worker, f"echo {big}").stdout) == len(big) + 1, "what was asked for is not bounded so"
    assert nudged.connections == 1
    for _ in range(3):
        with server._lock:
            transports = list(server._open)
        for transport in transports:
            message = paramiko.Message()
            message.add_byte(b"\x02")  # SSH_MSG_IGNORE
            message.add_string(b"x" * 700)
            with contextlib.suppress(EOFError):  # the second message was enough for it
                transport._send_user_message(message)  # type: ignore[attr-defined]
    wait_until(lambda: nudged.connections == 0)
    assert nudged.remote.run(worker, "echo again").stdout == b"again\n"


def test_the_knock_is_the_first_login(nudged: NudgedRemote, server: SshStandIn) -> None:
    """A connection that is closed without a login is an attack to sshguard."""
    worker = worker_at(server)
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}
    assert nudged.remote.run(worker, "echo in").stdout == b"in\n"
    assert (server.accepted, server.logins) == (1, 1)


def test_a_knock_that_the_server_hung_up_on_is_followed_by_a_login(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}
    wait_until(lambda: server.open == 1)
    server.drop()
    assert nudged.remote.run(worker, "echo in").stdout == b"in\n"
    assert server.accepted == 2


def test_a_knock_that_nobody_needs_any_more_is_closed(nudged: NudgedRemote, server: SshStandIn) -> None:
    worker = worker_at(server)
    nudged.remote.watch_ports([worker])
    assert nudged.next_hints(SOON) == {worker.key}
    wait_until(lambda: server.open == 1)
    nudged.remote.disconnect(worker.key)
    wait_until(lambda: server.open == 0)


def test_a_worker_that_refused_our_key_is_left_alone_for_a_while(
    nudged: NudgedRemote, server: SshStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorized, server.authorized = server.authorized, "ssh-ed25519 another"
    worker, pauses = worker_at(server), iter((timedelta(0), timedelta(hours=1)))
    monkeypatch.setattr("tpucare.adapters.ssh.remote.refusal_pause", lambda _refusals: next(pauses))
    for logins in (1, 2, 2):
        with pytest.raises(AuthRefused):
            nudged.remote.run(worker, "true")
        assert server.logins == logins
    server.authorized = authorized
    with pytest.raises(AuthRefused, match=r"was refused; not tried again for 3\d\d\d s$") as refused:
        nudged.remote.run(worker, "true")
    assert (refused.value.host, str(refused.value)) == (worker.host, f"{worker.host}: {refused.value.message}")
    nudged.remote.disconnect(worker.key)
    assert nudged.remote.run(worker, "echo in").stdout == b"in\n"


def test_knock_at_a_dark_address_tries_again(key: LoginKey, opened: Callable[..., NudgedRemote]) -> None:
    port = sshd.free_port()
    nudged = opened(port)
    with dark_address(port) as dark:
        nudged.remote.watch_ports([Worker(node_key(), 1, 0, dark)])
        assert nudged.next_hints(1.5) == frozenset()
    server = SshStandIn(key.public, answer=echo, address=dark, port=port)
    try:
        assert nudged.next_hints(SOON) == {node_key()}
    finally:
        server.stop()


@contextmanager
def dark_address(port: int) -> Iterator[str]:
    """A loopback address that answers no SYN: a listener whose queue is full."""
    address = "127.6.0.1"
    with socket.create_server((address, port), backlog=0) as listener:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        try:
            yield address
        finally:
            for filler in fillers:
                filler.close()


def wait_until(holds: Callable[[], bool], seconds: float = SOON) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


# --- real sshd ---


@pytest.fixture
def real(key: LoginKey, tmp_path: Path) -> Iterator[sshd.Sshd]:
    if not sshd.available():
        pytest.skip("no sshd here: apt-get install openssh-server")
    server = sshd.Sshd(tmp_path / "worker", "127.2.5.1", sshd.free_port(), key.public).start()
    yield server
    server.stop()


@pytest.mark.machines
def test_frozen_sshd_is_silent_by_the_deadline(opened: Callable[..., NudgedRemote], real: sshd.Sshd) -> None:
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    nudged.remote.run(worker, "true")
    real.freeze()
    for _ in range(2):  # On the kept connection, then on a new one.
        begun = time.monotonic()
        with pytest.raises(WorkerSilent, match="within"):
            nudged.remote.run(worker, "true", deadline=SHORT)
        assert time.monotonic() - begun < 10
    with pytest.raises(WorkerSilent, match="within"):
        nudged.remote.put(worker, "file", b"", 0o600, deadline=SHORT)
    real.thaw()
    assert nudged.remote.run(worker, "echo thawed").stdout == b"thawed\n"


@pytest.mark.machines
@pytest.mark.parametrize("size", [1 << 14, 30 << 20])
def test_sshd_frozen_in_the_middle_of_a_command(
    opened: Callable[..., NudgedRemote], real: sshd.Sshd, size: int
) -> None:
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    nudged.remote.run(worker, "true")
    freezer = threading.Timer(0.15, real.freeze)
    freezer.start()
    begun = time.monotonic()
    with pytest.raises(WorkerSilent, match="within"):
        nudged.remote.run(worker, "sleep 0.3; cat > /dev/null; sleep 3", stdin=bytes(size), deadline=SHORT)
    assert time.monotonic() - begun < SOON
    freezer.join()
    real.thaw()
    assert nudged.remote.run(worker, "echo thawed").stdout == b"thawed\n"


@pytest.mark.machines
def test_killed_sshd_is_hinted_at_and_then_refuses(opened: Callable[..., NudgedRemote], real: sshd.Sshd) -> None:
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    nudged.remote.run(worker, "true")
    real.stop()
    assert nudged.next_hints(SOON) == {worker.key}
    with pytest.raises(WorkerSilent, match="refused"):
        nudged.remote.run(worker, "true")


@pytest.mark.machines
@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_sshd_with_a_new_host_key(opened: Callable[..., NudgedRemote], real: sshd.Sshd, kind: str) -> None:
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    nudged.remote.run(worker, "true")
    real.stop()
    real.new_host_key(kind)
    real.start()
    with pytest.raises(HostKeyChanged):
        nudged.remote.run(worker, "true")
    nudged.remote.repin(worker, [real.host_key])
    assert nudged.remote.run(worker, "echo vouched").stdout == b"vouched\n"


@pytest.mark.machines
@pytest.mark.parametrize("tries", [6, 1])
def test_sshd_that_refuses_our_key(opened: Callable[..., NudgedRemote], real: sshd.Sshd, tries: int) -> None:
    # With one try sshd hangs up ("Too many authentication failures") instead of saying no.
    (real.folder / "authorized_keys").write_text("")
    with (real.folder / "sshd_config").open("a") as config:
        config.write(f"MaxAuthTries {tries}\n")
    real.stop()
    real.start()
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    with pytest.raises(AuthRefused):
        nudged.remote.run(worker, "true")


@pytest.mark.machines
def test_disk_full_on_a_real_worker(opened: Callable[..., NudgedRemote], real: sshd.Sshd) -> None:
    small = real.home / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
        with pytest.raises(CommandFailed, match="Failure"):
            nudged.remote.put(worker, "small/file", bytes(1 << 20), 0o600)
        assert os.listdir(small) == []
        nudged.remote.put(worker, "small/file", bytes(1 << 10), 0o600)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.machines
@pytest.mark.slow
def test_50_mb_through_stdin(opened: Callable[..., NudgedRemote], real: sshd.Sshd) -> None:
    nudged, worker = opened(real.port), Worker(node_key(), 1, 0, real.address)
    ran = nudged.remote.run(worker, "wc -c", stdin=bytes(50 << 20), deadline=timedelta(seconds=60))
    assert ran.stdout.split() == [b"52428800"]
