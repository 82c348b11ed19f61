"""
State of this worker as one line of JSON: run, phase, exit, chips, newest checkpoint, step, and the log's new bytes.

It runs every few seconds over a kept connection, so it has to be fast: slow modules are imported only when needed, and
for a healthy run it reads the lock and a few small files, whose JSON goes into the answer unchanged. It writes only the
findings of `foreign` about runs that the runner did not start, and how often the run should save, where the question
says that anew. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import binascii
import os
import sys

import files
import processes

MATCH_BYTES = 1 << 18
OVERLAP_BYTES = 1 << 12
MATCH_SECONDS = 1
CADENCE_BYTES, ARCHIVE_BYTES = 400, 1000


def main(arguments: list[str]) -> None:
    """
    Pairs: `worker`; `token` and `offset`: end of the caller's copy of the log; `bytes`: limit of the log's new bytes,
    `failed_bytes`: the same for a failed run; `progress` (a pattern), `checkpoint` (a path), `rescan` (1: search old
    lines for a step, too); `settled` (the foreign run whose setup is over); `cadence` (new content of that file of the
    run `run`; empty: it stays).
    """
    question = files.read_pairs(arguments)
    base = processes.home()
    tokens = processes.run_tokens(base)
    holds = processes.lock_token(base)
    # A folder that was pushed and never started is not a run; the lock's last holder is.
    token = holds if holds in tokens else ""
    folder = os.path.join(base, token) if token else ""
    worker = int(question["worker"])
    foreign = processes.is_foreign(base, token)
    answer = {
        "token": token,
        "last_number": processes.run_number(tokens[-1]) if tokens else 0,
        "boot_id": files.read_text("/proc/sys/kernel/random/boot_id", 64).strip(),
        # Before the run's files: a run that is dead here has written its last file.
        **(_of_foreign(base, token, worker, question["settled"]) if foreign else _presence(base, worker)),
    }
    parts = [files.to_json(answer)[1:-1]]
    if token:
        parts += _of_run(base, token, folder, question)
    print("{" + ", ".join(parts) + "}")


def _presence(base: str, worker: int) -> dict[str, str | int | bool]:
    """While the lock is held the chips count as the run's: a search for other holders would only take time."""
    if processes.lock_is_held(base):
        return {"alive": True, "chips_free": False, "detail": ""}
    holders = processes.chip_holders()
    rest = processes.living(base, worker)
    detail = "; ".join(f"process {pid} holds {device}" for pid, device in sorted(holders.items())[:4])
    if rest:
        detail = f"processes without a runner: {sorted(rest)[:8]}"
    return {"alive": bool(rest or holders), "chips_free": not holders, "detail": detail}


def _of_foreign(base: str, token: str, worker: int, settled: str) -> dict[str, str | int | bool | None]:
    """While a process of the run is alive the chips count as its own; otherwise their holder is in the way."""
    from foreign import inspect_run

    alive, fields = inspect_run(base, token, worker, settled)
    rest = alive or processes.living(base, worker)
    holders = {} if rest else processes.chip_holders()
    detail = "; ".join(f"process {pid} holds {device}" for pid, device in sorted(holders.items())[:4])
    return {**fields, "alive": bool(rest or holders), "chips_free": not rest and not holders, "detail": detail}


def _of_run(base: str, token: str, folder: str, question: dict[str, str]) -> list[str]:
    state = files.read_text(os.path.join(folder, "phase"))
    ended = files.read_text(os.path.join(folder, "exit"))
    failed = bool(ended) and not ended.startswith('{"status": 0,')
    known = question["token"] == token
    cadence = os.path.join(folder, files.CADENCE)
    if question["cadence"] and question["run"] == token:
        files.write_whole(cadence, question["cadence"])
    # Read once: a line that is written between two reads must not count as reported.
    end = files.log_end(folder)
    more = {
        "told": files.was_asked_to_end(folder),
        "step": _step(folder, question, int(question["offset"]) if known else 0, end),
        "checkpoint": _checkpoint(base, folder, question["checkpoint"]),
        "log_bytes": end,
        # As texts: the run may have written anything there.
        "cadence": files.read_text(cadence, CADENCE_BYTES),
        "saves": files.read_text(os.path.join(folder, files.SAVES), CADENCE_BYTES),
        "archive": files.read_text(os.path.join(folder, files.ARCHIVE), ARCHIVE_BYTES),
    }
    log = files.to_json(_news(base, token, end, question, failed))
    return [f'"state": {state or "null"}', f'"exit": {ended or "null"}', f'"log": {log}', files.to_json(more)[1:-1]]


def _checkpoint(base: str, folder: str, path: str) -> int | None:
    if "://" in path:
        seen = files.read_text(os.path.join(folder, "checkpoint"), 32)
        return int(seen) if seen.isdigit() else None
    # A relative path starts at the job's folder.
    return files.newest_checkpoint(os.path.join(base, "work", path)) if path else None


def _news(base: str, token: str, end: int, question: dict[str, str], failed: bool) -> dict[str, str | int]:
    """New bytes of the log; after a new run first the unread rest of the caller's run."""
    before, offset = question["token"], int(question["offset"])
    if before != token:
        end_before = files.log_end(os.path.join(base, before)) if processes.run_number(before) >= 0 else 0
        token, offset, end = (before, offset, end_before) if end_before > offset else (token, 0, end)
    folder = os.path.join(base, token)
    most = int(question["failed_bytes" if failed else "bytes"])
    start, data = files.read_log(folder, max(offset, end - most), end)
    return {"token": token, "start": start, "data": binascii.b2a_base64(data, newline=False).decode()}


def _step(folder: str, question: dict[str, str], offset: int, end: int) -> int | None:
    """The step of the last match of the progress pattern in whole lines of the log since *offset*; None: no new one."""
    rescan = question["rescan"] == "1"
    if not question["progress"] or (end <= offset and not rescan):
        return None
    begin = 0 if rescan else offset - OVERLAP_BYTES
    _, data = files.read_log(folder, max(0, begin, end - MATCH_BYTES), end)
    whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
    return _match_apart(question["progress"], whole) if whole else None


def _match_apart(pattern: str, data: bytes) -> int | None:
    """Match in a child process with a timer: some patterns never end, and only a signal's death interrupts `re`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _match(pattern, data, writer)
        finally:
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 32).decode(errors="replace")
    os.waitpid(child, 0)
    return _count(text)


def _count(text: str) -> int | None:
    """The number in `450`, or in `1.2k`, as progress bars shorten it; None for any other text."""
    if text.isascii() and text.isdigit():
        return int(text)
    scale = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower())
    whole, _, part = text[:-1].partition(".")
    if scale is None or not (whole + part).isascii() or not whole.isdigit() or not (part or "0").isdigit():
        return None
    return int(float(f"{whole}.{part or 0}") * scale + 0.5)


def _match(pattern: str, data: bytes, writer: int) -> None:
    import re
    import signal

    # CPU time, not wall time: on a busy machine a wall-clock alarm would lose the step of a good pattern.
    signal.setitimer(signal.ITIMER_PROF, MATCH_SECONDS)
    last = None
    for match in re.finditer(pattern, data.decode(errors="replace")):
        last = match
    if last is not None:
        # In a pattern with alternatives only the matching one has a group.
        text = next((group for group in last.groups() if group is not None), last.group(0))
        os.write(writer, (text or "").encode()[:18])


if __name__ == "__main__":
    main(sys.argv[1:])
