"""`tpucare gc`, by the daemon or here."""

from __future__ import annotations

from typing import Any

from tpucare.cli.offline import LOOK_SECONDS, alone
from tpucare.control import NoDaemon, request
from tpucare.model import Event
from tpucare.options import Options


def find(options: Options) -> dict[str, Any]:
    return _gc(options, apply=False)


def sweep(options: Options) -> dict[str, Any]:
    """Ask for the deletion of every stray; accepted, not gone, when this returns."""
    return _gc(options, apply=True)


def _gc(options: Options, *, apply: bool) -> dict[str, Any]:
    order = {"do": "gc", "apply": apply}
    try:
        return request(options.socket, order)
    except NoDaemon:
        pass
    ended: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "collected":
            ended.append(event.node)

    with alone(options, listen=listen) as here:
        here.look()
        answer = here.desk.carry(order)
        here.run(lambda: set(answer["deleting"]) <= set(ended), LOOK_SECONDS)
        return answer
