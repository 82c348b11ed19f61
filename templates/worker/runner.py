"""
One run of a job on one worker: takes the lock, goes through fetch, setup and run, and records how it ended.

The launch script starts it inside `screen`; from then on the SSH connection may end at any time. It is the subreaper of
all processes below it, so even detached ones (setsid, double forks, nohup) stay its children: it writes the exit file
only after the last of them has ended. SIGTERM means stop; SIGHUP and SIGINT are ignored.

Output goes through one pipe into the log, which limits its size and hides a full disk from the job. If only this runner
is killed, the job gets a closed pipe at its next line of output and mostly ends; until then the lock that it inherited
keeps the run alive for probes, and `stop` ends it. Without an exit file the run counts as lost, never as finished.
Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import select
import sys
import time

import files
import processes
from processes import SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGTERM

try:
    # The functions of `signal` without its enums, whose import alone takes half as long as Python's own start.
    import _signal as signal  # type: ignore[import-not-found]
except ImportError:
    import signal

PR_SET_CHILD_SUBREAPER = 36
LOCK_WAIT_SECONDS = 2.0
STRAGGLER_GRACE_SECONDS = 5.0
KILL_SECONDS = 120.0
SWEEP_SECONDS = 0.05
MAINTENANCE_COUNTS_SECONDS = 300.0
UNPROVEN_SECONDS = 600.0
RESERVE_BYTES = 1 << 18
DISK_FULL_BYTES = 1 << 20
TAIL_BYTES = 1 << 16

# Texts of libtpu and JAX on a host whose chips are held or gone: only another node helps.
# Source: jax issue 10192 and reports of marin, hope and pcmd users.
DIRTY_HOST = (
    rb"TPU is already in use by process|libtpu(?:\.so)? (?:is )?already in use|[Nn]o TPU (?:devices? |chips? )?found"
    rb"|(?:/dev/accel|/dev/vfio|TPU|tpu)[^\n]{0,200}(?:Device or resource busy|No such device)"
    rb"|libtpu_lockfile[^\n]{0,200}(?:[Pp]ermission denied|held|locked)"
)


def main(arguments: list[str]) -> None:
    """
    Pairs: the order. The answer, one line, goes into the order's pipe `ack` in the run's folder: started, alive, over,
    stopped, busy RUN, or chips REASON.
    """
    order = files.read_pairs(arguments)
    base = processes.home()
    folder = os.path.join(base, order["token"])
    signal.signal(SIGHUP, signal.SIG_IGN)
    signal.signal(SIGINT, signal.SIG_IGN)
    lock = os.open(processes.lock_path(base), os.O_RDWR | os.O_CREAT, 0o600)
    answer = _refusal(base, folder, order, lock)
    if answer:
        _acknowledge(os.path.join(folder, order["ack"]), answer)
        return
    os.set_inheritable(lock, True)
    os.ftruncate(lock, 0)
    os.pwrite(lock, order["token"].encode(), 0)
    runner = Runner(base, folder, order)
    _acknowledge(os.path.join(folder, order["ack"]), "started")
    try:
        runner.go()
    except Exception as error:
        # No exit file: the run counts as lost, since its end is unknown.
        runner.note(f"the runner failed: {error!r}")
        runner.end_everything(0.0)
        raise
    os._exit(0)


def _refusal(base: str, folder: str, order: dict[str, str], lock: int) -> str:
    """The answer that refuses this run, or an empty text."""
    token, worker = order["token"], int(order["worker"])
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = processes.lock_token(base)
            if holder == token:
                return "alive"
            if time.monotonic() > deadline:
                return f"busy {holder}"
            time.sleep(0.01)
    if os.path.exists(os.path.join(folder, "exit")):
        return "over"
    if os.path.exists(os.path.join(folder, "stopped")):
        return "stopped"
    # Processes with the inherited lock were found above; this finds those that closed their descriptors.
    others = [name for name in processes.run_tokens(base) if name != token]
    if processes.marked(others, worker):
        return f"busy {processes.lock_token(base)}"
    for pid, device in processes.chip_holders().items():
        return f"chips process {pid} holds {device}"
    processes.drop_libtpu_lock()
    return ""


def _acknowledge(pipe: str, answer: str) -> None:
    """Write one line into the launch script's pipe; its reader may be gone."""
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(handle, answer.encode() + b"\n")
        os.close(handle)
        os.unlink(pipe)
    except OSError:
        pass


class Runner:
    """The state of the run, and its one loop (`_turn`)."""

    def __init__(self, base: str, folder: str, order: dict[str, str]) -> None:
        self._base, self._folder, self._order = base, folder, order
        self._phases = order["phases"].split(",")
        self._state: dict[str, str | int | float | bool] = {"phase": self._phases[0], "pid": os.getpid()}
        self._state.update(signalled=False, preempted=False, maintenance="", at=time.time())
        self._log = files.BoundedLog(folder, int(order["log_bytes"]))
        self._main: int | None = None
        self._restorer: int | None = None
        self._prefetcher: int | None = None
        self._key = ""
        self._status: int | None = None
        self._childless = False
        self._stop_asked = False
        self._stop_at: float | None = None
        self._termed = False
        self._maintained_at: float | None = None
        self._news: list[tuple[str, str]] = []
        self._output, self._input = os.pipe()
        self._wake, self._waker = os.pipe()
        for handle in (self._output, self._wake, self._waker):
            os.set_blocking(handle, False)
        self._screen = _screen_output()
        self._save_state()

    # --- the phases ---

    def _enter(self, phase: str) -> None:
        self._state.update(phase=phase, at=time.time())
        self._save_state()

    def go(self) -> None:
        self._prepare()
        self._begin_restore()
        self._begin_prefetch()
        phase, status, began = "", 0, 0.0
        for phase in self._phases:
            if phase == "setup" and self._setup_is_done():
                self.note("setup was done on this node before; skipped")
                continue
            if self._stop_asked:
                break
            self._enter(phase)
            began = time.monotonic()
            if phase == "setup" and self._is_restored():
                self._end_setup("restored", began)
                continue
            if self._stop_asked:
                break
            status = self._supervise(phase)
            if status:
                break
            if phase == "setup":
                self._end_setup("made", began)
            elif phase == "fetch":
                self._state["fetch_seconds"] = round(time.monotonic() - began, 1)
        self._end_stragglers()
        if phase == "run" and status and time.monotonic() - began < UNPROVEN_SECONDS:
            self._doubt_environment()
        self._publish(phase, status)

    def _doubt_environment(self) -> None:
        """A run that fails early in a restored environment may fail for it: the next one on this node sets up."""
        if self._state.get("environment") == "restored" and not self._state["signalled"]:
            files.write_whole(os.path.join(self._base, "work.setup"), "the restored environment is not trusted")

    def _end_setup(self, environment: str, began: float) -> None:
        """*environment*: `restored` from an archive, or `made` by the set-up."""
        files.write_whole(os.path.join(self._base, "work.setup"), self._setup_key())
        self._state["environment"] = environment
        self._state["setup_seconds"] = round(time.monotonic() - began, 1)
        if environment == "made" and self._key and self._order["worker"] == "0":
            self._spawn_environment("save")

    def _begin_restore(self) -> None:
        """Fetch and unpack the environment beside the fetch of the code, on a node without a set-up."""
        if self._order.get("archive_key") and not files.read_text(os.path.join(self._base, "work.setup")):
            self._restorer = self._spawn_environment("restore")

    def _begin_prefetch(self) -> None:
        """Copy the newest checkpoint to this host, beside fetch and set-up."""
        if self._order.get("prefetch"):
            # Of an earlier run: a step may have been saved anew since.
            files.remove(self._prefetch_state)
            pairs = [f"base={self._base}", f"checkpoint={self._order['checkpoint']}"]
            self._prefetcher = self._spawn_tool("prefetch", pairs)

    @property
    def _prefetch_state(self) -> str:
        return os.path.join(self._base, "prefetch", "state")

    def _spawn_environment(self, verb: str) -> int:
        pairs = [f"{name}={value}" for name, value in self._order.items()]
        return self._spawn_tool("environment", [f"do={verb}", f"folder={self._folder}", f"key={self._key}", *pairs])

    def _spawn_tool(self, tool: str, pairs: list[str]) -> int:
        """Run another tool beside the job; it is a process of the run, and ends with it."""
        tools = os.path.dirname(os.path.abspath(__file__))
        code = f"import sys; sys.path.insert(0, sys.argv[1]); __import__({tool!r}).main(sys.argv[2:])"
        command = [sys.executable, "-I", "-S", "-c", code, tools, *pairs]
        return self._spawn(sys.executable, command)

    def _spawn(self, program: str, command: list[str]) -> int:
        """Start a process in a session of its own, with nothing to read; what it prints goes into the log."""
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, self._input, 1),
            (os.POSIX_SPAWN_DUP2, self._input, 2),
        ]
        reset = [SIGPIPE, SIGHUP, SIGINT, SIGTERM]
        return os.posix_spawn(program, command, self._env, file_actions=actions, setsid=True, setsigdef=reset)

    def _is_restored(self) -> bool:
        """Wait for the end of the restore, and move the environment into the job's folder."""
        if not self._order.get("cache"):
            return False
        while self._restorer is not None:
            self._turn(self._patience())
            if self._stop_asked:
                return False
        import environment

        try:
            # Now, since the set-up may make or change the files that it depends on.
            self._key = environment.key_of(self._base, self._folder, self._order)
        except (OSError, environment.Refused) as error:
            self.note(f"the environment is not kept: {error}")
        if not self._order.get("archive_key"):
            return False
        problem = environment.adopt(self._base, self._folder, self._order, self._key)
        self._state["missed"] = problem[:200]
        how = files.read_text(os.path.join(self._folder, "restored"), 200)
        self.note(f"the set-up runs: {problem}" if problem else f"environment restored ({how[3:]}); setup skipped")
        return not problem

    def note(self, text: str) -> None:
        self._write(b"[tpucare: %s]\n" % text.encode(errors="replace"))

    def _prepare(self) -> None:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(SIGTERM, self._asked_to_stop)
        signal.signal(SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        os.makedirs(os.path.join(self._base, "work"), exist_ok=True)
        files.write_whole(os.path.join(self._folder, files.RESERVE), "\0" * RESERVE_BYTES)
        self._env = self._environment()
        processes.prune_runs(self._base, self._order["token"])
        _thread.start_new_thread(self._watch_outside, ())

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **files.read_environment(self._folder)}
        env.pop(processes.LAUNCH, None)
        env["TPUCARE_RUN"] = self._order["token"]
        env["TPUCARE_WORKER"] = self._order["worker"]
        env["TPUCARE_NOTICE"] = os.path.join(self._folder, "notice")
        if self._order.get("prefetch"):
            env["TPUCARE_PREFETCH"] = os.path.dirname(self._prefetch_state)
        env["TPUCARE_CADENCE"] = os.path.join(self._folder, files.CADENCE)
        if self._order.get("commit"):
            env["TPUCARE_COMMIT"] = self._order["commit"]
        return env

    # --- one phase ---

    def _supervise(self, phase: str) -> int:
        """Run the script of *phase* to its end. Returns its exit status, 128 + n if signal n ended it."""
        if phase == "fetch" and self._order.get("error"):
            self.note(self._order["error"])
            return 1
        if phase == "setup":
            files.remove(os.path.join(self._base, "work.setup"))
        script = os.path.join(self._folder, f"{phase}.sh")
        self._status = None
        self._childless = False
        self._main = self._spawn("/bin/bash", ["bash", script])
        while self._status is None:
            self._turn(self._patience())
            if self._stop_asked:
                self._stop()
        self._drain()
        return self._status

    def _stop(self) -> None:
        """First SIGTERM to the job's process group, after the grace SIGKILL to all processes of the run."""
        now = time.monotonic()
        if self._stop_at is None:
            self._stop_at = now + self._grace()
            self._term()
        elif now >= self._stop_at:
            self._kill_all()

    def _term(self) -> None:
        if not self._termed and self._main is not None:
            self._termed = True
            self._state["signalled"] = True
            self._save_state()
            _signal_group(self._main, SIGTERM)
            self._term_below_sudo()

    def _term_below_sudo(self) -> None:
        """SIGTERM for other users' processes in the main group (`sudo python3 train.py`), which killpg cannot reach."""
        below = self._below()
        others = [pid for pid, (_, group) in below.items() if group == self._main and processes.is_anothers(pid)]
        for pid in others:
            parent = below[pid][0]
            # sudo passes the signal on to its command; a second signal would interrupt the saving.
            if parent not in others or not processes.is_sudo(parent):
                processes.send(pid, SIGTERM)

    def _patience(self) -> float:
        """Seconds for which the loop may sleep."""
        if self._stop_at is None:
            return 3600.0
        return max(SWEEP_SECONDS, self._stop_at - time.monotonic())

    def _grace(self) -> float:
        asked = files.read_text(os.path.join(self._folder, "stopped"), 32).strip()
        try:
            return min(float(asked), 3600.0)
        except ValueError:
            return float(self._order["grace"])

    def _setup_key(self) -> str:
        source = files.read_text(os.path.join(self._base, "work.source"))
        return f"{self._order['setup_key']} {source}"

    def _setup_is_done(self) -> bool:
        return files.read_text(os.path.join(self._base, "work.setup")) == self._setup_key()

    # --- the loop ---

    def _turn(self, timeout: float) -> None:
        """Wait for output, a child's end, a signal or news, and handle all of them."""
        select.select([self._output, self._wake], [], [], timeout)
        self._read(self._wake)
        self._copy()
        self._reap()
        while self._news:
            self._handle_news(*self._news.pop(0))

    def _copy(self) -> bool:
        data = self._read(self._output)
        self._write(data)
        return bool(data)

    def _drain(self) -> None:
        while self._copy():
            pass

    @staticmethod
    def _read(handle: int) -> bytes:
        try:
            return os.read(handle, 1 << 18)
        except BlockingIOError:
            return b""

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._log.write(data)
        # The screen session shows the output, too; a terminal that is too slow misses some.
        if self._screen is not None and len(data) <= 1 << 14:
            _offer(self._screen, data.replace(b"\n", b"\r\n"))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                return
            if pid == self._restorer:
                self._restorer = None
            if pid == self._prefetcher and not files.read_text(self._prefetch_state).startswith(("done ", "failed ")):
                files.write_whole(self._prefetch_state, "failed it was ended")
            if pid == self._main:
                self._status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def _asked_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    # --- the metadata server and the bucket ---

    def _watch_outside(self) -> None:
        """On a thread of its own. It begins late: its imports take longer than the rest of a start."""
        time.sleep(float(self._order["watch_after"]))
        import metadata

        for entry in ("preempted", "maintenance-event"):
            metadata.watch(entry, self._add_news)
        if self._order["checkpoint"].startswith("gs://") and self._order["worker"] == "0":
            import checkpoints

            checkpoints.watch(self._order["checkpoint"], os.path.join(self._folder, "checkpoint"))

    def _add_news(self, entry: str, value: str) -> None:
        """On the watch's thread: hand the news to the loop."""
        self._news.append((entry, value))
        _offer(self._waker, b"\0")

    def _handle_news(self, entry: str, value: str) -> None:
        if entry == "preempted" and value.upper() == "TRUE":
            self._state.update(preempted=True, signalled=True)
            self._notice("preempted: the cloud takes this machine back; save now")
            if self._order["sigterm_on_preemption"] == "1" and self._state["phase"] == "run":
                self._term()
        elif entry == "maintenance-event":
            event = "" if value.upper() in ("", "NONE") else value[:100]
            if self._state["maintenance"] and not event:
                self._maintained_at = time.monotonic()
            self._state["maintenance"] = event
            if event:
                self._notice(f"{files.MAINTENANCE}{event}")
        self._save_state()

    def _is_maintained(self) -> bool:
        """True during a maintenance and shortly after: then an exit may be its effect; days later it is not."""
        over = self._maintained_at
        return bool(self._state["maintenance"]) or (
            over is not None and time.monotonic() - over < MAINTENANCE_COUNTS_SECONDS
        )

    def _notice(self, text: str) -> None:
        self.note(f"notice: {text}")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            with open(os.path.join(self._folder, "notice"), "a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {text}\n")
        except OSError as error:
            self.note(f"the notice could not be written: {error}")

    def _save_state(self) -> None:
        files.write_whole(os.path.join(self._folder, "phase"), files.to_json(self._state))

    # --- the end ---

    def _end_stragglers(self) -> None:
        """
        SIGTERM, later SIGKILL, for the processes that survive the main process. A job that was asked to stop has the
        rest of its grace: `bash run.sh` dies of SIGTERM at once, while the training below it is still saving.
        """
        self._turn(0)
        if self._childless:
            return
        if self._termed and self._stop_at is None:
            self._stop_at = time.monotonic() + self._grace()
        left = self._stop_at - time.monotonic() if self._stop_at is not None else STRAGGLER_GRACE_SECONDS
        group = self._main if self._termed else None
        for pid, (_, own_group) in self._below().items():
            if own_group != group:
                processes.send(pid, SIGTERM)
        self.end_everything(max(left, 1.0))

    def end_everything(self, grace: float) -> None:
        """Wait *grace* seconds for all children to end, then SIGKILL until none is left, for at most two minutes."""
        now = time.monotonic()
        kill_at, give_up_at = now + grace, now + grace + KILL_SECONDS
        self._reap()
        while not self._childless and time.monotonic() < give_up_at:
            if time.monotonic() >= kill_at:
                self._kill_all()
            self._turn(SWEEP_SECONDS)
        if not self._childless:
            # They hold the inherited lock, so the run still counts as alive.
            self.note(f"processes survive SIGKILL: {sorted(self._below())}")
        self._drain()

    def _below(self) -> dict[int, tuple[int, int]]:
        alive = processes.table()
        return {pid: alive[pid] for pid in processes.descendants([os.getpid()], alive)}

    def _kill_all(self) -> None:
        for pid in self._below():
            processes.send(pid, SIGKILL)

    def _publish(self, phase: str, status: int) -> None:
        """Write the exit file, once no process is left. On a full disk it uses the reserve, then waits for space."""
        signalled = (
            bool(self._state["signalled"])
            or self._stop_asked
            or self._is_maintained()
            or files.was_asked_to_end(self._folder)
        )
        failure = self._failure(phase, status, signalled)
        self.note(f"{phase} ended with status {status}" + (f" ({failure})" if failure else ""))
        result = {
            # First, since a probe compares the beginning of the file.
            "status": status,
            **self._state,
            "phase": phase,
            "failure": failure,
            "signalled": signalled,
            "at": time.time(),
            "detail": self._order["error"] or ("" if phase == "run" else f"in its {phase} phase"),
        }
        while not files.write_whole(os.path.join(self._folder, "exit"), files.to_json(result), durable=True):
            time.sleep(1.0)

    def _failure(self, phase: str, status: int, signalled: bool) -> str:
        if status == 0:
            return ""
        end = files.log_end(self._folder)
        _, tail = files.read_log(self._folder, max(0, end - TAIL_BYTES), end)
        if b"No space left on device" in tail or self._log.disk_was_full or _disk_is_full(self._base):
            return "disk-full"
        if phase != "run":
            return phase
        import re

        if not signalled and re.search(DIRTY_HOST, tail):
            return "dirty-host"
        return "crash"


def _offer(handle: int, data: bytes) -> None:
    """Write as much as a descriptor accepts without blocking; `contextlib.suppress` would cost an import."""
    try:  # noqa: SIM105
        os.write(handle, data)
    except OSError:
        pass


def _signal_group(leader: int, number: int) -> None:
    try:  # noqa: SIM105  (`contextlib` would cost an import)
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass


def _screen_output() -> int | None:
    """A new descriptor of the screen window, so that O_NONBLOCK does not affect other processes."""
    try:
        return os.open("/dev/tty", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _disk_is_full(path: str) -> bool:
    for place in (path, os.environ.get("TMPDIR", "/tmp")):
        try:
            room = os.statvfs(place)
        except OSError:
            continue
        if room.f_bavail * room.f_frsize < DISK_FULL_BYTES:
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
