"""
Checks the audit log of a world by the rules of tpucare (docs/design.md, section 5), without help of tpucare itself.

Each check is a pure function from records (of `World.audit`, or lines of the JSONL that a server writes) to findings;
without findings no rule is broken. Tests of the parts check rules that a log cannot show, such as observed time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_OWNER,
    LABEL_SLOT,
    Health,
    NodeState,
    QueuedState,
    parse_node_name,
)
from tpucare.testbed.emulator.world.queued_records import IN_QUEUE

Record = Mapping[str, Any]

LOST_AFTER_SECONDS = 10.0
"""A caller may have given up waiting for an answer that took longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule, at one instant."""

    rule: str
    at: str
    text: str

    def __str__(self) -> str:
        return f"{self.at} {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Expected:
    """
    Facts that are not in the log.

    owner:          nodes with this owner label are ours; empty: unknown, and the checks that need it find nothing
    fleets:         fleets that the store has known; None: any
    live_slots:     slots that should hold a node at the end; None: not checked
    allowed_deletes: ids of nodes whose delete a person or a finished run asked for
    restarts:       instants at which the daemon was killed and started again: calls in flight then are in doubt
    secrets:        values that must not appear anywhere in the log
    """

    owner: str = ""
    fleets: frozenset[str] | None = None
    creates_per_minute: int = 60
    live_slots: frozenset[str] | None = None
    allowed_deletes: frozenset[str] = frozenset()
    restarts: tuple[datetime, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)


def check(source: Path | Iterable[Record], expected: Expected) -> list[Finding]:
    """
    Every finding, oldest first; empty = clean.

    Raises: OSError, ValueError: the file cannot be read, or is not JSONL.
    """
    records = load(source) if isinstance(source, Path) else list(source)
    findings = [
        *doubled_runs(records),
        *runs_on_two_nodes(records),
        *foreign_deletes(records, expected),
        *repeated_names(records, expected),
        *doubled_requests(records, expected),
        *foreign_requests_deleted(records, expected),
        *requests_left(records, expected),
        *create_bursts(records, expected),
        *leaks(records, expected),
        *unasked_deletes(records, expected),
        *shown_secrets(records, expected),
    ]
    return sorted(findings, key=lambda finding: finding.at)


def load(path: Path) -> list[Record]:
    """The records of a JSONL file. A last line that was cut off (the writer was killed) is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON") from error
    return records


# --- rule 1: never two runs of one slot at the same time -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Start:
    """A run that started on a worker, and the runs of its slot alive at that instant, per (node, worker)."""

    record: Record
    slot: str
    alive: Mapping[tuple[str, int], str]


def doubled_runs(records: Sequence[Record]) -> list[Finding]:
    """Another run of the same slot, or this one a second time, was alive on the same node."""
    found = []
    for start in _starts(records):
        node, worker, token = start.record["name"], int(start.record["worker"]), str(start.record["token"])
        others = {other for (of, _), other in start.alive.items() if of == node and other != token}
        if start.alive.get((node, worker)) == token:
            others.add(token)
        if others:
            text = f"{token} started on worker {worker} of {node} while {', '.join(sorted(others))} ran there"
            found.append(Finding("doubled-run", start.record["at"], text))
    return found


def runs_on_two_nodes(records: Sequence[Record]) -> list[Finding]:
    """A run started while a run of the same slot was alive on another node."""
    found = []
    for start in _starts(records):
        node = start.record["name"]
        others = {f"{token} on {of}" for (of, _), token in start.alive.items() if of != node}
        if others:
            text = f"{start.record['token']} of slot {start.slot} started on {node} beside {', '.join(sorted(others))}"
            found.append(Finding("two-nodes", start.record["at"], text))
    return found


def _starts(records: Sequence[Record]) -> Iterator[_Start]:
    """A run lives from its start until its end is reported, or its machine is killed; silence does not end it."""
    slots = _slots(records)
    alive: dict[str, dict[tuple[str, int], str]] = {}
    for record in records:
        if record["kind"] == "note" and record["event"] in ("run-started", "run-ended"):
            key = (str(record["name"]), int(record["worker"]))
            slot = _slot_of(record, slots)
            runs = alive.setdefault(slot, {})
            if record["event"] == "run-started":
                yield _Start(record, slot, dict(runs))
                runs[key] = str(record["token"])
            elif runs.get(key) == record["token"]:
                del runs[key]
        elif record["kind"] == "machine" and record["event"] == "kill":
            for runs in alive.values():
                _end_on(runs, record["name"], record.get("worker"))


def _end_on(runs: dict[tuple[str, int], str], node: str, worker: int | None) -> None:
    for key in [key for key in runs if key[0] == node and worker in (None, key[1])]:
        del runs[key]


def _slots(records: Iterable[Record]) -> dict[str, str]:
    """Slot of every node ever made, by its label."""
    made = (record for record in records if record["kind"] == "node" and record["event"] == "created")
    return {record["name"]: record["labels"].get(LABEL_SLOT, "") for record in made}


def _slot_of(record: Record, slots: Mapping[str, str]) -> str:
    """The slot in the node's label, else in the token, `<slot>-a<number>.<n>`."""
    if labelled := slots.get(record["name"]):
        return labelled
    parsed = parse_node_name(str(record["token"]).rpartition(".")[0])
    return parsed[0] if parsed else str(record["name"])


# --- rule 2: touch only our own nodes --------------------------------------------------------------------------------


def foreign_deletes(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """A delete that was accepted for a node without our owner label, or of a fleet that was never known."""
    return _foreign(_accepted(records, "DeleteNode"), expected)


def _foreign(deletes: Iterable[Record], expected: Expected) -> list[Finding]:
    if not expected.owner:
        return []
    found = []
    for record in deletes:
        labels = record["labels"]
        if labels.get(LABEL_OWNER) != expected.owner:
            text = f"{record['name']} is owned by {labels.get(LABEL_OWNER) or 'nobody'}"
            found.append(Finding("foreign-delete", record["at"], text))
        elif expected.fleets is not None and labels.get(LABEL_FLEET) not in expected.fleets:
            text = f"{record['name']} is of fleet {labels.get(LABEL_FLEET) or 'none'}, which was never known"
            found.append(Finding("foreign-delete", record["at"], text))
    return found


# --- rule 5: everything asked for is accounted for -----------------------------------------------------------------


def repeated_names(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """
    A create under a name that was accepted before.

    A second create is right only if the answer to the first was lost, may have come too late, or the daemon died in
    between. A call that its own repetition overtook does not count as a second one.
    """
    found = []
    answered: dict[str, Record] = {}
    for record in records:
        if not _is_call(record, "CreateNode") or not _is_ours(record, expected):
            continue
        name = record["name"]
        before = answered.get(name)
        if (
            before is not None
            and _asked_at(record) > _instant(before)
            and not _restarted_between(before, record, expected)
        ):
            text = f"{name} was accepted at {before['at']}, and asked for again"
            found.append(Finding("repeated-name", record["at"], text))
        in_doubt = record["answer"] == "lost" or record["latency"] >= LOST_AFTER_SECONDS
        if record["applied"] and record["code"] == 0 and not in_doubt:
            answered[name] = record
    return found


def _asked_at(record: Record) -> datetime:
    return _instant(record) - timedelta(seconds=record.get("under_way", 0.0))


def _restarted_between(before: Record, after: Record, expected: Expected) -> bool:
    # A call may be in flight while its process dies: the next process does not learn how it ended.
    return any(_asked_at(before) <= restart <= _instant(after) for restart in expected.restarts)


def create_bursts(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """More create calls within any 60 s than the budget, refused ones included; one finding per burst."""
    found = []
    window: deque[datetime] = deque()
    over = False
    for record in records:
        if not _is_call(record, "CreateNode") or not _is_ours(record, expected):
            continue
        now = _instant(record)
        window.append(now)
        while window[0] <= now - timedelta(minutes=1):
            window.popleft()
        was_over, over = over, len(window) > expected.creates_per_minute
        if over and not was_over:
            text = f"{len(window)} creates within a minute, {expected.creates_per_minute} allowed"
            found.append(Finding("create-burst", record["at"], text))
    return found


def leaks(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """Our nodes that exist at the end although no slot wants them, or beside a newer node of their slot."""
    if expected.live_slots is None:
        return []
    found = []
    newest: dict[str, str] = {}
    ours = _left(records, "node", expected)
    for record in ours:
        newest[record["labels"].get(LABEL_SLOT, "")] = record["name"]
    for record in ours:
        slot = record["labels"].get(LABEL_SLOT, "")
        if slot not in expected.live_slots or newest[slot] != record["name"]:
            text = f"{record['name']} of slot {slot or 'none'} is still there"
            found.append(Finding("leak", record["at"], text))
    return found


# --- queued resources: rules 2 and 5 ---------------------------------------------------------------------------------


def foreign_requests_deleted(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """A delete of a queued resource without our owner label in its node_spec, or of a fleet that was never known."""
    return _foreign(_accepted(records, "DeleteQueuedResource"), expected)


def doubled_requests(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """
    A queued resource of ours was made while another one of its slot stood in the queue, and was not deleted.

    One in a zone that does not answer for long may be given up before it can be deleted: that is found as well.
    """
    found = []
    standing: dict[str, str] = {}
    for record in records:
        if record["kind"] == "queued":
            if record["event"] == "created" and _is_ours(record, expected):
                slot = str(record["labels"].get(LABEL_SLOT, ""))
                others = sorted(name for name, of in standing.items() if of == slot)
                if others:
                    text = f"{record['name']} was made while {', '.join(others)} stood for slot {slot}"
                    found.append(Finding("doubled-request", record["at"], text))
                standing[record["name"]] = slot
            elif record["event"] == "gone" or record["state"] not in IN_QUEUE:
                standing.pop(record["name"], None)
        elif _is_call(record, "DeleteQueuedResource") and record["applied"] and record["code"] == 0:
            standing.pop(record["name"], None)
    return found


def requests_left(records: Sequence[Record], expected: Expected) -> list[Finding]:
    """Queued resources of ours that exist at the end, but for those of slots that should hold a node."""
    if expected.live_slots is None:
        return []
    states: dict[str, int] = {record["name"]: record["state"] for record in records if record["kind"] == "queued"}
    found = []
    for record in _left(records, "queued", expected):
        name, slot = record["name"], str(record["labels"].get(LABEL_SLOT, ""))
        state = states[name]
        serves = slot in expected.live_slots and (state in IN_QUEUE or state == QueuedState.ACTIVE)
        if not serves:
            text = f"{name} of slot {slot or 'none'} is still there, in state {QueuedState(state).name}"
            found.append(Finding("leak", record["at"], text))
    return found


# --- rules 6 and 12: no living node is deleted unasked ---------------------------------------------------------------


def unasked_deletes(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """An unasked delete of a READY, healthy node whose workers all answered, or of the queued resource that it has."""
    found = []
    for record in _accepted(records, "DeleteQueuedResource"):
        for name in record["serving"]:
            if name.rpartition("/")[2] not in expected.allowed_deletes:
                text = f"{name} was alive and well, and went with its queued resource"
                found.append(Finding("unasked-delete", record["at"], text))
    for record in _accepted(records, "DeleteNode"):
        is_well = record["state"] == NodeState.READY and record["health"] in (Health.UNSPECIFIED, Health.HEALTHY)
        node_id = record["name"].rpartition("/")[2]
        if is_well and record["serving"] and node_id not in expected.allowed_deletes:
            found.append(Finding("unasked-delete", record["at"], f"{record['name']} was alive and well"))
    return found


# --- rule 8: secrets -------------------------------------------------------------------------------------------------


def shown_secrets(records: Iterable[Record], expected: Expected) -> list[Finding]:
    """A secret's value in a label, in metadata or elsewhere in the cloud; findings do not repeat the value."""
    secrets = [json.dumps(secret)[1:-1] for secret in expected.secrets if secret]
    if not secrets:
        return []
    found = []
    for record in records:
        text = json.dumps(record)
        if any(secret in text for secret in secrets):
            where = f"{record['kind']} {record.get('method', record.get('event', ''))} {record.get('name', '')}"
            found.append(Finding("shown-secret", record["at"], where))
    return found


# --- reading records -------------------------------------------------------------------------------------------------


def _is_call(record: Record, method: str) -> bool:
    return bool(record["kind"] == "call" and record["method"] == method)


def _accepted(records: Iterable[Record], method: str) -> Iterator[Record]:
    """Calls that took effect; a delete during another delete changes nothing."""
    for record in records:
        if _is_call(record, method) and record["applied"] and record["code"] == 0 and not record.get("repeated"):
            yield record


def _left(records: Iterable[Record], kind: str, expected: Expected) -> list[Record]:
    """The creation of each thing of that *kind* that is ours and exists at the end."""
    left: dict[str, Record] = {}
    for record in records:
        if record["kind"] == kind and record["event"] == "created":
            left[record["name"]] = record
        elif record["kind"] == kind and record["event"] == "gone":
            left.pop(record["name"], None)
    return [record for record in left.values() if _is_ours(record, expected)]


def _is_ours(record: Record, expected: Expected) -> bool:
    """Calls that never reached the service have no labels; they count as ours."""
    labels = record.get("labels")
    return not expected.owner or labels is None or labels.get(LABEL_OWNER) == expected.owner


def _instant(record: Record) -> datetime:
    return datetime.fromisoformat(record["at"])
