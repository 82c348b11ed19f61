"""
Remote without SSH: every worker is a HOME folder on this machine, a command is a `bash -c` in it.

For tests of what runs on workers (launch scripts, runner, probes) where the transport does not matter. It passes the
same contract tests as `tpucare.remote`. Workers can fall silent, refuse the key, or show a new host key at a word.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO, TypeVar

from tpucare.model.errors import CommandFailed, RemoteError, WorkerSilent
from tpucare.model.resources import NodeKey, Ran, Worker

T = TypeVar("T")

# A child in the background may hold stdout open after the command ended; sshd's clients wait this long for it, too.
LINGER_SECONDS = 1.0
CHUNK_BYTES = 1 << 16
# More than a pipe holds, so that a child that never stops writing does not keep its reader.
PIPE_BYTES = 1 << 20


class LocalRemote:
    """
    ports.Remote over folders. Each worker has `home` (its HOME), `s` (its SCREENDIR) and `tmp` of its own.

    The root is short (a folder in /tmp), for a socket's path may have 108 bytes. `env` is added to every command's
    environment. `close` ends every process that was started under the root, and removes it.
    """

    def __init__(
        self, root: Path | None = None, *, env: Mapping[str, str] | None = None, nudge: Callable[[], None] | None = None
    ) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="tc", dir="/tmp"))
        self._env = dict(env or {})
        self._nudge = nudge or (lambda: None)
        self._lock = threading.Lock()
        self._faults: dict[Worker, RemoteError] = {}
        self._awaited: set[Worker] = set()
        self._hints: set[NodeKey] = set()
        self._commands: dict[Worker, set[subprocess.Popen[bytes]]] = {}

    # --- what a test says ---

    def home(self, worker: Worker) -> Path:
        """HOME of *worker*; made when first asked for. Two nodes of one name have different ones (by id)."""
        place = self._place(worker)
        for name in ("home", "s", "tmp"):
            (place / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        return place / "home"

    def silence(self, worker: Worker) -> None:
        """From now on nothing is heard of *worker*; its processes live on. Commands under way are lost, too."""
        self.fail(worker, WorkerSilent("silenced by the test", host=worker.host))

    def fail(self, worker: Worker, error: RemoteError) -> None:
        """From now on every use of *worker* raises *error*."""
        with self._lock:
            self._faults[worker] = error
            self._hints.add(worker.key)
        self._nudge()

    def heal(self, worker: Worker) -> None:
        """The worker answers again."""
        with self._lock:
            self._faults.pop(worker, None)
            awaited = worker in self._awaited
        if awaited:
            self.watch_ports([worker])

    def kill(self, worker: Worker) -> None:
        """The VM is gone: silent, every process on it dead."""
        self.silence(worker)
        _end_processes(self._place(worker))

    def close(self) -> None:
        _end_processes(self.root)
        shutil.rmtree(self.root, ignore_errors=True)

    # --- ports.Remote ---

    def run(
        self,
        worker: Worker,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta = timedelta(seconds=10),
        limit: int = 1 << 20,
    ) -> Ran:
        self._check(worker)
        process = self._start(worker, command)
        with self._lock:
            self._commands.setdefault(worker, set()).add(process)
        try:
            return self._finish(worker, process, stdin, deadline.total_seconds(), limit)
        finally:
            with self._lock:
                self._commands[worker].discard(process)

    def put(
        self, worker: Worker, path: str, content: bytes, mode: int, *, deadline: timedelta = timedelta(seconds=30)
    ) -> None:
        self._check(worker)
        target = self.home(worker) / path
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "wb") as stream:
                os.fchmod(handle, mode)
                stream.write(content)
            os.replace(name, target)
        except OSError as error:
            raise CommandFailed(f"put {path}: {error.strerror}", 1, str(error), host=worker.host) from error

    def each(self, workers: Sequence[Worker], call: Callable[[Worker], T]) -> list[T | Exception]:
        if not workers:
            return []

        def guarded(worker: Worker) -> T | Exception:
            try:
                return call(worker)
            except Exception as error:
                return error

        with ThreadPoolExecutor(max_workers=min(len(workers), 32)) as pool:
            return list(pool.map(guarded, workers))

    def watch_ports(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            with self._lock:
                listens = not isinstance(self._faults.get(worker), WorkerSilent)
                if listens:
                    self._awaited.discard(worker)
                    self._hints.add(worker.key)
                else:
                    self._awaited.add(worker)
            if listens:
                self._nudge()

    def disconnect(self, key: NodeKey) -> None:
        with self._lock:
            self._awaited = {worker for worker in self._awaited if worker.key != key}
            self._hints.discard(key)

    def forget_node(self, key: NodeKey) -> None:
        self.disconnect(key)

    def repin(self, worker: Worker, host_keys: Iterable[str]) -> bool:
        """There are no host keys here."""
        return True

    def hints(self) -> frozenset[NodeKey]:
        with self._lock:
            hints, self._hints = frozenset(self._hints), set()
        return hints

    # --- inside ---

    def _place(self, worker: Worker) -> Path:
        return self.root / f"{worker.key.zone}-{worker.key.name}-{worker.node_id}" / str(worker.number)

    def _check(self, worker: Worker) -> None:
        with self._lock:
            fault = self._faults.get(worker)
        if fault is not None:
            raise fault

    def _start(self, worker: Worker, command: str) -> subprocess.Popen[bytes]:
        home = self.home(worker)
        env = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "SCREENDIR": str(home.parent / "s"),
            "TMPDIR": str(home.parent / "tmp"),
            "SHELL": "/bin/bash",
            "USER": os.environ.get("USER", "root"),
            **self._env,
        }
        return subprocess.Popen(
            ["/bin/bash", "-c", command],
            cwd=home,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _finish(
        self, worker: Worker, process: subprocess.Popen[bytes], stdin: bytes, seconds: float, limit: int
    ) -> Ran:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        out, err = _Reader(process.stdout, limit), _Reader(process.stderr, limit)
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # As with SSH the command itself may live on; nothing is known about it.
            raise WorkerSilent(f"no answer within {seconds:g} s", host=worker.host) from None
        self._check(worker)
        for reader in (out, err):
            reader.join(LINGER_SECONDS)
            reader.drain()
        # sshd reports no status for a command that a signal ended; OpenSSH's paramiko side then says "unknown".
        if status < 0:
            raise WorkerSilent("the command ended without a status", host=worker.host)
        return Ran(status, bytes(out.kept), bytes(err.kept), out.truncated or err.truncated)


class _Reader(threading.Thread):
    """Reads a stream to its end and keeps the first `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        super().__init__(daemon=True)
        self._stream, self._limit = stream, limit
        os.set_blocking(stream.fileno(), False)
        self._lock = threading.Lock()
        self._over = False
        self.kept = bytearray()
        self.truncated = False
        self.start()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        with self._stream:
            while not self._over:
                poll.poll()
                with self._lock:
                    self._take()

    def drain(self) -> None:
        """What a command wrote before it ended is there, however long this thread had to wait for its turn."""
        with self._lock:
            for _ in range(PIPE_BYTES // CHUNK_BYTES):
                if self._over or not self._take():
                    return

    def _take(self) -> int:
        try:
            chunk = os.read(self._stream.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return 0
        self._over = not chunk
        room = self._limit - len(self.kept)
        self.kept += chunk[:room]
        self.truncated |= len(chunk) > room
        return len(chunk)


def _feed(stream: IO[bytes], content: bytes) -> None:
    try:
        with stream:
            stream.write(content)
    except BrokenPipeError:
        pass  # The command did not want all of it, which is its right.


def _end_processes(root: Path) -> None:
    """SIGKILL everything whose HOME lies below *root*, until a sweep finds nothing new and all of it has ended."""
    marker = f"HOME={root}/".encode()
    ended: set[tuple[int, str]] = set()
    while found := [pid for pid in _pids() if _environ_has(pid, marker)]:
        ended |= {(pid, _since(pid)) for pid in found}
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    # A process loses its environment before its files, and with them its locks.
    for pid, since in ended:
        while since and _since(pid) == since:
            time.sleep(0.001)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _since(pid: int) -> str:
    """When that process began, which no other of its number has; empty of a dead one, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _environ_has(pid: int, marker: bytes) -> bool:
    """A zombie's environment is empty, so what is dead and not yet reaped does not count."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(marker) for entry in environ.split(b"\0"))
