"""
The state of everything that is cared for from one state folder: by the daemon, and by every script beside it.

Whoever cares for a store now is asked; of the others the store tells what was true when it was last cared for.
Doors show it (`tpucare status`, `tpucare.status()`); nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

from tpucare._version import __version__
from tpucare.adapters.state.owner import OWNER_FILE
from tpucare.model.errors import TpuCareError
from tpucare.model.memory import End, Wish
from tpucare.model.text import hint, plain, shown
from tpucare.service.control_socket import NoDaemon, Stopping, request
from tpucare.service.options import DAEMON_STORE, Options

Answer = dict[str, Any]

# Of a log, where its last line is looked for.
LAST_BYTES = 64 << 10


def status(options: Options, target: str = "") -> Answer:
    """
    All slots, or those of *target*, a fleet or slot; `daemon`: whether the daemon, or the script, answered itself.

    Each row of a slot bears the `store` that knows it. Raises: StoreError: there is none. TpuCareError: no such target.
    """
    answers = [of_store(one, target) for one in _chosen(options, target)]
    if len(answers) == 1:
        return _only(answers[0], target)
    return _merged([answer for number, answer in enumerate(answers) if number == 0 or not _is_past(answer)])


def is_untouched(options: Options) -> bool:
    """Whether nothing was ever cared for from this state folder."""
    return not any(options.state.glob("*.sqlite")) and not (options.state / OWNER_FILE).exists()


def _only(answer: Answer, target: str) -> Answer:
    """What is said of fleets is said of those that *target* means."""
    if not target:
        return answer
    meant = {target} | {row["fleet"] for row in answer["slots"]}
    return {**answer, "fleets": [row for row in answer["fleets"] if row["fleet"] in meant]}


def _chosen(options: Options, target: str) -> list[Options]:
    # Reading stores costs an import that a daemon without neighbours is spared.
    names = sorted(path.stem for path in options.state.glob("*.sqlite"))
    if options.store != DAEMON_STORE or names in ([], [DAEMON_STORE]):
        return [options]
    if target:
        from tpucare.service.stores import meant

        return [meant(options, target)]
    return [replace(options, store=name) for name in sorted(names, key=lambda name: name != DAEMON_STORE)]


def of_store(options: Options, target: str) -> Answer:
    """What one store has to say, by whoever cares for it now, else from itself alone. Raises: as `status`."""
    try:
        answer = {"daemon": True, **request(options.socket, {"do": "status", "target": target})}
    except (NoDaemon, Stopping):
        answer = {"daemon": False, **_remembered(options, target)}
    for row in answer["slots"]:
        row["store"] = options.store
        if row["end"] == End.FAILED.value:
            row["last_line"] = _last_line(options, row["slot"])
    return answer


def _last_line(options: Options, slot: str) -> str:
    """What the failed run of a slot said last, of the first worker of which anything is kept."""
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


def _remembered(options: Options, target: str) -> Answer:
    from tpucare.adapters.state.store import open_reader
    from tpucare.adapters.system import SystemClock
    from tpucare.service import view

    now = SystemClock().now()
    with open_reader(options.state, name=options.store) as store:
        records, memories = store.fleets(), store.memories()
        if target and target not in memories and _fleet_meant(target, records) not in records:
            known = [*records, *memories]
            raise TpuCareError(
                f"no fleet or slot {shown(target)}{hint(target, known)}" + ("" if known else "; no fleet is known yet")
            )
        chosen = {name: memory for name, memory in memories.items() if not target or target in (name, memory.fleet)}
        rows = [view.remembered_row(name, memory, now) for name, memory in chosen.items()]
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
            "fleets": view.fleet_rows(records, {}, {}),
            "files": [],
            "slots": rows,
            "strays": [],
        }


def _fleet_meant(word: str, fleets: Container[str]) -> str:
    """The fleet that is called so, or of which *word* may be a slot that has no memory yet."""
    fleet, _, index = word.rpartition("-")
    return fleet if word not in fleets and index.isdecimal() else word


def _is_past(answer: Answer) -> bool:
    """Of a script that was ended for good, and of which nothing is left."""
    is_left = any(row["node"] or row["wish"] != Wish.DOWN.value for row in answer["slots"])
    is_wanted = any(row["wish"] != Wish.DOWN.value for row in answer["fleets"])
    return not (answer["daemon"] or is_left or is_wanted)


def _merged(answers: list[Answer]) -> Answer:
    """One answer of all. A project that one of them cannot see is shown as such; nodes that one knows are no strays."""
    projects = {row["project"]: row for answer in answers for row in answer["projects"] if row["seen"]}
    projects |= {row["project"]: row for answer in answers for row in answer["projects"] if not row["seen"]}
    return {
        **answers[0],
        "daemon": any(answer["daemon"] for answer in answers),
        "store_lost": any(answer["store_lost"] for answer in answers),
        "projects": list(projects.values()),
        "fleets": _all("fleets", answers),
        "slots": _all("slots", answers),
        "strays": list({row["node"]: row for row in _all("strays", answers)}.values()),
    }


def _all(key: str, answers: Iterable[Answer]) -> list[Answer]:
    return [row for answer in answers for row in answer[key]]
