"""`tpucare gc` and `tpucare adopt-node`: nodes that belong to no slot, swept or taken in, by the daemon or here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tpucare.model.errors import CloudError, ConfigError, TpuCareError
from tpucare.model.resources import Event
from tpucare.service.control_socket import NoDaemon, request
from tpucare.service.offline import LOOK_SECONDS, Alone, alone
from tpucare.service.options import Options

ASK_EVERY_SECONDS = 0.3


class NotLooked(CloudError):
    """What is there is not known; "none" would be a guess."""


def find(options: Options) -> dict[str, Any]:
    return _gc(options, apply=False)


def sweep(options: Options) -> dict[str, Any]:
    """Ask for the deletion of every stray; accepted, not gone, when this returns."""
    return _gc(options, apply=True)


def _gc(options: Options, *, apply: bool) -> dict[str, Any]:
    order = {"do": "gc", "apply": apply}
    try:
        answer = request(options.socket, order)
        if not answer["projects"]:
            raise NotLooked("not looked: the daemon has no project to list; start it with --project or apply a fleet")
        return answer
    except NoDaemon:
        pass
    ended: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "collected":
            ended.append(event.node)

    with alone(options, listen=listen) as here:
        if not here.care.engine.projects:
            here.care.engine.watch(_project_of(here))
        try:
            here.look()
        except CloudError as error:
            raise NotLooked(f"not looked: {error.message}", error.code, advice=error.advice) from error
        answer = here.desk.carry(order)
        here.run(lambda: set(answer["deleting"]) <= set(ended), LOOK_SECONDS)
        return answer


def _project_of(here: Alone) -> str:
    """Where a caretaker without fleets looks. Raises: NotLooked: no project is known."""
    try:
        return here.care.find_project()
    except ConfigError as error:
        raise NotLooked(f"not looked: {error}") from error


def adopt(options: Options, node: str, slot: str) -> dict[str, Any]:
    """Returns once the node bears our labels. Raises: TpuCareError: the API refused."""
    order = {"do": "adopt-node", "node": node, "slot": slot}
    try:
        newest = request(options.socket, {"do": "events", "limit": 1})["events"]
        answer = request(options.socket, order)
    except NoDaemon:
        return _adopt_here(options, order)
    after = newest[-1]["number"] if newest else 0
    until = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < until:
        rows = request(options.socket, {"do": "events", "after": after, "limit": 1000})["events"]
        for row in rows:
            if row["kind"] == "adopted" and row["node"] == node:
                _refuse(row["level"], row["text"])
                return answer
        after = rows[-1]["number"] if rows else after
        time.sleep(ASK_EVERY_SECONDS)
    raise TpuCareError(f"{node}: the API did not answer within {LOOK_SECONDS:.0f} s; look at `tpucare events`")


def _adopt_here(options: Options, order: Mapping[str, str]) -> dict[str, Any]:
    ended: list[Event] = []

    def listen(event: Event) -> None:
        if event.kind == "adopted" and event.node == order["node"]:
            ended.append(event)

    with alone(options, listen=listen) as here:
        here.look()
        answer = here.desk.carry(order)
        if not here.run(lambda: bool(ended), LOOK_SECONDS):
            raise TpuCareError(f"{order['node']}: the API did not answer within {LOOK_SECONDS:.0f} s")
        _refuse(ended[0].level, ended[0].text)
        return answer


def _refuse(level: str, text: str) -> None:
    if level != "info":
        raise TpuCareError(text)
