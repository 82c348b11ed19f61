"""
The Ray of one TPU VM: joins the cluster's head, stays joined, and leaves nothing behind.

It is the job of a pool's slot, run with the Python that has Ray. Verbs:
    check RAY PYTHON    exit 1, with one line, unless this Python has the head's Ray and minor version
    run                 join, until SIGTERM
    start, drain, session    parts of `run`, in processes of their own

`run` starts `ray start --block` in a session of its own, so that the SIGTERM of a stop reaches only this script: it
drains the Ray node first. If Ray ends by itself, it is started again here, since a slice whose hosts keep its name
heals by itself; the exit status says only that a person, or another node, is needed (75), or that this script was
stopped (143). The token is written to a file that only this user may read; no process below has it in its environment.

Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import http.client
import inspect
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
# A socket path has 107 bytes at most, and Ray's own part of it is 62.
FOLDER_BYTES = 45
SESSIONS_KEPT = 3
NEEDS_ANOTHER = 75
STOPPED = 143
# Exit statuses of `session`; any other one says that the head gave no answer.
SAME_SESSION, OTHER_SESSION = 0, 3

NOTICE = "preempted"
NOTICE_DEADLINE_SECONDS = 30
# A VM that still lives so long after its notice is not preempted any more.
NOTICE_COUNTS_SECONDS = 600.0
HELPER_SECONDS = 15.0
# Ray drains its node at SIGTERM, up to 30 s by default; tpucare's own stop has 30 s in all.
LAST_DRAIN_SECONDS = 5
STOP_SECONDS = 15.0
KILL_SECONDS = 20.0

ENDS_LIMIT = 5
SHORT_LIFE_SECONDS = 600.0
HEAD_POLL_SECONDS = 3.0
HEAD_CONNECT_SECONDS = 2.0
HEAD_TOLD_SECONDS = 300.0
TICK_SECONDS = 1.0
METADATA_TRIES = 3

# A task must not get them from the host: the token is in a file, and the address is the head's own.
DROPPED = ("RAY_AUTH_TOKEN", "RAY_ADDRESS")
WAKING = {signal.SIGTERM, signal.SIGCHLD}


class Refused(Exception):
    """This host cannot join; the text says why."""


def main(words: list[str]) -> int:
    verb, rest = words[0] if words else "", words[1:]
    try:
        if verb == "check" and len(rest) == 2:
            return check(*rest)
        if verb == "run" and not rest:
            return Host().run()
        if verb == "start":
            return start(rest)
        if verb == "drain" and len(rest) == 3:
            return drain(*rest)
        if verb == "session" and len(rest) == 2:
            return session(*rest)
    except Refused as error:
        say(str(error))
        return 1
    say("verbs: check RAY PYTHON, run")
    return 2


def say(text: str) -> None:
    print(f"[tpucare: {text}]", flush=True)


# --- decisions -------------------------------------------------------------------------------------------------------


def after_end(short_lives: int, lived_seconds: float, head_was_away: bool) -> tuple[int, bool]:
    """
    After Ray ended by itself: the number of short lives in a row, and whether to start it again.

    Without its head Ray ends by itself after a minute; such an end says nothing about this host.
    """
    if head_was_away or lived_seconds >= SHORT_LIFE_SECONDS:
        return 0, True
    return short_lives + 1, short_lives + 1 < ENDS_LIMIT


def pause_before(short_lives: int) -> float:
    """Seconds before the next start: none after the first end, so that a slice heals at once."""
    return 0.0 if short_lives < 2 else float(2 ** (short_lives - 1))


def difference(ray_wanted: str, python_wanted: str, ray_here: str, python_here: str) -> str:
    """One line with the versions of head and host if they differ; empty if the host can join."""
    if (ray_here, python_here) == (ray_wanted, python_wanted):
        return ""
    here = f"has Ray {ray_here} on Python {python_here}" if ray_here else f"(Python {python_here}) has no Ray"
    return (
        f"the head has Ray {ray_wanted} on Python {python_wanted}, but {sys.executable} of this host {here}: "
        f"make job.setup install ray=={ray_wanted} for Python {python_wanted}"
    )


def ray_environment(env: dict[str, str], token_path: str) -> dict[str, str]:
    """
    Environment of Ray on this host.

    Chips, accelerator type, topology and worker number are Ray's to find; TPU_NAME alone is another one than Google's.
    """
    hidden = {*DROPPED, env.get("TPUCARE_RAY_TOKEN_FROM", "")}
    return {
        **{name: value for name, value in env.items() if name not in hidden},
        "TPU_NAME": env["TPUCARE_SLOT"],
        "RAY_CLOUD_INSTANCE_ID": env["TPUCARE_NODE"],
        "RAY_NODE_TYPE_NAME": env["TPUCARE_RAY_POOL"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(LAST_DRAIN_SECONDS),
    }


def folder_path(env: dict[str, str], uid: int) -> str:
    """
    Path of this host's private folder; Ray's own folder in it (`ray_folder`) is FOLDER_BYTES long at most.

    Emulated hosts of one machine have one /tmp and homes of their own.
    """
    mark = hashlib.sha256(f"{env.get('HOME', '')}\0{uid}".encode(errors="replace")).hexdigest()[:6]
    path = os.path.join(env.get("TMPDIR") or "/tmp", f"ray-{mark}")
    fits = len(os.fsencode(ray_folder(path))) <= FOLDER_BYTES
    return path if path.startswith("/") and fits else f"/tmp/ray-{mark}"


def ray_folder(private: str) -> str:
    """Ray's own folder: Ray opens it to all users of the machine, so that it needs a private one above it."""
    return os.path.join(private, "t")


def is_preempted(notice: str) -> bool:
    """True if the text of $TPUCARE_NOTICE has a line that announces the preemption of this VM."""
    return any(line.startswith(NOTICE) for line in notice.splitlines())


def descendants(root: int, parents: dict[int, int]) -> set[int]:
    """All processes below *root*. *parents*: parent of each process."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(below)
        waiting += below
    return found


# --- parts of `run` in processes of their own ------------------------------------------------------------------------


def check(ray_wanted: str, python_wanted: str) -> int:
    from importlib import metadata

    try:
        ray_here = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray_here = ""
    line = difference(ray_wanted, python_wanted, ray_here, "{}.{}".format(*sys.version_info[:2]))
    if line:
        say(line)
    return 1 if line else 0


def start(words: list[str]) -> int:
    """`ray start` with *words*. As `python -m ray` it would import modules of the job's folder, such as a `ray.py`."""
    from ray.scripts.scripts import main as ray

    sys.argv = ["ray", "start", *words]
    return int(ray() or 0)


def drain(head: str, node: str, ip: str) -> int:
    """Tell the head that this host is preempted. Source: Ray 2.60, _private/node.py, `_drain_node_before_shutdown`."""
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.core.generated import autoscaler_pb2 as words

    client = GcsClient(address=head)
    # Ray 2.56 has no such limit; HELPER_SECONDS ends this process.
    limit = {"timeout": 5} if "timeout" in inspect.signature(client.drain_node).parameters else {}
    deadline_ms = int((time.time() + NOTICE_DEADLINE_SECONDS) * 1000)
    for state in get_cluster_resource_state(client).node_states:
        if (state.instance_id, state.node_ip_address) == (node, ip) and state.status != words.NodeStatus.DEAD:
            accepted, why = client.drain_node(
                state.node_id.hex(),
                words.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
                "the cloud takes this machine back",
                deadline_ms,
                **limit,
            )
            say("Ray knows that this host is preempted" if accepted else f"Ray refuses to drain this host: {why}")
    return 0


def session(head: str, known: str) -> int:
    """Whether the head still has the session *known*. Source: Ray 2.60, _private/node.py, `session_name`."""
    from ray._raylet import GcsClient

    found = GcsClient(address=head).internal_kv_get(b"session_name", b"session", timeout=5)
    if not found:
        return 1
    return SAME_SESSION if found.decode() == known else OTHER_SESSION


# --- run -------------------------------------------------------------------------------------------------------------


class Host:
    """The Ray of this host, over all its starts."""

    def __init__(self) -> None:
        self._env = dict(os.environ)
        try:
            self._head = self._env["TPUCARE_RAY_ADDRESS"]
            self._token = self._env[self._env["TPUCARE_RAY_TOKEN_FROM"]]
            self._node = self._env["TPUCARE_NODE"]
            host, _, port = self._head.rpartition(":")
            self._head_address = (host.strip("[]"), int(port))
            self._words = shlex.split(self._env.get("TPUCARE_RAY_ARGS", ""))
            self._folder = folder_path(self._env, os.geteuid())
            self._token_path = os.path.join(self._folder, "token")
            self._ray_env = ray_environment(self._env, self._token_path)
        except KeyError as error:
            raise Refused(f"the variable {error.args[0]} is not set") from None
        except ValueError as error:
            raise Refused(f"TPUCARE_RAY_ADDRESS or TPUCARE_RAY_ARGS: {error}") from None
        own_folder(self._folder, os.geteuid())
        self._asked_to_stop = False
        self._ended: dict[int, int] = {}
        self._preempted_at: float | None = None
        self._line: socket.socket | None = None

    def run(self) -> int:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Blocked, they wait for `_wait`; every process below starts without the block.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, WAKING)
        try:
            return self._run()
        finally:
            self._end_everything()
            with contextlib.suppress(OSError):
                os.unlink(self._token_path)
                tidy(ray_folder(self._folder))

    def _run(self) -> int:
        ip = internal_address(self._env, self._head_address)
        short_lives = 0
        while self._await_head():
            lived, head_was_away, how = self._live(ip)
            if self._asked_to_stop:
                break
            if not self._end_everything():
                say(f"processes of Ray do not end within {KILL_SECONDS:.0f} s of SIGKILL")
                return NEEDS_ANOTHER
            short_lives, again = after_end(short_lives, lived, head_was_away)
            if not again:
                say(f"Ray ended {short_lives} times in a row (at last it {how}); its output above says why")
                return NEEDS_ANOTHER
            say(f"Ray {how}, and is started again here")
            self._wait(pause_before(short_lives))
        return STOPPED

    def _await_head(self) -> bool:
        """Wait until the head takes connections; False if this script was asked to stop."""
        told_at: float | None = None
        while not self._asked_to_stop:
            now = time.monotonic()
            if self._preempted_at is not None and now < self._preempted_at + NOTICE_COUNTS_SECONDS:
                reason = "Ray is not started again on a machine that the cloud takes back"
            elif self._head_answers():
                return True
            else:
                reason = f"waiting for the head at {self._head}"
            if told_at is None or now >= told_at + HEAD_TOLD_SECONDS:
                say(reason)
                told_at = now
            self._wait(TICK_SECONDS)
            self._look_for_notice()
        return False

    def _live(self, ip: str) -> tuple[float, bool, str]:
        """One life of Ray: its seconds, whether the head was away meanwhile, and how it ended."""
        # Each time anew: a cleaner of /tmp may have removed them.
        own_folder(self._folder, os.geteuid())
        write_token(self._token_path, self._token)
        tidy(ray_folder(self._folder))
        began = asked_head_at = time.monotonic()
        fixed = ["--log-color=false", "--block", "--address", self._head, "--node-ip-address", ip]
        ray = self._spawn("start", *fixed, "--temp-dir", ray_folder(self._folder), *self._words)
        helpers: dict[int, float] = {}
        asker, head_was_away, doubted = 0, False, False
        while ray not in self._ended:
            self._wait(TICK_SECONDS)
            now = time.monotonic()
            for pid in [pid for pid, until in helpers.items() if now > until and pid not in self._ended]:
                kill(pid, signal.SIGKILL)
            if self._asked_to_stop:
                self._stop(ray)
                break
            if self._look_for_notice():
                helpers[self._spawn("drain", self._head, self._node, ip)] = now + HELPER_SECONDS
            if asker in self._ended:
                answer, asker = self._ended[asker], 0
                # Ray itself would wait a minute for a head that does not know it any more.
                if answer == OTHER_SESSION:
                    return now - began, True, "has a head that began a new session"
                doubted = answer != SAME_SESSION
            if now >= asked_head_at + HEAD_POLL_SECONDS:
                was_cut = self._line_is_cut()
                asked_head_at, answers = now, self._head_answers()
                is_away = was_cut or not answers
                head_was_away, doubted = head_was_away or is_away, doubted or is_away
                known = session_of(ray_folder(self._folder))
                if answers and doubted and known and not asker:
                    asker = self._spawn("session", self._head, known)
                    helpers[asker] = now + HELPER_SECONDS
        lived = time.monotonic() - began
        how = f"ended by itself after {lived:.0f} s (status {self._ended.get(ray, 0)})"
        return lived, head_was_away or not self._head_answers(), how

    def _stop(self, ray: int) -> None:
        """SIGTERM: Ray drains its node, and ends its processes. `_end_everything` follows."""
        kill(ray, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while ray not in self._ended and time.monotonic() < until:
            self._wait(0.2)

    def _look_for_notice(self) -> bool:
        """True at the first sight of the notice that this VM is preempted."""
        if self._preempted_at is not None:
            return False
        try:
            with open(self._env.get("TPUCARE_NOTICE", ""), encoding="utf-8", errors="replace") as stream:
                preempted = is_preempted(stream.read())
        except OSError:
            return False
        if preempted:
            self._preempted_at = time.monotonic()
        return preempted

    def _head_answers(self) -> bool:
        """Whether the head takes a connection; it is held until the next one."""
        if self._line is not None:
            self._line.close()
        try:
            self._line = socket.create_connection(self._head_address, HEAD_CONNECT_SECONDS)
        except OSError:
            self._line = None
            return False
        # Else `recv` waits for what a living head does not say, and fails.
        self._line.setblocking(False)
        return True

    def _line_is_cut(self) -> bool:
        """Whether the head ended since it took the connection, even if another one answers in its place by now."""
        try:
            while self._line is not None:
                if not self._line.recv(4096):
                    return True
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    # --- processes ---

    def _spawn(self, *words: str) -> int:
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        return os.posix_spawn(
            sys.executable,
            [sys.executable, os.path.abspath(__file__), *words],
            self._ray_env,
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )

    def _wait(self, seconds: float) -> None:
        """Until a child ends or SIGTERM comes, *seconds* at most."""
        caught = signal.sigtimedwait(WAKING, seconds)
        if caught is not None and caught.si_signo == signal.SIGTERM:
            self._asked_to_stop = True
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._ended[pid] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _end_everything(self) -> bool:
        """SIGKILL to every process below, until none is left; False if some stay. Orphans come to this subreaper."""
        until = time.monotonic() + KILL_SECONDS
        while True:
            self._reap()
            left = descendants(os.getpid(), living_parents())
            if not left or time.monotonic() > until:
                self._ended.clear()
                return not left
            for pid in left:
                kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def living_parents() -> dict[int, int]:
    """Parent of each process that is not a zombie."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                found[int(name)] = int(fields[1])
    return found


# --- the folder, and the address of this host ------------------------------------------------------------------------


def own_folder(path: str, uid: int) -> str:
    """Make the folder, for this user alone. Raises: Refused: another user's, or no folder."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
        raise Refused(f"{path} is another user's or no folder; remove it, Ray needs one of that name")
    os.chmod(path, 0o700)
    return path


def write_token(path: str, token: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as stream:
        stream.write(token.strip())


def tidy(folder: str) -> None:
    """Remove what ended Ray processes left (sockets, spilled objects, environments), and logs of old sessions."""
    os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "session_latest"))
    sessions = sorted(name for name in os.listdir(folder) if name.startswith("session_2"))
    for place, name in enumerate(reversed(sessions)):
        session = os.path.join(folder, name)
        for part in os.listdir(session):
            path = os.path.join(session, part)
            if part == "logs" and place < SESSIONS_KEPT:
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        if place >= SESSIONS_KEPT:
            shutil.rmtree(session, ignore_errors=True)


def session_of(folder: str) -> str:
    """Name of the session that Ray joined in this life; empty before."""
    try:
        return os.path.basename(os.readlink(os.path.join(folder, "session_latest")))
    except OSError:
        return ""


def internal_address(env: dict[str, str], head: tuple[str, int]) -> str:
    """This VM's address in its network; without a metadata server, the address from which it reaches the head."""
    server = env.get("GCE_METADATA_HOST", "metadata.google.internal")
    for attempt in range(METADATA_TRIES):
        time.sleep(attempt)
        try:
            return _ask(server, "instance/network-interfaces/0/ip")
        except (OSError, http.client.HTTPException, ValueError):
            continue
    family = socket.AF_INET6 if ":" in head[0] else socket.AF_INET
    # A UDP socket is only bound to a route; no packet is sent.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(head)
        except OSError as error:
            raise Refused(f"no route to the head at {head[0]}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def _ask(server: str, entry: str) -> str:
    connection = http.client.HTTPConnection(server, timeout=5)
    try:
        connection.request("GET", f"/computeMetadata/v1/{entry}", headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        text = answer.read(256).decode("ascii", "replace").strip()
    finally:
        connection.close()
    if answer.status != 200 or not text or not set(text) <= set("0123456789abcdefABCDEF.:"):
        raise ValueError(f"status {answer.status}")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
