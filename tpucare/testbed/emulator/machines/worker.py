"""
One boot of one emulated TPU worker: a real sshd on an address of its own, a home, a sandbox around all processes.

A reboot is another `WorkerMachine` over the same folder: home and host key stay; boot id, screens and processes do not.
`machines` boots and watches the workers.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGSTOP
from typing import NamedTuple

from tpucare.testbed.emulator.machines import own_files, proctree, sandbox, worker_files
from tpucare.testbed.emulator.machines.flood import Flood, Flooding
from tpucare.testbed.emulator.machines.guard import Guard
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.proctree import ProcessEntry
from tpucare.testbed.emulator.machines.sandbox import Cage, MachineError, living
from tpucare.testbed.emulator.machines.worker_files import SSH_KEYS_ATTRIBUTE, Site
from tpucare.testbed.emulator.world.machine_effects import Boot
from tpucare.testbed.emulator.world.records import NodePath

_LISTENING = b"Server listening on"
# Files below a home in which tpucare writes secrets: the environment of each run, W&B keys beside scripts.
_SECRETS = (".tpucare/*/env", "*.netrc")
_LISTEN_TIMEOUT_SECONDS = 30.0
# sshd listens with a backlog of 128, which the kernel fills with 129 connections.
_BACKLOG_ATTEMPTS = 160
_GUARD_SETTLES_SECONDS = 0.5
# Log lines of a connection that ended before its login; after a login sshd writes `user` without these words.
_ATTACK = re.compile(
    rb"^Connection (?:closed|reset) by (?:(?:authenticating|invalid) user \S+ )?[0-9.]+ port"
    rb"|^Disconnected from (?:authenticating|invalid) user",
    re.MULTILINE,
)


class WorkerKey(NamedTuple):
    """One worker of one incarnation of a node: a name may be used again, an id is not."""

    path: NodePath
    node_id: int
    worker: int


class WorkerMachine:
    """
    One boot of a worker. `begin_end` and the events may be used from any thread, the rest by one thread at a time.

    listening: its sshd answers; settled: `boot` has ended or failed; ended: no process of it is left.
    Boot it on a thread that lives as long as the machines (see `Cage`).
    """

    def __init__(self, site: Site, order: Boot, awaits: Sequence[WorkerMachine] = ()) -> None:
        """`awaits`: machines that must end before this one boots, because they use its address or its folder."""
        self.key = WorkerKey(order.path, order.node_id, order.worker)
        self.address = order.address
        self.mark = f"{site.mark}.{uuid.uuid4().hex[:12]}"
        self.listening = threading.Event()
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.is_ending = False
        self.host_keys: Mapping[str, str] = {}
        self._site = site
        self.order = order
        self._awaits = awaits
        self._cage: Cage | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._stopped: list[ProcessEntry] = []
        self._flood: Flood | None = None
        self._before_flood: dict[Path, str] = {}
        guarded = site.guest.sshguard
        self._guard = Guard(guarded) if guarded is not None else None
        self._guard_read, self._blocking = 0, False
        self.folders = worker_files.folders_of(site, order, self.mark[-10:])

    # --- life

    def boot(self) -> None:
        """
        Start it, and return when its sshd listens or when its end has begun meanwhile.

        Raises: MachineError: it cannot start; no process of it is left.
        """
        with self._lock:
            if self.is_ending:
                self.settled.set()
                return
            self._begun = True
        try:
            self._await_predecessors()
            if not self.is_ending:
                self._boot()
        except (OSError, ValueError) as error:
            raise MachineError(f"worker {self.key.worker} of {self.key.path.node_id}: {error}") from error
        finally:
            self.settled.set()

    def _await_predecessors(self) -> None:
        deadline = time.monotonic() + _LISTEN_TIMEOUT_SECONDS
        for machine in self._awaits:
            while not machine.ended.wait(0.02) and not self.is_ending:
                if time.monotonic() > deadline:
                    raise MachineError(f"{self.address} is still used by {machine.key.path.node_id}")
        self._awaits = ()

    def _boot(self) -> None:
        boot_id = str(uuid.uuid4())
        worker_files.prepare(self._site, self.folders, self.order, mark=self.mark, boot_id=boot_id)
        self.host_keys = worker_files.host_keys(self.folders)
        values = worker_files.first_metadata(self.order)
        self._site.metadata.add(self.address, values, by_name=self._site.sandbox.mounts)
        env = {"PATH": os.defpath, worker_files.MARK: self.mark}
        with self.folders.log.open("wb") as log:
            table = own_files.mount_table(self.folders.root)
            cage = Cage(self._site.sandbox, self._sshd(), mount_table=table, env=env, log=log)
        with self._lock:
            self._cage = cage
            if self.is_ending:
                cage.begin_end()
        if self._await_listening(0):
            self._write_pids(cage)
            self.listening.set()

    def begin_end(self) -> None:
        """Begin to end every process, without waiting; `end_all` completes it. Any thread."""
        with self._lock:
            self.is_ending = True
            if self._cage is not None:
                self._cage.begin_end()

    def await_settled(self) -> None:
        """Wait for the end of a boot that has begun; an ending machine begins none."""
        if self._begun:
            self.settled.wait(_LISTEN_TIMEOUT_SECONDS)

    def release_folders(self) -> None:
        """Release its folders; call when its processes have ended and nothing listens on its address."""
        self._cage = None
        self._end_flood()
        self.listening.clear()
        self.folders.pids.unlink(missing_ok=True)
        shutil.rmtree(self.folders.screens, ignore_errors=True)
        self.settled.set()
        self.ended.set()

    def has_died(self) -> bool:
        """True when it was up and ended by itself."""
        cage = self._cage
        return self.listening.is_set() and not self.is_ending and cage is not None and cage.has_ended()

    @property
    def cage(self) -> Cage | None:
        """The sandbox with its processes; None when there can be none."""
        return self._cage

    def conflicts_with(self, order: Boot) -> bool:
        """True when both cannot run at the same time: same address, or same folder."""
        return self.address == order.address or self.key == (order.path, order.node_id, order.worker)

    def remove_secrets(self) -> None:
        """Remove the secrets from a home that is kept for inspection only."""
        for pattern in _SECRETS:
            for path in self.folders.home.glob(pattern):
                path.unlink(missing_ok=True)

    def move_folder_away(self) -> Path:
        """Rename its folder, so that a worker of the same name can boot; the caller removes the returned path later."""
        gone = self.folders.root.with_name(f"{self.mark[-12:]}.gone")
        self.folders.root.rename(gone)
        return gone

    # --- effects of the world

    def set_attributes(self, values: Mapping[str, str]) -> None:
        """Change values of its metadata server."""
        self._site.metadata.update(self.address, values)

    def authorize(self, ssh_keys: str) -> None:
        """Accept only these keys (`ssh-keys` metadata) from now on; open sessions stay open."""
        self.set_attributes({SSH_KEYS_ATTRIBUTE: ssh_keys})
        worker_files.authorize(self.folders, ssh_keys)

    # --- faults

    def refuse_keys(self) -> None:
        """Refuse every login, whatever the metadata says."""
        worker_files.authorize(self.folders, "")

    def change_host_key(self) -> None:
        """
        Answer with another host key from now on; processes go on.

        Raises: MachineError: sshd did not come back.
        """
        worker_files.make_host_key(self.folders)
        self.host_keys = worker_files.host_keys(self.folders)
        self._reload_sshd()

    def guard(self) -> None:
        """Do as sshguard does: read sshd's log, and block an attacking address; open sessions go on."""
        cage, guard, now = self._cage, self._guard, time.monotonic()
        if guard is None or cage is None or not self.listening.is_set() or self.is_ending:
            return
        if self._blocking and guard.is_blocked(now):
            return
        listener = cage.first_process()
        if self._blocking and listener is not None:
            # The connections that filled the queue are accepted now; they are not attacks.
            self._blocking = False
            proctree.send(listener, SIGCONT)
            time.sleep(_GUARD_SETTLES_SECONDS)
            self._guard_read = self.folders.log.stat().st_size
        with self.folders.log.open("rb") as log:
            log.seek(self._guard_read)
            # An unfinished line is left to the next read.
            lines = log.read().rpartition(b"\n")[0]
        self._guard_read += len(lines)
        for _ in _ATTACK.findall(lines):
            guard.count_attack(now)
        if guard.is_blocked(now) and listener is not None:
            self._blocking = True
            proctree.send(listener, SIGSTOP)
            _fill_accept_queue(self.address, self._site.ssh_port)

    def freeze(self) -> None:
        """Stop every process and let connects time out: like a machine that vanished."""
        self._stop(lambda _: True)
        _fill_accept_queue(self.address, self._site.ssh_port)

    def cut_off(self) -> None:
        """Let connects and open sessions hang while processes go on: like a network that is gone."""
        self._stop(_is_sshd)
        _fill_accept_queue(self.address, self._site.ssh_port)

    def hang(self) -> None:
        """Accept connections and send nothing; processes go on."""
        self._stop(_is_sshd)

    def flood(self, what: Flooding) -> None:
        """
        Send data without end; processes and open sessions go on.

        Raises: MachineError: sshd did not release the port.
        """
        if self._before_flood or self._cage is None:
            return
        place = self.folders.wrapper if what is Flooding.OUTPUT else self.folders.sshd_config
        self._before_flood[place] = place.read_text()
        if what is Flooding.OUTPUT:
            worker_files.replace(place, worker_files.FLOODING_WRAPPER, 0o700)
        else:
            worker_files.move_sshd(self.folders, self.address, self._site.ssh_port)
            self._reload_sshd()
            self._flood = Flood(self.address, self._site.ssh_port, what)

    def resume(self) -> None:
        """Undo `freeze`, `cut_off`, `hang` and `flood`."""
        # Children first, so that none finds its parent still stopped.
        for process in reversed(self._stopped):
            proctree.send(process, SIGCONT)
        self._stopped = []
        if self._before_flood:
            self._end_flood()
            for path, text in self._before_flood.items():
                worker_files.replace(path, text, stat.S_IMODE(path.stat().st_mode))
            self._before_flood = {}
            self._reload_sshd()

    def _end_flood(self) -> None:
        if self._flood is not None:
            self._flood.close()
            self._flood = None

    def _reload_sshd(self) -> None:
        """Let sshd read its files again. Raises: MachineError: it did not come back."""
        cage = self._cage
        if (first := cage.first_process() if cage else None) is not None:
            offset = self.folders.log.stat().st_size
            proctree.send(first, SIGHUP)
            self._await_listening(offset)

    def _stop(self, concerns: Callable[[ProcessEntry], bool]) -> None:
        if (cage := self._cage) is not None:
            self._stopped += proctree.stop_all(lambda: [process for process in living([cage]) if concerns(process)])

    def _sshd(self) -> list[str]:
        # -D: stay in the foreground, -e: log to stderr, where we read when it listens.
        sshd = [str(self._site.sshd), "-D", "-e", "-f", str(self.folders.sshd_config)]
        holder = "tpu-runtime" if self.order.holds_chips else ""
        services = self._site.guest.containers or self.order.holds_chips
        chip = worker_files.chip(self._site, self.folders)
        return worker_files.boot_command(self.folders, sshd, services=services, holder=holder, chip=chip)

    def _write_pids(self, cage: Cage) -> None:
        """Record pids for a later emulator, in case this one crashes: sshd's environment cannot always be read."""
        processes = [proctree.read_process(cage.pid), cage.first_process()]
        text = "".join(f"{process.pid} {process.started}\n" for process in processes if process)
        worker_files.replace(self.folders.pids, text, 0o600)

    def _await_listening(self, offset: int) -> bool:
        """Wait until sshd listens, by its own log (another program may hold the port); False when ending meanwhile."""
        deadline = time.monotonic() + _LISTEN_TIMEOUT_SECONDS
        while not self.is_ending:
            log = self.folders.log.read_bytes()[offset:]
            if _LISTENING in log:
                return True
            cage = self._cage
            if cage is None or cage.has_ended() or time.monotonic() > deadline:
                tail = log.decode(errors="replace").strip() or "its sshd printed nothing"
                raise MachineError(f"worker {self.key.worker} of {self.key.path.node_id} does not start: {tail[-500:]}")
            time.sleep(0.005)
        return False


def end_all(machines: Collection[WorkerMachine], metadata: MetadataServer) -> list[int]:
    """
    End machines together, then kill processes that escaped a sandbox. Returns the pids of those, normally none.

    Raises: MachineError: a process survives that too.
    """
    for machine in machines:
        machine.begin_end()
    for machine in machines:
        machine.await_settled()
    try:
        sandbox.end([machine.cage for machine in machines if machine.cage])
    finally:
        metadata.remove(*(machine.address for machine in machines))
        for machine in machines:
            machine.release_folders()
    dead_marks = {machine.mark for machine in machines}

    def escaped() -> list[ProcessEntry]:
        return [process for process, mark in proctree.marks(worker_files.MARK).items() if mark in dead_marks]

    found = escaped()
    if found and (left := proctree.kill_all(escaped)):
        raise MachineError(f"processes survive SIGKILL: {sorted(process.pid for process in left)}")
    return [process.pid for process in found]


def _is_sshd(process: ProcessEntry) -> bool:
    """The listener, its sessions and their helpers (`sshd-session` and `sshd-auth` of newer OpenSSH among them)."""
    return process.name.startswith(("sshd", "sftp-server"))


def _fill_accept_queue(address: str, port: int) -> None:
    """
    Connect to a stopped listener until its queue is full, so that further connects get no answer at all.

    Closed connections stay in the queue until the listener accepts them.
    """
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for _ in range(_BACKLOG_ATTEMPTS):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((address, port))
            poll.register(client, select.POLLOUT)
            # Over loopback a handshake ends within the connect call: one that still waits found the queue full.
            if not poll.poll(20):
                return
            poll.unregister(client)
