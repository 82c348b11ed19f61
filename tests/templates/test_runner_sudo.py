"""A run that tpucare starts as an ordinary user and whose training is root's, by sudo. Real users, real setuid."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.bench_worker import NO_METADATA, Node, eventually
from tests.kits.local_remote import LocalRemote
from tpucare.model.resources import Ran, Worker

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a user's process and a setuid program"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
]

USER = 65534

# What sudo does of interest here: it becomes root in every respect, and then either waits for its command, to which it
# relays what it is sent (with a plugin that wants to see the end, as by default), or becomes the command.
SUDO = """\
import os, signal, sys
os.setgid(0)
os.setuid(0)
arguments = sys.argv[2:] if sys.argv[1] == "-n" else sys.argv[1:]
# Known and able to relay before its command begins.
with open("/proc/self/comm", "w") as stream:
    stream.write("sudo")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = os.fork() if {waits} else 0
if not child:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.execvp(arguments[0], arguments)
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
"""

TRAIN = """\
trap 'echo told >>told; sleep 0.5; echo saved >saved' TERM
id -u >user
while [ ! -e saved ]; do sleep 0.05; done
"""


class UsersRemote(LocalRemote):
    """Every command is an ordinary user's."""

    def run(
        self,
        worker: Worker,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta = timedelta(seconds=10),
        limit: int = 1 << 20,
    ) -> Ran:
        as_user = f"exec setpriv --reuid={USER} --regid={USER} --clear-groups bash -c {shlex.quote(command)}"
        return super().run(worker, as_user, stdin=stdin, deadline=deadline, limit=limit)

    def home(self, worker: Worker) -> Path:
        home = super().home(worker)
        for folder in (home, home.parent / "s", home.parent / "tmp"):
            os.chown(folder, USER, USER)
        for folder in (self.root, home.parent.parent, home.parent):
            folder.chmod(0o755)
        return home


def put_sudo(folder: Path, waits: bool) -> None:
    """A program `sudo` there, which works for anybody without a password."""
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "sudo.py").write_text(SUDO.format(waits=waits))
    shutil.copy("/bin/bash", folder / "as-root")
    (folder / "as-root").chmod(0o4755)
    # bash itself becomes root in its effective user alone; what that starts could be signalled by the user.
    begin = f"""exec /usr/bin/python3 {folder}/sudo.py "$@" """
    (folder / "sudo").write_text(f'#!/bin/bash\nexec {folder}/as-root -p -c {shlex.quote(begin)} sudo "$@"\n')
    (folder / "sudo").chmod(0o755)


@pytest.fixture(params=[True, False], ids=["sudo waits", "sudo becomes its command"])
def users(request: pytest.FixtureRequest) -> Iterator[Node]:
    root = Path(tempfile.mkdtemp(prefix="tc", dir="/tmp"))
    put_sudo(root / "bin", request.param)
    remote = UsersRemote(root, env={**NO_METADATA, "PATH": f"{root}/bin:/usr/bin:/bin"})
    try:
        yield Node(remote, 1, {})
    finally:
        remote.close()


@pytest.mark.parametrize("leader", ["bash -c 'sudo bash train.sh; true'", "exec sudo bash train.sh"])
def test_training_below_sudo_is_told_once_to_stop_and_may_save(users: Node, leader: str) -> None:
    work = users.homes[0] / ".tpucare/work"
    users.start(f"cat >train.sh <<'X'\n{TRAIN}X\n{leader}", grace=20)
    eventually(lambda: (work / "user").exists() and (work / "user").read_text())
    if (work / "user").read_text() != "0\n":
        pytest.skip("setuid programs have no effect in the folder for temporary files")
    assert users.stop(grace=20).quiet
    assert (work / "saved").exists()
    assert (work / "told").read_text() == "told\n"
    assert users.ended().signalled
