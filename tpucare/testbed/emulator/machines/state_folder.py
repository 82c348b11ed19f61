"""
The folder of an emulator's machines: its lock, its identity, and the cleaning up after a crashed emulator.

Only processes with this folder's mark, or named by its own pid files, are ended.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tpucare.testbed.emulator.machines import proctree, worker_files
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.proctree import ProcessEntry
from tpucare.testbed.emulator.machines.sandbox import MachineError, Sandbox, choose
from tpucare.testbed.emulator.machines.worker_files import Site
from tpucare.testbed.emulator.world.config import Guest

_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
_SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/libexec/sftp-server",
    "/usr/lib/ssh/sftp-server",
)


class StateFolder:
    """`state_dir/machines`, locked for one emulator at a time."""

    def __init__(self, state_dir: Path) -> None:
        """Raises: MachineError: another emulator uses the folder, or this user could not log in to a worker."""
        self._root = state_dir.resolve() / "machines"
        self._root.mkdir(parents=True, exist_ok=True)
        # Its `bin` is on every worker's PATH: whatever the umask, other users must not write there.
        self._root.chmod(0o755)
        self.login_user = _login_user()
        self._lock = _locked(self._root / "lock")
        self._sockets: Path | None = None

    def open(
        self,
        ssh_port: int,
        metadata: MetadataServer,
        *,
        sandbox: Sandbox | None,
        path_prefix: Sequence[Path],
        extra_env: Mapping[str, str],
        guest: Guest,
    ) -> Site:
        """Clean up after a crash; return the shared settings. Raises: MachineError: no sshd, or a process survives."""
        sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")
        sftp_server = next((Path(path) for path in _SFTP_SERVERS if Path(path).exists()), None)
        if sshd is None or sftp_server is None:
            raise MachineError("emulated workers need OpenSSH's server: apt-get install openssh-server screen")
        mark = self._identity()
        self._remove_leftovers(mark)
        if os.geteuid() == 0:
            # Without it: "Missing privilege separation directory". The package makes it only for its own service.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self._write_stubs(guest)
        # A short path, because a socket's path is limited to 108 bytes; recorded, so that a later cleaning removes it.
        self._sockets = Path(tempfile.mkdtemp(prefix="tpuemu-", dir="/tmp"))
        (self._root / "sockets").write_text(str(self._sockets))
        return Site(
            workers=self._root / "workers",
            sockets=self._sockets,
            bin=self._root / "bin",
            mark=mark,
            sandbox=sandbox or choose(self._root / "probe"),
            # Absolute and resolved, else "re-exec requires execution with an absolute path".
            sshd=Path(sshd).resolve(),
            sftp_server=sftp_server,
            use_pam=_root_is_locked(),
            ssh_port=ssh_port,
            path_prefix=tuple(path_prefix),
            extra_env=dict(extra_env),
            metadata=metadata,
            guest=guest,
        )

    def clean_up(self, *, keep_workers: bool) -> None:
        """Remove the sockets and unlock the folder; call when no process of a worker is left."""
        if self._sockets:
            shutil.rmtree(self._sockets, ignore_errors=True)
        (self._root / "sockets").unlink(missing_ok=True)
        if not keep_workers:
            shutil.rmtree(self._root / "workers", ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Unlock the folder, so that another emulator can use it."""
        self._lock.close()

    def _identity(self) -> str:
        """An id per folder, made once; it begins the mark of every process."""
        file = self._root / "identity"
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        return file.read_text().strip()

    def _remove_leftovers(self, mark: str) -> None:
        """End processes that a crashed emulator of this folder left, and remove its homes and sockets."""

        def leftovers() -> list[ProcessEntry]:
            marked = [
                process for process, value in proctree.marks(worker_files.MARK).items() if value.startswith(f"{mark}.")
            ]
            noted = list(_recorded_processes(self._root / "workers"))
            below = proctree.descendants(proctree.process_table(), [process.pid for process in (*noted, *marked)])
            return list({process.pid: process for process in (*noted, *marked, *below)}.values())

        if left := proctree.kill_all(leftovers):
            raise MachineError(f"processes of an earlier emulator survive: {sorted(process.pid for process in left)}")
        shutil.rmtree(self._root / "workers", ignore_errors=True)
        sockets = self._root / "sockets"
        if sockets.exists() and (folder := Path(sockets.read_text())).name.startswith("tpuemu-"):
            shutil.rmtree(folder, ignore_errors=True)

    def _write_stubs(self, guest: Guest) -> None:
        folder = self._root / "bin"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        for name, text in worker_files.stubs(guest).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)


def _recorded_processes(workers: Path) -> Iterator[ProcessEntry]:
    """Living processes named by pid files; their start times tell them from later users of their pids."""
    for file in workers.glob("*/pids"):
        for line in file.read_text().splitlines():
            pid, _, started = line.partition(" ")
            process = proctree.read_process(int(pid))
            if process and process.started == int(started) and not process.is_dead:
                yield process


def _locked(path: Path) -> TextIO:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise MachineError(f"another emulator uses {path.parent.parent}; give this one a folder of its own") from None
    return file


def _login_user() -> str:
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise MachineError(
            f"user id {os.geteuid()} has no name, so sshd refuses every login; run as a named user"
        ) from error
    if Path(account.pw_shell).name in ("nologin", "false"):
        raise MachineError(f"user {account.pw_name} has no login shell ({account.pw_shell}); run as another user")
    return account.pw_name


def _root_is_locked() -> bool:
    """sshd without PAM refuses an account whose password is locked (`!`), keys or not; with PAM it does not."""
    if os.geteuid() != 0:
        return False
    try:
        entries = Path("/etc/shadow").read_text().splitlines()
    except OSError:
        return False
    return any(entry.startswith("root:!") for entry in entries)
