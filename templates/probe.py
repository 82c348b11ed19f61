"""
How this worker is, as one line of JSON: run, phase, exit, chips, newest checkpoint, step, and the log's new bytes.

Asked every few seconds over a kept connection, so it is short: what costs time is imported only when it is needed, and
a healthy run is answered from the lock and three small files. It changes nothing.
Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import binascii
import collections
import json
import os
import sys
from typing import Any

import files
import processes

MATCH_BYTES = 1 << 18
OVERLAP_BYTES = 1 << 12
MATCH_SECONDS = 1


def main(arguments: list[str]) -> None:
    """
    `QUESTION` as JSON: `worker`; `token` and `offset` of the log that the asker has; `bytes` of the log at most, and
    `failed_bytes` when the run ended badly; `progress` (a pattern), `checkpoint` (a path), `rescan`.
    """
    print(json.dumps(_answer(processes.home(), json.loads(arguments[0]))))


def _answer(base: str, question: dict[str, Any]) -> dict[str, Any]:
    tokens = processes.run_tokens(base)
    holds = processes.lock_token(base)
    # A folder that was pushed and never started is no run: the lock's last holder is.
    token = holds if holds in tokens else ""
    folder = os.path.join(base, token)
    answer = _presence(base, question["worker"], folder if token else "")
    answer["token"] = token
    answer["last_number"] = int(tokens[-1].rpartition(".")[2]) if tokens else 0
    answer["boot_id"] = files.read_text("/proc/sys/kernel/random/boot_id", 64).strip()
    if token:
        known = question.get("token") == token
        answer["step"] = _step(folder, question, int(question["offset"]) if known else 0)
        answer["checkpoint"] = _checkpoint(folder, question.get("checkpoint", ""))
        answer["log"] = _news(base, token, question, bool((answer["exit"] or {}).get("status")))
    return answer


def _presence(base: str, worker: int, folder: str) -> dict[str, Any]:
    """
    Alive or not, and what the run's files say. Read in this order: the state last, so that a run seen dead has
    published what it will ever publish.

    While the lock is held the chips count as the run's own: looking for other holders costs time and changes nothing.
    """
    alive = processes.lock_is_held(base)
    detail = ""
    if alive:
        chips_free = False
    else:
        holders = processes.chip_holders()
        chips_free = not holders
        rest = processes.living(base, worker)
        alive = bool(rest or holders)
        detail = "; ".join(f"process {pid} holds {device}" for pid, device in sorted(holders.items())[:4])
        detail = detail or (f"processes without a runner: {sorted(rest)[:8]}" if rest else "")
    state = files.read_object(os.path.join(folder, "phase")) if folder else {}
    ended = files.read_object(os.path.join(folder, "exit")) if folder else {}
    told = [name for name in ("notice", "stopped") if folder and os.path.exists(os.path.join(folder, name))]
    return {
        "alive": alive,
        "chips_free": chips_free,
        "phase": state.get("phase", ""),
        "exit": ended or None,
        "signalled": bool(told or state.get("signalled")),
        "preempted": bool(state.get("preempted")),
        "maintenance": str(state.get("maintenance", "")),
        "detail": detail or str(ended.get("detail", "")),
    }


def _checkpoint(folder: str, path: str) -> int | None:
    if "://" in path:
        seen = files.read_text(os.path.join(folder, "checkpoint"), 32)
        return int(seen) if seen.isdigit() else None
    import checkpoints

    return checkpoints.newest(path)


def _news(base: str, token: str, question: dict[str, Any], failed: bool) -> dict[str, Any]:
    """New bytes of the log; first those that are left of the run that the asker knows, when another came after it."""
    before, offset = str(question.get("token", "")), int(question["offset"])
    if before != token:
        unread = processes.TOKEN.fullmatch(before) and files.log_end(os.path.join(base, before)) > offset
        token, offset = (before, offset) if unread else (token, 0)
    folder = os.path.join(base, token)
    end = files.log_end(folder)
    most = int(question["failed_bytes"] if failed else question["bytes"])
    start, data = files.read_log(folder, max(offset, end - most), end)
    return {"token": token, "start": start, "data": binascii.b2a_base64(data, newline=False).decode()}


def _step(folder: str, question: dict[str, Any], offset: int) -> int | None:
    """The last match of the progress pattern in whole lines of the log since *offset*; None: nothing new."""
    pattern, end = question.get("progress", ""), files.log_end(folder)
    if not pattern or (end <= offset and not question.get("rescan")):
        return None
    begin = 0 if question.get("rescan") else offset - OVERLAP_BYTES
    _, data = files.read_log(folder, max(0, begin, end - MATCH_BYTES), end)
    whole = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
    return _match_apart(pattern, whole) if whole else None


def _match_apart(pattern: str, data: bytes) -> int | None:
    """Match in a child with an alarm, for some patterns never end, and nothing else interrupts `re`."""
    import re
    import signal

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(MATCH_SECONDS)
            found = collections.deque(re.finditer(pattern, data.decode(errors="replace")), maxlen=1)
            for last in found:
                text = last.group(1) if last.re.groups else last.group(0)
                os.write(writer, (text or "").encode()[:18])
        finally:
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 32).decode(errors="replace")
    os.waitpid(child, 0)
    return int(text) if text.isascii() and text.isdigit() else None


if __name__ == "__main__":
    main(sys.argv[1:])
