"""`tpucare down` to its end: asked of the daemon and watched, or done here when no daemon runs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tpucare.cli.common import warn
from tpucare.cli.offline import alone
from tpucare.control import NoDaemon, Refused, is_running, request
from tpucare.errors import StoreLocked
from tpucare.model import Event, Slot
from tpucare.options import Options

LOOK_EVERY_SECONDS = 0.5
# A process that stops lets go of its store within this.
END_SECONDS = 20.0


def take_down(options: Options, target: str, *, wait: bool) -> dict[str, Any]:
    """Returns `changed` and `left`: slots of which something was there when this returned."""
    order = {"do": "down", "target": target}
    try:
        answer = request(options.socket, order)
    except NoDaemon:
        return _here(options, order, wait=wait)
    slots = list(answer["changed"])
    left = slots
    try:
        while wait and (left := _left(options, slots)):
            time.sleep(LOOK_EVERY_SECONDS)
    except (NoDaemon, Refused):
        if is_running(options.socket):
            raise
        return _after_it(options, order)
    return {**answer, "left": left}


def _after_it(options: Options, order: dict[str, str]) -> dict[str, Any]:
    """Who was told ended, as a script does when nothing is left; what it did not get done is done here."""
    until = time.monotonic() + END_SECONDS
    while True:
        try:
            return _here(options, order, wait=True)
        except StoreLocked:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_EVERY_SECONDS)


def _left(options: Options, slots: list[str]) -> list[str]:
    status = request(options.socket, {"do": "status"})
    rows = {row["slot"]: row for row in status["slots"]}
    return [slot for slot in slots if slot in rows and not rows[slot]["over"]]


def _here(options: Options, order: dict[str, str], *, wait: bool) -> dict[str, Any]:
    with alone(options, listen=_tell) as here:
        answer = here.desk.carry(order)
        engine, fleet, slots = here.care.engine, answer["fleet"], list(answer["changed"])

        def is_meant(slot: Slot) -> bool:
            return slot.fleet == fleet if fleet else slot.name in slots

        def left() -> list[str]:
            return [name for name, track in engine.slots.items() if is_meant(track.slot) and not engine.is_over(name)]

        def done() -> bool:
            # Only a listing that saw every zone can say that nothing is left.
            return not left() and all(view.fresh and view.complete for view in engine.projects.values())

        if wait:
            # This process ends soon: it begins nothing for slots that it was not asked about.
            engine.settings = replace(engine.settings, dry_run=False, acts_for=is_meant)
            here.run(done)
        return {**answer, "left": left()}


def _tell(event: Event) -> None:
    if event.level != "debug":
        warn(event.text)
