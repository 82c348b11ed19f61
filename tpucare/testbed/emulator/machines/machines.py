"""
The workers of the emulated nodes: each has a real sshd, home and screen, and a preemption ends all of it at once.

`apply` takes an effect of the world and returns at once; boots run in parallel in a bounded pool, all other effects in
order on one thread. As root, workers run as root on the real machine: a training script can change the machine. As
another user, only that user can log in (`login_user`).
`worker` is one boot of one worker, `sandbox` holds its processes together, `worker_files` writes its files,
`metadata_server` serves its metadata, `state_folder` is the folder that all workers share.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tpucare.testbed.emulator.machines import proctree, worker_files
from tpucare.testbed.emulator.machines.flood import Flooding
from tpucare.testbed.emulator.machines.jobs import JobThread, done
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.sandbox import MachineError, Sandbox, living
from tpucare.testbed.emulator.machines.state_folder import StateFolder
from tpucare.testbed.emulator.machines.worker import WorkerKey, WorkerMachine, end_all
from tpucare.testbed.emulator.world.config import Guest
from tpucare.testbed.emulator.world.machine_effects import (
    AuthorizeKeys,
    Boot,
    Kill,
    MachineEffect,
    Resume,
    SetAttribute,
    Silence,
)
from tpucare.testbed.emulator.world.records import NodePath

OnHostKeys = Callable[[NodePath, int, Mapping[str, str]], None]
"""Node, worker number, and host key by type (`ssh-ed25519` -> base64), as a guest agent publishes them at boot."""

OnGone = Callable[[NodePath, int, str], None]
"""Node, worker number, and why its machine ended by itself or could not boot."""

_BOOTS_AT_ONCE = 16
_WATCH_SECONDS = 0.5


class WorkerMachines:
    """
    All workers of one emulator. Thread-safe. Use as a context manager, or `close` it.

    A second one on the same folder is refused while the first lives; processes that a crashed one left are ended.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        ssh_port: int = 2222,
        metadata_port: int = 8080,
        path_prefix: Sequence[Path] = (),
        extra_env: Mapping[str, str] | None = None,
        on_host_keys: OnHostKeys = lambda *_: None,
        on_gone: OnGone = lambda *_: None,
        sandbox: Sandbox | None = None,
        silence_freezes: bool = True,
        guest: Guest | None = None,
        keep_dead: int = 64,
    ) -> None:
        """
        path_prefix:     folders before the system's on a worker's PATH, for example a venv's `bin`
        extra_env:       variables of every session
        sandbox:         None: the best one that works here
        silence_freezes: whether a Silence also stops the processes (a machine that vanished), or only cuts the network
        keep_dead:       number of homes of ended workers to keep (a reboot needs its own); the oldest go first
        guest:           services and limits of the image; None: only the necessary ones
        on_host_keys, on_gone are called on threads of this object and must not wait for it.
        Raises: MachineError: no sshd, a folder that another emulator uses, or a user who cannot log in.
        """
        self._folder = StateFolder(state_dir)
        try:
            self._metadata = MetadataServer(metadata_port)
            self._site = self._folder.open(
                ssh_port,
                self._metadata,
                sandbox=sandbox,
                path_prefix=path_prefix,
                extra_env=extra_env or {},
                guest=guest or Guest(),
            )
        except BaseException:
            self._folder.release()
            raise
        self._on_host_keys, self._on_gone = on_host_keys, on_gone
        self._silence_freezes, self._keep_dead = silence_freezes, keep_dead
        self._machines: dict[WorkerKey, WorkerMachine] = {}
        self._ending: list[WorkerMachine] = []
        self._dead: deque[WorkerMachine] = deque()
        self._escaped = 0
        self._changed = threading.Condition()
        self._closing = False
        # These threads live until close(): a worker dies with the thread that started it.
        self._boots = ThreadPoolExecutor(_BOOTS_AT_ONCE, thread_name_prefix="machine-boot")
        self._jobs: JobThread[WorkerMachine] = JobThread(self._end, self._watch, _WATCH_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def login_user(self) -> str:
        """The only name that can log in, whichever names stand before the keys in `ssh-keys`."""
        return self._folder.login_user

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox that holds the processes of each worker together."""
        return self._site.sandbox

    @property
    def escaped(self) -> int:
        """Number of processes that escaped a sandbox and had to be killed one by one; it should be 0."""
        return self._escaped

    # --- effects of the world

    def apply(self, effect: MachineEffect) -> Future[None]:
        """
        Apply *effect* without blocking. The future ends when it is done: a Boot listens, a Kill left nothing alive.

        An effect on a worker that does not exist is done at once. The future of a failed boot holds a MachineError.
        """
        match effect:
            case Boot():
                return self._boot(effect)
            case Kill():
                return self._kill(self._select(effect.path, effect.node_id, effect.worker))
            case Silence():
                fault = WorkerMachine.freeze if self._silence_freezes else WorkerMachine.cut_off
                return self._each(self._select(effect.path, effect.node_id, effect.worker), fault)
            case Resume():
                return self._each(self._select(effect.path, effect.node_id, effect.worker), WorkerMachine.resume)
            case SetAttribute():
                machines = self._select(effect.path, effect.node_id, effect.worker)
                return self._each(machines, lambda machine: machine.set_attributes({effect.name: effect.value}))
            case AuthorizeKeys():
                return self._each(
                    self._select(effect.path, effect.node_id, effect.worker),
                    lambda machine: machine.authorize(effect.ssh_keys),
                )

    # --- faults for tests and operators, of the newest incarnation

    def refuse_keys(self, path: NodePath, worker: int) -> Future[None]:
        """Refuse every login, until an AuthorizeKeys."""
        return self._each(self._newest(path, worker), WorkerMachine.refuse_keys)

    def change_host_key(self, path: NodePath, worker: int) -> Future[None]:
        """Answer with another host key; processes go on."""

        def change(machine: WorkerMachine) -> None:
            machine.change_host_key()
            self._on_host_keys(path, worker, machine.host_keys)

        return self._each(self._newest(path, worker), change)

    def hang(self, path: NodePath, worker: int) -> Future[None]:
        """Accept connections and send nothing; processes go on."""
        return self._each(self._newest(path, worker), WorkerMachine.hang)

    def flood(self, path: NodePath, worker: int, what: Flooding) -> Future[None]:
        """Send data without end, before the greeting or as the output of every command; processes go on."""
        return self._each(self._newest(path, worker), lambda machine: machine.flood(what))

    def freeze(self, path: NodePath, worker: int) -> Future[None]:
        """Stop everything and let connects time out, whatever `silence_freezes` says."""
        return self._each(self._newest(path, worker), WorkerMachine.freeze)

    def cut_off(self, path: NodePath, worker: int) -> Future[None]:
        """Let connects time out and sessions hang while processes go on, whatever `silence_freezes` says."""
        return self._each(self._newest(path, worker), WorkerMachine.cut_off)

    def resume(self, path: NodePath, worker: int) -> Future[None]:
        """Undo `hang`, `freeze`, `cut_off` and `flood`."""
        return self._each(self._newest(path, worker), WorkerMachine.resume)

    def reboot(self, path: NodePath, worker: int) -> Future[None]:
        """End everything and boot again: same home, same host key, new boot id."""
        machines = self._newest(path, worker)
        return self._boot(machines[0].order) if machines else done()

    # --- inspection

    def processes(self, path: NodePath, worker: int) -> list[int]:
        """Pids of all processes of that worker, its sshd first."""
        cages = [machine.cage for machine in self._newest(path, worker)]
        return [process.pid for process in living([cage for cage in cages if cage])]

    def survivors(self) -> list[int]:
        """Pids of all processes of all workers, of ended ones too."""
        with self._changed:
            cages = [machine.cage for machine in (*self._machines.values(), *self._ending)]
        mine = living([cage for cage in cages if cage])
        marks = proctree.marks(worker_files.MARK)
        marked = [process for process, mark in marks.items() if mark.startswith(f"{self._site.mark}.")]
        return sorted({process.pid for process in (*mine, *marked)})

    # --- the end

    def close(self) -> None:
        """
        End all machines, and check that no process is left. May be called twice.

        Raises: MachineError: a process survives.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            ended = self._retire(list(self._machines.values()))
        try:
            ended.result(timeout=120)
        finally:
            self._jobs.stop()
            self._boots.shutdown(wait=True)
            self._metadata.close()
        if left := self.survivors():
            raise MachineError(f"processes of the emulator survive: {left}")
        self._folder.clean_up(keep_workers=self._keep_dead > 0)

    # --- inside

    def _boot(self, order: Boot) -> Future[None]:
        key = WorkerKey(order.path, order.node_id, order.worker)
        with self._changed:
            if self._closing:
                raise MachineError("the emulated machines are closing")
            if running := self._machines.get(key):
                self._retire([running])
            awaited = [*self._ending, *(other for other in self._machines.values() if other.address == order.address)]
            machine = WorkerMachine(self._site, order, [other for other in awaited if other.conflicts_with(order)])
            self._machines[key] = machine
        return self._boots.submit(self._bring_up, machine)

    def _bring_up(self, machine: WorkerMachine) -> None:
        try:
            machine.boot()
        except Exception as error:
            self._kill([machine])
            self._on_gone(machine.key.path, machine.key.worker, str(error))
            raise
        with self._changed:
            self._changed.notify_all()
        if machine.listening.is_set():
            self._on_host_keys(machine.key.path, machine.key.worker, machine.host_keys)

    def _kill(self, machines: Collection[WorkerMachine]) -> Future[None]:
        with self._changed:
            return self._retire(machines)

    def _retire(self, machines: Collection[WorkerMachine]) -> Future[None]:
        """Call with the lock: begin the end of *machines* at once, complete it on the job thread."""
        current = [machine for machine in machines if self._machines.get(machine.key) is machine]
        for machine in current:
            machine.begin_end()
            del self._machines[machine.key]
        self._ending += current
        return self._jobs.end(current)

    def _each(self, machines: Collection[WorkerMachine], act: Callable[[WorkerMachine], None]) -> Future[None]:
        def work() -> None:
            for machine in machines:
                machine.settled.wait()
                if not machine.is_ending:
                    act(machine)

        return self._jobs.do(work) if machines else done()

    def _select(self, path: NodePath, node_id: int, worker: int | None) -> list[WorkerMachine]:
        with self._changed:
            return [
                machine
                for key, machine in self._machines.items()
                if key.path == path and key.node_id == node_id and worker in (None, key.worker)
            ]

    def _newest(self, path: NodePath, worker: int) -> list[WorkerMachine]:
        """The last booted machine of that name and number, as a list of one or none."""
        with self._changed:
            return [m for key, m in self._machines.items() if key.path == path and key.worker == worker][-1:]

    def _end(self, machines: Sequence[WorkerMachine]) -> None:
        try:
            self._escaped += len(end_all(machines, self._metadata))
        finally:
            with self._changed:
                self._ending = [machine for machine in self._ending if not machine.ended.is_set()]
            self._keep_folders(machines)

    def _keep_folders(self, machines: Sequence[WorkerMachine]) -> None:
        self._dead.extend(machines)
        with self._changed:
            booted = {machine.folders.root for machine in self._machines.values()}
        for machine in machines:
            self._boots.submit(shutil.rmtree, machine.folders.tmp, ignore_errors=True)
            # The home of an ended worker is kept for inspection only, and needs no secrets.
            if machine.folders.root not in booted:
                machine.remove_secrets()
        while len(self._dead) > self._keep_dead:
            oldest = self._dead.popleft()
            with self._changed:
                in_use = {machine.folders.root for machine in (*self._machines.values(), *self._dead)}
            if oldest.folders.root not in in_use and oldest.folders.root.exists():
                self._boots.submit(shutil.rmtree, oldest.move_folder_away(), ignore_errors=True)

    def _watch(self) -> None:
        with self._changed:
            machines = list(self._machines.values())
        if self._site.guest.sshguard is not None:
            for machine in machines:
                machine.guard()
        died = [machine for machine in machines if machine.has_died()]
        for machine in died:
            self._kill([machine])
            self._on_gone(machine.key.path, machine.key.worker, "its sshd ended by itself")
