"""
Status rows: every slot, fleet and project as plain data for tables and JSON.

From the running engine, from one store alone, or from all stores of a state folder. Scripts rely on the keys: new ones
may come, none is renamed. Ages are in seconds. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from typing import Any

from tpucare._version import __version__
from tpucare.engine.engine import Engine
from tpucare.engine.state import ProjectView
from tpucare.engine.tracking import NodeTrack, SlotTrack
from tpucare.model.actions import Wait, word_of
from tpucare.model.causes import Cause
from tpucare.model.errors import TpuCareError
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import DesiredState, End, FleetRecord, Memory, NodeMemory
from tpucare.model.resources import UNBOUNDED, Bounds, Node, NodeKey, NodeState, Provisioning, QueuedResource, Worker
from tpucare.model.runs import UNPREPARED, Contact, Phase, WorkerReport, preparation_text
from tpucare.model.text import hint, length, plain, shown
from tpucare.planner.budget import HOUR, Spending, spending_of
from tpucare.planner.cadence import USUAL_INTERVAL
from tpucare.planner.deadline import draw_line, pace
from tpucare.planner.predicates import job_mark
from tpucare.service.control_socket import NoDaemon, Stopping, Suspended, request
from tpucare.service.options import DAEMON_STORE, Options
from tpucare.service.stores import Stores

Row = dict[str, Any]

# Phases of a run in their order; a slot shows the phase of its slowest worker.
_COURSE = (Phase.NONE, Phase.FETCH, Phase.SETUP, Phase.RUN, Phase.EXITED)


def slot_rows(engine: Engine, names: Iterable[str], now: datetime) -> list[Row]:
    return [slot_row(engine, engine.slots[name], now) for name in names]


def slot_row(engine: Engine, track: SlotTrack, now: datetime) -> Row:
    """
    One slot as the engine knows it.

    phase: down | paused | done | failed | waiting | creating | booting | connecting | ready | fetch | setup | run |
    exited | ended | deleting, or the node's state in lower case; `ended`: what start_fn started
    is over, success unknown. `training`: every worker holds the run launched last.
    """
    memory, seen = track.memory, newest(track)
    view = engine.projects[track.slot.project]
    past = memory.node(seen.node.name) if seen is not None else None
    row = _remembered(track.slot.name, memory, now)
    row |= {
        "phase": phase_of(track, seen, past),
        "training": engine.is_training(track.slot.name),
        "over": engine.is_over(track.slot.name),
        "out_of_reach": key_rows(engine.out_of_reach(track.slot.name)),
        "project": track.slot.project,
        "nodes": [_node_row(node, memory) for node in track.nodes.values()],
        "action": action_word(track),
        "why": _why(track, row["run_age_seconds"]),
        "cause": track.action.cause.value,
        "needs_person": isinstance(track.action, Wait) and (track.action.needs_person or _all_blocked(track)),
        "waits_for_place": track.action.cause in (Cause.NO_PLACE_OPEN, Cause.QUEUED),
        "behind": _behind(track, seen),
        "kept_until": _kept_until(track, seen),
        "work": work_row(engine, track),
    }
    if seen is not None:
        row |= _place_row(seen.node) | _workers_row(seen, track) | _progress_row(seen, memory, view)
        row["cadence"] = _cadence_row(engine, track, seen)
        row["preparation"] = _preparation_row(track, seen)
    return row


def work_row(engine: Engine, track: SlotTrack) -> Row | None:
    """Hours of work done and due by the line of the slot's deadline; None: it has none."""
    deadline = track.slot.bounds.deadline
    if deadline is None:
        return None
    now = engine.state.cloud_now(track)
    found = pace(draw_line(track.memory.work, deadline, now), deadline, now)
    return {
        "hours": round(found.done / HOUR, 2),
        "hours_due": round(found.due / HOUR, 2),
        "hours_of_work": deadline.hours_of_work,
        "slack_hours": round(found.slack / HOUR, 2),
        "by": deadline.by.isoformat(),
        "tier": found.tier.value,
    }


def _why(track: SlotTrack, run_age: float | None) -> str:
    """The reason of the last decision, with how long a setup takes: nothing is decided while nothing changes."""
    why = plain(track.action.why)
    if run_age is not None and track.action.cause is Cause.SETTING_UP:
        return f"{why}; launched {length(run_age)} ago"
    return why


def _all_blocked(track: SlotTrack) -> bool:
    """Whether every place waits for a person; each is still tried from time to time."""
    action, places = track.action, track.slot.places
    waits = action.cause is Cause.NO_PLACE_OPEN
    return waits and bool(places) and all(track.memory.place(place.key).blocked for place in places)


def _behind(track: SlotTrack, seen: NodeTrack | None) -> list[str]:
    """The parts of the slot that are not yet as declared: `job`, `tpu`."""
    run, job = track.memory.run, track.slot.job
    if seen is None:
        return []
    ours = run is not None and run.node == seen.node.name and not run.state.is_past and run.state is not RunState.OVER
    found = ["job"] if ours and run and run.job and job is not None and run.job != job_mark(job) else []
    node = seen.node
    declared = {(place.zone, place.accelerator_type, place.provisioning) for place in track.slot.places}
    if (node.key.zone, node.accelerator_type, node.provisioning) not in declared:
        found.append("tpu")
    return found


def _kept_until(track: SlotTrack, seen: NodeTrack | None) -> str | None:
    """The instant until which the node of a failed slot is kept; None: it has none, or keeps it for good."""
    ended = track.memory.ended_at
    if seen is None or ended is None or track.memory.end is not End.FAILED:
        return None
    stays = seen.node.provisioning in (Provisioning.ON_DEMAND, Provisioning.RESERVED)
    return None if stays else (ended + track.slot.care.keep_failed).isoformat()


def remembered_row(slot: str, memory: Memory, now: datetime) -> Row:
    """One slot as the store knows it, when no daemon runs: the state in which the last one left it."""
    row = _remembered(slot, memory, now)
    live = [node for node in memory.nodes if node.serves]
    node = live[-1] if live else None
    row |= {
        "phase": _ended_phase(memory) or ("unknown" if node else "waiting"),
        "why": "no daemon runs",
        "cause": Cause.NOT_RUNNING.value,
    }
    if node is not None:
        row |= {"node": node.name, "zone": node.zone, "type": _part(node.place, 1), "tier": _part(node.place, 2)}
    return row


def _remembered(slot: str, memory: Memory, now: datetime) -> Row:
    run = memory.run
    return {
        "slot": slot,
        "fleet": memory.fleet,
        "wish": memory.wish.value,
        "end": memory.end.value,
        "end_why": plain(memory.end_why),
        "end_cause": memory.end_cause.value,
        "phase": "",
        "training": False,
        "over": False,
        "out_of_reach": [],
        "project": "",
        "node": "",
        "zone": "",
        "type": "",
        "tier": "",
        "state": "",
        "attempt": memory.attempts,
        "run": run.token if run is not None else "",
        "run_age_seconds": _age(run.launched_at, now) if run is not None else None,
        "step": memory.last_step if memory.last_step is not None else memory.step,
        "step_age_seconds": None,
        "checkpoint": memory.last_checkpoint if memory.last_checkpoint is not None else memory.checkpoint,
        "workers": 0,
        "workers_answering": 0,
        "books": _books(memory, now),
        "places": _places(memory, now),
        "nodes": [],
        "action": "",
        "why": "",
        "cause": "",
        "needs_person": memory.end is End.FAILED,
        "waits_for_place": False,
        "behind": [],
        "kept_until": None,
        "work": None,
        "cadence": None,
        "preparation": None,
        "surplus": False,
    }


def key_rows(keys: Iterable[NodeKey]) -> list[Row]:
    return [{"node": plain(key.name), "zone": plain(key.zone)} for key in keys]


def _books(memory: Memory, now: datetime) -> Row:
    return {
        name: {
            "failures": book.failures,
            "total": book.total,
            "retry_in_seconds": _ahead(book.retry_at, now),
            "reason": plain(book.reason),
        }
        for name, book in memory.books.items()
    }


def _places(memory: Memory, now: datetime) -> Row:
    """Places that refused: why each is not asked for the next create, and until when."""
    return {
        key: {
            "kind": place.kind.value,
            "failures": place.failures,
            "blocked": place.blocked,
            "retry_in_seconds": _ahead(place.retry_at, now),
            "reason": plain(place.reason),
        }
        for key, place in memory.places.items()
        if place.failures or place.blocked or place.kind
    }


def newest(track: SlotTrack) -> NodeTrack | None:
    """The node that stands for the slot: the one with the run, else the newest that is not being deleted."""
    run = track.memory.run
    if run is not None and run.node in track.nodes and track.memory.serves(run.node):
        return track.nodes[run.node]
    return max(track.nodes.values(), key=lambda seen: _rank(seen, track.memory), default=None)


def _rank(seen: NodeTrack, memory: Memory) -> tuple[bool, datetime]:
    return (not is_given_up(seen, memory), seen.node.create_time)


def is_given_up(seen: NodeTrack, memory: Memory) -> bool:
    """Whether its deletion was asked for, by us or by another person."""
    return seen.node.state is NodeState.DELETING or memory.has_given_up(seen.node.name)


def phase_of(track: SlotTrack, seen: NodeTrack | None, past: NodeMemory | None) -> str:
    if (ended := _ended_phase(track.memory)) and seen is None:
        return ended
    if seen is None:
        return _asking_phase(track.memory)
    # A dead node that we have not deleted yet is shown with the state that the cloud reports.
    if past is not None and past.delete is not None:
        return "deleting"
    state = seen.node.state
    if state is NodeState.CREATING:
        return "booting"
    if state is not NodeState.READY:
        return state.name.lower()
    return ended or _run_phase(seen, track.memory)


def _asking_phase(memory: Memory) -> str:
    if memory.creates:
        return "creating"
    return "queued" if memory.standing_request is not None else "waiting"


def _run_phase(seen: NodeTrack, memory: Memory) -> str:
    report, run = seen.report, memory.run
    if report is None or not report.all_answer:
        return "connecting"
    if run is None or run.node != seen.node.name:
        return "ready"
    if run.state is RunState.OVER:
        return "ended"
    phases = [worker.phase for worker in report.workers if worker.token == run.token]
    slowest = min(phases, key=_COURSE.index, default=Phase.NONE)
    return "ready" if slowest is Phase.NONE else slowest.value


def _ended_phase(memory: Memory) -> str:
    if memory.wish is not DesiredState.UP:
        return memory.wish.value
    return memory.end.value if memory.end is not End.NONE else ""


def _place_row(node: Node) -> Row:
    return {
        "node": plain(node.name),
        "zone": node.key.zone,
        "type": plain(node.accelerator_type),
        "tier": node.provisioning.value,
        "state": node.state.name,
    }


def _workers_row(seen: NodeTrack, track: SlotTrack) -> Row:
    report = seen.report
    answering = sum(w.contact is Contact.ANSWERED for w in report.workers) if report is not None else 0
    expected = len(seen.workers) if seen.workers is not None else track.slot.workers
    return {"workers": expected, "workers_answering": answering}


def _progress_row(seen: NodeTrack, memory: Memory, view: ProjectView) -> Row:
    """Progress of the current run; until it reports any, the row keeps that of the run before."""
    progress, last = seen.progress, seen.progress.last or seen.progress.first_step
    if memory.run is None or memory.run.token != progress.token:
        return {}
    age = (view.observed - last.observed).total_seconds() if last is not None else None
    told = {"step": progress.step, "checkpoint": progress.checkpoint}
    return {
        "step_age_seconds": round(age, 1) if age is not None else None,
        **{name: value for name, value in told.items() if value is not None},
    }


def _cadence_row(engine: Engine, track: SlotTrack, seen: NodeTrack) -> Row | None:
    """How often the run should save, and what that wins; None: no run was told."""
    first = _first_report(track, seen)
    if first is None or first.cadence_seconds is None:
        return None
    advice = engine.state.cadence_of(track)
    return {
        "interval_seconds": first.cadence_seconds,
        "node_life_seconds": round(advice.node_life.total_seconds()),
        "save_seconds": advice.save_cost.total_seconds(),
        "followed": first.save_seconds is not None,
        "lost_minutes_a_day": round(advice.lost_minutes_a_day(), 1),
        "usual_minutes_a_day": round(advice.lost_minutes_a_day(USUAL_INTERVAL), 1),
    }


def _preparation_row(track: SlotTrack, seen: NodeTrack) -> Row | None:
    """How long fetch and set-up of the run took, and whether its environment was restored; None: not told yet."""
    first = _first_report(track, seen)
    if first is None or first.preparation == UNPREPARED:
        return None
    made = first.preparation
    return {
        "environment": made.environment,
        "fetch_seconds": made.fetch_seconds,
        "setup_seconds": made.setup_seconds,
        "text": preparation_text(made),
        "refused": made.refused,
    }


def _first_report(track: SlotTrack, seen: NodeTrack) -> WorkerReport | None:
    """What the first worker reports of the slot's run; None: nothing yet."""
    report, run = seen.report, track.memory.run
    first = report.workers[0] if report is not None and report.workers else None
    return first if first is not None and run is not None and first.token == run.token else None


def _node_row(seen: NodeTrack, memory: Memory) -> Row:
    node, past = seen.node, memory.node(seen.node.name)
    return {
        "name": plain(node.name),
        "zone": node.key.zone,
        "state": node.state.name,
        "health": node.health.name,
        "created": node.create_time.isoformat(),
        "listed": seen.listed,
        "deleting": past is not None and past.delete is not None,
    }


def action_word(track: SlotTrack) -> str:
    return word_of(track.action)


# --- what surrounds the slots ----------------------------------------------------------------------------------------


def project_rows(engine: Engine) -> list[Row]:
    return [
        {
            "project": view.name,
            "seen": view.fresh,
            "why": plain(view.blind_why) or ("" if view.fresh else "the first listing is under way"),
            "nodes": view.nodes,
            "unreachable": sorted(view.unreachable),
        }
        for view in engine.projects.values()
    ]


def fleet_rows(
    records: Mapping[str, FleetRecord],
    unread: Mapping[str, str],
    counts: Mapping[str, int],
    costs: Mapping[str, Row],
) -> list[Row]:
    # A `status` that a daemon answers does without them, and what reads fleet files takes long to import.
    from tpucare.fleetfile.parse import cluster_of
    from tpucare.fleetfile.python_fleet import is_python

    return [
        {
            "fleet": record.name,
            "wish": record.wish.value,
            "count": counts.get(record.name),
            "accepted": record.accepted_at.isoformat(),
            "cluster": "" if is_python(record.text) else cluster_of(record.name, record.text),
            "problem": unread.get(record.name, ""),
            "cost": costs.get(record.name),
        }
        for record in records.values()
    ]


def cost_row(bounds: Bounds, spending: Spending) -> Row:
    """What a fleet has cost in dollars, by the prices of its places, and its bounds."""
    return {
        "dollars": round(spending.dollars, 2),
        "dollars_per_hour": round(spending.per_hour, 4),
        "max_cost": bounds.max_cost,
        "until": bounds.until.isoformat() if bounds.until is not None else None,
    }


def stray_rows(engine: Engine) -> list[Row]:
    """Orphans: nodes and queued resources with our owner label that belong to no slot of ours."""
    orphans: list[tuple[Node | QueuedResource, str]] = [
        (node, plain(node.accelerator_type)) for node in engine.orphans.values()
    ]
    requests = (one for one in engine.orphan_requests.values() if one.name not in engine.orphans)
    return [
        {
            "node": plain(one.name),
            "project": one.key.project,
            "zone": one.key.zone,
            "fleet": plain(one.fleet),
            "slot": plain(one.slot),
            "state": one.state.name,
            "type": kind,
            "created": one.create_time.isoformat(),
        }
        for one, kind in [*orphans, *((request, "queued resource") for request in requests)]
    ]


def worker_rows(node: Node, workers: Iterable[Worker]) -> list[Row]:
    """Addresses of workers, as ssh needs them."""
    return [
        {
            "node": node.name,
            "project": node.key.project,
            "zone": node.key.zone,
            "id": node.id,
            "worker": worker.number,
            "host": worker.host,
        }
        for worker in workers
    ]


def _age(instant: datetime, now: datetime) -> float:
    return round(max(0.0, (now - instant).total_seconds()), 1)


def _ahead(instant: datetime | None, now: datetime) -> float | None:
    return None if instant is None else round(max(0.0, (instant - now).total_seconds()), 1)


def _part(place: str, index: int) -> str:
    parts = place.split("/")
    return parts[index] if index < len(parts) else ""


# --- all stores of one state folder: the daemon, and every script beside it -------------------------------------------
# The process that holds a store answers for it; without one the store says what was true when a process last held it.


Answer = dict[str, Any]

# Of a log, where its last line is looked for.
LAST_BYTES = 64 << 10


def status(options: Options, target: str = "") -> Answer:
    """
    All slots, or those of *target*, a fleet or slot; `daemon`: whether the daemon, or the script, answered itself.

    Each row of a slot bears the `store` that knows it. Raises: StoreError: there is none. TpuCareError: no such target.
    """
    stores = Stores(options)
    answers = [of_store(one, target) for one in ([stores.options_for(target)] if target else stores.all_options())]
    if len(answers) == 1:
        return _only(answers[0], target)
    return _merged([answer for number, answer in enumerate(answers) if number == 0 or not _is_past(answer)])


def _only(answer: Answer, target: str) -> Answer:
    """*answer* with only the fleets that *target* means."""
    if not target:
        return answer
    meant = {target} | {row["fleet"] for row in answer["slots"]}
    return {**answer, "fleets": [row for row in answer["fleets"] if row["fleet"] in meant]}


def of_store(options: Options, target: str) -> Answer:
    """The status of one store, by the process that holds it, else from the store alone. Raises: as `status`."""
    try:
        command = {"do": "status", "target": target}
        answer = {"daemon": True, **request(options.socket, command, suspended_seconds=0.0)}
    except Suspended as suspended:
        answer = {"daemon": False, "suspended": str(suspended), **_of_store_at_rest(options, target)}
        answer["slots"] = [{**row, "why": str(suspended)} for row in answer["slots"]]
    except (NoDaemon, Stopping):
        answer = {"daemon": False, **_of_store_at_rest(options, target)}
    for row in answer["slots"]:
        row["store"] = options.store
        if row["end"] == End.FAILED.value:
            row["last_line"] = _last_line(options, row["slot"])
    return answer


def _last_line(options: Options, slot: str) -> str:
    """The last line of the output of a slot's failed run, of the first worker whose log is kept."""
    from tpucare.adapters.runner.logs import LogKeeper

    keeper = LogKeeper(options.logs)
    attempts = keeper.attempts(slot)
    for worker in attempts[max(attempts)] if attempts else ():
        lines = keeper.read(slot, max(attempts), worker)[-LAST_BYTES:].decode("utf-8", "replace").splitlines()
        if said := next((line.strip() for line in reversed(lines) if _is_said(line)), ""):
            return plain(said)
    return ""


def _is_said(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("--- run ", "[tpucare:"))


def _of_store_at_rest(options: Options, target: str) -> Answer:
    from tpucare.adapters.state.store import open_reader
    from tpucare.adapters.system import SystemClock

    now = SystemClock().now()
    with open_reader(options.state, name=options.store) as store:
        records, memories = store.fleets(), store.memories()
        if target and target not in memories and _fleet_meant(target, records) not in records:
            known = [*records, *memories]
            raise TpuCareError(
                f"no fleet or slot {shown(target)}{hint(target, known)}" + ("" if known else "; no fleet is known yet")
            )
        chosen = {name: memory for name, memory in memories.items() if not target or target in (name, memory.fleet)}
        rows = [remembered_row(name, memory, now) for name, memory in chosen.items()]
        if options.store != DAEMON_STORE:
            rows = [{**row, "why": "its script does not run"} for row in rows]
        return {
            "last_event": last[-1][1].at.isoformat() if (last := store.last_events(limit=1)) else None,
            "stopped": bool(last) and last[-1][1].kind == "stop",
            "version": __version__,
            "at": now.isoformat(),
            "owner": store.owner,
            "store_lost": store.lost,
            "projects": [],
            "fleets": fleet_rows(records, {}, {}, _costs_at_rest(memories, now)),
            "files": [],
            "slots": rows,
            "strays": [],
        }


def _costs_at_rest(memories: Mapping[str, Memory], now: datetime) -> dict[str, Row]:
    own: dict[str, list[Memory]] = {}
    for memory in memories.values():
        own.setdefault(memory.fleet, []).append(memory)
    return {fleet: cost_row(UNBOUNDED, spending_of(known, (), now)) for fleet, known in own.items()}


def _fleet_meant(word: str, fleets: Container[str]) -> str:
    """The fleet *word*, or the fleet that *word* may be a slot of, if it has no memory yet."""
    fleet, _, index = word.rpartition("-")
    return fleet if word not in fleets and index.isdecimal() else word


def _is_past(answer: Answer) -> bool:
    """Whether it is of a script that has ended for good, with no node left."""
    is_left = any(row["node"] or row["wish"] != DesiredState.DOWN.value for row in answer["slots"])
    is_wanted = any(row["wish"] != DesiredState.DOWN.value for row in answer["fleets"])
    return not (answer["daemon"] or is_left or is_wanted)


def _merged(answers: list[Answer]) -> Answer:
    """All answers as one. A project counts as unseen if one process cannot see it; each orphan stands once."""
    projects = {row["project"]: row for answer in answers for row in answer["projects"] if row["seen"]}
    projects |= {row["project"]: row for answer in answers for row in answer["projects"] if not row["seen"]}
    suspended = "; ".join(answer["suspended"] for answer in answers if "suspended" in answer)
    return {
        **answers[0],
        **({"suspended": suspended} if suspended else {}),
        "daemon": any(answer["daemon"] for answer in answers),
        "store_lost": any(answer["store_lost"] for answer in answers),
        "projects": list(projects.values()),
        "fleets": _all("fleets", answers),
        "slots": _all("slots", answers),
        "strays": list({row["node"]: row for row in _all("strays", answers)}.values()),
    }


def _all(key: str, answers: Iterable[Answer]) -> list[Answer]:
    return [row for answer in answers for row in answer[key]]
