"""
Access to workers for `ssh`, `scp`, `ssh-config` and `exec`: with the key and the pinned host keys of the daemon.

Addresses come from the daemon; without one, from the store's last node and GetNode. The system's own ssh and scp
replace this process, so that terminals, agents and their options work as usual.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import typer

from tpucare.adapters.ssh.connection import NeverSent
from tpucare.adapters.ssh.keys import PinStore, load_or_make_key
from tpucare.cli.common import CommandError
from tpucare.model.errors import ConfigError, RemoteError, WorkerSilent
from tpucare.model.memory import FleetRecord
from tpucare.model.resources import NodeKey, Place, Ran, Worker, reaches_externally, workers_of
from tpucare.model.text import plain, plain_lines
from tpucare.service.assembly import project_finder, remote_of
from tpucare.service.control_socket import NoDaemon, Suspended, request
from tpucare.service.options import Options
from tpucare.service.stores import Stores

OUTPUT_LIMIT = 16 << 20
SSH_FAILED = 255


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one worker; `status` 255: it was not reached, as with ssh."""

    worker: int
    status: int
    stdout: str = ""
    stderr: str = ""

    def row(self) -> dict[str, Any]:
        return {"worker": self.worker, "status": self.status, "stdout": self.stdout, "stderr": self.stderr}

    def print(self, numbered: bool) -> None:
        prefix = f"[{self.worker}] " if numbered else ""
        for text, to_stderr in ((self.stdout, False), (self.stderr, True)):
            for line in text.splitlines():
                typer.echo(prefix + line, err=to_stderr)


# --- workers of a slot -----------------------------------------------------------------------------------------------


def workers(options: Options, slot: str) -> list[Worker]:
    """Workers of the slot's node. Raises: CommandError, CloudError: there is no node, or it lists no workers."""
    try:
        rows = request(options.socket, {"do": "workers", "slot": slot}, suspended_seconds=0.0)["workers"]
    except (NoDaemon, Suspended):
        return _workers_without_daemon(options, slot)
    return [
        Worker(NodeKey(row["project"], row["zone"], row["node"]), row["id"], row["worker"], row["host"]) for row in rows
    ]


def _workers_without_daemon(options: Options, word: str) -> list[Worker]:
    from tpucare.adapters.google.client import connect
    from tpucare.adapters.system import SystemClock
    from tpucare.fleetfile.yaml_document import named

    store = Stores(options).read(options.store)
    memories, records = store.memories, store.records
    slot = word if word in memories else f"{word}-0"
    memory = memories.get(slot)
    live = [node for node in memory.nodes if node.serves] if memory else []
    if memory is None or not live:
        raise CommandError(f"the store has no node of {word}, and no daemon runs: start it with `tpucare daemon`")
    past, record = live[-1], records.get(memory.fleet)
    known = (named(record.text, "project") or record.project) if record is not None else ""
    project = known or project_finder(options, os.environ)()
    cloud = connect(options.endpoint or None, monotonic=SystemClock().monotonic)
    try:
        node = cloud.get_node(NodeKey(project, past.zone, past.name))
    finally:
        cloud.close()
    places = _places_of(record) if record is not None else ()
    place = next((place for place in places if place.key == past.place), None)
    found = workers_of(node, external=reaches_externally(node, place, places), expected=1)
    if found is None:
        raise CommandError(f"{past.name} has no workers now: it is {node.state.name}")
    return list(found)


def _places_of(record: FleetRecord) -> tuple[Place, ...]:
    """Places of the fleet as last accepted; empty if this version cannot read its text."""
    from tpucare.fleetfile.python_fleet import parse_accepted

    try:
        return parse_accepted(record).places
    except ConfigError:
        return ()


def one_worker(options: Options, slot: str, number: int) -> Worker:
    found = workers(options, slot)
    if number >= len(found):
        has = f"{len(found)} workers, 0 to {len(found) - 1}" if len(found) > 1 else "one worker, 0"
        raise CommandError(f"{slot} has no worker {number}; it has {has}")
    return found[number]


# --- the system's ssh ------------------------------------------------------------------------------------------------


def run_ssh(options: Options, slot: str, number: int, arguments: Sequence[str]) -> None:
    """Replace this process by ssh. Does not return."""
    worker = one_worker(options, slot, number)
    command = [_program("ssh"), *_flags(options, worker), "-p", str(options.ssh_port)]
    _exec([*command, f"{options.ssh_user}@{worker.host}", *arguments])


def run_scp(options: Options, source: str, target: str, number: int, *, recursive: bool) -> None:
    """Replace this process by scp. Does not return."""
    remote = [text for text in (source, target) if _slot_of(text)]
    if len(remote) != 1:
        raise CommandError("exactly one of the two must be SLOT:PATH; write ./ before a local path with a colon")
    worker = one_worker(options, _slot_of(remote[0]), number)
    paths = [
        f"{options.ssh_user}@{_bracketed(worker.host)}:{text.partition(':')[2]}" if _slot_of(text) else text
        for text in (source, target)
    ]
    flags = ["-r"] if recursive else []
    _exec([_program("scp"), *flags, *_flags(options, worker), "-P", str(options.ssh_port), "--", *paths])


def config_text(options: Options, slot: str) -> str:
    """Entries for every worker; worker 0 also under the slot's own name."""
    slots = [slot] if slot else _slots_with_nodes(options)
    entries = [_entry(options, name, worker) for name in slots for worker in workers(options, name)]
    if not entries:
        raise CommandError("no slot has a node now")
    return "\n".join(entries)


def _slots_with_nodes(options: Options) -> list[str]:
    try:
        rows = request(options.socket, {"do": "status"}, suspended_seconds=0.0)["slots"]
        return [row["slot"] for row in rows if row["workers"] and row["node"] and row["state"] == "READY"]
    except (NoDaemon, Suspended):
        memories = Stores(options).read(options.store).memories
        return [name for name, memory in memories.items() if memory.nodes]


def _entry(options: Options, slot: str, worker: Worker) -> str:
    if not PinStore(options.host_keys).pinned(worker):
        # ssh would trust any entry here for as long as the file is kept.
        return f"# {slot}, worker {worker.number}: its host key is not pinned yet; run this again once workers answer\n"
    names = f"{slot} {slot}.0" if worker.number == 0 else f"{slot}.{worker.number}"
    lines = [f"Host {names}", f"  HostName {worker.host}", f"  Port {options.ssh_port}", f"  User {options.ssh_user}"]
    return "\n".join([*lines, *(f"  {key} {_quoted(value)}" for key, value in _settings(options, worker))]) + "\n"


def _settings(options: Options, worker: Worker) -> list[tuple[str, str]]:
    """ssh_config(5) settings. Before the first pin any host key is accepted, and not kept."""
    pins = PinStore(options.host_keys)
    load_or_make_key(options.key)
    file, alias = pins.known_hosts(worker)
    pinned = bool(pins.pinned(worker))
    return [
        ("IdentityFile", str(options.key)),
        ("IdentitiesOnly", "yes"),
        ("UserKnownHostsFile", str(file) if pinned else os.devnull),
        ("GlobalKnownHostsFile", os.devnull),
        ("HostKeyAlias", alias),
        ("StrictHostKeyChecking", "yes" if pinned else "accept-new"),
    ]


def _flags(options: Options, worker: Worker) -> list[str]:
    return [part for key, value in _settings(options, worker) for part in ("-o", f"{key}={_quoted(value)}")]


def _quoted(value: str) -> str:
    """ssh reads a `%` as the start of a token, and spaces as the end of a value."""
    doubled = value.replace("%", "%%")
    return f'"{doubled}"' if " " in doubled else doubled


def _slot_of(text: str) -> str:
    slot, colon, _ = text.partition(":")
    return slot if colon and "/" not in slot else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CommandError(f"{name} is not installed: run `apt install openssh-client`")
    return found


def _exec(command: Sequence[str]) -> None:
    os.execv(command[0], list(command))


# --- exec ------------------------------------------------------------------------------------------------------------


def run_everywhere(options: Options, slot: str, words: Sequence[str], worker: str, timeout: int) -> list[Result]:
    """Run *words* in the login shell of each worker. Shape: one result per worker, in order."""
    found = workers(options, slot) if worker == "all" else [one_worker(options, slot, int(worker))]
    line = words[0] if len(words) == 1 else shlex.join(words)
    deadline = timedelta(seconds=timeout)
    remote = remote_of(options, load_or_make_key(options.key))
    try:
        answers = remote.each(found, lambda one: remote.run(one, line, deadline=deadline, limit=OUTPUT_LIMIT))
    finally:
        remote.close()
    return [_result(one, answer) for one, answer in zip(found, answers, strict=True)]


def _result(worker: Worker, answer: Ran | Exception) -> Result:
    if isinstance(answer, Ran):
        texts = (plain_lines(stream.decode("utf-8", "replace")) for stream in (answer.stdout, answer.stderr))
        return Result(worker.number, answer.exit_status, *texts)
    if isinstance(answer, RemoteError | ConfigError):
        text = answer.message if isinstance(answer, RemoteError) else str(answer)
        # A command on the worker survives the end of its connection.
        was_sent = isinstance(answer, WorkerSilent) and not isinstance(answer, NeverSent)
        ending = "; the command may still run there" if was_sent else ""
        return Result(
            worker.number, SSH_FAILED, stderr=plain(f"tpucare: worker {worker.number}: {text}{ending}") + "\n"
        )
    raise answer
