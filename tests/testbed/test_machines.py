"""Emulated workers are real machines in miniature: they boot, let in, run, fall silent, and die without a survivor."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import paramiko
import pytest
import structlog

from tpucare.testbed.emulator.machines import proctree, worker_files
from tpucare.testbed.emulator.machines.flood import Flooding
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.machines.metadata_server import may_serve_by_name
from tpucare.testbed.emulator.machines.sandbox import MachineError, Sandbox
from tpucare.testbed.emulator.world.machine_effects import AuthorizeKeys, Boot, Kill, Resume, SetAttribute, Silence
from tpucare.testbed.emulator.world.records import NodePath

pytestmark = [pytest.mark.machines, pytest.mark.timeout(60)]

AT = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodePath("grant", "us-central1-a", "pod-0-a1")
SSH_PORT = 2391
METADATA_PORT = 8391
SSH_KEYS = "instance/attributes/ssh-keys"
TEMPLATES = Path(__file__).parents[2] / "templates" / "worker"
WAYS = [None, Sandbox.SUBREAPER]

# Everything that outlives an SSH session by itself: screen, nohup, setsid, and a daemon that forked twice.
DAEMONS = """\
screen -dmS train sleep 600
nohup sleep 601 >/dev/null 2>&1 </dev/null &
setsid sleep 602 >/dev/null 2>&1 </dev/null &
setsid bash -c 'env -i setsid sleep 603 & exit' >/dev/null 2>&1 </dev/null
"""


class Zone:
    """The machines under test, and a person with a key who logs in to them."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.key = paramiko.Ed25519Key.from_private_key_file(str(_make_key(folder / "person")))
        self.public = f"me:ssh-ed25519 {self.key.get_base64()} me@home"
        self.host_keys: list[tuple[int, Mapping[str, str]]] = []
        self.gone: list[tuple[int, str]] = []
        # Each process of a parallel test run has addresses of its own.
        self._first_octets = f"127.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
        self.machines = WorkerMachines(
            folder / "state",
            ssh_port=SSH_PORT,
            metadata_port=METADATA_PORT,
            on_host_keys=lambda path, worker, keys: self.host_keys.append((worker, keys)),
            on_gone=lambda path, worker, why: self.gone.append((worker, why)),
            **settings,  # type: ignore[arg-type]
        )

    def address(self, worker: int = 0) -> str:
        return f"{self._first_octets}.{worker + 1}"

    def order(self, worker: int = 0, node_id: int = 7, path: NodePath = NODE, workers: int = 1) -> Boot:
        peers = tuple(self.address(number) for number in range(workers))
        return Boot(
            AT, path, node_id, worker, self.address(worker), f"t1v-n-0000000{node_id}-w-{worker}",
            {SSH_KEYS: self.public}, peers,
        )  # fmt: skip

    def boot(self, worker: int = 0, node_id: int = 7, path: NodePath = NODE) -> None:
        self.machines.apply(self.order(worker, node_id, path)).result(timeout=30)

    def kill(self, node_id: int = 7, path: NodePath = NODE) -> None:
        self.machines.apply(Kill(AT, path, node_id)).result(timeout=30)

    def connect(self, worker: int = 0, timeout: float = 10.0) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        client.connect(
            self.address(worker), SSH_PORT, self.machines.login_user, pkey=self.key,
            timeout=timeout, banner_timeout=timeout, look_for_keys=False, allow_agent=False,
        )  # fmt: skip
        return client

    def run(self, command: str, worker: int = 0) -> str:
        with self.connect(worker) as client:
            _, stdout, stderr = client.exec_command(command, timeout=20)
            text = stdout.read().decode()
            assert stdout.channel.recv_exit_status() == 0, stderr.read().decode()
            return text.strip()

    def start_daemons(self, worker: int = 0) -> None:
        """DAEMONS, until each is the `sleep` that it is to become."""
        self.run(DAEMONS, worker)
        _until(lambda: len(self.daemons(worker)) == 4)

    def daemons(self, worker: int = 0) -> list[int]:
        """Those alone: the sshd of the connection that started them may still be on its way out."""
        return [pid for pid in self.machines.processes(NODE, worker) if _command(pid).startswith("sleep 60")]

    def ask(self, path: str, worker: int = 0, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address(worker), METADATA_PORT, timeout=10)
        connection.request("GET", f"/computeMetadata/v1/{path}", headers=headers or {"Metadata-Flavor": "Google"})
        return connection.getresponse()

    def offered_host_key(self, worker: int = 0) -> str:
        with self.connect(worker) as client:
            transport = client.get_transport()
            assert transport is not None
            return transport.get_remote_server_key().get_base64()


def _make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def need_mounts(zone: Zone) -> None:
    if not zone.machines.sandbox.mounts:
        pytest.skip("no namespaces here, so a worker has neither a /dev nor a process table of its own")


def need_port_80() -> None:
    if not may_serve_by_name():
        pytest.skip("http://metadata.google.internal needs port 80, where only root may listen")


@pytest.fixture
def zone(tmp_path: Path) -> Iterator[Zone]:
    zone = Zone(tmp_path)
    yield zone
    zone.machines.close()
    assert zone.machines.survivors() == []


# --- a worker that lives ------------------------------------------------------------------------------------


def test_a_session_finds_itself_on_a_tpu_vm(tmp_path: Path) -> None:
    python_folder = tmp_path / "venv-bin"
    python_folder.mkdir()
    zone = Zone(tmp_path, path_prefix=[python_folder], extra_env={"EXTRA": 'it\'s "quoted" $HOME'})
    try:
        zone.boot()
        environment = dict(line.partition("=")[::2] for line in zone.run("env").splitlines())
        assert environment["HOSTNAME"] == "t1v-n-00000007-w-0"
        assert environment["EXTRA"] == 'it\'s "quoted" $HOME'
        assert environment["GCE_METADATA_IP"] == environment["GCE_METADATA_HOST"] == f"{zone.address()}:{METADATA_PORT}"
        stubs, *others = environment["PATH"].split(":")
        assert others[0] == str(python_folder)
        assert Path(stubs, "sudo").exists()
        assert zone.run("pwd") == environment["HOME"] == zone.run("cd ~ && pwd") == zone.run("echo $HOME")
        assert environment["HOME"].startswith(str(tmp_path))
        assert zone.run("bash -lc 'echo $PATH'") == environment["PATH"]
        assert zone.run("sudo -E -n A='b c' sh -c 'echo $A'") == "b c"
        assert zone.run("mktemp").startswith(environment["TMPDIR"])
    finally:
        zone.machines.close()


def test_files_travel_by_sftp_into_the_home(zone: Zone) -> None:
    zone.boot()
    with zone.connect() as client, client.open_sftp() as sftp:
        with sftp.open("setup.sh", "w") as file:
            file.write("echo ready")
        assert sftp.normalize(".") == zone.run("pwd")
    assert zone.run("bash ./setup.sh") == "ready"


def test_screen_works_and_its_sockets_are_gone_after_a_reboot(zone: Zone) -> None:
    zone.boot()
    # `screen -dmS` returns before its socket can be listed when the machine is busy.
    listed = "for i in $(seq 100); do screen -ls | grep -q train && exit 0; sleep 0.1; done; exit 1"
    zone.run(f"screen -dmS train sleep 600; {listed}")
    zone.machines.reboot(NODE, 0).result(timeout=30)
    assert "No Sockets" in zone.run("screen -ls || true")


def test_a_worker_sees_its_own_processes_only(zone: Zone) -> None:
    need_mounts(zone)
    zone.boot(0)
    zone.boot(1)
    zone.run("setsid sleep 611 >/dev/null 2>&1 </dev/null &", worker=1)
    assert "sleep 611" in zone.run("ps ax", worker=1)
    assert "sleep 611" not in zone.run("ps ax", worker=0)


def test_a_worker_has_a_dev_of_its_own(zone: Zone) -> None:
    need_mounts(zone)
    for worker, chips in enumerate((4, 8)):
        zone.machines.apply(replace(zone.order(worker), chips=chips)).result(timeout=30)
        assert zone.run("ls /dev/accel* | wc -l", worker) == str(chips)
    zone.run("touch /dev/accel9; echo lost >/dev/null; head -c 5 /dev/zero >/dev/shm/mine")
    assert zone.run("ls /dev/accel9 /dev/shm/mine 2>/dev/null || echo none", worker=1) == "none"
    with zone.connect() as client:
        _, stdout, _ = client.exec_command(
            "test -t 0 && tty; screen -dmS train sleep 600; cat", timeout=20, get_pty=True
        )
        assert stdout.readline().startswith("/dev/pts/")
        _until(lambda: "train" in zone.run("screen -ls || true"))
    zone.machines.reboot(NODE, 0).result(timeout=30)
    assert zone.run("ls /dev/accel9 /dev/shm/mine 2>/dev/null || echo none") == "none"


def test_a_process_that_holds_a_chip_is_found(zone: Zone) -> None:
    need_mounts(zone)
    zone.boot()
    find = f"PYTHONPATH='{TEMPLATES}' python3 -c 'import processes; print(processes.chip_holders())'"
    assert zone.run(find) == "{}"
    holder = zone.run("setsid sleep 630 >/dev/null 2>&1 </dev/accel2 & echo $!")
    assert zone.run(find) == f"{{{holder}: '/dev/accel2'}}"


def test_rays_sockets_fit_into_the_temporary_folder_which_ends_with_the_worker(zone: Zone) -> None:
    zone.boot()
    folder = zone.run("echo large >$TMPDIR/file; echo $TMPDIR")
    assert len(f"{folder}/ray-12345678") + 62 <= 107
    zone.kill()
    _until(lambda: not Path(folder).exists())


def test_the_host_key_that_is_told_is_the_one_that_is_offered(zone: Zone) -> None:
    zone.boot()
    assert zone.host_keys == [(0, {"ssh-ed25519": zone.offered_host_key()})]


def test_sixteen_workers_boot_side_by_side(zone: Zone) -> None:
    booted = [zone.machines.apply(zone.order(worker, workers=16)) for worker in range(16)]
    for future in booted:
        future.result(timeout=30)
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda worker: zone.run("echo $HOSTNAME", worker), range(16)))
    assert names == [f"t1v-n-00000007-w-{worker}" for worker in range(16)]
    assert len({keys["ssh-ed25519"] for _, keys in zone.host_keys}) == 16
    zone.kill()
    assert zone.machines.survivors() == []


# --- the end of a worker ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_leaves_no_survivor(tmp_path: Path, way: Sandbox | None) -> None:
    zone = Zone(tmp_path, sandbox=way)
    try:
        zone.boot(0)
        zone.boot(1)
        zone.start_daemons()
        zone.start_daemons(1)
        session = zone.connect()
        doomed, spared = zone.machines.processes(NODE, 0), zone.daemons(1)
        assert len(zone.daemons()) == len(spared) == 4
        zone.machines.apply(Kill(AT, NODE, 7, worker=0)).result(timeout=10)
        assert not any(_lives(pid) for pid in doomed)
        assert zone.machines.processes(NODE, 0) == []
        assert all(_lives(pid) for pid in spared)
        assert zone.run("echo spared", worker=1) == "spared"
        assert zone.machines.escaped == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((zone.address(), SSH_PORT), timeout=2)
        session.close()
    finally:
        zone.machines.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_outruns_a_worker_that_forks_as_fast_as_it_can(tmp_path: Path, way: Sandbox | None) -> None:
    zone = Zone(tmp_path, sandbox=way)
    try:
        zone.boot()
        # Bounded by its own end: 20 s, should the kill fail.
        zone.run(
            "(end=$((SECONDS+20)); while [ $SECONDS -lt $end ]; do setsid sleep 5 & done) >/dev/null 2>&1 </dev/null &"
        )
        _until(lambda: len(zone.machines.processes(NODE, 0)) > 50)
        zone.kill()
        assert zone.machines.survivors() == []
    finally:
        zone.machines.close()


def test_a_kill_during_boot_wins(zone: Zone) -> None:
    booted = [zone.machines.apply(zone.order(worker)) for worker in range(8)]
    zone.kill()
    for future in booted:
        future.result(timeout=30)
    assert zone.machines.survivors() == []
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection((zone.address(), SSH_PORT), timeout=0.5)


def test_an_address_is_used_again_by_another_machine(zone: Zone) -> None:
    zone.boot()
    zone.run("echo old > mark")
    old_key = zone.offered_host_key()
    zone.machines.apply(Kill(AT, NODE, 7))
    zone.boot(node_id=8, path=NODE._replace(node_id="pod-0-a2"))
    assert zone.offered_host_key() != old_key
    assert zone.run("ls") == ""
    assert zone.machines.processes(NODE, 0) == []


def test_an_address_that_is_taken_makes_the_boot_fail_loudly(zone: Zone) -> None:
    with socket.create_server((zone.address(), SSH_PORT)), pytest.raises(MachineError, match="Address already in use"):
        zone.boot()
    assert [worker for worker, _ in zone.gone] == [0]
    zone.boot()
    assert zone.run("echo up") == "up"


def test_a_machine_that_ends_by_itself_is_told(zone: Zone) -> None:
    zone.boot()
    os.kill(zone.machines.processes(NODE, 0)[0], signal.SIGKILL)
    _until(lambda: zone.gone == [(0, "its sshd ended by itself")])


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_worker_lets_connects_time_out_and_stops(tmp_path: Path, way: Sandbox | None) -> None:
    zone = Zone(tmp_path, sandbox=way)
    try:
        zone.boot()
        zone.run("(while :; do date +%N > clock; sleep 0.02; done) >/dev/null 2>&1 </dev/null &")
        clock = Path(zone.run("pwd")) / "clock"
        _until(clock.exists)
        zone.machines.apply(Silence(AT, NODE, 7, 0)).result(timeout=10)
        with pytest.raises(TimeoutError):
            socket.create_connection((zone.address(), SSH_PORT), timeout=0.5)
        stopped_at = clock.read_text()
        time.sleep(0.1)  # long enough for five ticks, were it running
        assert clock.read_text() == stopped_at
        zone.machines.apply(Resume(AT, NODE, 7, 0)).result(timeout=10)
        _until(lambda: clock.read_text() != stopped_at)
        assert zone.run("echo back") == "back"
        zone.machines.apply(Silence(AT, NODE, 7)).result(timeout=10)
        zone.kill()
        assert zone.machines.survivors() == []
    finally:
        zone.machines.close()


def test_a_worker_cut_off_from_the_network_goes_on_working(zone: Zone) -> None:
    zone.boot()
    zone.run("(while :; do date +%N > clock; sleep 0.02; done) >/dev/null 2>&1 </dev/null &")
    clock = Path(zone.run("pwd")) / "clock"
    _until(clock.exists)
    zone.machines.cut_off(NODE, 0).result(timeout=10)
    with pytest.raises(TimeoutError):
        socket.create_connection((zone.address(), SSH_PORT), timeout=0.5)
    seen = clock.read_text()
    _until(lambda: clock.read_text() not in ("", seen))


def test_a_hung_worker_accepts_and_says_nothing(zone: Zone) -> None:
    zone.boot()
    zone.machines.hang(NODE, 0).result(timeout=10)
    with socket.create_connection((zone.address(), SSH_PORT), timeout=1) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    zone.machines.resume(NODE, 0).result(timeout=10)
    assert zone.run("echo back") == "back"


@pytest.mark.parametrize("what", [Flooding.LINE, Flooding.LINES, Flooding.PACKET])
def test_a_worker_that_floods_its_greeting(zone: Zone, what: Flooding) -> None:
    zone.boot()
    with zone.connect() as client:
        _, open_session, _ = client.exec_command("cat; echo heard")
        zone.machines.flood(NODE, 0, what).result(timeout=10)
        with socket.create_connection((zone.address(), SSH_PORT), timeout=5) as connection:
            heard = b""
            while len(heard) <= 100_000:
                # Of a slow speaker each time brings little.
                said = connection.recv(1 << 16)
                assert said, "it hung up"
                heard += said
        assert (b"SSH-" in heard) is (what is Flooding.PACKET)
        assert (b"\n" in heard[100:]) is (what is Flooding.LINES)
        open_session.channel.shutdown_write()
        assert open_session.read() == b"heard\n"
    zone.machines.resume(NODE, 0).result(timeout=10)
    assert zone.run("echo back") == "back"
    zone.machines.flood(NODE, 0, what).result(timeout=10)
    zone.kill()
    zone.boot(node_id=8)
    assert zone.run("echo next") == "next"


def test_a_worker_whose_commands_flood(zone: Zone) -> None:
    zone.boot()
    zone.machines.flood(NODE, 0, Flooding.OUTPUT).result(timeout=10)
    with zone.connect() as client:
        channel = client.exec_command("true", timeout=20)[1].channel
        heard = {"stdout": 0, "stderr": 0}

        def hear() -> bool:
            # Both, as they come: what is left unread of one takes the room that the other's next words need.
            if channel.recv_ready():
                heard["stdout"] += len(channel.recv(1 << 20))
            if channel.recv_stderr_ready():
                heard["stderr"] += len(channel.recv_stderr(1 << 20))
            return min(heard.values()) >= 1 << 20

        _until(hear, 20)
    zone.machines.resume(NODE, 0).result(timeout=10)
    assert zone.run("echo back") == "back"


def test_keys_are_refused_until_the_guest_agent_brings_them_back(zone: Zone, tmp_path: Path) -> None:
    zone.boot()
    zone.machines.refuse_keys(NODE, 0).result(timeout=10)
    with pytest.raises(paramiko.AuthenticationException):
        zone.connect()
    zone.machines.apply(AuthorizeKeys(AT, NODE, 7, f"you:ssh-ed25519 AAAA you\n{zone.public}\n")).result(timeout=10)
    assert zone.run("echo in") == "in"
    assert zone.public in zone.ask(SSH_KEYS).read().decode()


def test_another_host_key_while_the_run_goes_on(zone: Zone) -> None:
    zone.boot()
    old_key = zone.offered_host_key()
    run = int(zone.run("setsid sleep 620 >/dev/null 2>&1 </dev/null & echo $!").split()[0])
    zone.machines.change_host_key(NODE, 0).result(timeout=10)
    assert zone.offered_host_key() not in ("", old_key)
    assert zone.host_keys[-1] == (0, {"ssh-ed25519": zone.offered_host_key()})
    assert zone.run(f"kill -0 {run} && echo alive") == "alive"


def test_a_reboot_keeps_home_and_host_key_and_nothing_else(zone: Zone) -> None:
    zone.boot()
    zone.run("echo kept > mark; echo lost > $TMPDIR/mark")
    zone.start_daemons()
    before = zone.machines.processes(NODE, 0)
    boot_id = zone.run("cat /proc/sys/kernel/random/boot_id; echo $TPUEMU_BOOT_ID").split()
    host_key = zone.offered_host_key()
    zone.boot()
    assert zone.run("cat mark; ls $TMPDIR") == "kept"
    assert zone.offered_host_key() == host_key
    assert zone.run("echo $TPUEMU_BOOT_ID") != boot_id[1]
    if zone.machines.sandbox.mounts:
        assert boot_id[0] == boot_id[1]
        assert zone.run("cat /proc/sys/kernel/random/boot_id") == zone.run("echo $TPUEMU_BOOT_ID")
    assert not any(_lives(pid) for pid in before)


# --- metadata -----------------------------------------------------------------------------------------------


def test_metadata_answers_as_the_service_does(zone: Zone) -> None:
    zone.machines.apply(zone.order(1, workers=2)).result(timeout=30)
    attributes = "instance/attributes/"
    answer = zone.ask(f"{attributes}agent-worker-number", worker=1)
    assert (answer.status, answer.read(), answer.headers["Metadata-Flavor"]) == (200, b"1", "Google")
    endpoints = zone.ask(f"{attributes}worker-network-endpoints", worker=1).read().decode()
    assert [entry.split(":")[2] for entry in endpoints.split(",")] == [zone.address(0), zone.address(1)]
    assert zone.ask("instance/preempted", worker=1).read() == b"FALSE"
    assert zone.ask("instance/maintenance-event", worker=1).read() == b"NONE"
    assert zone.ask("project/project-id", worker=1).read() == b"grant"
    assert zone.ask("instance/hostname", worker=1).read().startswith(b"t1v-n-00000007-w-1.")
    assert b"agent-worker-number\n" in zone.ask(attributes, worker=1).read()
    tree = json.loads(zone.ask("instance/?recursive=true", worker=1).read())
    assert tree["maintenanceEvent"] == "NONE"
    assert tree["attributes"]["agent-worker-number"] == "1"
    assert zone.ask("instance/nothing", worker=1).status == 404
    assert zone.ask("instance/preempted", worker=1, Host="metadata").status == 403


def test_metadata_answers_by_the_name_of_the_service(zone: Zone) -> None:
    """Ray and others know no address but this, nor do they read GCE_METADATA_HOST."""
    need_mounts(zone)
    need_port_80()
    ask = (
        "from urllib.request import Request, urlopen\n"
        "for host in ('metadata.google.internal', 'metadata', '{}'):\n"
        "    url = f'http://{{host}}/computeMetadata/v1/instance/attributes/agent-worker-number'\n"
        "    print(urlopen(Request(url, headers={{'Metadata-Flavor': 'Google'}}), timeout=10).read().decode())"
    )
    for worker in range(2):
        zone.boot(worker)
        assert zone.run(f'python3 -c "{ask.format(zone.address(worker))}"', worker).split() == [str(worker)] * 3
    zone.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((zone.address(), 80), timeout=2)


def test_a_taken_port_80_costs_the_name_only(zone: Zone) -> None:
    need_mounts(zone)
    need_port_80()
    with socket.create_server((zone.address(), 80)), structlog.testing.capture_logs() as told:
        zone.boot()
        zone.boot()
    assert len(told) == 1
    assert "metadata.google.internal does not answer" in told[0]["event"]
    assert zone.ask("instance/preempted").read() == b"FALSE"


def test_a_long_poll_hears_of_a_preemption_at_once(zone: Zone) -> None:
    zone.boot()
    etag = zone.ask("instance/preempted").headers["ETag"]
    poll = f"instance/preempted?wait_for_change=true&last_etag={etag}"
    unchanged = zone.ask(f"{poll}&timeout_sec=0.1")
    assert (unchanged.read(), unchanged.headers["ETag"]) == (b"FALSE", etag)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: zone.ask(poll).read())
        zone.machines.apply(SetAttribute(AT, NODE, 7, None, "instance/maintenance-event", "MIGRATE"))
        zone.machines.apply(SetAttribute(AT, NODE, 7, None, "instance/preempted", "TRUE"))
        assert waiting.result(timeout=30) == b"TRUE"
    assert zone.ask(poll).read() == b"TRUE"  # who comes late with an old etag does not wait


def test_metadata_falls_with_its_worker(zone: Zone) -> None:
    zone.boot()
    zone.kill()
    with pytest.raises(ConnectionRefusedError):
        zone.ask("instance/preempted")


# --- the house that all stand in ----------------------------------------------------------------------------


def test_a_folder_serves_one_emulator_at_a_time(zone: Zone, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="another emulator uses"):
        WorkerMachines(tmp_path / "state")


CRASHER = """\
import os, signal, sys
from pathlib import Path
from tests.testbed.test_machines import NODE, Zone
from tpucare.testbed.emulator.machines.sandbox import Sandbox

zone = Zone(Path(sys.argv[1]), sandbox=Sandbox(sys.argv[2]) if sys.argv[2] else None)
zone.boot()
zone.start_daemons()
pids = zone.machines.processes(NODE, 0)
if sys.argv[2]:
    # Not even the subreaper lives to clean up behind the emulator.
    os.kill(int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_crashed_emulator_is_swept_up_by_the_next(tmp_path: Path, way: Sandbox | None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    crashed = subprocess.run(
        [sys.executable, "-c", CRASHER, str(tmp_path), way or ""], env=environment, capture_output=True, text=True
    )
    pids = [int(pid) for pid in crashed.stdout.split()]
    # `env -i` takes the mark off: with the subreaper gone, too, such a daemon cannot be known any more.
    markless = [pid for pid in pids if way and _command(pid) == "sleep 603"]
    bystander = subprocess.Popen(["sleep", "60"], env={worker_files.MARK: "another-emulator.1"})
    try:
        with WorkerMachines(tmp_path / "state", ssh_port=SSH_PORT, metadata_port=METADATA_PORT):
            assert crashed.returncode == -signal.SIGKILL, crashed.stderr
            assert not any(_lives(pid) for pid in pids if pid not in markless)
            assert bystander.poll() is None
    finally:
        for pid in markless:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        bystander.kill()
        bystander.wait()


def test_secrets_of_a_worker_go_with_it_and_stay_over_a_reboot(zone: Zone, tmp_path: Path) -> None:
    """Homes of the dead are kept, and outlived the emulator with real keys in them."""
    secrets = "mkdir -p .tpucare/pod-0-a1.1; echo s3cr3t | tee .tpucare/pod-0-a1.1/env run.sh.netrc; echo kept >.note"
    for node_id, worker in ((7, 0), (8, 1)):
        zone.boot(worker, node_id)
        zone.run(secrets, worker)
    zone.machines.reboot(NODE, 0).result(timeout=30)
    assert zone.run("cat .tpucare/pod-0-a1.1/env") == "s3cr3t"
    zone.kill(8)
    holders = [path for path in (tmp_path / "state").rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert {path.name for path in holders} == {"env", "run.sh.netrc"}
    assert all("7" in path.relative_to(tmp_path / "state").parts[2] for path in holders), holders
    zone.machines.close()
    left = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert not [path for path in left if b"s3cr3t" in path.read_bytes()]
    assert len([path for path in left if path.name == ".note"]) == 2


def test_what_is_on_the_path_of_every_worker_is_closed_to_writers(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        (tmp_path / "state").mkdir()
        zone = Zone(tmp_path)
    finally:
        os.umask(mask)
    zone.machines.close()
    bin_folder = tmp_path / "state/machines/bin"
    assert [
        path for path in (bin_folder.parent, bin_folder, *bin_folder.iterdir()) if path.stat().st_mode & 0o022
    ] == []


def test_close_leaves_nothing(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    zone = Zone(tmp_path, keep_dead=0)
    for worker in range(3):
        zone.boot(worker)
        zone.start_daemons(worker)
    pids = zone.machines.survivors()
    sockets = Path((tmp_path / "state/machines/sockets").read_text())
    assert sockets.exists()
    zone.machines.close()
    assert not any(_lives(pid) for pid in pids)
    assert zone.machines.survivors() == []
    assert not sockets.exists()
    assert not (tmp_path / "state/machines/workers").exists()
    # One of an earlier test may have ended meanwhile.
    assert set(threading.enumerate()) <= threads
    zone.machines.close()


ORDINARY = """\
import sys
from pathlib import Path
from tests.testbed.test_machines import DAEMONS, NODE, Zone
from tpucare.testbed.emulator.machines.sandbox import Sandbox

zone = Zone(Path(sys.argv[1]), sandbox=Sandbox(sys.argv[2]) if sys.argv[2] else None)
zone.boot()
print(zone.run("id -un"))
if zone.machines.sandbox.mounts:
    assert zone.run("ls /dev/accel* | wc -l") == "4"
    with zone.connect() as client:
        assert client.exec_command("tty", timeout=20, get_pty=True)[1].read().startswith(b"/dev/pts/")
zone.start_daemons()
zone.machines.freeze(NODE, 0).result(timeout=10)
zone.machines.resume(NODE, 0).result(timeout=10)
assert zone.run("ls -a | grep -c profile") == "1"
assert len(zone.machines.processes(NODE, 0)) >= 5
zone.machines.reboot(NODE, 0).result(timeout=20)
zone.run(DAEMONS)
zone.machines.close()
print(zone.machines.sandbox, zone.machines.survivors(), zone.machines.escaped)
"""


@pytest.mark.parametrize("way", WAYS)
def test_an_ordinary_user_has_machines_too(tmp_path_factory: pytest.TempPathFactory, way: Sandbox | None) -> None:
    user = _ordinary_user()
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/tpucare-test-XXXXXX"], text=True).strip())
    try:
        os.chown(folder, user.pw_uid, user.pw_gid)
        root = Path(__file__).parents[2]
        packages = [str(root), *(path for path in sys.path if path.endswith("site-packages"))]
        became = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        command = [*(became if os.geteuid() == 0 else []), _readable_python(), "-c", ORDINARY, str(folder), way or ""]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(packages), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=50)
        if "ModuleNotFoundError" in done.stderr or "Permission denied: '/" in done.stderr:
            pytest.skip(f"{user.pw_name} cannot read this Python or its packages: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr
        name, outcome = done.stdout.splitlines()
        assert name == user.pw_name
        assert outcome.endswith(" [] 0")
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def _ordinary_user() -> pwd.struct_passwd:
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for user in pwd.getpwall():
        if user.pw_uid >= 1000 and Path(user.pw_shell).name in ("bash", "sh", "dash", "zsh"):
            return user
    pytest.skip("no ordinary user with a login shell exists on this machine")


def _readable_python() -> str:
    """A Python that another user may run; one installed below root's home is none."""
    if os.geteuid() != 0:
        return sys.executable
    version = f"python3.{sys.version_info.minor}"
    for candidate in (Path("/usr/bin", version), Path("/usr/local/bin", version)):
        if candidate.exists():
            return str(candidate)
    pytest.skip(f"no system {version} that an ordinary user could run")


# --- words --------------------------------------------------------------------------------------------------


def test_only_plain_keys_of_the_metadata_let_in() -> None:
    metadata = textwrap.dedent("""\
        me:ssh-ed25519 AAAA me@home
        you:ecdsa-sha2-nistp256 BBBB google-ssh {"userName":"you","expireOn":"2030-01-01T00:00:00+0000"}
        evil:command="rm -rf /" ssh-ed25519 CCCC
        not a line
        """)
    assert [line.split()[1] for line in worker_files.authorized_keys(metadata).splitlines()] == ["AAAA", "BBBB"]


def _lives(pid: int) -> bool:
    process = proctree.read_process(pid)
    return process is not None and not process.is_dead


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
