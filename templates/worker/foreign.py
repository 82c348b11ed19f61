"""
Runs that tpucare's runner did not start (those of `start_fn`): claiming a worker for them, and finding their processes.

A run consists of the processes that a user's function started: those with its token in their environment, their
descendants, and the sessions of screen or tmux that they made. Findings are saved in the run's folder, so that they
survive the probe. The exit status is known only if the script of `exec_command` left one for this run, with the last
content of its screen; otherwise there is none.

In a run's folder: `foreign` (sessions that existed before it, and the boot of its launch), `sessions` (its own),
`phase`, `seen` (a process of it was alive after its setup), `log.0` (the last content of its screen). Standard library
only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys

import files
import processes
import sessions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD, OWN, SEEN, PHASE = "foreign", "sessions", "seen", "phase"
# Folder and files of `exec_model.sh.j2`, beside our own folder. `exit` has a line with the status and one with the run.
MODEL, EXIT, SCREEN = ".tpucare-model", "exit", "screen"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOCK_WAIT_SECONDS = 5.0


def main(arguments: list[str]) -> None:
    """
    Claim this worker for a run. Pairs: `worker`, `token`.

    Prints one line of JSON: `claim` (started | alive | busy | chips | stopped), `rest` (the run or process in the way),
    `phase` of a run that is there already, and `created`: a run of this node was prepared before.
    """
    question = files.read_pairs(arguments)
    base, worker, token = processes.home(), int(question["worker"]), question["token"]
    if processes.run_number(token) < 0:
        raise SystemExit(f"{token!r} is not a run token")
    lock = os.open(processes.lock_path(base), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    word, rest = ("", "") if _acquire(lock) else ("busy", processes.lock_token(base))
    if not word:
        word, rest = _claim(base, worker, token, lock)
    answer: dict[str, str | int | float | bool | None] = {
        "claim": word,
        "rest": rest,
        "phase": phase(base, token),
        "created": os.path.exists(os.path.join(base, "created")),
    }
    print(files.to_json(answer))


def _acquire(lock: int) -> bool:
    import time

    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _claim(base: str, worker: int, token: str, lock: int) -> tuple[str, str]:
    folder = os.path.join(base, token)
    if os.path.exists(os.path.join(folder, "stopped")):
        return "stopped", ""
    if processes.is_foreign(base, token) and processes.lock_token(base) == token:
        return "alive", ""
    if processes.living(base, worker):
        return "busy", processes.lock_token(base)
    for pid, device in processes.chip_holders().items():
        return "chips", f"process {pid} holds {device}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    before = {session.identity: session.name for session in sessions.listing().values()}
    files.write_whole(os.path.join(folder, PHASE), '{"phase": "setup"}')
    record = json.dumps({"before": before, "boot": _boot_id()})
    if not files.write_whole(os.path.join(folder, RECORD), record, durable=True):
        raise SystemExit("No space left on device")
    os.ftruncate(lock, 0)
    os.pwrite(lock, token.encode(), 0)
    processes.prune_runs(base, token)
    return "started", ""


def _boot_id() -> str:
    return files.read_text(BOOT_ID, 64).strip()


def phase(base: str, token: str) -> str:
    """`setup` or `run`; empty for an unknown run."""
    return str(_read(os.path.join(base, token, PHASE)).get("phase", ""))


def inspect_run(base: str, token: str, worker: int, settled: str) -> tuple[set[int], dict[str, bool | int | None]]:
    """
    Live processes of a run, and its fields of a probe's answer. New findings are saved.

    *settled*: the run whose setup is over on all workers, according to the caller.
    """
    folder = os.path.join(base, token)
    record = _read(os.path.join(folder, RECORD))
    rebooted = record.get("boot") != _boot_id()
    table = processes.table()
    bearing = processes.marked([token], worker) & set(table)
    bearing |= processes.descendants(bearing, table)
    in_setup = phase(base, token) != "run"
    own = _own_sessions(folder, record, bearing, in_setup=in_setup, rebooted=rebooted)
    roots = {pid for session in own for pid in session.roots}
    alive = (bearing | roots | processes.descendants(roots, table)) & set(table)
    alive -= processes.own_line(table)
    if in_setup and settled == token:
        files.write_whole(os.path.join(folder, PHASE), '{"phase": "run"}', durable=True)
        in_setup = False
    seen = os.path.exists(os.path.join(folder, SEEN))
    if alive and not seen and not in_setup:
        seen = files.write_whole(os.path.join(folder, SEEN), "")
    status = None if in_setup else _status(base, token)
    return alive, {"seen": seen, "rebooted": rebooted, "ended_with": status}


def _status(base: str, token: str) -> int | None:
    """The exit status that the script of `exec_command` left for this run; its screen's content becomes the log."""
    model = os.path.join(os.path.dirname(base), MODEL)
    status, _, run = files.read_text(os.path.join(model, EXIT), 512).partition("\n")
    if run.strip() != token or not (status.isascii() and status.isdigit() and len(status) < 4):
        return None
    screen, log = os.path.join(model, SCREEN), os.path.join(base, token, "log.0")
    # Only once: a run that a reboot brings back appends to the log. A full disk loses the text.
    text = files.read_text(screen, 1 << 20).strip("\n")
    if files.remove(screen) and text:
        files.write_whole(log, files.read_text(log, 1 << 20) + text + "\n")
    return int(status)


def _own_sessions(
    folder: str, record: dict[str, object], bearing: set[int], *, in_setup: bool, rebooted: bool
) -> list[sessions.Session]:
    """
    Sessions of the run: known ones; those made by one of its processes; those with a known name after a reboot; and,
    during its setup, new ones. New ones count only for tmux: processes in a screen have the marks of its maker.
    """
    path = os.path.join(folder, OWN)
    adopt = in_setup and not rebooted and not os.path.exists(os.path.join(folder, "stopped"))
    known, before = _read(path), record.get("before")
    earlier = set(before) if isinstance(before, dict) else set()
    own = []
    for session in sessions.listing().values():
        is_new = adopt and session.identity.startswith("tmux:") and session.identity not in earlier
        is_back = rebooted and session.name in known.values()
        if session.identity in known or session.roots & bearing or is_new or is_back:
            own.append(session)
    seen = {session.identity: session.name for session in own}
    if not seen.keys() <= known.keys():
        files.write_whole(path, json.dumps({**known, **seen}))
    return own


def session_processes(base: str, tokens: Iterable[str]) -> set[int]:
    """Processes of all known sessions of these runs."""
    known: set[str] = set()
    for token in tokens:
        known |= set(_read(os.path.join(base, token, OWN)))
    if not known:
        return set()
    return {pid for name, session in sessions.listing().items() if name in known for pid in session.roots}


def _read(path: str) -> dict[str, object]:
    try:
        content = json.loads(files.read_text(path, 1 << 20) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    main(sys.argv[1:])
