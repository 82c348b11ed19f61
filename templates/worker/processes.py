"""
Processes of runs on this worker, for the runner, the probe and the stop.

A run is alive while the lock is held, or a process has its marks (TPUCARE_RUN and TPUCARE_WORKER in its environment),
or a process holds the chips. Every process of a run inherits the lock's descriptor, so it stays held if only the runner
is killed; the marks find processes that closed their descriptors, the lock's holders find those that overwrote their
environment (as setproctitle does).

Standard library only, Python 3.8 and newer: this runs on the TPU VM. Imports are few and small, here and in the runner
and the probe: `json`, `re`, `typing` or `signal` would take longer than the rest of a start.
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

DEVICES = "/dev/accel*:/dev/vfio/*"
LIBTPU_LOCK = "/tmp/libtpu_lockfile"
RUNS_KEPT = 5

# RUN marks the processes of a run, LAUNCH the launch script, screen and the runner: a stop has to find a launch, but a
# launch is not a run, and of two racing launches the lock decides which one goes on.
RUN, LAUNCH = "TPUCARE_RUN", "TPUCARE_LAUNCH"

SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGCHLD = 1, 2, 9, 13, 15, 17
SIGNAL_NAMES = {SIGKILL: "KILL", SIGTERM: "TERM"}


def home() -> str:
    return os.path.join(os.path.expanduser("~"), ".tpucare")


def run_number(token: str) -> int:
    """The number in a run token, `<node>.<number>`; -1 for any other text."""
    node, _, number = token.rpartition(".")
    is_node = node.replace(".", "").replace("-", "").replace("_", "").isalnum() and not node.startswith(".")
    return int(number) if is_node and node.isascii() and number.isdigit() and len(token) < 160 else -1


def run_tokens(base: str) -> list[str]:
    """Runs with a folder on this worker, lowest number first."""
    try:
        names = os.listdir(base)
    except OSError:
        return []
    return sorted((name for name in names if run_number(name) >= 0), key=run_number)


def is_foreign(base: str, token: str) -> bool:
    """True if the runner did not start that run."""
    return bool(token) and os.path.exists(os.path.join(base, token, "foreign"))


def lock_path(base: str) -> str:
    return os.path.join(base, "lock")


def lock_token(base: str) -> str:
    """The run that holds the lock, or held it last; empty if there was none."""
    try:
        with open(lock_path(base), encoding="utf-8", errors="replace") as stream:
            token = stream.read(256).strip()
    except OSError:
        return ""
    return token if run_number(token) >= 0 else ""


def lock_is_held(base: str) -> bool:
    """True if a run holds the lock. Takes a shared lock for an instant; a runner that fails for it tries again."""
    try:
        handle = os.open(lock_path(base), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def table() -> dict[int, tuple[int, int]]:
    """Parent and process group of every process that is not a zombie."""
    found = {}
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            found[pid] = (int(fields[1]), int(fields[2]))
    return found


def descendants(roots: Iterable[int], processes: dict[int, tuple[int, int]]) -> set[int]:
    """All processes below *roots*, without *roots*."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def marked(tokens: Iterable[str], worker: int, names: tuple[str, ...] = (RUN,)) -> set[int]:
    """
    Processes of these runs on this worker, by their environment.

    The worker's number is checked, too, since emulated workers of one machine may see each other's processes.
    """
    marks = {f"{name}={token}".encode() for token in tokens for name in names}
    number = b"TPUCARE_WORKER=%d" % worker
    found = set()
    for pid in _pids() if marks else ():
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                environ = stream.read()
        except OSError:
            continue
        if number in environ:
            entries = environ.split(b"\0")
            if number in entries and not marks.isdisjoint(entries):
                found.add(pid)
    return found


def living(base: str, worker: int) -> set[int]:
    """Processes of all runs of this worker, without the calling process and its ancestors."""
    processes, tokens = table(), run_tokens(base)
    found = marked(tokens, worker, (RUN, LAUNCH)) | set(_holders({os.path.realpath(lock_path(base))}))
    foreign = [token for token in tokens if is_foreign(base, token)]
    if foreign:
        # Imported late: it imports `json`, and runs of the runner do not need it.
        from foreign import session_processes

        found |= session_processes(base, foreign)
    found |= descendants(found, processes)
    return (found & set(processes)) - own_line(processes)


def own_line(processes: dict[int, tuple[int, int]]) -> set[int]:
    """The calling process and its ancestors."""
    line, pid = {os.getpid()}, os.getpid()
    while pid in processes:
        pid = processes[pid][0]
        line.add(pid)
    return line


def chip_holders() -> dict[int, str]:
    """
    Processes that hold a TPU chip: pid -> device. TPUCARE_DEVICE_GLOB (patterns joined by colons) replaces DEVICES.

    Other users' descriptors are read through sudo, which a TPU VM's login user may use without a password; otherwise
    only our own user's processes are found.
    """
    devices = _devices(os.environ.get("TPUCARE_DEVICE_GLOB", DEVICES))
    if not devices:
        return {}
    holders = _holders(devices)
    if not holders and os.geteuid() != 0:
        holders = _holders_by_sudo(devices)
    return holders


def drop_libtpu_lock() -> None:
    """
    Remove libtpu's lock file, which survives a SIGKILL; libtpu does not load beside another user's one.

    Call it only if no process holds a chip. On a machine without chips it does nothing.
    """
    path = os.environ.get("TPUCARE_LIBTPU_LOCK", LIBTPU_LOCK)
    if not _devices(os.environ.get("TPUCARE_DEVICE_GLOB", DEVICES)) or not os.path.lexists(path):
        return
    try:
        os.unlink(path)
    except PermissionError:
        quietly(["sudo", "-n", "rm", "-f", path])
    except OSError:
        pass


def send(pid: int, number: int) -> None:
    """Signal *pid*; through sudo if it is not ours, as a process that the job started by sudo."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        quietly(["sudo", "-n", "kill", f"-{SIGNAL_NAMES[number]}", str(pid)])


def is_anothers(pid: int) -> bool:
    """True if we may not signal *pid*: a signal to its group then skips it without an error."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def is_sudo(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", "rb") as stream:
            return stream.read() == b"sudo\n"
    except OSError:
        return False


def prune_runs(base: str, token: str) -> None:
    """Remove folders of old runs and of interrupted launches, so that a crash loop does not fill the disk."""
    import time

    old = [name for name in run_tokens(base) if name != token][: -(RUNS_KEPT - 1)]
    hour_ago = time.time() - 3600
    cut = [name for name in os.listdir(base) if name.startswith(".in-")]
    old += [name for name in cut if _changed_at(os.path.join(base, name)) < hour_ago]
    if old:
        import shutil

        for name in old:
            shutil.rmtree(os.path.join(base, name), ignore_errors=True)


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        # A launch that arrived meanwhile has renamed it.
        return float("inf")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _devices(patterns: str) -> set[str]:
    """Paths that match *patterns*, with a star only at the end: `glob` would take ten times as long."""
    found = set()
    for pattern in patterns.split(":"):
        folder, _, stem = pattern.rpartition("/")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        chosen = [name for name in names if (name.startswith(stem[:-1]) if stem.endswith("*") else name == stem)]
        found |= {os.path.realpath(os.path.join(folder, name)) for name in chosen}
    return found


def _holders(paths: set[str]) -> dict[int, str]:
    found = {}
    for pid in _pids():
        folder = f"/proc/{pid}/fd"
        try:
            handles = os.listdir(folder)
        except OSError:
            continue
        for handle in handles:
            try:
                target = os.readlink(f"{folder}/{handle}")
            except OSError:
                continue
            if target in paths:
                found[pid] = target
                break
    return found


def _holders_by_sudo(devices: set[str]) -> dict[int, str]:
    names = [part for device in sorted(devices) for part in ("-o", "-lname", device)][1:]
    text = quietly(["sudo", "-n", "find", "/proc", "-maxdepth", "3", "-path", "/proc/[0-9]*/fd/*", "(", *names, ")"])
    found = {}
    for line in (text or "").splitlines():
        parts = line.split("/")
        if len(parts) == 5 and parts[2].isdigit():
            found[int(parts[2])] = "a TPU chip"
    return found


def quietly(command: list[str]) -> str | None:
    """Output of *command*, whatever its exit status; None if it cannot run or takes longer than 5 s."""
    # Imported late: it takes a third of a probe's time, and a probe of a healthy run does not need it.
    import subprocess

    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")
