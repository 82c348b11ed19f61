"""
Answers of workers, read strictly: they come from machines that run other people's code.

Pure. Every field has a type and a limit; an answer with one wrong field raises `MalformedAnswer` as a whole. The other
side of the protocol is in `templates/worker/probe.py`, `stop.py` and `runner.py`.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tpucare.model.errors import CommandFailed, RemoteError
from tpucare.model.resources import Ran
from tpucare.model.runs import Archive, Contact, Failure, ForeignRun, Phase, Preparation, WorkerReport
from tpucare.model.text import plain

TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.\d{1,9}")
BOOT_ID = re.compile(r"[0-9a-f-]{1,64}")
DETAIL_LIMIT = 500
_GIT_ASIDES = ("warning:", "hint:", "cloning into", "note:")
_GIT_PREFIXES = ("fatal: ", "remote: ", "error: ")
NUMBER_LIMIT = 10**18
SECONDS_LIMIT = 10**6

_DIGEST = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(rb"^commit ([0-9a-f]{40}|[0-9a-f]{64})$", re.MULTILINE)


class MalformedAnswer(RemoteError):
    """The worker ran our command and printed a text that is not an answer to it."""


class ToolsMissing(Exception):
    """The worker has a tpucare folder without the tools of this version."""


@dataclass(frozen=True, slots=True)
class LogNews:
    """New bytes of the log of run *token*, which begin at offset *start*."""

    token: str
    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    report: WorkerReport
    log: LogNews | None = None


def read_probe(ran: Ran) -> ProbeAnswer:
    """Raises: ToolsMissing, MalformedAnswer."""
    fields = _object(ran)
    boot_id = _text(fields, "boot_id", 64)
    report = WorkerReport(Contact.ANSWERED, boot_id=boot_id if BOOT_ID.fullmatch(boot_id) else "")
    if fields.get("fresh") is True:
        return ProbeAnswer(report)
    report = replace(
        report,
        token=_token(fields, "token"),
        alive=_flag(fields, "alive"),
        chips_free=_flag(fields, "chips_free"),
        last_number=_number(fields, "last_number") or 0,
        detail=one_line(_text(fields, "detail", 10_000)),
    )
    return (
        ProbeAnswer(_of_run(report, fields), _log_news(_part(fields, "log"))) if report.token else ProbeAnswer(report)
    )


def read_stop(ran: Ran) -> bool:
    """True: no run and chips free. Raises: ToolsMissing, MalformedAnswer."""
    fields = _object(ran)
    return fields.get("fresh") is True or _flag(fields, "quiet")


def read_start(ran: Ran, name: str) -> CommandFailed | None:
    """
    None if the run holds the worker *name* now: started, found running, or over already (a probe reports that).

    The answer comes from the runner, after it took the lock.
    """
    word, _, rest = one_line(_last_line(ran).decode(errors="replace")).partition(" ")
    if ran.exit_status:
        return failed(ran, f"{name}: the launch failed")
    return None if word in ("started", "alive", "over") else _refusal(word, rest, name)


def _refusal(word: str, rest: str, name: str) -> CommandFailed:
    reasons = {
        "busy": f"run {rest or 'of unknown name'} lives there",
        "chips": f"its chips are not free: {rest}",
        "stopped": "this run was stopped before it began; a relaunch needs a new number",
        "silent": f"the runner did not start: {rest or 'no word from it'}",
    }
    return CommandFailed(f"{name}: {reasons.get(word, f'unknown answer {word!r}')}", 75, rest)


def read_claim(ran: Ran, name: str) -> tuple[CommandFailed | None, bool, bool]:
    """
    The answer of a worker *name* to a claim for a foreign run: the problem, or None; True if that run's setup is over
    there; True if a run of this node was prepared before. Raises: ToolsMissing, MalformedAnswer.
    """
    fields = _object(ran)
    if fields.get("fresh") is True:
        raise ToolsMissing
    word, rest = _text(fields, "claim", 20), one_line(_text(fields, "rest", 1000))
    problem = None if word in ("started", "alive") else _refusal(word, rest, name)
    return problem, _text(fields, "phase", 20) == Phase.RUN, _flag(fields, "created")


def read_commit(ran: Ran) -> str:
    """The commit of the resolved branch; empty if that failed."""
    found = _COMMIT.findall(ran.stdout[-4096:])
    return found[-1].decode() if found and ran.exit_status == 0 else ""


def failed(ran: Ran, what: str) -> CommandFailed:
    """The error of a command that exited non-zero, with its last line on stderr."""
    lines = [line for line in ran.stderr[-4096:].decode(errors="replace").splitlines() if line.strip()]
    tail = one_line(lines[-1]) if lines else ""
    return CommandFailed(f"{what}: {tail or f'exit status {ran.exit_status}'}", ran.exit_status, tail)


def git_failed(ran: Ran, secrets: Collection[str]) -> str:
    """
    Why a repository or branch was not found, from the first relevant line of git: the last ones are general advice.

    secrets: names of the job's secrets
    """
    lines = [line.strip() for line in ran.stderr[-4096:].decode(errors="replace").splitlines() if line.strip()]
    relevant = [line for line in lines if not line.lower().startswith(_GIT_ASIDES)] or lines
    if not relevant:
        return f"git ended with status {ran.exit_status}"
    text = relevant[0]
    for prefix in _GIT_PREFIXES:
        text = text.removeprefix(prefix)
    is_gits = any(line.startswith("fatal: ") for line in lines)
    private = is_gits and not {"GIT_TOKEN", "GIT_SSH_KEY"} & set(secrets)
    return one_line(text) + (" (private? name GIT_TOKEN or GIT_SSH_KEY in job.secrets)" if private else "")


def one_line(text: str) -> str:
    """*text* as one line of at most DETAIL_LIMIT characters, without control sequences of terminals."""
    return plain(text[: 4 * DETAIL_LIMIT])[:DETAIL_LIMIT]


def _of_run(report: WorkerReport, fields: Mapping[str, object]) -> WorkerReport:
    """*report* with the run's own files: its state, and its exit if it has ended."""
    state, ended = _part(fields, "state") or {}, _part(fields, "exit")
    report = replace(
        report,
        phase=_phase(_text(state, "phase", 20)),
        signalled=_flag(fields, "told") or _flag(state, "signalled"),
        preempted=_flag(state, "preempted"),
        maintenance=one_line(_text(state, "maintenance", 200)),
        step=_number(fields, "step"),
        checkpoint=_number(fields, "checkpoint"),
        log_bytes=_number(fields, "log_bytes") or 0,
        cadence_seconds=_seconds_in(_text(fields, "cadence", 1000), "interval_seconds"),
        save_seconds=_seconds_in(_text(fields, "saves", 1000), "save_seconds"),
        preparation=_preparation(state, _flat(_text(fields, "archive", 2000))),
    )
    if "seen" in fields:
        report = replace(report, foreign=_foreign(fields))
    if ended is None:
        return report
    status = _number(ended, "status")
    return replace(
        report,
        phase=Phase.EXITED,
        exit_status=status,
        failure=_failure(_text(ended, "failure", 40), status),
        signalled=report.signalled or _flag(ended, "signalled"),
        detail=report.detail or one_line(_text(ended, "detail", 10_000)),
    )


def _foreign(fields: Mapping[str, object]) -> ForeignRun:
    return ForeignRun(_flag(fields, "seen"), _flag(fields, "rebooted"), status=_number(fields, "ended_with"))


def _seconds_in(text: str, key: str) -> float | None:
    """A length in a small JSON file; None for any other content."""
    return _seconds(_flat(text), key)


def _flat(text: str) -> Mapping[str, object]:
    """A small JSON file of a run; empty for any other content, since the job may write what it likes there."""
    try:
        fields = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _seconds(fields: Mapping[str, object], key: str) -> float | None:
    value = fields.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= SECONDS_LIMIT:
        return None
    return float(value)


def _preparation(state: Mapping[str, object], stored: Mapping[str, object]) -> Preparation:
    refused = stored.get("refused")
    return Preparation(
        environment=one_line(_text(state, "environment", 20)),
        fetch_seconds=_seconds(state, "fetch_seconds"),
        setup_seconds=_seconds(state, "setup_seconds"),
        missed=one_line(_text(state, "missed", 1000)),
        refused=one_line(refused) if isinstance(refused, str) else "",
        archive=_archive(stored),
    )


def _archive(stored: Mapping[str, object]) -> Archive | None:
    scope, key, sha256, size = (stored.get(name) for name in ("scope", "key", "sha256", "bytes"))
    if not (isinstance(scope, str) and isinstance(key, str) and isinstance(sha256, str) and isinstance(size, int)):
        return None
    if not all(map(_DIGEST.fullmatch, (scope, key, sha256))) or not 0 < size <= NUMBER_LIMIT:
        return None
    return Archive(scope, key, sha256, size)


def _phase(word: str) -> Phase:
    return Phase(word) if word in (Phase.FETCH, Phase.SETUP, Phase.RUN) else Phase.NONE


def _failure(word: str, status: int | None) -> Failure:
    if not status:
        return Failure.NONE
    return Failure(word) if word in set(Failure) else Failure.CRASH


def _log_news(fields: Mapping[str, object] | None) -> LogNews | None:
    if fields is None:
        return None
    try:
        data = binascii.a2b_base64(_text(fields, "data", 1 << 23), strict_mode=True)
    except ValueError as error:
        raise MalformedAnswer(f"log: {error}") from None
    token = _token(fields, "token")
    return LogNews(token, _number(fields, "start") or 0, data) if token and data else None


def _part(fields: Mapping[str, object], key: str) -> Mapping[str, object] | None:
    part = fields.get(key)
    if part is not None and not isinstance(part, dict):
        raise MalformedAnswer(f"{key} is not an object")
    return part


def _object(ran: Ran) -> Mapping[str, object]:
    if ran.exit_status:
        raise MalformedAnswer(str(failed(ran, "the worker's tool failed")))
    if ran.truncated:
        raise MalformedAnswer("the answer is too long")
    try:
        fields = json.loads(_last_line(ran))
    except (ValueError, RecursionError):
        raise MalformedAnswer("the answer is not JSON") from None
    if not isinstance(fields, dict):
        raise MalformedAnswer("the answer is not an object")
    if fields.get("tools") is False:
        raise ToolsMissing
    return fields


def _last_line(ran: Ran) -> bytes:
    """The answer. Lines before it come from start-up files of the login shell: bash reads ~/.bashrc under sshd."""
    return ran.stdout.strip().rpartition(b"\n")[2]


def _text(fields: Mapping[str, object], key: str, limit: int) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str) or len(value) > limit:
        raise MalformedAnswer(f"{key} is not a text of at most {limit} characters")
    return value


def _token(fields: Mapping[str, object], key: str) -> str:
    token = _text(fields, key, 200)
    if token and not TOKEN.fullmatch(token):
        raise MalformedAnswer(f"{key} is not a run token")
    return token


def _flag(fields: Mapping[str, object], key: str) -> bool:
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise MalformedAnswer(f"{key} is neither true nor false")
    return value


def _number(fields: Mapping[str, object], key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= NUMBER_LIMIT:
        raise MalformedAnswer(f"{key} is not a number")
    return value
