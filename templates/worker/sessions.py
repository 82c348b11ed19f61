"""
Sessions of `screen` and `tmux` of this user on this worker: their names and their processes.

A session survives the command that made it, and processes in a tmux session have the environment of tmux's server,
which may be older than the command. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import os

import processes

SERVERS = ("screen", "tmux: server")
PANES = "#{session_created} #{session_id} #{pid} #{pane_pid} #{session_name}"


class Session:
    """
    identity: unique among all sessions, past ones included    name: its name, the same after a reboot
    roots:    its processes without their descendants
    """

    def __init__(self, identity: str, name: str, roots: set[int]) -> None:
        self.identity, self.name, self.roots = identity, name, roots


def listing() -> dict[str, Session]:
    """Every live session, by its identity."""
    return {session.identity: session for session in (*_screens(), *_panes())}


def servers(pids: set[int]) -> set[int]:
    """
    The servers of sessions among *pids*. A server that gets SIGTERM hangs up on the processes in it, which then end
    without a grace; without a signal it ends after the last of them.
    """
    return {pid for pid in pids if _command(pid) in SERVERS}


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read(64).strip().lower()
    except OSError:
        return ""


def _is_at_home(pid: int) -> bool:
    """True if that process has our home: emulated workers of one machine share the folder of tmux's sockets."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return b"HOME=" + os.fsencode(os.path.expanduser("~")) in stream.read().split(b"\0")
    except OSError:
        return False


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _screens() -> list[Session]:
    """Live screens. A socket's name is `<pid>.<name>`; those of dead sessions stay for ever."""
    folders = [os.environ.get("SCREENDIR", ""), *(f"{place}/S-{_user()}" for place in ("/run/screen", "/tmp/screens"))]
    folders.append(os.path.expanduser("~/.screen"))
    found = []
    for folder in dict.fromkeys(folder for folder in folders if folder):
        for socket in _names(folder):
            number, _, name = socket.partition(".")
            if number.isdigit() and _command(int(number)) == "screen" and _is_at_home(int(number)):
                found.append(Session(f"screen:{socket}", f"screen:{name}", {int(number)}))
    return found


def _panes() -> list[Session]:
    """Sessions of every tmux server."""
    folder = os.path.join(os.environ.get("TMUX_TMPDIR") or "/tmp", f"tmux-{os.geteuid()}")
    found: dict[str, Session] = {}
    for socket in _names(folder):
        text = processes.quietly(["tmux", "-S", os.path.join(folder, socket), "list-panes", "-a", "-F", PANES]) or ""
        for line in text.splitlines():
            parts = line.split(" ", 4)
            if len(parts) < 5 or not (parts[2].isdigit() and parts[3].isdigit()) or not _is_at_home(int(parts[2])):
                continue
            identity = f"tmux:{socket}:{parts[0]}:{parts[1]}"
            session = found.setdefault(identity, Session(identity, f"tmux:{socket}:{parts[4]}", set()))
            session.roots.add(int(parts[3]))
    return list(found.values())
