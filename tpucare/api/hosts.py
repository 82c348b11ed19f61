"""
The functions of the Python API that use nodes: files and commands on workers, addresses, listings.

`host` is a slot, or the name of a node. Inside a `start_fn`, and with a `Host` that a callback was given, a call acts
on exactly that attempt, and raises `NodeGone` once it is over. Elsewhere it acts on the newest living node of that name
in the project that the environment names (`session`). `deletion` has the functions that delete.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from tpucare.api.attempt import attempt_of
from tpucare.api.exec_command import NAMELESS, NETRC_SUFFIX, Command
from tpucare.api.session import OUTPUT_LIMIT, check_name, current, in_background
from tpucare.model.errors import (
    AuthRefused,
    CommandFailed,
    ConfigError,
    HostKeyChanged,
    NodeGone,
    RemoteError,
    WorkerSilent,
)
from tpucare.model.resources import Ran, Worker
from tpucare.model.text import plain, plain_lines, shown, worker_range

WorkerIndex = int | Literal["all"]
T = TypeVar("T")

# One argument of a program may have 128 KiB (Linux, MAX_ARG_STRLEN), and the command is quoted on its way.
COMMAND_LIMIT = 96 << 10
TAIL_LINES = 3
TAIL_CHARACTERS = 2000
DEAD = ("PREEMPTED", "TERMINATED")


class Reach(Protocol):
    """Access to the workers of an attempt, or of a node found by its name."""

    workers: tuple[Worker, ...]

    def run(self, worker: int, command: str, *, limit: int = ...) -> Ran: ...

    def put(self, worker: int, path: str, content: bytes, mode: int) -> None: ...


# --- files and commands ----------------------------------------------------------------------------------------------


def send_to_tpu(host: str, zone: str, filename_on_tpu: str, command: str, worker: WorkerIndex = 0) -> None:
    """
    Write *command* to a file in the login user's home on one worker, or on `"all"`: whole or not at all.

    Mode 0700 when it is a script (its first line begins with `#!`), else 0600. The W&B key of an `exec_command` is
    written to a file of mode 0600 beside the script. Folders in *filename_on_tpu* must exist.
    Raises: NodeGone, RemoteError (CommandFailed: the worker says why not), CloudError; ConfigError: bad arguments.
    """
    path = _path(filename_on_tpu)
    content = _encoded("command", command)
    mode = 0o700 if content.startswith(b"#!") else 0o600
    reach = _reach(host, zone)

    def put(number: int) -> None:
        # The key first, so that the script never lies there without it.
        if isinstance(command, Command) and command.netrc:
            _put(host, reach, number, path + NETRC_SUFFIX, command.netrc.encode(), 0o600)
        _put(host, reach, number, path, content, mode)

    _on_each(host, reach, worker, put)


def exec_on_tpu(host: str, zone: str, command: str, worker: WorkerIndex = 0) -> str:
    """
    Run *command* with bash on one worker and return what it wrote to standard output, at most 16 MiB.

    Blocks as long as the command does, without a limit. With `"all"` it runs on all workers at once, and their outputs
    are returned one after the other, in the order of the workers.
    Raises: CommandFailed: a non-zero exit status (`exit_status`), with the last lines (`stderr_tail`). NodeGone: the
    attempt is over, or no such node lives. RemoteError: a worker could not be used. CloudError, ConfigError.
    """
    text = _encoded("command", command).decode()
    if len(shlex.quote(text)) > COMMAND_LIMIT:
        raise ConfigError(f"command has more than {COMMAND_LIMIT >> 10} KiB: write it to a file with send_to_tpu")
    reach = _reach(host, zone)

    def run(number: int) -> str:
        if isinstance(command, Command) and command.netrc:
            _put(host, reach, number, NAMELESS + NETRC_SUFFIX, command.netrc.encode(), 0o600)
        return _checked(host, number, reach.run(number, text, limit=OUTPUT_LIMIT))

    outputs = _on_each(host, reach, worker, run)
    *first, last = outputs
    return "".join(text if not text or text.endswith("\n") else f"{text}\n" for text in first) + last


def tpu_ips(host: str, zone: str) -> list[str]:
    """
    Address of every worker, external where it has one. Shape: one entry per worker, index = worker number.

    Raises: NodeGone: the attempt is over, or no such node lives; WorkerSilent: no addresses are listed yet.
    """
    attempt = attempt_of(host)
    if attempt is not None and attempt.over:
        raise NodeGone(f"{attempt.node} (attempt {attempt.number} of {attempt.slot}): {attempt.why}")
    return [worker.host for worker in _reach(host, zone).workers]


# --- listings --------------------------------------------------------------------------------------------------------


def all_tpus(zone: str) -> list[dict[str, Any]]:
    """
    All nodes of *zone*, of any owner, in the JSON shape of the REST API v2 (`projects.locations.nodes`).

    `name` is the full resource name; fields with their default value are left out. Listed within the last second.
    Raises: ConfigError: no such zone or project, or no credentials; CloudError: a failed listing is never empty.
    """
    return [dict(rest) for _, rest in current().nodes(zone)]


def tpu_names(
    zone: str,
    preempted: bool = True,
    deleting: bool = False,
    unhealthy: bool = False,
    no_filter: bool = False,
    prefix: str = "",
) -> list[str]:
    """
    Names of the TPUs in *zone*: the slot for nodes that are ours, the node's own name for others. No name twice.

    preempted: also those that were preempted or terminated    deleting: also those that are being deleted; with both,
    every state    unhealthy: also those whose health is known and not good    no_filter: every node
    Raises: as `all_tpus`.
    """
    session = current()
    names = [
        session.slot_of(node)
        for node, rest in session.nodes(zone)
        if no_filter or _is_wanted(rest, preempted=preempted, deleting=deleting, unhealthy=unhealthy)
    ]
    return [name for name in dict.fromkeys(names) if name.startswith(prefix)]


def _is_wanted(rest: Mapping[str, Any], *, preempted: bool, deleting: bool, unhealthy: bool) -> bool:
    state, health = rest.get("state"), rest.get("health")
    if not unhealthy and health not in (None, "HEALTHY"):
        return False
    if preempted and deleting:
        return True
    return state is not None and (deleting or state != "DELETING") and (preempted or state not in DEAD)


# --- workers ---------------------------------------------------------------------------------------------------------


def _reach(host: str, zone: str) -> Reach:
    """The attempt of this call, wherever its node is; else the node of that name in *zone*."""
    check_name("host", host)
    return attempt_of(host) or current().reach(host, zone)


def _numbers(host: str, reach: Reach, worker: object) -> Sequence[int]:
    count = len(reach.workers)
    if worker == "all":
        return range(count)
    if isinstance(worker, str) and worker.isascii() and worker.isdecimal():
        worker = int(worker)
    if isinstance(worker, bool) or not hasattr(worker, "__index__"):
        raise ConfigError(f'worker {shown(worker)} is neither a number nor "all"')
    number = worker.__index__()
    if not 0 <= number < count:
        raise ConfigError(f"{host} has no worker {number}: {worker_range(count)}")
    return (int(number),)


def _on_each(host: str, reach: Reach, worker: object, call: Callable[[int], T]) -> list[T]:
    """Call on this thread for one worker, else for all at once. Raises: the errors of all workers as one."""
    numbers = _numbers(host, reach, worker)

    def named(number: int) -> T:
        try:
            return call(number)
        except (WorkerSilent, AuthRefused, HostKeyChanged) as error:
            # The error names an address; users know the worker by host and number.
            address = reach.workers[number].host
            raise type(error)(f"{host}, worker {number} ({address}): {error.message}") from error

    if len(numbers) == 1:
        return [named(numbers[0])]
    futures = [in_background(lambda number=number: named(number)) for number in numbers]  # type: ignore[misc]
    errors = {number: error for number, future in zip(numbers, futures, strict=True) if (error := future.exception())}
    if errors:
        raise _together(host, len(numbers), errors)
    return [future.result() for future in futures]


def _together(host: str, count: int, errors: Mapping[int, BaseException]) -> BaseException:
    first = next(iter(errors.values()))
    gone = next((error for error in errors.values() if isinstance(error, NodeGone)), None)
    others = [error for error in errors.values() if not isinstance(error, RemoteError)]
    if gone is not None or others or len(errors) == 1:
        return gone or (others[0] if others else first)
    text = f"{host}: {len(errors)} of {count} workers failed: " + "; ".join(str(error) for error in errors.values())
    failed = [error for error in errors.values() if isinstance(error, CommandFailed)]
    if len(failed) == len(errors):
        tail = "\n".join(error.stderr_tail for error in failed)[-TAIL_CHARACTERS:]
        return CommandFailed(text, failed[0].exit_status, tail)
    silent = next(error for error in errors.values() if not isinstance(error, CommandFailed))
    return type(silent)(text)


def _put(host: str, reach: Reach, number: int, path: str, content: bytes, mode: int) -> None:
    """Raises: CommandFailed: it names host and worker, as those of the other functions."""
    try:
        reach.put(number, path, content, mode)
    except CommandFailed as error:
        why = error.stderr_tail or str(error)
        text = f"{host}, worker {number}: {path} cannot be written: {why}"
        raise CommandFailed(text, error.exit_status, error.stderr_tail) from error


def _checked(host: str, number: int, ran: Ran) -> str:
    output = ran.stdout.decode("utf-8", "replace")
    if ran.exit_status == 0:
        return output
    said = plain_lines(ran.stderr.decode("utf-8", "replace")).strip() or plain_lines(output).strip()
    lines = " | ".join(plain(line) for line in said.splitlines()[-TAIL_LINES:])
    text = f"{host}, worker {number}: exit status {ran.exit_status}" + (f": {lines}" if lines else "")
    raise CommandFailed(text, ran.exit_status, said[-TAIL_CHARACTERS:])


# --- arguments -------------------------------------------------------------------------------------------------------


def _path(filename: str) -> str:
    """Relative to the login user's home, as SFTP reads it."""
    path = filename.removeprefix("~/") if isinstance(filename, str) else ""
    if not path or path.endswith(("/", "/.", "/..")) or path in (".", "..") or "\0" in path or "\n" in path:
        raise ConfigError(f"filename_on_tpu {shown(filename)} is not the name of a file")
    _encoded("filename_on_tpu", path)
    return path


def _encoded(what: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be a text, not {type(text).__name__}")
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} holds half a character, which no file can hold") from error
    if b"\0" in content and what == "filename_on_tpu":
        raise ConfigError(f"{what} holds a NUL")
    return content
