"""Real OpenSSH sshd for tests: one process per worker, on a loopback address of its own, with a HOME of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"

_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
PrintLastLog no
UseDNS no
MaxStartups 500
KexAlgorithms curve25519-sha256@libssh.org
Subsystem sftp {sftp_server}
ForceCommand {folder}/wrap.sh
SetEnv HOME=/nonexistent
"""

# sshd hands over exec, shell and sftp alike; the worker's own HOME is set here, for root's is not to be touched.
_WRAP = """\
#!/bin/bash
export HOME={folder}/home
cd "$HOME" || exit 255
case "$SSH_ORIGINAL_COMMAND" in
  internal-sftp*|*/sftp-server*) exec {sftp_server} ;;
  *) exec /bin/bash -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""


def available() -> bool:
    return os.path.exists(SSHD) and shutil.which("ssh-keygen") is not None


def _sftp_server() -> str:
    places = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
    return next((place for place in places if os.path.exists(place)), places[0])


class Sshd:
    """One sshd. `stop` ends it and all its sessions; `start` again keeps HOME, `new_host_key` changes who it is."""

    def __init__(self, folder: Path, address: str, port: int, authorized: str, host_key_kind: str = "ed25519") -> None:
        self.folder, self.address, self.port = folder, address, port
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        names = {"folder": folder, "address": address, "port": port, "sftp_server": _sftp_server()}
        (folder / "sshd_config").write_text(_CONFIG.format(**names))
        (folder / "authorized_keys").write_text(authorized + "\n")
        wrap = folder / "wrap.sh"
        wrap.write_text(_WRAP.format(**names))
        wrap.chmod(0o755)
        self.new_host_key(host_key_kind)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host_key(self) -> str:
        """The public host key as `type base64`."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def new_host_key(self, kind: str = "ed25519") -> None:
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(self.folder / "host_key")], check=True, timeout=30
        )

    def start(self) -> Sshd:
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")], stdin=subprocess.DEVNULL, stderr=log
            )
        self._wait_for_banner()
        return self

    def _wait_for_banner(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert self._process
            assert self._process.poll() is None, (self.folder / "log").read_text()
            try:
                with socket.create_connection((self.address, self.port), timeout=1) as sock:
                    if sock.recv(4) == b"SSH-":
                        return
            except OSError:
                time.sleep(0.01)
        raise AssertionError("sshd does not answer")

    def freeze(self) -> None:
        """SIGSTOP of it and its sessions: the kernel takes connections, nobody answers."""
        frozen: set[int] = set()
        # What was forked between a look and its signals is there at the next one.
        while fresh := [pid for pid in self._tree() if pid not in frozen]:
            _send(signal.SIGSTOP, fresh)
            frozen.update(fresh)

    def thaw(self) -> None:
        _send(signal.SIGCONT, self._tree())

    def stop(self) -> None:
        if self._process is None:
            return
        # A session that begins just now would outlive its parent otherwise.
        self.freeze()
        _send(signal.SIGKILL, self._tree())
        self._process.wait()
        self._process = None

    def _tree(self) -> list[int]:
        """sshd and everything below it, parents first."""
        if self._process is None:
            return []
        found = [self._process.pid]
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                children.setdefault(int(fields[1]), []).append(int(entry))
        for pid in found:
            found += children.get(pid, [])
        return found


def _send(number: signal.Signals, pids: list[int]) -> None:
    """To those that are still there: sessions end by themselves, too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """A port that was free on all of 127/8 a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
